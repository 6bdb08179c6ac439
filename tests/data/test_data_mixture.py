"""The mixture loader: one global order, whatever the ranks, the cuts and the exclusions."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collective_limit import limit_groups
from fork_server import call_on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_sentinel.data.mixture import MixtureLoader, Source

FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Numbers:
    """Sample ``i`` holds its own index; ids such as ``a/3``."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> dict[str, Any]:
        return {
            "input_ids": np.full(3, index, dtype=np.int64),
            "targets": np.arange(3),
            "document_ids": np.zeros(3, dtype=np.int32),
        }

    def sample_id(self, index: int) -> str:
        return f"{self.name}/{index}"


def mixture(lengths: dict[str, int], **options: Any) -> MixtureLoader:
    return MixtureLoader([Numbers(name, length) for name, length in lengths.items()], **options)


def take(loader: MixtureLoader, batches: int) -> list[list[str]]:
    iterator = iter(loader)
    return [next(iterator)["sample_id"] for _ in range(batches)]


def flat(batches: list[list[str]]) -> list[str]:
    return [name for batch in batches for name in batch]


def stream(lengths: dict[str, int], count: int, **options: Any) -> list[str]:
    """The first ``count`` samples of the global order."""
    return flat(take(mixture(lengths, batch_size=1, **options), count))


AB = {"a": 7, "b": 20}


def test_a_batch() -> None:
    loader = mixture(AB, batch_size=4, seed=3)
    batch = next(iter(loader))
    assert isinstance(Numbers("a", 1), Source)
    assert loader.sources == ["a", "b"]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in batch.items() if isinstance(v, torch.Tensor)} == {
        "input_ids": (torch.int64, (4, 3)),
        "targets": (torch.int64, (4, 3)),
        "document_ids": (torch.int32, (4, 3)),
        "source": (torch.int64, (4,)),
    }
    names = [f"{loader.sources[s]}/{i}" for s, i in zip(batch["source"], batch["input_ids"][:, 0], strict=True)]
    assert batch["sample_id"] == names
    assert batch["sample_pass"] == [0, 0, 0, 0]


def test_the_order_is_the_same_for_ever() -> None:
    # written down, so that no version of this code, NumPy or Python changes it unseen
    assert stream(AB, 12, seed=3) == ORDER_OF_SEED_3
    assert stream(AB, 12, seed=4) != ORDER_OF_SEED_3


ORDER_OF_SEED_3 = ["a/1", "a/4", "b/14", "a/3", "b/6", "a/6", "b/19", "a/5", "a/0", "b/5", "b/17", "b/11"]


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    take(mixture(AB, batch_size=4), 20)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_each_pass_over_a_source_holds_each_sample_once_in_a_new_order() -> None:
    order = stream(AB, 300, seed=1)
    for name, length in AB.items():
        drawn = [int(i.split("/")[1]) for i in order if i.startswith(name)]
        passes = [drawn[k : k + length] for k in range(0, len(drawn) - length + 1, length)]
        assert all(sorted(p) == list(range(length)) for p in passes)
        assert len({tuple(p) for p in passes}) == len(passes)
    loader = mixture(AB, batch_size=1, seed=1)
    take(loader, 300)
    assert loader.passes == {name: sum(i.startswith(name) for i in order) // n for name, n in AB.items()}


def test_sample_pass_counts_passes() -> None:
    loader = mixture({"a": 3}, batch_size=4)
    iterator = iter(loader)
    assert [next(iterator)["sample_pass"] for _ in range(3)] == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]


@FEW
@given(
    world=st.integers(1, 5),
    batch=st.integers(1, 4),
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
    a=st.integers(1, 9),
)
def test_ranks_share_the_global_order_exactly(world: int, batch: int, steps: int, seed: int, a: int) -> None:
    lengths = {"a": a, "b": 13}
    loaders = [mixture(lengths, batch_size=batch, seed=seed, rank=r, world_size=world) for r in range(world)]
    per_rank = [take(loader, steps) for loader in loaders]
    together = [name for step in range(steps) for rank in range(world) for name in per_rank[rank][step]]
    assert together == stream(lengths, steps * batch * world, seed=seed)
    states = [json.dumps(loader.state_dict()) for loader in loaders]
    assert len(set(states)) == 1


@FEW
@given(
    plan=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_restarts_on_other_world_sizes_lose_and_repeat_nothing(plan: list[tuple[int, int, int]], seed: int) -> None:
    """Any number of legs, each with its own world size, batch size and length."""
    lengths = {"a": 5, "b": 11, "c": 2}
    drawn: list[str] = []
    state = None
    for world, batch, steps in plan:
        loaders = [mixture(lengths, batch_size=batch, seed=seed, rank=r, world_size=world) for r in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        per_rank = [take(loader, steps) for loader in loaders]
        drawn += [name for step in range(steps) for rank in range(world) for name in per_rank[rank][step]]
        state = json.loads(json.dumps(loaders[-1].state_dict()))
        assert state["draws"] == len(drawn)
    assert drawn == stream(lengths, len(drawn), seed=seed)
    # so each source's passes are whole: every remaining sample of a pass is seen exactly once
    for name, length in lengths.items():
        ours = [i for i in drawn if i.startswith(name)]
        for k in range(0, len(ours), length):
            assert max(Counter(ours[k : k + length]).values()) == 1


@FEW
@given(cut=st.integers(0, 25), more=st.integers(1, 25), epoch=st.integers(1, 9), data=st.data())
def test_resume_anywhere_is_the_uninterrupted_run(cut: int, more: int, epoch: int, data: st.DataObject) -> None:
    """Several epochs, with the iterator of each; the epoch's end stays where it was."""

    def run(loader: MixtureLoader, count: int, log: list[Any]) -> None:
        while len(log) < count:
            for batch in loader:
                log.append(batch["sample_id"])
                if len(log) == count:
                    return
            log_ends.append(len(log))

    options = {"batch_size": 2, "steps_per_epoch": epoch, "seed": data.draw(st.integers(0, 9))}
    log_ends: list[int] = []
    whole: list[Any] = []
    run(mixture(AB, **options), cut + more, whole)
    ends, log_ends = log_ends, []
    first: list[Any] = []
    before = mixture(AB, **options)
    run(before, cut, first)
    after = mixture(AB, **options)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    run(after, cut + more, first)
    assert first == whole
    assert ends == list(range(epoch, cut + more, epoch))
    assert log_ends == [n for n in ends if n != cut]


LONG = stream(AB, 2700, seed=5)


@FEW
@given(
    out=st.sets(
        st.sampled_from([*(f"a/{i}" for i in range(6)), *(f"b/{i}" for i in range(19)), "c/unknown"]), max_size=20
    ),
    world=st.integers(1, 3),
    batch=st.integers(1, 3),
    steps=st.integers(1, 20),
    before=st.integers(0, 10),
)
def test_the_order_without_some_samples_is_the_order_less_these(
    out: set[str], world: int, batch: int, steps: int, before: int
) -> None:
    loaders = [mixture(AB, batch_size=batch, seed=5, rank=r, world_size=world) for r in range(world)]
    start = [take(loader, before) for loader in loaders]
    for loader in loaders:
        loader.exclude(f"sample:{name}" for name in out)
    per_rank = [take(loader, steps) for loader in loaders]
    drawn = [name for step in range(steps) for rank in range(world) for name in per_rank[rank][step]]
    done = before * batch * world
    assert [n for s in range(before) for r in range(world) for n in start[r][s]] == LONG[:done]
    rest = [name for name in LONG[done:] if name not in out]
    assert drawn == rest[: len(drawn)]
    # the exclusion is part of the position
    other = mixture(AB, batch_size=batch, seed=5, rank=0, world_size=world)
    other.load_state_dict(loaders[0].state_dict())
    assert take(other, 3) == take(loaders[0], 3)


def test_exclude_takes_the_whole_set() -> None:
    loader = mixture(AB, batch_size=5)
    loader.exclude(["sample:a/1", "source:b"])
    assert loader.excluded == {"sample:a/1", "source:b"}
    assert {i[0] for i in flat(take(loader, 9))} == {"a"}
    loader.exclude(["sample:a/1"])
    assert {i[0] for i in flat(take(loader, 9))} == {"a", "b"}
    loader.exclude([])
    assert "a/1" in flat(take(loader, 20))


def test_an_excluded_source_leaves_its_weight_and_the_others_order() -> None:
    lengths = {"a": 7, "b": 20, "c": 9}
    loader = mixture(lengths, weights={"a": 1, "b": 2, "c": 1}, batch_size=1, seed=2)
    loader.exclude(["source:c"])
    assert loader.mixture_weights() == {"a": 1 / 3, "b": 2 / 3, "c": 0.0}
    assert loader.weights_at(0) == {"a": 0.25, "b": 0.5, "c": 0.25}
    drawn = flat(take(loader, 600))
    plain = stream(lengths, 2000, seed=2, weights={"a": 1, "b": 2, "c": 1})
    for name in "ab":
        ours = [i for i in drawn if i.startswith(name)]
        assert ours == [i for i in plain if i.startswith(name)][: len(ours)]
    assert sum(i.startswith("a") for i in drawn) / 600 == pytest.approx(1 / 3, abs=0.06)


def test_excluding_everything_is_an_error_and_changes_nothing() -> None:
    loader = mixture({"a": 2, "b": 3}, weights={"a": 1.0, "b": 1.0}, batch_size=2)
    message = r"excluding \d+ names leaves nothing to draw: every source with a weight is excluded \(\['a', 'b'\]\)"
    with pytest.raises(ValueError, match=message):
        loader.exclude(["source:a", "source:b"])
    with pytest.raises(ValueError, match=message):
        loader.exclude(["source:b", "sample:a/0", "sample:a/1"])
    assert loader.excluded == frozenset()
    # a source whose samples are all excluded is an excluded source
    loader.exclude(["sample:a/0", "sample:a/1"])
    assert loader.mixture_weights() == {"a": 0.0, "b": 1.0}
    assert {i[0] for i in flat(take(loader, 9))} == {"b"}
    only = mixture({"a": 2, "b": 3}, weights={"a": 1.0})
    with pytest.raises(ValueError, match=r"every source with a weight is excluded \(\['a'\]\)"):
        only.exclude(["source:a"])


def test_where_the_plan_has_only_excluded_sources_the_others_that_it_uses_share() -> None:
    knots = [{"draw": 0, "weights": {"a": 1}}, {"draw": 10, "weights": {"a": 1, "b": 1}}]
    loader = mixture({"a": 5, "b": 5, "never": 5}, weights=knots)
    loader.exclude(["source:a"])
    assert loader.mixture_weights() == {"a": 0.0, "b": 1.0, "never": 0.0}
    assert {i[0] for i in flat(take(loader, 20))} == {"b"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/1"], "'a/1' can not be excluded; write 'sample:<id>' or 'source:<name>'"),
        (["source:d"], r"source 'd' can not be excluded; the sources are \['a', 'b'\]"),
    ],
)
def test_bad_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(AB).exclude(names)


def test_constant_schedule() -> None:
    knots = [{"draw": 0, "weights": {"a": 3, "b": 1}}, {"draw": 400, "weights": {"b": 2}}]
    loader = mixture(AB, weights=knots, batch_size=4)
    assert loader.transitions == [400]
    assert loader.weights_at(399) == {"a": 0.75, "b": 0.25}
    assert loader.weights_at(400) == loader.weights_at(10**9) == {"a": 0.0, "b": 1.0}
    assert loader.mixture_weights() == {"a": 0.75, "b": 0.25}
    drawn = flat(take(loader, 100))
    assert sum(i.startswith("a") for i in drawn) / 400 == pytest.approx(0.75, abs=0.06)
    assert loader.mixture_weights() == {"a": 0.0, "b": 1.0}
    assert {i[0] for i in flat(take(loader, 25))} == {"b"}


def test_linear_schedule() -> None:
    knots = [{"draw": 0, "weights": {"a": 1}}, {"draw": 1000, "weights": {"b": 1}}]
    loader = mixture(AB, weights=knots, interpolation="linear", batch_size=50)
    assert loader.weights_at(250) == {"a": 0.75, "b": 0.25}
    assert loader.weights_at(5000) == {"a": 0.0, "b": 1.0}
    share = [sum(i.startswith("a") for i in batch) for batch in take(loader, 21)]
    assert share[-1] == 0
    assert sum(share[:10]) / 500 == pytest.approx(0.75, abs=0.06)
    assert sum(share[10:20]) / 500 == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "weights has no knot"),
        ({"a": 0.0}, "the weights at draw 0 sum to 0; at least one source needs a weight > 0"),
        ({"a": -1.0, "b": 2.0}, "the weight of 'a' at draw 0 is -1.0, expected a finite number >= 0"),
        ({"a": float("nan")}, "the weight of 'a' at draw 0 is nan, expected a finite number >= 0"),
        ({"a": 1.0, "bb": 1.0}, r"name 'bb', but the sources are \['a', 'b'\]; did you mean 'b'\?"),
        ([{"draw": 5, "weights": {"a": 1}}], "the first knot of weights is at draw 5, expected draw 0"),
        ([{"draw": 0, "weights": {"a": 1}}] * 2, r"are at draws \[0, 0\], expected rising draws"),
        ([{"step": 0, "weights": {"a": 1}}], "expected {'draw': int, 'weights': {...}}"),
    ],
)
def test_bad_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(AB, weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0, expected at least 1, or None"),
        ({"rank": 1}, "rank is 1 and world_size is None; give both or neither"),
        ({"rank": 2, "world_size": 2}, "rank is 2, expected 0 <= rank < world_size = 2"),
        ({"interpolation": "cubic"}, "interpolation is 'cubic', expected 'constant' or 'linear'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(AB, **options)


def test_bad_sources_are_refused() -> None:
    with pytest.raises(ValueError, match="MixtureLoader has no source; give at least one"):
        MixtureLoader([])
    with pytest.raises(
        ValueError, match=r"the sources \['b'\] are empty; every source of a mixture needs at least one"
    ):
        mixture({"a": 3, "b": 0})
    with pytest.raises(ValueError, match=r"the names of the sources are \['a', 'a'\], expected each name once"):
        MixtureLoader([Numbers("a", 1), Numbers("a", 2)])


def test_samples_that_do_not_fit_together_are_named() -> None:
    loader = mixture({"a": 4}, batch_size=4)
    source = loader.source("a")
    plain = source.sample
    for change, message in [
        (
            {"targets": np.arange(5)},
            r"'targets' of sample a/2 is int64\[5\], that of the batch's first sample a/\d is int64",
        ),
        ({"extra": np.arange(5)}, "sample a/2 has the keys"),
    ]:
        source.sample = lambda i, change=change: plain(i) | (change if i == 2 else {})  # type: ignore[method-assign]
        first = next(i for i in stream({"a": 4}, 4))
        assert first != "a/2"
        with pytest.raises(ValueError, match=message):
            next(iter(mixture_of(source)))
    source.sample = lambda i: plain(i) | {"source": np.arange(1)}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has the key 'source', which the loader itself fills"):
        next(iter(mixture_of(source)))


def mixture_of(source: Any) -> MixtureLoader:
    return MixtureLoader([source], batch_size=4)


def test_a_state_of_other_data_is_refused() -> None:
    state = mixture(AB, seed=1).state_dict()
    with pytest.raises(ValueError, match="the loader state was written with seed = 1, this loader has 2; the order of"):
        mixture(AB, seed=2).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"written with lengths = {'a': 7, 'b': 20}, this loader has {'a': 8, 'b': 20}"
    ):
        mixture({"a": 8, "b": 20}, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="the loader state has version 9, expected 1"):
        mixture(AB).load_state_dict({**state, "version": 9})


def test_loading_moves_a_running_iterator() -> None:
    loader = mixture(AB, batch_size=2, steps_per_epoch=10)
    begin = loader.state_dict()
    iterator = iter(loader)
    first = [next(iterator)["sample_id"] for _ in range(6)]
    loader.load_state_dict(begin)
    assert [next(iterator)["sample_id"] for _ in range(6)] == first
    # and the iterator of the next epoch is a whole one
    assert len(list(loader)) == 10


def test_epochs_have_their_length_and_go_on() -> None:
    loader = mixture(AB, batch_size=2, steps_per_epoch=4)
    assert len(loader) == 4
    epochs = [[batch["sample_id"] for batch in loader] for _ in range(3)]
    assert [len(e) for e in epochs] == [4, 4, 4]
    assert flat([b for e in epochs for b in e]) == stream(AB, 24)
    with pytest.raises(TypeError, match="a MixtureLoader without steps_per_epoch is endless"):
        len(mixture(AB))


def test_an_epoch_that_was_left_early_does_not_shorten_the_next() -> None:
    loader = mixture(AB, batch_size=2, steps_per_epoch=4)
    take(loader, 3)
    assert len(list(loader)) == 4
    # nor does a position that was loaded and left without a draw
    take(loader, 3)
    loader.load_state_dict(loader.state_dict())
    iter(loader)
    assert len(list(loader)) == 4
    # the position at an epoch's end opens a whole epoch
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == 4


def test_faults_can_sit_in_the_source() -> None:
    loader = mixture(AB, batch_size=3)
    source = loader.source("a")
    plain = source.sample
    source.sample = lambda index: plain(index) | {"input_ids": np.full(3, 99)}  # type: ignore[method-assign]
    for _, batch in zip(range(10), loader, strict=False):
        assert ((batch["input_ids"][:, 0] == 99) == (batch["source"] == 0)).all()


def test_one_of_many_ranks_draws_its_own_part() -> None:
    loader = mixture({"a": 10_000, "b": 90_000}, batch_size=8, rank=777, world_size=1024)
    drawn = flat(take(loader, 3))
    assert drawn == [n for k in range(3) for n in BIG[k * 8192 + 777 * 8 : k * 8192 + 778 * 8]]


BIG = stream({"a": 10_000, "b": 90_000}, 0) or flat(take(mixture({"a": 10_000, "b": 90_000}, batch_size=8192), 3))


class Recorder(LightningModule):
    """Writes down what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.log_of: list[tuple[int, int, list[str]]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.log_of.append((self.current_epoch, batch_idx, batch["sample_id"]))
        return self.layer(batch["input_ids"].float()).pow(2).mean() * 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(module: LightningModule, loader: Any, tmp_path: Any, ckpt: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(module, loader, ckpt_path=ckpt, weights_only=True) if ckpt else trainer.fit(module, loader)
    return trainer


@pytest.mark.parametrize("steps_per_epoch", [6, None])
def test_in_a_trainer(tmp_path: Any, steps_per_epoch: int | None) -> None:
    module = Recorder()
    fit(module, mixture(AB, batch_size=2, steps_per_epoch=steps_per_epoch), tmp_path, max_steps=15)
    assert flat([ids for _, _, ids in module.log_of]) == stream(AB, 30)
    assert [e for e, _, _ in module.log_of] == ([0] * 6 + [1] * 6 + [2] * 3 if steps_per_epoch else [0] * 15)


@pytest.mark.parametrize("cut", [3, 6, 8, 12])
def test_lightnings_own_resume_is_exact(tmp_path: Any, cut: int) -> None:
    """In the middle of an epoch and on its last batch, where Lightning with other loaders leaves an empty epoch."""
    whole = Recorder()
    fit(whole, mixture(AB, batch_size=2, steps_per_epoch=6), tmp_path, max_steps=18)
    saver = ModelCheckpoint(
        tmp_path, every_n_train_steps=cut, save_top_k=-1, save_weights_only=False, filename="{step}"
    )
    options = {"callbacks": [saver], "enable_checkpointing": True}
    first = Recorder()
    fit(first, mixture(AB, batch_size=2, steps_per_epoch=6), tmp_path, max_steps=cut, **options)
    second = Recorder()
    ckpt = tmp_path / f"step={cut}.ckpt"
    fit(second, mixture(AB, batch_size=2, steps_per_epoch=6), tmp_path, ckpt, max_steps=18, **options)
    assert [ids for _, _, ids in first.log_of + second.log_of] == [ids for _, _, ids in whole.log_of]
    assert (first.log_of + second.log_of)[:-1] == whole.log_of[:-1]


def test_combined_loaders(tmp_path: Any) -> None:
    loaders = {
        "text": mixture({"a": 7}, batch_size=2, steps_per_epoch=5),
        "code": mixture({"b": 5}, batch_size=1, steps_per_epoch=5),
    }

    class Both(Recorder):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self.log_of.append((self.current_epoch, batch_idx, batch["text"]["sample_id"] + batch["code"]["sample_id"]))
            return self.layer(batch["text"]["input_ids"].float()).mean()

    module = Both()
    fit(module, loaders, tmp_path, max_epochs=2)
    drawn = flat([ids for _, _, ids in module.log_of])
    assert [i for i in drawn if i[0] == "a"] == stream({"a": 7}, 20)
    assert [i for i in drawn if i[0] == "b"] == stream({"b": 5}, 10)


def _draw_as_rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=240)
    )
    limit_groups()
    loader = mixture(AB, batch_size=3)
    drawn = take(loader, 4)
    Path(folder, f"{rank}.json").write_text(json.dumps([drawn, loader.state_dict()]))
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_ranks_come_from_torch_distributed(tmp_path: Path) -> None:
    call_on_ranks(_draw_as_rank, str(tmp_path))
    (first, state), (second, other) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2))
    assert [name for a, b in zip(first, second, strict=True) for name in a + b] == stream(AB, 24)
    assert state == other
    # on one process from there on
    alone = mixture(AB, batch_size=2)
    alone.load_state_dict(state)
    assert flat(take(alone, 5)) == stream(AB, 34)[24:]
