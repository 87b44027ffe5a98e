"""Catastrophic overfitting of training against a single-step attack."""

from dataclasses import dataclass

from lightning.pytorch import Trainer

from lightning_robustness._processes import rank_zero_warn

# Number of steps of the attack that looks for it
MANY_STEPS = 5
# How far accuracy under many steps must fall
_MARGIN = 0.2


@dataclass
class CatastrophicOverfitting:
    """Sign of catastrophic overfitting: accuracy under many attack steps falls, accuracy under one step does not.

    If the budget changes, the comparison starts over, since a larger budget lowers both accuracies.
    """

    single: float | None = None
    multi: float = 0.0
    eps: float | None = None
    seen: bool = False

    def update(self, single: float, multi: float, eps: float | None = None) -> bool:
        """Compare the accuracies of an epoch at its budget, and return whether it shows the sign."""
        is_there = self.single is not None and single >= self.single and multi <= self.multi - _MARGIN
        if not is_there and (self.single is None or multi >= self.multi or eps != self.eps):
            self.single, self.multi, self.eps = single, multi, eps
        self.seen = self.seen or is_there
        return is_there

    def watch(self, trainer: Trainer, single: float, multi: float, eps: float, checkpoint: str | None = None) -> bool:
        """Update at the end of an epoch, warn the first time the sign is there, and keep a checkpoint until then."""
        was_seen, is_there = self.seen, self.update(single, multi, eps)
        if is_there and not was_seen:
            rank_zero_warn(
                f"Catastrophic overfitting: at the end of epoch {trainer.current_epoch}, accuracy under the one step "
                f"that this run trains against is {single:.0%}, after {self.single:.0%} in an earlier epoch, but "
                f"{multi:.0%}, after {self.multi:.0%}, under PGD with {MANY_STEPS} steps: the network has learned "
                "to defeat the one step. Train against several (`attack='pgd'`), or with a smaller `eps` or `alpha`."
                + (f" A checkpoint of the last epoch before is in {checkpoint}." if checkpoint is not None else "")
            )
        has_fallen = multi <= self.multi - _MARGIN
        if checkpoint is not None and not self.seen and not has_fallen:
            trainer.save_checkpoint(checkpoint)
        return is_there
