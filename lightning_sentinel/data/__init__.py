"""Data: a loader with an exact position, names for samples, and the ledger of who is not drawn any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .identity import sample_ids
    from .mixture import MixtureLoader
    from .quarantine import QuarantineLedger

# Loaded on first use: the callbacks import the ledger, and the ledger must not bring the loader along.
_PUBLIC = {"MixtureLoader": "mixture", "QuarantineLedger": "quarantine", "sample_ids": "identity"}

__all__ = ["MixtureLoader", "QuarantineLedger", "sample_ids"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
