"""Watch the adversarial robustness of a classifier while it trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_robustness._isolation.sandbox import is_sandboxed
    from lightning_robustness.callbacks import (
        AdversarialTraining,
        AdversarialWeightPerturbation,
        AttackFreeRegularization,
        RobustEarlyStopping,
        RobustModelCheckpoint,
        RobustnessMonitor,
    )
    from lightning_robustness.input_space import InputSpace

__version__ = "0.1.0"

__all__ = [
    "AdversarialTraining",
    "AdversarialWeightPerturbation",
    "AttackFreeRegularization",
    "InputSpace",
    "RobustEarlyStopping",
    "RobustModelCheckpoint",
    "RobustnessMonitor",
    "__version__",
    "is_sandboxed",
]

_SUBPACKAGES = ("attacks", "callbacks", "evaluation", "functional", "losses", "metrics")


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for: all at once takes seconds, which the command saves."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"InputSpace": "input_space", "is_sandboxed": "_isolation.sandbox"}.get(name, "callbacks")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
