"""Random number state of this process: Python, NumPy, torch on the CPU and on the device that trains.

Everything captured is made of tensors, ints, strings and tuples, so that it goes through ``torch.save`` and comes back
with ``weights_only=True``.

Example:
    >>> state = capture()
    >>> first = torch.rand(3)
    >>> restore(state)
    >>> torch.equal(first, torch.rand(3))
    True
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of every global generator; ``device`` is the accelerator in use, if any."""
    generator: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = generator
    state: dict[str, Any] = {
        "python": random.getstate(),
        # torch has no full support for uint32: the same bits as int32
        "numpy": (name, torch.from_numpy(keys.view(np.int32).copy()), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type not in ("cpu", "meta"):
        state["device"] = _generator_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put back what :func:`capture` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "device" in state and device is not None and device.type not in ("cpu", "meta"):
        _generator_module(device).set_rng_state(state["device"], device)


def _generator_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
