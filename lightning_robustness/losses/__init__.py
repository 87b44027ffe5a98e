from lightning_robustness.losses.adversarial import mart_loss, trades_loss
from lightning_robustness.losses.penalties import boundary_penalty, fisher_penalty
from lightning_robustness.losses.rdi_loss import rdi_loss

__all__ = ["boundary_penalty", "fisher_penalty", "mart_loss", "rdi_loss", "trades_loss"]
