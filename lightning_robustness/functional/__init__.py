from lightning_robustness.functional.attack_success_rate import attack_success_rate
from lightning_robustness.functional.clever_score import clever_score
from lightning_robustness.functional.fisher_penalty import fisher_penalty
from lightning_robustness.functional.fisher_spectral_norm import fisher_spectral_norm
from lightning_robustness.functional.lipschitz_constant import lipschitz_constant
from lightning_robustness.functional.mart_loss import mart_loss
from lightning_robustness.functional.rdi_loss import rdi_loss
from lightning_robustness.functional.robustness_difference_index import robustness_difference_index
from lightning_robustness.functional.roby import feature_subspace_aggregation, feature_subspace_distance, roby
from lightning_robustness.functional.spectral_bounds import SpectralBounds, SpectralRow, spectral_bounds
from lightning_robustness.functional.trades_loss import trades_loss

__all__ = [
    "SpectralBounds",
    "SpectralRow",
    "attack_success_rate",
    "clever_score",
    "feature_subspace_aggregation",
    "feature_subspace_distance",
    "fisher_penalty",
    "fisher_spectral_norm",
    "lipschitz_constant",
    "mart_loss",
    "rdi_loss",
    "robustness_difference_index",
    "roby",
    "spectral_bounds",
    "trades_loss",
]
