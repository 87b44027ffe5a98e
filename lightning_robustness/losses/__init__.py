from lightning_robustness.losses.boundary_penalty import boundary_penalty
from lightning_robustness.losses.fisher_penalty import fisher_penalty
from lightning_robustness.losses.mart_loss import mart_loss
from lightning_robustness.losses.rdi_loss import rdi_loss
from lightning_robustness.losses.trades_loss import trades_loss

__all__ = ["boundary_penalty", "fisher_penalty", "mart_loss", "rdi_loss", "trades_loss"]
