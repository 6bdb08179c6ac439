"""Injectable faults: each happens in the real data, computation or state, and counts how often it fired."""

from .base import Fault, Moment
from .catalogue import CATALOGUE
from .computation import Fp16Collapse, Fp16Overflow, NanBackward, NanForward, TransientNan
from .data import CorruptBatch, LevelShift, NoSupervisedTokens, OutOfRangeToken
from .training_state import BadRank, CursorRewind, LearningRateSpike, OptimizerCorruption, SchedulerReset

__all__ = [
    "CATALOGUE",
    "BadRank",
    "CorruptBatch",
    "CursorRewind",
    "Fault",
    "Fp16Collapse",
    "Fp16Overflow",
    "LearningRateSpike",
    "LevelShift",
    "Moment",
    "NanBackward",
    "NanForward",
    "NoSupervisedTokens",
    "OptimizerCorruption",
    "OutOfRangeToken",
    "SchedulerReset",
    "TransientNan",
]
