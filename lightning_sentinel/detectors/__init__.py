"""Pure detectors: records in, findings out. NumPy and the standard library only."""

from .base import Detector
from .divergence import Divergence
from .forecast import ForecastBand
from .loss_scale import LossScale
from .nonfinite import NonFinite, is_scaler_overflow
from .rank_outlier import RankOutlier
from .spike import Spike

__all__ = [
    "Detector",
    "Divergence",
    "ForecastBand",
    "LossScale",
    "NonFinite",
    "RankOutlier",
    "Spike",
    "is_scaler_overflow",
]
