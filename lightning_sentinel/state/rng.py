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

import ctypes
import random
import struct
import sys
from typing import Any

import numpy as np
import torch


def capture(device: torch.device | None = None) -> dict[str, Any]:
    """The state of every global generator; ``device`` is the accelerator in use, if any."""
    name, keys, position, has_gauss, cached = numpy_state()
    state: dict[str, Any] = {
        "python": python_state(),
        # torch has no full support for uint32: the same bits as int32
        "numpy": (name, torch.from_numpy(keys.view(np.int32)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type not in ("cpu", "meta"):
        state["device"] = _generator_module(device).get_rng_state(device)
    return state


# A generator of 624 words draws them one by one and then makes all of them anew, so that its position and a few words tell
# whether it has moved: that so many words are the same by chance is less likely than that the memory has failed. To read
# and compare all of them in every step costs ten times as much, because they are in no cache then.
_WORDS = 16
_NUMPY_POSITION = 624 * 4
_NUMPY: Any = getattr(np.random.get_state, "__self__", None)  # the RandomState behind the functions of ``numpy.random``


def _gauss_offset() -> int | None:
    """Where a ``RandomState`` says whether it keeps the second of a pair of normal numbers, and that number behind it.

    Looked for in one of our own; None if it is not found as expected.
    """
    probe = np.random.RandomState(1)
    probe.standard_normal()
    kept: Any = probe.get_state(legacy=True)
    found = _memory_of(probe).find(struct.pack("=d", kept[4]))
    place = found - 8  # an int before a double
    if kept[3] != 1 or place < 0 or _memory_of(probe)[place : place + 4] != struct.pack("=i", 1):
        return None
    probe.standard_normal()
    return place if _memory_of(probe)[place : place + 4] == struct.pack("=i", 0) else None


def _memory_of(value: Any) -> bytes:
    return ctypes.string_at(id(value), type(value).__basicsize__)


_GAUSS = _gauss_offset() if sys.implementation.name == "cpython" else None
_last_numpy: tuple[Any, int, bytes, bytes, bytes, Any] | None = None


def numpy_state() -> Any:
    """``np.random.get_state()``, read anew only where it has changed: the call costs more than all the other generators.

    A draw moves words or position, or takes the number that is kept as ``gauss``. The arrays are shared and not to be
    changed.
    """
    global _last_numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, its stub forgets it
    if _GAUSS is None or type(_NUMPY) is not np.random.RandomState or type(generator) is not np.random.MT19937:
        return np.random.get_state(legacy=True)
    last = _last_numpy
    address = last[1] if last is not None and last[0] is generator else int(generator.ctypes.state_address)
    words, position = ctypes.string_at(address, 4 * _WORDS), ctypes.string_at(address + _NUMPY_POSITION, 4)
    gauss = ctypes.string_at(id(_NUMPY) + _GAUSS, 16)
    if last is not None and last[0] is generator and last[2:5] == (words, position, gauss):
        return last[5]
    state: Any = np.random.get_state(legacy=True)
    _last_numpy = (generator, address, words, position, gauss, state)
    return state


def _python_offset() -> int | None:
    """Where in a ``random.Random`` of this interpreter its index and 624 words lie in one piece; None if they do not.

    Looked for in a generator of our own with a known state.
    """
    probe = random.Random(1)
    words = probe.getstate()[1]
    expected = words[-1].to_bytes(4, sys.byteorder) + b"".join(w.to_bytes(4, sys.byteorder) for w in words[:-1])
    found = _memory_of(probe).find(expected)
    return found if found >= 0 else None


_PYTHON_BYTES = 4 + 4 * _WORDS  # its index comes first
_PYTHON_OFFSET = _python_offset() if sys.implementation.name == "cpython" else None
_PYTHON: Any = getattr(random.getstate, "__self__", None)  # the generator behind the functions of ``random``
_last_python: tuple[bytes, Any, Any] | None = None


def python_state() -> Any:
    """``random.getstate()``, read anew only where it has changed: it makes 625 numbers, in every step."""
    global _last_python
    if _PYTHON_OFFSET is None or type(_PYTHON) is not random.Random:
        return random.getstate()
    raw, gauss = ctypes.string_at(id(_PYTHON) + _PYTHON_OFFSET, _PYTHON_BYTES), _PYTHON.gauss_next  # type: ignore[attr-defined]
    if _last_python is None or _last_python[0] != raw or _last_python[1] != gauss:
        _last_python = (raw, gauss, random.getstate())
    return _last_python[2]


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
