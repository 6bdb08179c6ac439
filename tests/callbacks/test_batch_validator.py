"""BatchValidator: what it finds in every layout of batch, what it names, and what it leaves alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sentinel.callbacks.batch_validator import BatchValidator
from lightning_sentinel.context import context_of
from lightning_sentinel.data.mixture import MixtureLoader
from lightning_sentinel.data.quarantine import QuarantineLedger
from lightning_sentinel.incidents import Finding, FindingKind, Severity

V, IGNORED = 10, -100


def good(batch: int = 3, length: int = 4, first: int = 0) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(batch * length).reshape(batch, length) % V,
        "targets": (torch.arange(batch * length).reshape(batch, length) + 1) % V,
        "document_ids": torch.tensor([[0, 0, 1, 1]] * batch, dtype=torch.int32),
        "source": torch.zeros(batch, dtype=torch.int64),
        "sample_id": [f"prose/{first + i}" for i in range(batch)],
    }


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, [f.message for f in findings]
    assert Finding.from_dict(findings[0].to_dict()) == findings[0]
    return findings[0]


def changed(key: str, at: tuple[int, ...], value: float) -> dict[str, Any]:
    batch = good()
    batch[key][at] = value
    return batch


# -- what is healthy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        good(),
        {"input_ids": torch.zeros(2, 3, dtype=torch.int32), "labels": torch.zeros(2, 3, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 3, dtype=torch.int64)},
        {"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3)},
        {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 1, 3, 3)},
        {**good(), "sample_weight": torch.tensor([0.0, 1.0, 2.5])},
        {**good(), "loss_mask": torch.ones(3, 4, dtype=torch.bool)},
        (torch.zeros(2, 3).long(), torch.tensor([[1, 2, 3], [4, -100, -100]])),
        [torch.randn(5, 8), torch.randint(0, 1000, (5,))],
        (torch.randn(5, 8), torch.randn(5)),
        torch.randn(5, 8),
        torch.tensor(3.0),
        {"x": torch.randn(4, 3), "label": torch.tensor([50, 60, 70, 80])},
        {"a": good(), "b": good(first=9)},
        ("only", "words"),
        {},
        None,
    ],
)
def test_healthy_batches_have_no_finding(batch: Any) -> None:
    before = copy.deepcopy(batch)
    assert BatchValidator(V, neutralise=True).check(batch, step=0) == []
    flat_before, flat_after = torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(batch)
    for a, b in zip(flat_before, flat_after, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_partly_unsupervised_batches_are_healthy() -> None:
    batch = good()
    batch["targets"][:2] = IGNORED
    assert BatchValidator(V).check(batch, step=0) == []


# -- what is not ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [V, 1_000_000, -1])
def test_token_out_of_range(value: int) -> None:
    finding = only(BatchValidator(V).check(changed("input_ids", (1, 2), value), step=7, rank=3))
    assert finding.kind is FindingKind.INVALID_BATCH
    assert finding.severity is Severity.INCIDENT
    assert (finding.step, finding.ranks, finding.culprits) == (7, (3,), ("sample:prose/1",))
    assert finding.message == (
        f"rank 3: token {value} at [1, 2] of sample prose/1, expected 0 <= token < 10 (1 of 3 samples)"
    )
    assert finding.evidence == {
        "check": "token",
        "position": [1, 2],
        "value": value,
        "bound": "0 <= token < 10",
        "count": 1,
        "neutralised": False,
    }


def test_without_a_vocabulary_only_negative_tokens_are_wrong() -> None:
    validator = BatchValidator()
    assert validator.check(changed("input_ids", (1, 2), 10**6), step=0) == []
    assert only(validator.check({**changed("input_ids", (1, 2), -1), "sample_id": [*"xyz"]}, step=1)).culprits == (
        "sample:y",
    )
    # unnamed integers may be anything
    assert validator.check((torch.full((2, 3), -5), torch.full((2, 3), -7)), step=2) == []


def test_target_out_of_range() -> None:
    finding = only(BatchValidator(V).check(changed("targets", (2, 0), V), step=0))
    assert finding.culprits == ("sample:prose/2",)
    assert finding.evidence["check"] == "target"
    assert finding.evidence["bound"] == "0 <= target < 10 or -100"
    finding = only(BatchValidator(V, ignore_index=-1).check(changed("targets", (2, 0), -100), step=0))
    assert finding.evidence["value"] == -100


def test_several_samples_are_one_finding_that_names_them_all() -> None:
    batch = good()
    batch["input_ids"][0, 1:3] = 77
    batch["input_ids"][2, 3] = 88
    finding = only(BatchValidator(V).check(batch, step=0))
    assert finding.culprits == ("sample:prose/0", "sample:prose/2")
    assert (finding.evidence["position"], finding.evidence["value"], finding.evidence["count"]) == ([0, 1], 77, 3)
    assert finding.score == 2.0


@pytest.mark.parametrize(
    "batch", [(good()["input_ids"], good()["targets"]), [good()["input_ids"]], good()["input_ids"]]
)
def test_tuples_and_tensors_with_a_vocabulary(batch: Any) -> None:
    batch = copy.deepcopy(batch)
    tokens = batch if isinstance(batch, Tensor) else batch[0]
    tokens[1, 0] = 55
    finding = only(BatchValidator(V).check(batch, step=0))
    assert finding.evidence["position"] == [1, 0]
    assert finding.culprits[0].startswith("sample:hash/")


def test_nested_batches() -> None:
    batch = {"a": good(), "b": changed("input_ids", (2, 3), 44) | {"sample_id": ["code/0", "code/1", "code/2"]}}
    assert only(BatchValidator(V).check(batch, step=0)).culprits == ("sample:code/2",)


def test_no_supervised_tokens() -> None:
    batch = good()
    batch["targets"][:] = IGNORED
    finding = only(BatchValidator(V).check(batch, step=4))
    assert finding.kind is FindingKind.NO_SUPERVISED_TOKENS
    assert finding.culprits == ("sample:prose/0", "sample:prose/1", "sample:prose/2")
    assert finding.message == (
        "rank 0: none of the 3 samples has a target that carries loss (all are -100 or masked): prose/0, prose/1, prose/2"
    )


def test_a_loss_mask_counts_as_ignored() -> None:
    batch = good() | {"loss_mask": torch.zeros(3, 4)}
    assert only(BatchValidator(V).check(batch, step=4)).kind is FindingKind.NO_SUPERVISED_TOKENS
    targets = torch.full((3,), IGNORED)
    assert only(BatchValidator().check((torch.randn(3, 2), targets), step=4)).kind is FindingKind.NO_SUPERVISED_TOKENS


def test_float_tokens() -> None:
    batch = good()
    batch["input_ids"] = batch["input_ids"].float()
    finding = only(BatchValidator(V).check(batch, step=0))
    assert finding.message == "rank 0: tokens are torch.float32, expected an integer type"
    assert finding.evidence == {"check": "dtype", "value": "torch.float32"}
    assert len(finding.culprits) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targets": torch.zeros(3, 5).long()},
            "rank 0: targets have shape [3, 5], expected that of the tokens, [3, 4]",
        ),
        (
            {"targets": torch.zeros(2, 4).long()},
            "rank 0: targets have shape [2, 4], inputs [3, 4]; expected as many samples",
        ),
        (
            {"document_ids": torch.zeros(3, 5)},
            "rank 0: document_ids has shape [3, 5], expected that of the tokens, [3, 4]",
        ),
        (
            {"attention_mask": torch.ones(3, 5)},
            "rank 0: attention_mask has shape [3, 5], expected that of the tokens, [3, 4]",
        ),
        ({"loss_mask": torch.ones(4, 3)}, "rank 0: loss_mask has shape [4, 3], expected that of the tokens, [3, 4]"),
        ({"sample_id": ["a", "b"]}, "rank 0: the batch has 3 samples but 2 sample ids"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    finding = only(BatchValidator(V).check(good() | change, step=0))
    assert (finding.kind, finding.message) == (FindingKind.INVALID_BATCH, message)


def test_document_boundaries_only_rise() -> None:
    finding = only(BatchValidator(V).check(changed("document_ids", (1, 3), 0), step=0))
    assert finding.culprits == ("sample:prose/1",)
    assert finding.message == (
        "rank 0: document id 0 at [1, 3] of sample prose/1, expected no smaller than the one before it (1 of 3 samples)"
    )


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -0.5])
def test_sample_weights(weight: float) -> None:
    batch = good() | {"sample_weight": torch.tensor([1.0, 1.0, weight])}
    finding = only(BatchValidator(V).check(batch, step=0))
    assert finding.culprits == ("sample:prose/2",)
    assert finding.evidence["check"] == "sample weight"
    assert finding.evidence["bound"] == "finite and >= 0"


def test_masks() -> None:
    mask = torch.ones(3, 4)
    mask[0, 1] = float("nan")
    finding = only(BatchValidator(V).check(good() | {"loss_mask": mask}, step=0))
    assert (finding.evidence["check"], finding.culprits) == ("loss_mask", ("sample:prose/0",))


def test_targets_under_the_attention_mask_are_shown_not_answered() -> None:
    mask = torch.ones(3, 4, dtype=torch.int64)
    mask[1, 3] = 0
    finding = only(BatchValidator(V).check(good() | {"attention_mask": mask}, step=0))
    assert finding.severity is Severity.ALARM
    assert finding.evidence["check"] == "target under the mask"
    batch = good() | {"attention_mask": mask}
    batch["targets"][1, 3] = IGNORED
    assert BatchValidator(V).check(batch, step=0) == []


def test_unseen_ids() -> None:
    validator = BatchValidator(V, known_ids=lambda name: name != "prose/1")
    finding = only(validator.check(good(), step=0))
    assert finding.kind is FindingKind.UNSEEN_SAMPLES
    assert finding.culprits == ("sample:prose/1",)
    assert finding.message == "rank 0: 1 of 3 samples are not of this data: prose/1"


# -- taking a sample out --------------------------------------------------------------------------------------------------


def test_neutralise_takes_the_sample_out_in_place() -> None:
    batch = changed("input_ids", (1, 2), 99)
    tokens, targets = batch["input_ids"], batch["targets"]
    finding = only(BatchValidator(V, neutralise=True).check(batch, step=0))
    assert finding.evidence["neutralised"] is True
    assert finding.evidence["value"] == 99
    assert finding.message.endswith("; taken out of the loss")
    assert batch["input_ids"] is tokens
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 0, 7], [8, 9, 0, 1]]
    assert targets.tolist() == [[1, 2, 3, 4], [IGNORED] * 4, [9, 0, 1, 2]]


def test_neutralise_targets() -> None:
    batch = changed("targets", (0, 1), -7)
    assert only(BatchValidator(V, neutralise=True).check(batch, step=0)).evidence["neutralised"] is True
    assert batch["targets"].tolist() == [[IGNORED] * 4, [5, 6, 7, 8], [9, 0, 1, 2]]
    assert torch.equal(batch["input_ids"], good()["input_ids"])


def test_neutralise_labels_that_are_the_inputs() -> None:
    tokens = torch.tensor([[1, 2], [3, 99]])
    batch = {"input_ids": tokens, "labels": tokens}
    findings = BatchValidator(V, neutralise=True).check(batch, step=0)
    assert [f.evidence["check"] for f in findings] == ["token", "target"]
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [[1, 2], [IGNORED, IGNORED]]


def test_what_can_not_be_taken_out_is_left_alone() -> None:
    for batch in (
        torch.tensor([[1, 99]]),
        (torch.tensor([[1, 99]]), torch.randn(1)),
        {"input_ids": torch.tensor([[1, 99]])},
    ):
        finding = only(BatchValidator(V, neutralise=True).check(batch, step=0))
        assert finding.evidence["neutralised"] is False
        tokens = batch if isinstance(batch, Tensor) else batch["input_ids"] if isinstance(batch, dict) else batch[0]
        assert tokens.tolist() == [[1, 99]]


# -- repeats --------------------------------------------------------------------------------------------------------------


def feed(validator: BatchValidator, batches: list[list[str]], start: int = 0, epoch: int = 0) -> list[Finding]:
    found: list[Finding] = []
    for step, ids in enumerate(batches, start):
        batch = {"input_ids": torch.ones(len(ids), 2).long(), "sample_id": ids}
        found += validator.check(batch, step=step, epoch=epoch)
    return found


def test_a_cursor_that_has_gone_back() -> None:
    validator = BatchValidator(V)
    assert feed(validator, [["a", "b"], ["c", "d"], ["e", "f"]]) == []
    finding = only(feed(validator, [["c", "d"]], start=3))
    assert (finding.kind, finding.severity) == (FindingKind.REPEATED_SAMPLES, Severity.INCIDENT)
    assert finding.culprits == ("cursor",)
    assert (finding.step, finding.since_step) == (3, 3)
    assert finding.message == (
        "rank 0: 2 of 2 samples come again in the order in which they were drawn at step 1 (first: c); the data cursor has"
        " gone back"
    )
    assert finding.evidence == {
        "check": "repeats",
        "first_repeated": "c",
        "position": [0],
        "first_drawn_step": 1,
        "repeated": 2,
        "samples": 2,
        "in_order": True,
    }
    # it goes on: the same incident, since the same step; then the data is new again
    finding = only(feed(validator, [["e", "f"]], start=4))
    assert (finding.culprits, finding.since_step, finding.evidence["first_drawn_step"]) == (("cursor",), 3, 2)
    assert feed(validator, [["g", "h"]], start=5) == []


def test_a_cursor_in_the_middle_of_a_batch() -> None:
    validator = BatchValidator(V)
    feed(validator, [["a", "b"], ["c", "d"], ["e", "f"]])
    assert only(feed(validator, [["b", "c"]], start=3)).culprits == ("cursor",)


def test_a_cursor_with_one_sample_a_batch_is_told_at_the_second() -> None:
    validator = BatchValidator(V)
    feed(validator, [["a"], ["b"], ["c"], ["d"]])
    first, second = feed(validator, [["b"], ["c"]], start=4)
    assert (first.culprits, first.severity) == (("sample:b",), Severity.ALARM)
    assert (second.culprits, second.severity, second.since_step) == (("cursor",), Severity.INCIDENT, 4)


def test_duplicated_data_is_no_cursor() -> None:
    validator = BatchValidator(V)
    twice = only(feed(validator, [["a", "b", "a"]]))
    assert (twice.culprits, twice.severity) == (("sample:a",), Severity.ALARM)
    assert twice.message == "rank 0: 1 of 3 samples more than once in this batch: a"
    again = only(feed(validator, [["c", "b", "d"]], start=1))
    assert (again.culprits, again.severity, again.since_step) == (("sample:b",), Severity.ALARM, 1)
    assert again.message == "rank 0: 1 of 3 samples already drawn, at step 0: b"
    assert again.evidence["first_drawn_step"] == 0
    # all of them, but in another order
    assert only(feed(validator, [["d", "c"]], start=2)).culprits == ("sample:d", "sample:c")


def test_a_new_epoch_may_repeat() -> None:
    validator = BatchValidator(V)
    order = [["a", "b"], ["c", "d"]]
    assert feed(validator, order, epoch=0) == []
    assert feed(validator, order, start=2, epoch=1) == []
    assert only(feed(validator, order[:1], start=4, epoch=1)).culprits == ("cursor",)


def test_equal_content_is_no_proof() -> None:
    validator = BatchValidator(V)
    data = [(torch.tensor([[i], [i + 1]]), torch.tensor([[1], [1]])) for i in range(0, 6, 2)]
    assert [f for step, batch in enumerate(data) for f in validator.check(batch, step=step)] == []
    finding = only(validator.check(data[0], step=3))
    assert (finding.culprits, finding.severity) == (("cursor",), Severity.ALARM)
    assert validator.check((data[0][0][:1], data[0][1][:1]), step=4) == []
    for step in range(5, 10):
        assert validator.check(torch.zeros(2, 3).long(), step=step) == []
        assert validator.check(torch.ones(1, 3).long(), step=step) == []


def test_repeats_may_be_allowed() -> None:
    assert feed(BatchValidator(V, repeats="allow"), [["a", "a"], ["a", "a"]]) == []


def test_ids_of_a_function() -> None:
    validator = BatchValidator(V, sample_id_fn=lambda batch: batch[0][:, 0].tolist())
    batch = (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 3], [4, 99]]))
    assert only(validator.check(batch, step=0)).culprits == ("sample:3",)


# -- options, state, cost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be at least 1 or None, found 0"),
        ({"vocabulary_size": 10, "ignore_index": 0}, "ignore_index is 0, a token of the vocabulary of 10; expected"),
        ({"repeats": "never"}, "repeats is 'never', expected one of report, allow"),
        ({"max_remembered": 0}, "max_remembered must be at least 2, found 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchValidator(**options)


def test_state_goes_round_at_any_point(tmp_path: Path) -> None:
    order = [["a", "b"], ["c", "d"], ["a", "b"], ["c", "d"], ["e", "e"], ["f", "a"]]
    whole = feed(BatchValidator(V), order)
    for cut in range(len(order) + 1):
        first = BatchValidator(V)
        found = feed(first, order[:cut])
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second = BatchValidator(V)
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert found + feed(second, order[cut:], start=cut) == whole


def test_a_healthy_batch_costs_one_host_read() -> None:
    validator = BatchValidator(257)
    batches = [
        {
            "input_ids": torch.randint(0, 257, (8, 256)),
            "targets": torch.randint(0, 257, (8, 256)),
            "document_ids": torch.zeros(8, 256, dtype=torch.int32),
            "sample_id": [f"prose/3fa9c1d2e0/{k * 8 + i}" for i in range(8)],
        }
        for k in range(50)
    ]
    for step, batch in enumerate(batches):
        assert validator.check(batch, step=step) == []
    # on meta tensors every host read raises: up to the one read nothing does
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in batches[0].items()}
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta") as error:
        validator.check(meta, step=99)
    assert any(entry.name == "_check_part" for entry in error.traceback)
    assert str(error.traceback[-1].path).endswith("batch_validator.py")
    assert "tolist" in str(error.traceback[-1].statement)


# -- in a Trainer ---------------------------------------------------------------------------------------------------------


class Text:
    """One source; sample ``i`` is a run of consecutive tokens."""

    def __init__(self, name: str, length: int) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> dict[str, Any]:
        tokens = np.arange(index, index + 5, dtype=np.int64) % V
        return {"input_ids": tokens[:-1], "targets": tokens[1:].copy(), "document_ids": np.zeros(4, dtype=np.int32)}

    def sample_id(self, index: int) -> str:
        return f"{self.name}/{index}"


class Model(LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, V)
        self.automatic_optimization = not manual
        self.windows: list[tuple[int, list[str], int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scratch = context_of(self.trainer).scratch
        self.windows.append((self.global_step, list(scratch["sample_ids"]), len(scratch["batch_findings"])))
        tokens, targets = (batch["input_ids"], batch["targets"]) if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self.embed(tokens).flatten(0, 1), targets.flatten())
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lines:
    """Keeps the events, as a journal would."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def flush(self) -> None:
        return None


def fit(
    model: Model, loader: Any, validator: BatchValidator, tmp_path: Path, sink: Lines | None = None, **options: Any
) -> Lines:
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[validator],
        **options,
    )
    sink = context_of(trainer).journal = sink or Lines()
    context_of(trainer).run_dir = tmp_path
    trainer.fit(model, loader)
    return sink


def loader(**options: Any) -> MixtureLoader:
    return MixtureLoader([Text("a", 30), Text("b", 40)], batch_size=2, **options)


@pytest.mark.parametrize("manual", [False, True])
def test_a_window_holds_the_ids_of_its_micro_batches(tmp_path: Path, manual: bool) -> None:
    model = Model(manual)
    options = {} if manual else {"accumulate_grad_batches": 2}
    sink = fit(model, loader(steps_per_epoch=5), BatchValidator(V), tmp_path, max_epochs=2, **options)
    assert sink.lines == []
    drawn = [batch["sample_id"] for _, batch in zip(range(10), loader(), strict=False)]
    # of five batches an epoch, automatic optimization steps on the last alone; the manual loop goes on accumulating
    sizes = [2, 4, 2, 4, 2, 4, 6, 2, 4, 2] if manual else [2, 4, 2, 4, 2, 2, 4, 2, 4, 2]
    assert [len(ids) for _, ids, _ in model.windows] == sizes
    for (_, ids, _), own in zip(model.windows, drawn, strict=True):
        assert ids[-2:] == own


def test_an_out_of_range_token_is_named_before_the_forward_crashes(tmp_path: Path) -> None:
    data = loader()
    source = data.source("b")
    plain = source.sample
    source.sample = lambda i: plain(i) | {"input_ids": np.array([1, 2, 99, 4])} if i == 7 else plain(i)  # type: ignore
    model, sink = Model(), Lines()
    with pytest.raises(IndexError):
        fit(model, data, BatchValidator(V), tmp_path, sink, max_steps=100)
    (line,) = sink.lines
    assert (line["event"], line["step"]) == ("batch.invalid", model.windows[-1][0])
    assert line["finding"]["culprits"] == ("sample:b/7",)
    assert (line["finding"]["evidence"]["value"], line["finding"]["evidence"]["position"][1]) == (99, 2)


def test_neutralised_in_a_trainer_the_run_goes_on(tmp_path: Path) -> None:
    data = loader()
    source = data.source("b")
    plain = source.sample
    source.sample = lambda i: plain(i) | {"input_ids": np.array([1, 2, 99, 4])} if i == 7 else plain(i)  # type: ignore
    model = Model()
    sink = fit(model, data, BatchValidator(V, neutralise=True), tmp_path, max_steps=40)
    assert all(line["event"] == "batch.invalid" for line in sink.lines)
    assert {tuple(line["finding"]["culprits"]) for line in sink.lines} == {("sample:b/7",)}
    assert sink.lines[0]["finding"]["evidence"]["neutralised"] is True
    steps = [line["step"] for line in sink.lines]
    assert (
        steps
        == [step for step, _, found in model.windows if found]
        == [step for step, ids, _ in model.windows if "b/7" in ids]
    )
    assert torch.isfinite(model.embed.weight).all()


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_a_rewound_loader_is_found_at_its_first_batch(tmp_path: Path, steps_per_epoch: int | None) -> None:
    class Rewinds(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 10:
                data.load_state_dict(begin)

    data = loader(steps_per_epoch=steps_per_epoch)
    begin = data.state_dict()
    model = Rewinds()
    sink = fit(model, data, BatchValidator(V), tmp_path, max_steps=16)
    # without a length Lightning holds one batch that was drawn before the rewind
    first = 10 if steps_per_epoch else 11
    assert [line["step"] for line in sink.lines] == list(range(first, 16))
    finding = sink.lines[0]["finding"]
    assert finding["culprits"] == ("cursor",)
    assert finding["since_step"] == first
    assert finding["evidence"]["first_drawn_step"] == 0
    assert finding["evidence"]["repeated"] == 2


def test_passes_and_epochs_of_healthy_loaders_are_no_repeats(tmp_path: Path) -> None:
    small = MixtureLoader([Text("a", 3), Text("b", 5)], batch_size=4, steps_per_epoch=5)
    assert fit(Model(), small, BatchValidator(V), tmp_path, max_steps=40).lines == []
    rows = [
        {k: torch.from_numpy(v) for k, v in Text("a", 8).sample(i).items()} | {"sample_id": f"a/{i}"} for i in range(8)
    ]
    plain = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    assert fit(Model(), plain, BatchValidator(V), tmp_path, max_epochs=3).lines == []


def test_looking_changes_nothing(tmp_path: Path) -> None:
    def weights(validate: bool) -> Tensor:
        torch.manual_seed(0)
        model = Model()
        validator = BatchValidator(V) if validate else Silent()
        fit(model, loader(), validator, tmp_path, max_steps=20)
        return model.embed.weight.detach()

    assert torch.equal(weights(True), weights(False))


class Silent(BatchValidator):
    """In the Trainer, but looks at nothing."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        context_of(trainer).scratch.update(sample_ids=[], batch_findings=[])


@pytest.mark.parametrize("layout", ["tuple", "tensor"])
def test_batches_that_are_no_dicts(tmp_path: Path, layout: str) -> None:
    rows = [torch.from_numpy(Text("a", 8).sample(i)["input_ids"]) for i in range(8)]

    class Plain(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch if layout == "tuple" else (batch, batch.clone()), batch_idx)

    data = DataLoader([(r, r) for r in rows] if layout == "tuple" else rows, batch_size=2)  # type: ignore[arg-type]
    assert fit(Plain(), data, BatchValidator(V), tmp_path, max_epochs=2).lines == []
    sink = fit(Plain(), data, BatchValidator(5, neutralise=True), tmp_path, max_epochs=1)
    assert {f["finding"]["evidence"]["neutralised"] for f in sink.lines} == {layout == "tuple"}


def test_the_ledger_of_the_run_folder_holds_from_the_start(tmp_path: Path) -> None:
    earlier = QuarantineLedger(tmp_path / "quarantine.jsonl")
    earlier.add(["sample:a/3", "source:b"], step=5, incident=1, policy="recover", reason="random tokens")
    model = Model()
    assert fit(model, loader(steps_per_epoch=20), BatchValidator(V), tmp_path, max_epochs=1).lines == []
    drawn = {name for _, ids, _ in model.windows for name in ids}
    assert drawn == {f"a/{i}" for i in range(30)} - {"a/3"}
    rows = [(torch.ones(2).long(), torch.ones(2).long())] * 4
    sink = fit(model, DataLoader(rows), BatchValidator(V), tmp_path, max_epochs=1)  # type: ignore[arg-type]
    assert [line["event"] for line in sink.lines] == ["quarantine.refused"]
    assert sink.lines[0]["reason"].startswith("DataLoader has no exclude(names), so its 2 quarantined names are still")
    assert earlier.path is not None
    assert len(earlier.path.read_text().splitlines()) == 2
