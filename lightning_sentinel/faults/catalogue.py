"""All faults by name.

Example:
    >>> from lightning_sentinel.faults.catalogue import CATALOGUE
    >>> CATALOGUE["lr_spike"].__name__
    'LearningRateSpike'
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from .base import Fault
from .computation import Fp16Collapse, Fp16Overflow, NanBackward, NanForward, TransientNan
from .data import CorruptBatch, LevelShift, NoSupervisedTokens, OutOfRangeToken
from .training_state import BadRank, CursorRewind, LearningRateSpike, OptimizerCorruption, SchedulerReset

CATALOGUE: Final = MappingProxyType[str, type[Fault]](
    {
        kind.default_name: kind
        for kind in (
            CorruptBatch,
            OutOfRangeToken,
            NoSupervisedTokens,
            NanForward,
            NanBackward,
            TransientNan,
            BadRank,
            Fp16Overflow,
            Fp16Collapse,
            LearningRateSpike,
            OptimizerCorruption,
            SchedulerReset,
            LevelShift,
            CursorRewind,
        )
    }
)
