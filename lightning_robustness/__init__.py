"""Watch the adversarial robustness of a classifier while it trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_robustness._isolation.sandbox import is_sandboxed, sandbox
    from lightning_robustness.callbacks import (
        AdversarialTraining,
        AdversarialWeightPerturbation,
        AttackFreeRegularization,
        RobustEarlyStopping,
        RobustModelCheckpoint,
        RobustnessMonitor,
    )
    from lightning_robustness.evaluation.compare import compare
    from lightning_robustness.evaluation.evaluate import evaluate
    from lightning_robustness.evaluation.sweep import sweep
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
    "compare",
    "evaluate",
    "is_sandboxed",
    "sandbox",
    "sweep",
]

_SUBPACKAGES = ("attacks", "callbacks", "evaluation", "functional", "losses", "metrics")
_MODULES = {
    "InputSpace": "input_space",
    "compare": "evaluation",
    "evaluate": "evaluation",
    "is_sandboxed": "_isolation.sandbox",
    "sandbox": "_isolation.sandbox",
    "sweep": "evaluation",
}


def __getattr__(name: str) -> Any:
    """Import lazily: importing everything takes seconds, and ``--help`` should not wait."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'callbacks')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
