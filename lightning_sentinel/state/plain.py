"""Training state as plain data, which ``torch.load(weights_only=True)`` reads back, and the way home.

Tensors, numbers, strings, lists, tuples and dicts stay what they are. NumPy arrays, sets and dtypes become tagged dicts,
and so do the three kinds of batch that collators make beside these: Hugging Face's ``BatchEncoding`` (any ``UserDict``),
dataclasses and named tuples. Reading them back imports nothing: a class must have been loaded by the program already, and
must be of one of the three kinds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tree import local

_ATOMS = (int, float, bool, str, type(None), bytes)


def to_plain(value: Any, where: str) -> Any:
    """``value`` as plain data.

    Args:
        value: Any nesting of what the module's text names.
        where: Its place, for the error.

    Raises:
        ValueError: Something in it is of another kind; says what and where.
    """
    if isinstance(value, Tensor):
        return local(value.detach())
    if type(value) in _ATOMS:
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        shape, kind = list(value.shape), value.dtype.str
        data = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8).copy())
        return {"__array__": kind, "shape": shape, "data": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_key(k, where): to_plain(v, f"{where}.{k}") for k, v in value.items()}
    fields = _fields(value)
    if fields is not None:
        kind = type(value)
        content = [[_key(k, where), to_plain(v, f"{where}.{k}")] for k, v in fields.items()]
        return {"__class__": f"{kind.__module__}:{kind.__qualname__}", "fields": content}
    if isinstance(value, tuple):
        return tuple(to_plain(v, f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(value, list):
        return [to_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return {"__set__": [to_plain(v, where) for v in sorted(value)]}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, torch.dtype):
        return {"__dtype__": str(value).removeprefix("torch.")}
    raise ValueError(
        f"The training state holds a {type(value).__name__} at `{where}`, which cannot be saved as plain data. Only"
        " tensors, numbers, strings, and dicts, lists, tuples, dataclasses and named tuples of them can be written to a"
        " checkpoint that is read back safely."
    )


def from_plain(value: Any) -> Any:
    """What :func:`to_plain` was given.

    Raises:
        ValueError: A class is missing in this program, or is not what it was.
    """
    if isinstance(value, dict):
        if "__array__" in value:
            data = value["data"].numpy().tobytes()
            return np.frombuffer(data, dtype=np.dtype(value["__array__"])).reshape(value["shape"]).copy()
        if "__set__" in value:
            return set(from_plain(value["__set__"]))
        if "__dtype__" in value:
            return getattr(torch, value["__dtype__"])
        if "__class__" in value:
            return _made(value["__class__"], {k: from_plain(v) for k, v in value["fields"]})
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    if isinstance(value, tuple):
        return tuple(from_plain(v) for v in value)
    return value


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (int, float, bool)) or key is None:
        return key
    raise ValueError(f"The training state has a dictionary at `{where}` with a {type(key).__name__} as key.")


def _fields(value: Any) -> dict[Any, Any] | None:
    """Content of a batch class by name; None for anything else."""
    if isinstance(value, UserDict):
        return dict(value.data)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    return None


def _made(name: str, content: dict[Any, Any]) -> Any:
    """An object of a batch class with this content."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type):
        raise ValueError(
            f"The saved state holds a batch of class {path} from module {module}, which this program has not loaded."
            " Import the module that defines it before training is resumed."
        )
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(**content)
    if not (issubclass(kind, UserDict) or dataclasses.is_dataclass(kind)):
        raise ValueError(
            f"The saved state holds a batch of class {name}, which is no dataclass, named tuple or UserDict."
        )
    if issubclass(kind, UserDict):
        return kind(content)
    # Not by its constructor: what ``__post_init__`` does to a batch has been done already.
    made = object.__new__(kind)
    for key, entry in content.items():
        object.__setattr__(made, key, entry)
    return made
