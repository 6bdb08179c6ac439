"""What every detector is: a record in, findings out; state that goes through ``state_dict``."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

from ..incidents import Finding
from ..record import StepRecord


@runtime_checkable
class Detector(Protocol):
    """A pure detector. It never touches the trainer, and equal records give equal findings on every rank.

    ``observe`` looks at the record and, where the record is acceptable, takes it into its history (robust statistics
    rest on accepted values only). ``state_dict`` holds only numbers, strings, lists, dicts and NumPy arrays.
    """

    name: ClassVar[str]

    def observe(self, record: StepRecord) -> list[Finding]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
