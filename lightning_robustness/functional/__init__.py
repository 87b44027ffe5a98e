from lightning_robustness.functional.attack_success_rate import attack_success_rate
from lightning_robustness.functional.boundary_distance import boundary_distance
from lightning_robustness.functional.clever_score import clever_score
from lightning_robustness.functional.fisher_spectral_norm import fisher_spectral_norm
from lightning_robustness.functional.lipschitz_constant import lipschitz_constant
from lightning_robustness.functional.robustness_difference_index import robustness_difference_index
from lightning_robustness.functional.roby import roby
from lightning_robustness.functional.smoothing_radius import num_rayleigh_directions, smoothing_radius
from lightning_robustness.functional.spectral_bounds import SpectralBounds, SpectralRow, spectral_bounds

__all__ = [
    "SpectralBounds",
    "SpectralRow",
    "attack_success_rate",
    "boundary_distance",
    "clever_score",
    "fisher_spectral_norm",
    "lipschitz_constant",
    "num_rayleigh_directions",
    "robustness_difference_index",
    "roby",
    "smoothing_radius",
    "spectral_bounds",
]
