"""Fetches the samples of a step again by their ids, as one batch.

Asked in this order: the datamodule's ``fetch_samples(ids) -> batch``, the training loader's ``fetch(ids) -> batch`` (the
project's ``MixtureLoader`` has it), and a map-style data set, walked through until every id has been met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import Trainer

from ..data.identity import SampleIdFn, sample_ids
from ..state.lightning_private import datamodule_of, train_loaders

Progress = Callable[[Iterable[int], str], Iterable[int]]


class FetchError(ValueError):
    """Samples that cannot be had again; the message says which, and what to do."""


def fetch_batch(
    trainer: Trainer,
    ids: Sequence[str],
    *,
    sample_id_fn: SampleIdFn | None = None,
    progress: Progress = lambda items, words: items,
) -> Any:
    """The batch of these samples, in this order, before it is moved to a device.

    Args:
        trainer: A Trainer whose training loader is set up.
        ids: As the journal names them.
        sample_id_fn: ``batch -> ids``, where the run named its samples by one.
        progress: Wraps the indices of a data set that has to be walked through.

    Raises:
        FetchError: With the ids that were not found and what to do.
    """
    wanted = [str(i) for i in ids]
    module = datamodule_of(trainer)
    if callable(getattr(module, "fetch_samples", None)):
        return _asked(f"{type(module).__name__}.fetch_samples", module.fetch_samples, wanted)
    loaders = train_loaders(trainer)
    for loader in loaders:
        if callable(getattr(loader, "fetch", None)):
            return _asked(f"{type(loader).__name__}.fetch", loader.fetch, wanted)
    if len(loaders) == 1 and _is_map_style(loaders[0]):
        return _walk(loaders[0], wanted, sample_id_fn, progress)
    names = ", ".join(sorted({type(x).__name__ for x in loaders})) or "no training loader"
    raise FetchError(
        f"{_few(wanted)} cannot be fetched again: {names} offers neither fetch(ids) nor a map-style data set."
        " Give the datamodule a method fetch_samples(ids) that returns the batch of these samples, or let the run write"
        " its batches (IncidentResponse(capture_batch=True))."
    )


def _asked(name: str, fetch: Callable[[Sequence[str]], Any], wanted: list[str]) -> Any:
    try:
        return fetch(wanted)
    except (KeyError, ValueError, LookupError) as error:
        text = str(error.args[0]) if error.args else str(error)
        raise FetchError(
            f"{_few(wanted)} cannot be fetched again: {name} says: {text} Is this the data that the run used?"
        ) from error


def _is_map_style(loader: Any) -> bool:
    data = getattr(loader, "dataset", None)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and callable(getattr(loader, "collate_fn", None))


def _walk(loader: Any, wanted: list[str], sample_id_fn: SampleIdFn | None, progress: Progress) -> Any:
    """Look at each sample of a map-style data set alone until all are found."""
    missing, found = set(wanted), {}
    for index in progress(range(len(loader.dataset)), "looking for the samples"):
        sample = loader.dataset[index]
        names = sample_ids(loader.collate_fn([sample]), sample_id_fn)
        if len(names) == 1 and names[0] in missing:
            found[names[0]] = sample
            missing.discard(names[0])
            if not missing:
                break
    if missing:
        hashed = all(name.startswith("hash/") for name in missing)
        why = (
            " They are named by their content: it has changed, or collating pads a sample differently in a batch."
            if hashed
            else ""
        )
        raise FetchError(
            f"{_few(sorted(missing))} cannot be fetched again: the data set of {len(loader.dataset):,} samples holds"
            f" {len(wanted) - len(missing)} of {len(wanted)}.{why} Give the data that the run used, or let the run write its"
            " batches (IncidentResponse(capture_batch=True))."
        )
    return loader.collate_fn([found[name] for name in wanted])


def _few(ids: Sequence[str]) -> str:
    shown = ", ".join(f"sample:{i}" for i in ids[:3])
    return shown + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
