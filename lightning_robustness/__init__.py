"""Watch the adversarial robustness of a classifier while it trains."""

from lightning_robustness.callbacks import (
    AdversarialTraining,
    AdversarialWeightPerturbation,
    AttackFreeRegularization,
    RobustEarlyStopping,
    RobustnessMonitor,
)
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.sandbox import is_sandboxed

__version__ = "0.1.0.dev0"

__all__ = [
    "AdversarialTraining",
    "AdversarialWeightPerturbation",
    "AttackFreeRegularization",
    "InputSpace",
    "RobustEarlyStopping",
    "RobustnessMonitor",
    "__version__",
    "is_sandboxed",
]
