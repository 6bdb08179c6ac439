"""State of callbacks as plain data that ``torch.load(weights_only=True)`` accepts, and back.

Example:
    >>> import numpy as np
    >>> decode(encode({"window": np.arange(3), "best": np.float64(2.5), 7: ("a", None)}))
    {'window': array([0, 1, 2]), 'best': 2.5, 7: ('a', None)}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ARRAY = "__ndarray__"


def encode(value: Any, where: str = "state") -> Any:
    """``value`` made of tensors, numbers, strings, None, lists, tuples and dicts; TypeError names what is none of them."""
    if isinstance(value, Enum):
        return encode(value.value, where)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {_ARRAY: value.dtype.str, "shape": tuple(value.shape), "data": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bool, int, float, str)):  # a subclass: its own class would not be loaded back
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {encode(k, where): encode(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(encode(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, (list, deque)):
        return [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Set):
        return sorted((encode(v, where) for v in value), key=repr)
    raise TypeError(
        f"{where} is a {type(value).__qualname__}, which is not loaded back from a checkpoint. Let state_dict() return"
        " numbers, strings, tensors, NumPy arrays, lists, tuples and dicts."
    )


def decode(value: Any) -> Any:
    """What :func:`encode` was given, with NumPy arrays as they were."""
    if isinstance(value, dict):
        if _ARRAY in value:
            return np.frombuffer(value["data"].numpy().tobytes(), value[_ARRAY]).reshape(value["shape"]).copy()
        return {k: decode(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(decode(v) for v in value)
    return [decode(v) for v in value] if isinstance(value, list) else value
