import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_robustness._arguments import check_number, check_option
from lightning_robustness.attacks.adapters import ForeignAttack, UnitRangeModel, draw_seed
from lightning_robustness.attacks.attack import Norm

Version = Literal["standard", "plus", "rand"]
# Number of logits that the loss DLR compares: four with a target, three without
_FEWEST_CLASSES: dict[str, int] = {"standard": 4, "plus": 4, "rand": 3}
# Its passes: 100 steps for each loss, rival and restart, of two APGD and of FAB, and 5,000 queries
_PASSES: dict[str, int] = {"standard": 6_900, "plus": 8_300, "rand": 4_000}


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoAttackAdapter(ForeignAttack):
    """AutoAttack by its authors (the package ``autoattack`` of Croce and Hein), isolated from everything around it.

    It sees inputs that are mapped to [0, 1], and images of shape ``(N, C, H, W)`` only. Its targeted parts attack the
    nine highest rivals of the label or, where there are fewer classes, where AutoAttack itself fails, all of them. Its
    messages are switched off, it writes no log file, and it draws from the seed of the run.

    Args:
        version: ``"standard"``; ``"plus"``, which has more restarts; or ``"rand"`` for models that are random.
        eps: Largest distance from the input, in the units of the range.
        norm: ``"linf"`` or ``"l2"``.
        targeted: Not available.
        all_steps: Without effect: AutoAttack never attacks misclassified samples.

    Raises:
        ModuleNotFoundError: If the package is not installed, or cannot be imported.
        ValueError: If an argument is out of range or unknown, or targeted mode is requested; when it attacks, if the
            model has too few classes for the loss DLR, or the inputs are not images or have no range.

    """

    version: Version = "standard"
    eps: float = 8 / 255
    norm: Norm = "linf"
    name: ClassVar[str] = "autoattack"
    white_box: ClassVar[None] = None  # Square, which is one of its parts, is not

    @property
    def passes(self) -> int:
        """Largest number of passes."""
        return _PASSES[self.version]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("version", self.version, Version)
        check_option("norm", self.norm, Norm)
        check_number("eps", self.eps)
        if self.targeted:
            raise ValueError(
                "Expected argument `targeted` to be False for AutoAttack, which chooses targets by itself, but got "
                'True. Use get_attack("ensemble", targeted=True), the ensemble of this package.'
            )
        _import_package()

    def _attack(self, model: UnitRangeModel, x: Tensor, y: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(
                f"Expected images of shape (N, C, H, W) for AutoAttack but got {tuple(x.shape)}. "
                'Use get_attack("ensemble"), the ensemble of this package, which takes inputs of any shape.'
            )
        num_classes = model.count_classes(x)
        fewest = _FEWEST_CLASSES[self.version]
        if num_classes < fewest:
            raise ValueError(
                f"Expected a model of at least {fewest} classes for AutoAttack's version {self.version!r}, whose loss "
                f"compares {fewest} logits, but got {num_classes}. "
                'Use get_attack("ensemble"), the ensemble of this package, which has no such limit.'
            )
        with _quietly():
            attack = _import_package().AutoAttack(
                model,
                norm={"linf": "Linf", "l2": "L2"}[self.norm],
                eps=self.eps / model.width,
                version=self.version,
                seed=draw_seed(),
                device=x.device,
                verbose=False,
            )
            for part in (attack.apgd_targeted, attack.fab):
                part.n_target_classes = min(part.n_target_classes, num_classes - 1)
            x_adv: Tensor = attack.run_standard_evaluation(x, y, bs=len(x))
        return x_adv


def _import_package() -> Any:
    try:
        # torchattacks 3.3 brings a copy whose parts need an old release of torch
        importlib.import_module("autoattack.fab_pt")
        return importlib.import_module("autoattack")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Expected the package autoattack in a release that fits torch {torch.__version__} but importing it "
            f"failed: {error}. Install it with `pip install --force-reinstall --no-deps "
            "git+https://github.com/fra31/auto-attack`, install a newer torch if that does not help, or use "
            'get_attack("ensemble"), the ensemble of this package.'
        ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep messages off the console, and the tracer of a debugger in its place, which AutoAttack's checks remove."""
    tracer = sys.gettrace()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.settrace(tracer)
