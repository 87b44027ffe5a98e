from lightning_robustness.metrics.attack_success_rate import AttackSuccessRate
from lightning_robustness.metrics.boundary_distance import BoundaryDistance
from lightning_robustness.metrics.clever_score import CleverScore
from lightning_robustness.metrics.fisher_spectral_norm import FisherSpectralNorm
from lightning_robustness.metrics.lipschitz_constant import LipschitzConstant
from lightning_robustness.metrics.robustness_difference_index import RobustnessDifferenceIndex
from lightning_robustness.metrics.roby import ROBY

__all__ = [
    "ROBY",
    "AttackSuccessRate",
    "BoundaryDistance",
    "CleverScore",
    "FisherSpectralNorm",
    "LipschitzConstant",
    "RobustnessDifferenceIndex",
]
