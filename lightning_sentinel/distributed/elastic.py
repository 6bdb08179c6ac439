"""Coming back under ``torchrun``: joining the process group after a restart, and what stays the same over restarts.

``torchrun --max-restarts`` starts all workers anew when one dies, but the agent's store, through which they find each
other, lives on (for every rendezvous backend; seen with torch 2.13). So a worker that is faster than the others reads the
address of a dead one: gloo ends with ``connectFullMesh failed ... Connection refused``, and each failed attempt leaves more
stale addresses behind. A prefix made of ``TORCHELASTIC_RESTART_COUNT`` is not enough either: an agent that restarts because
the *membership* has changed does not raise its count, so that nodes may differ in it.

:func:`init_process_group` lets the workers of one attempt find each other first, whenever each of them starts, and then
uses a part of the store that is theirs alone:

1. Every worker but rank 0 says hello under a name that it has just made up, and waits for an offer to that name.
2. Rank 0 makes up the name of the meeting and offers it to everyone who has said hello, the dead included.
3. Only the living accept. When all ranks have, rank 0 goes on too.

An offer to a fresh name can't be stale, whatever else is left in the store.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("lightning_sentinel")

DEFAULT_TIMEOUT = timedelta(minutes=30)
_PREFIX = "lightning_sentinel"
_POLL_SECONDS = (0.01, 1.0)  # rank 0 looks for new hellos; each look that finds none doubles the wait


def init_process_group(backend: str | None = None, timeout: timedelta | None = None) -> bool:
    """Join the default process group so that it works after a restart by ``torchrun`` too. Call it before the Trainer.

    Lightning finds the group and makes none of its own, for every strategy. A ``timeout`` of the strategy has then no
    effect: give it here. Under other launchers, with a single process, or where a group exists, nothing happens.

    Example:
        >>> from lightning_sentinel.distributed import init_process_group
        >>> init_process_group()  # not under torchrun: left to Lightning
        False

    Args:
        backend: As for ``torch.distributed.init_process_group``. By default that of the accelerator that torch sees, so
            give ``"gloo"`` where you train on the CPU of a machine that has GPUs.
        timeout: How long the ranks wait for each other here, and later in collectives; by default 30 minutes.

    Returns:
        True if the process group was made here.

    Raises:
        RuntimeError: Not all ranks came within ``timeout``; on rank 0 the message names those that are missing.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or dist.is_initialized():
        return False
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return False
    timeout = DEFAULT_TIMEOUT if timeout is None else timeout
    store = meet(_agent_store(timeout), rank, world_size, timeout)
    backend = backend or os.environ.get("PL_TORCH_DISTRIBUTED_BACKEND") or _default_backend()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The part of ``store`` that belongs to the processes that are alive now; returns when all of them are there.

    Args:
        store: A store that may hold leftovers of earlier attempts; with ``append`` (``TCPStore``, ``HashStore``).
        rank: This process.
        world_size: How many processes meet.
        timeout: How long to wait for the others.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    prefix = f"{_PREFIX}/meeting"
    meeting = _host(store, prefix, world_size, timeout) if rank == 0 else _join(store, prefix, rank, timeout)
    return PrefixStore(f"{prefix}/{meeting}", store)


def _host(store: Any, prefix: str, world_size: int, timeout: timedelta) -> str:
    meeting = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    counted = offered = 0
    wait = _POLL_SECONDS[0]
    while store.add(f"{prefix}/{meeting}/accepted", 0) < world_size - 1:
        count = store.add(f"{prefix}/hellos", 0)
        if count > counted:  # a worker that died in between may have left its name but not its count
            counted = count
            names = store.get(f"{prefix}/hello").decode().split()
            keys = [f"{prefix}/offer/{name}" for name in names[offered:]]
            store.multi_set(keys, [meeting] * len(keys))
            offered = len(names)
            wait = _POLL_SECONDS[0]
            continue
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Of {world_size} ranks, {_missing(store, f'{prefix}/{meeting}', world_size)} did not come within"
                f" {timeout.total_seconds():g} s. Look at what torchrun says about them, or give init_process_group a"
                " longer timeout."
            )
        time.sleep(wait)
        wait = min(2 * wait, _POLL_SECONDS[1])
    return meeting


def _missing(store: Any, key: str, world_size: int) -> list[int]:
    came = {int(rank) for rank in store.get(key).decode().split()} if store.check([key]) else set()
    return sorted(set(range(1, world_size)) - came)


def _join(store: Any, prefix: str, rank: int, timeout: timedelta) -> str:
    name = f"{rank}-{uuid.uuid4().hex}"
    store.append(f"{prefix}/hello", f"{name} ")
    store.add(f"{prefix}/hellos", 1)
    try:
        store.wait([f"{prefix}/offer/{name}"], timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank 0 was not there within {timeout.total_seconds():g} s. Look at what torchrun says about it, or give"
            " init_process_group a longer timeout."
        ) from error
    meeting: str = store.get(f"{prefix}/offer/{name}").decode()
    store.append(f"{prefix}/{meeting}", f"{rank} ")
    store.add(f"{prefix}/{meeting}/accepted", 1)
    return meeting


def _agent_store(timeout: timedelta) -> Store:
    """A client of the store that the agent hosts; of one that rank 0 hosts where the agent shares none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return TCPStore(
        address,
        port,
        int(os.environ["WORLD_SIZE"]),
        is_master=not shared and os.environ["RANK"] == "0",
        timeout=timeout,
        multi_tenant=not shared,
    )


def _default_backend() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return dist.get_default_backend_for_device(accelerator or torch.device("cpu"))
