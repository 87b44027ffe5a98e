import contextlib
import copy
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation, perturb_by_function
from lightning_robustness.attacks.classifier import Classifier

_BLACK_BOX = {"GN", "OnePixel", "Pixle", "Square", "VANILA"}


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchAttack(Attack):
    """An attack of torchattacks, isolated from everything around it.

    It sees inputs that are mapped to [0, 1], the only range that torchattacks knows, and the model with the
    normalisation in front of it.

    Args:
        attack: Name of a class of torchattacks, or an instance. Of an instance, a copy attacks the model that is
            given in the call; its budget is in units of [0, 1].
        options: Arguments of the class, if a name is given: a mapping, or pairs. ``eps`` and ``alpha`` are in the units
            of the range; ``eps`` is left out for classes that have no budget.
        targeted: Whether ``y`` holds labels that the model shall predict; only with a name. An instance is in the mode
            that it is in, its own map gives the targets, and every misclassification counts as a success.
        all_steps: Whether it also sees samples that are wrong before.
        progress: Without effect.
        low: Smallest value of inputs.
        high: Largest value of inputs.

    Raises:
        ModuleNotFoundError: If torchattacks is not installed.
        ValueError: If it has no attack of this name, or the name or the class does not go with other arguments.

    """

    attack: Any
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(dict(self.options).items())))
        if not isinstance(self.attack, str):
            if self.options or self.targeted:
                raise ValueError(
                    f"Expected neither options nor targeted mode beside an instance of torchattacks but got "
                    f"options={dict(self.options)}, targeted={self.targeted}. Set them on the instance."
                )
            return
        parameters = inspect.signature(self._class()).parameters
        options = {name: value for name, value in dict(self.options).items() if name != "eps" or "eps" in parameters}
        object.__setattr__(self, "options", tuple(options.items()))
        unknown = [name for name in options if name not in parameters]
        if unknown:
            raise ValueError(
                f"Expected options of torchattacks' {self.attack} to be among {', '.join(list(parameters)[1:])} "
                f"but got {', '.join(unknown)}."
            )
        if self.eps is not None:
            self._check_number("eps")

    @property
    def name(self) -> str:
        """Name of torchattacks' class."""
        return self.attack if isinstance(self.attack, str) else type(self.attack).__name__

    @property
    def eps(self) -> float | None:
        """Largest distance from the input, in the units of the range; None for attacks without."""
        if isinstance(self.attack, str):
            default = inspect.signature(self._class()).parameters.get("eps")
            unit = None if default is None else default.default * self._width()
            return dict(self.options).get("eps", unit)
        eps = getattr(self.attack, "eps", None)
        return None if eps is None else eps * self._width()

    @property
    def norm(self) -> str:
        """Norm of the budget, ``"linf"`` or ``"l2"``."""
        default = "L2" if "L2" in self.name else "Linf"
        if isinstance(self.attack, str):
            return str(dict(self.options).get("norm", default)).lower()
        return str(getattr(self.attack, "norm", default)).lower()

    @property
    def white_box(self) -> bool:
        """Whether the attack uses gradients."""
        return self.name not in _BLACK_BOX

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        return perturb_by_function(self._perturb_rows, model, x, y, active)

    def _perturb_rows(self, model: Classifier, x: Tensor, y: Tensor) -> Tensor:
        width, low = self._width(), 0.0 if self.low is None else self.low
        attack = self._instance(_Rescaled(model, low, width))
        with contextlib.redirect_stdout(None):  # what it reports on the way is not for the user of this package
            x_adv = attack((x - low) / width, y)
        return x_adv.to(x) * width + low

    def _instance(self, model: "_Rescaled") -> Any:
        if not isinstance(self.attack, str):
            # A copy that holds the given model wherever the instance holds its own
            attack = copy.deepcopy(self.attack, {id(self.attack.model): model})
            attack.set_device(model.model.anchor.device)
            attack.normalization_used = None
            attack._set_normalization_applied(None)
            return attack
        options = dict(self.options)
        for name in ("eps", "alpha"):
            if name in options:
                options[name] = options[name] / self._width()
        attack = self._class()(model, **options)
        if self.targeted:
            with contextlib.redirect_stdout(None):
                attack.set_mode_targeted_by_function(lambda inputs, labels: labels)
        return attack

    def _width(self) -> float:
        if self.low is None or self.high is None:
            raise ValueError(
                f"Expected inputs with a range for torchattacks' {self.name}, which clamps to [0, 1], but got "
                f"low={self.low}, high={self.high}. Use an attack of this package, or declare a range in `input_space`."
            )
        return self.high - self.low

    def _class(self) -> Any:
        try:
            module = importlib.import_module("torchattacks")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Expected torchattacks to be installed for {self.attack!r} but {error.name} was not found. "
                'Install it with `pip install "lightning-robustness[torchattacks]"`.'
            ) from error
        found = getattr(module, self.attack, None)
        if not inspect.isclass(found):
            known = sorted(name for name, value in vars(module).items() if inspect.isclass(value))
            raise ValueError(f"Expected an attack of torchattacks but got {self.attack!r}. Known: {', '.join(known)}.")
        return found


class _Rescaled(torch.nn.Module):
    """The model, from inputs in [0, 1]."""

    def __init__(self, model: Classifier, low: float, width: float) -> None:
        super().__init__()
        self.training = False
        self.model, self.low, self.width = model, low, width

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * self.width + self.low)
