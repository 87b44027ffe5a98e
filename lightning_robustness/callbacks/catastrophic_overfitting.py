from dataclasses import dataclass


@dataclass
class CatastrophicOverfitting:
    """Sign of catastrophic overfitting: accuracy under many attack steps falls, that under one step does not.

    A network trained against a single-step attack may learn to defeat that step instead of becoming robust. Each epoch
    is compared with the best one under many steps. If the budget changes without the sign, the comparison starts over,
    since a larger budget lowers both accuracies.

    Args:
        margin: Drop in accuracy under many steps that counts; Wong et al. stop training at 0.2.
        single: Accuracy under one step in the best epoch; None before the first.
        multi: Accuracy under many steps in that epoch.
        eps: Budget in that epoch.
        seen: Whether any epoch showed the sign.

    Example:
        >>> from lightning_robustness.callbacks.catastrophic_overfitting import CatastrophicOverfitting
        >>> sign = CatastrophicOverfitting()
        >>> sign.update(single=0.5, multi=0.4), sign.update(single=0.6, multi=0.5), sign.update(single=0.9, multi=0.1)
        (False, False, True)

    """

    margin: float = 0.2
    single: float | None = None
    multi: float = 0.0
    eps: float | None = None
    seen: bool = False

    def update(self, single: float, multi: float, eps: float | None = None) -> bool:
        """Compare the accuracies of an epoch at its budget, and return whether it shows the sign."""
        is_there = self.single is not None and single >= self.single and multi <= self.multi - self.margin
        if not is_there and (self.single is None or multi >= self.multi or eps != self.eps):
            self.single, self.multi, self.eps = single, multi, eps
        self.seen = self.seen or is_there
        return is_there
