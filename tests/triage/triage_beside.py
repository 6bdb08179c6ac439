"""What the tests put beside each case of the matrix on two ranks."""

from __future__ import annotations

from collective_limit import CollectiveLimit
from triage_matrix.faults import Straggler


class Beside(CollectiveLimit):
    """The limit on collectives; and a slow rank that is ten times as slow, so that no pause of a busy machine outdoes it."""

    def __init__(self) -> None:
        super().__init__()
        Straggler.forwards_more = 27.0
