"""The data position of this rank: loader states, prefetched batches, the combined iterator, private generators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer

from ..data.identity import batch_size, sample_ids
from . import lightning_private as private
from .tree import clone

if TYPE_CHECKING:
    from ..data.quarantine import QuarantineLedger


def cursor_problems(trainer: Trainer) -> list[str]:
    """Why the data position cannot be put back exactly here; one sentence each, empty if it can."""
    problems = []
    loaders = private.train_loaders(trainer)
    for loader in loaders:
        name = type(loader).__name__
        if not private.is_stateful(loader):
            problems.append(
                f"Rollback needs a data loader with `state_dict` and `load_state_dict`; {name} has none. Use"
                " torchdata.stateful_dataloader.StatefulDataLoader, or lightning_sentinel.data.MixtureLoader."
            )
        elif getattr(loader, "in_order", True) is False and getattr(loader, "num_workers", 0) > 0:
            problems.append(f"{name}(in_order=False) with workers has no reproducible order; set in_order=True.")
    reload: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if reload:
        problems.append(
            f"reload_dataloaders_every_n_epochs={reload} replaces the loader while"
            " training, and the state of a loader that is gone cannot be put back. Set it to 0."
        )
    if private.uses_dataloader_iter(trainer):
        problems.append(
            "training_step takes `dataloader_iter` and fetches batches itself; batches that it holds cannot be put"
            " back. Take `batch` instead."
        )
    if len(loaders) > 1 and private.combined_mode(trainer) == "max_size":
        unknown = [
            type(x).__name__ for x in private.combined_iterator(trainer).iterators if not hasattr(x, "_finished")
        ]
        if unknown:
            problems.append(
                f"CombinedLoader(mode='max_size') over {', '.join(unknown)}: whether such a loader is exhausted cannot"
                " be read. Use StatefulDataLoader, or another mode."
            )
    return problems


def settle_samplers(trainer: Trainer) -> None:
    """Let samplers that begin lazily say where they will begin.

    torchdata's ``StatefulDistributedSampler`` takes over a restored position when its first sample is drawn: a state that is
    taken before that has the position of whatever it did before.
    """
    for loader in private.train_loaders(trainer):
        for sampler, _ in _lazy_samplers(loader):
            sampler.yielded = sampler.next_yielded


def _lazy_samplers(loader: Any) -> Iterator[tuple[Any, Any]]:
    """The loader's samplers with a restored position that they have not taken over yet, and the class that will do so."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found: list[Any] = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    for sampler in {id(s): s for s in found}.values():
        kind = next((c for c in type(sampler).__mro__ if c.__name__ == "StatefulDistributedSampler"), None)
        if kind is not None and sampler.next_yielded is not None:
            yield sampler, kind


def _take_over_position(loader: Any) -> None:
    """Give a restored position to the loader's iterator of now.

    Where no sample is drawn from that iterator any more, because the position is an epoch's end, the next one would begin
    with it otherwise, and the next epoch would be empty.
    """
    iterator: Any = getattr(loader, "_iterator", None)
    batches: Any = getattr(iterator, "_sampler_iter", None)
    for sampler, kind in _lazy_samplers(loader) if batches is not None else ():
        rest = _rest(sampler, kind, sampler.next_yielded)
        sampler.yielded, sampler.next_yielded = sampler.next_yielded, None
        if hasattr(batches, "sampler_iter"):
            batches.sampler_iter = rest
        else:  # without batches the loader draws from the sampler itself
            iterator._sampler_iter = rest


def _rest(sampler: Any, kind: Any, start: int) -> Iterator[int]:
    """What the sampler's own iterator does from a position on."""
    for index in itertools.islice(super(kind, sampler).__iter__(), start, None):
        sampler.yielded += 1
        yield index


def from_the_start(state: Any) -> Any:
    """A loader's state; where its iterator has drawn nothing yet, its sampler is at its beginning, too.

    For the same reason the sampler's own number is then that of the epoch before, and an epoch that begins with it is empty.

    Example:
        >>> from_the_start({"_sampler_iter_yielded": 0, "_sampler_iter_state": {"sampler_state": {"yielded": 32}}})
        {'_sampler_iter_yielded': 0, '_sampler_iter_state': {'sampler_state': {'yielded': 0}}}
    """
    if not isinstance(state, dict):
        return state
    fresh = state.get("_sampler_iter_yielded") == 0
    # with workers the state of the main process lies two levels deep; what the dataset says is not ours
    found = {k: from_the_start(v) if k in ("_snapshot", "_main_snapshot") else v for k, v in state.items()}
    for key in ("_index_sampler_state", "_sampler_iter_state") if fresh else ():
        sampler = found.get(key)
        while isinstance(sampler, dict):
            if "yielded" in sampler:
                sampler["yielded"] = 0
            sampler = sampler.get("sampler_state")
    return found


def take_cursor(trainer: Trainer, loop_state: dict[str, Any]) -> dict[str, Any]:
    """Position of every training loader. ``loop_state`` already holds the loaders' states; they are moved here."""
    fetcher = private.fetcher_of(trainer)
    iterator = private.combined_iterator(trainer)
    cursor: dict[str, Any] = {
        "loaders": clone(private.take_loader_states(loop_state)),
        "generators": {name: g.get_state() for name, g in _generators(trainer).items()},
        "fetched": fetcher.fetched,
        "done": fetcher.done,
        "batches": clone(list(getattr(fetcher, "batches", []))),
        "index": 0,
        "consumed": None,
        "finished": [],
    }
    if iterator is not None:
        cursor["index"], cursor["consumed"] = private.iterator_position(iterator)
        cursor["finished"] = [bool(getattr(x, "_finished", False)) for x in iterator.iterators]
    return cursor


def restore_cursor(trainer: Trainer, cursor: dict[str, Any], ledger: QuarantineLedger | None) -> None:
    """Put every training loader back to its position. Draws from the global generators: restore them afterwards."""
    fetcher = private.fetcher_of(trainer)
    loaders = private.train_loaders(trainer)
    for loader in loaders:
        private.stop_workers(loader)
    private.set_sampler_epochs(trainer)
    stateful = [x for x in loaders if private.is_stateful(x)]
    if len(stateful) != len(cursor["loaders"]):
        raise RuntimeError(
            f"The snapshot holds {len(cursor['loaders'])} loader states, this run has {len(stateful)} loaders with"
            " state. Use the same training loaders as in the run that made the snapshot."
        )
    for loader, state in zip(stateful, cursor["loaders"], strict=True):
        loader.load_state_dict(from_the_start(clone(state)))
    if ledger is not None:
        ledger.apply(loaders)  # before the iterators are made: some draw ahead at once
    private.iterate_without_prefetch(fetcher)
    for loader in stateful:
        _take_over_position(loader)
    iterator = private.combined_iterator(trainer)
    private.set_iterator_position(iterator, cursor["index"], cursor["consumed"])
    if private.combined_mode(trainer) == "max_size":
        # a loader that had run out would start over and hand out samples twice
        for i, finished in enumerate(cursor["finished"]):
            if finished:
                iterator.iterators[i] = iter(())
    if hasattr(fetcher, "batches"):
        fetcher.batches = clone(cursor["batches"])
    fetcher.fetched, fetcher.done = cursor["fetched"], cursor["done"]
    for _ in range(cursor.get("fetch_ahead", 0)):
        private.fetch_ahead(fetcher)
    if ledger is not None:
        _drop_fetched(trainer, ledger)
    for name, generator in _generators(trainer).items():
        if name in cursor["generators"]:
            generator.set_state(cursor["generators"][name])


def apply_ledger(trainer: Trainer, ledger: QuarantineLedger) -> list[str]:
    """From here on nobody who is quarantined is trained on, not even out of a batch that Lightning has fetched ahead.

    Returns:
        A sentence for each loader that could not follow; empty if all did.
    """
    problems = ledger.apply(private.train_loaders(trainer))
    _drop_fetched(trainer, ledger)
    return problems


def _drop_fetched(trainer: Trainer, ledger: QuarantineLedger) -> None:
    fetcher, iterator = private.fetcher_of(trainer), private.combined_iterator(trainer)
    loaders = private.train_loaders(trainer)
    follows = all(hasattr(loader, "exclude") for loader in loaders)
    if follows and iterator is not None and ledger.active and getattr(fetcher, "batches", []):
        _drop_excluded(fetcher, iterator, loaders, ledger.active)


def _drop_excluded(fetcher: Any, iterator: Any, loaders: list[Any], excluded: frozenset[str]) -> None:
    """Take excluded samples out of batches that Lightning had fetched ahead, before they were excluded.

    A batch that is left empty is replaced by the next one; one that keeps some samples stays, smaller.
    """
    sources = [str(s) for loader in loaders for s in getattr(loader, "sources", ())]
    kept = []
    for fetched, *place in fetcher.batches:
        rows = _rows_left(fetched, sources, excluded)
        if rows is None:
            kept.append((fetched, *place))
        elif rows:
            kept.append((select_rows(fetched, rows, batch_size(fetched)), *place))
    dropped = len(fetcher.batches) - len(kept)
    fetcher.batches = kept
    fetcher.fetched -= dropped
    private.move_iterator(iterator, -dropped)
    for _ in range(dropped):
        private.fetch_ahead(fetcher)


def _rows_left(batch: Any, sources: list[str], excluded: frozenset[str]) -> list[int] | None:
    """Rows of a batch that are not excluded; None if all are left."""
    named = [f"sample:{i}" in excluded for i in sample_ids(batch)]
    source = batch.get("source") if isinstance(batch, dict) else None
    if isinstance(source, torch.Tensor) and sources and len(source) == len(named):
        gone = {i for i, name in enumerate(sources) if f"source:{name}" in excluded}
        named = [out or int(i) in gone for out, i in zip(named, source.tolist(), strict=True)]
    return [i for i, out in enumerate(named) if not out] if any(named) else None


def select_rows(batch: Any, rows: list[int], size: int) -> Any:
    """The same batch with only these rows; whatever is not ``size`` long stays as it is."""
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, dict):
        return {key: select_rows(value, rows, size) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        if len(batch) == size and not any(isinstance(x, torch.Tensor | list | tuple | dict) for x in batch):
            return type(batch)(batch[i] for i in rows)
        return type(batch)(select_rows(value, rows, size) for value in batch)
    return batch


def _generators(trainer: Trainer) -> dict[str, torch.Generator]:
    """Generators that belong to a training or validation loader, each once, by where they hang."""
    roles = {"train": private.train_loaders(trainer), "validation": private.validation_loaders(trainer)}
    found: dict[str, torch.Generator] = {}
    seen: set[int] = set()
    for role, loaders in roles.items():
        for i, loader in enumerate(loaders):
            batch_sampler = getattr(loader, "batch_sampler", None)
            owners = {
                "loader": loader,
                "sampler": getattr(loader, "sampler", None),
                "batch_sampler": batch_sampler,
                "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
            }
            for where, owner in owners.items():
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and id(generator) not in seen:
                    seen.add(id(generator))
                    found[f"{role}.{i}.{where}"] = generator
    return found
