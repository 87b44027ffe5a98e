from dataclasses import dataclass


@dataclass
class CatastrophicOverfitting:
    """The sign of catastrophic overfitting: accuracy under one step rises while accuracy under many steps falls.

    A network that is trained against an attack of one step may learn to defeat that step instead of becoming robust.
    Each epoch is compared with the one that was best under many steps.

    Args:
        margin: By how much the accuracy under many steps has to fall; 0.2 is the limit at which Wong et al. stop.
        single: Accuracy under one step in the best epoch; None before the first.
        multi: Accuracy under many steps in that epoch.
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
    seen: bool = False

    def update(self, single: float, multi: float) -> bool:
        """Take the accuracies of an epoch and tell whether the sign is there."""
        if self.single is None or multi >= self.multi:
            self.single, self.multi = single, multi
            return False
        is_there = single > self.single and multi <= self.multi - self.margin
        self.seen = self.seen or is_there
        return is_there
