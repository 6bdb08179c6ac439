"""Ranks of a device mesh: which of them train on data of their own, and which hold parts of one replica.

Data-parallel ranks are compared with each other. The other ranks of a replica (tensor parallel, say) compute the same loss
of the same batch: they are one unit. Its first rank speaks for it in token counts, means and outliers, under its own number;
what is not finite and what is slow is told of each rank.

Example:
    >>> part_of_unit(("data_parallel", "tensor_parallel"), (3, 0)), part_of_unit(("data_parallel", "tensor_parallel"), (3, 1))
    (0, 1)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# Dimensions along which ranks have data of their own: Lightning's name, and those in use elsewhere.
_DATA = re.compile(r"data|^dp|^ddp|^fsdp|^hsdp|replicate|shard", re.IGNORECASE)


def part_of_unit(names: Sequence[str], coordinate: Sequence[int]) -> int:
    """0 for the rank that speaks for its unit; otherwise the first coordinate that is not of the data."""
    return next((c for name, c in zip(names, coordinate, strict=True) if c and not _DATA.search(name)), 0)


def speaks_for_unit(mesh: Any) -> bool:
    """Whether this rank's loss and tokens count. Without a mesh, or without names in it, every rank has its own data.

    Args:
        mesh: ``module.device_mesh``: a ``DeviceMesh``, a plain mapping of names to meshes, or None.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        return True
    coordinate = mesh.get_coordinate()
    return coordinate is None or part_of_unit(names, coordinate) == 0


def replicas_of(tensor: Tensor, world_size: int) -> int:
    """How many ranks hold the same part of a tensor, so that a sum over all ranks counts it once.

    A plain tensor lies on every rank; of a DTensor those dimensions count that do not split it, and the
    ranks outside its mesh.
    """
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", ())
    if mesh is None:
        return world_size
    parts = 1
    for dimension, placement in enumerate(placements):
        # not ``is_shard``: FSDP2 upon tensor parallelism divides in strides, which is another kind of placement
        parts *= 1 if placement.is_replicate() or placement.is_partial() else mesh.size(dimension)
    return world_size // parts
