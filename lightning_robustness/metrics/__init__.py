from lightning_robustness.metrics.robustness_difference_index import RobustnessDifferenceIndex
from lightning_robustness.metrics.roby import ROBY

__all__ = ["ROBY", "RobustnessDifferenceIndex"]
