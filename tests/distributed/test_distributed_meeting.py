"""Finding each other in a store that is full of leftovers: who is alive meets, nobody hears from the dead."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from lightning_sentinel.distributed import init_process_group
from lightning_sentinel.distributed.elastic import meet


def meet_all(stores: Sequence[Any], delays: Sequence[float | None], seconds: float = 20.0) -> list[Any]:
    """One thread per rank, each starting after its delay (None: never); rank 0's token as each sees it, or its error."""
    found: list[Any] = [None] * len(delays)

    def start(rank: int, delay: float) -> None:
        time.sleep(delay)
        try:
            part = meet(stores[rank], rank, len(delays), timedelta(seconds=seconds))
            if rank == 0:
                part.set("token", uuid.uuid4().hex)
            part.wait(["token"], timedelta(seconds=seconds))
            found[rank] = part.get("token")
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=start, args=(r, d)) for r, d in enumerate(delays) if d is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("kind", ["hash", "tcp"])
@pytest.mark.parametrize("delays", [(0.0, 0.4, 0.1), (0.4, 0.0, 0.2)], ids=["rank 0 first", "rank 0 last"])
def test_skewed_starts_meet_attempt_after_attempt(delays: tuple[float, ...], kind: str) -> None:
    """The store stays the same, with the leftovers of every attempt before."""
    if kind == "hash":
        stores: list[Any] = [HashStore()] * 3
    else:
        server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
        stores = [TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20)) for _ in range(3)]
    tokens = set()
    for _ in range(3):
        found = meet_all(stores, delays)
        assert len(set(found)) == 1, found
        assert isinstance(found[0], bytes)
        tokens.add(found[0])
    assert len(tokens) == 3


def test_who_died_while_looking_for_the_others_is_not_waited_for() -> None:
    stores = [HashStore()] * 3
    # rank 0 died before it came, the others after their hello; then rank 1 died before it came, and so on
    for delays in ((None, 0.0, 0.0), (0.0, None, 0.0), (0.0, 0.0, None)):
        assert all(r is None or isinstance(r, RuntimeError) for r in meet_all(stores, delays, seconds=0.3))
    stores[0].append("lightning_sentinel/meeting/hello", "1-killed-between-its-name-and-its-count ")
    found = meet_all(stores, (0.0, 0.3, 0.0))
    assert len(set(found)) == 1
    assert isinstance(found[0], bytes)


def test_rank_0_names_the_missing_and_the_others_name_rank_0() -> None:
    found = meet_all([HashStore()] * 4, (0.0, 0.0, None, None), seconds=0.4)
    assert str(found[0]).startswith("Of 4 ranks, [2, 3] did not come within 0.4 s.")
    assert isinstance(found[1], bytes | RuntimeError)  # it met rank 0, which then gave up
    found = meet_all([HashStore()] * 2, (None, 0.0), seconds=0.2)
    assert str(found[1]).startswith("Rank 0 was not there within 0.2 s.")


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert init_process_group() is False
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert init_process_group() is False
