from dataclasses import dataclass


@dataclass
class CatastrophicOverfitting:
    """The sign of catastrophic overfitting: accuracy under one step does not fall, while under many steps it does.

    A network that is trained against an attack of one step may learn to defeat that step instead of becoming robust.
    Each epoch is compared with the one that was best under many steps. Where the budget changes without the sign, the
    comparison begins anew: a larger one lowers both accuracies.

    Args:
        margin: By how much the accuracy under many steps has to fall; 0.2 is the limit at which Wong et al. stop.
        single: Accuracy under one step in the best epoch; None before the first.
        multi: Accuracy under many steps in that epoch.
        eps: Budget in that epoch.
        seen: Whether the sign was there in any epoch.

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
        """Take the accuracies of an epoch, and its budget, and tell whether the sign is there."""
        is_there = self.single is not None and single >= self.single and multi <= self.multi - self.margin
        if not is_there and (self.single is None or multi >= self.multi or eps != self.eps):
            self.single, self.multi, self.eps = single, multi, eps
        self.seen = self.seen or is_there
        return is_there
