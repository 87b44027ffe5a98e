import copy
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation, perturb_by_function
from lightning_robustness.attacks.budget import Budget
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.unit_range import UnitRangeModel, range_of
from lightning_robustness.utilities.checks import check_attack, check_number
from lightning_robustness.utilities.input_space import InputSpace

_BLACK_BOX = {"GN", "OnePixel", "Pixle", "Square", "VANILA"}
_MINIMUM_L2 = {"CW", "DeepFool"}


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchattacksAdapter(Attack):
    """An attack of torchattacks, isolated from everything around it.

    It sees inputs that are mapped to [0, 1], the only range that torchattacks knows, and a model that takes these and
    normalises them itself. Its messages are switched off.

    Args:
        attack: Name of a class of torchattacks, or an instance. Of an instance, a copy attacks the model that is
            given in the call; its budget is in units of [0, 1].
        options: Arguments of the class, if a name is given: a mapping, or pairs. ``eps`` and ``alpha`` are in the units
            of the range; ``eps`` is left out for classes that have no budget. ``n_classes``, which torchattacks sets
            to 10, is that of the model unless it is given.
        targeted: Whether ``y`` holds the labels to be predicted; only with a name. An instance stays in its mode, its
            own map gives the targets, and every misclassification counts as a success.
        all_steps: Whether it also sees samples that are misclassified before the attack.

    Raises:
        ModuleNotFoundError: If torchattacks is not installed.
        ValueError: If it has no attack of this name, or the name or the class does not go with other arguments.

    """

    attack: Any
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.options, (Mapping, tuple)):
            raise TypeError(f"Expected argument `options` to be a mapping of arguments but got {self.options!r}.")
        options, is_name = dict(sorted(dict(self.options).items())), isinstance(self.attack, str)
        if not is_name:
            check_attack(self.attack)
        parameters = dict(inspect.signature(self._class()).parameters) if is_name else {}
        if is_name and "eps" not in parameters:
            options.pop("eps", None)
        object.__setattr__(self, "options", tuple(options.items()))
        if not is_name and (options or self.targeted):
            raise ValueError(
                f"Expected neither options nor targeted mode beside an instance of torchattacks but got "
                f"options={options}, targeted={self.targeted}. Set them on the instance."
            )
        unknown = [name for name in options if name not in parameters]
        if unknown:
            raise ValueError(
                f"Expected options of torchattacks' {self.attack} to be among {', '.join(list(parameters)[1:])} "
                f"but got {', '.join(unknown)}."
            )
        if "eps" in options:
            check_number("eps", options["eps"])

    @property
    def name(self) -> str:
        """Name of torchattacks' class."""
        return self.attack if isinstance(self.attack, str) else type(self.attack).__name__

    @property
    def white_box(self) -> bool:
        """Whether the attack uses gradients."""
        return self.name not in _BLACK_BOX

    @property
    def norm(self) -> str | None:
        """The norm that an attack without a budget minimises, if it is l2."""
        return "l2" if self.name in _MINIMUM_L2 else None

    def budgets_in(self, input_space: InputSpace) -> list[Budget | None]:
        """Return the budget in the units of a range, as the only entry."""
        options = dict(self.options)
        default = "L2" if "L2" in self.name else "Linf"
        if isinstance(self.attack, str):
            parameter = inspect.signature(self._class()).parameters.get("eps")
            unit, norm = None if parameter is None else parameter.default, options.get("norm", default)
        else:
            unit, norm = getattr(self.attack, "eps", None), getattr(self.attack, "norm", default)
        if unit is None:
            return [None]
        _, width = range_of(input_space, f"torchattacks' {self.name}")
        return [Budget(str(norm).lower(), options.get("eps", unit * width))]

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        return perturb_by_function(self._perturb_rows, model, x, y, active)

    def _perturb_rows(self, model: Classifier, x: Tensor, y: Tensor) -> Tensor:
        low, width = range_of(model.input_space, f"torchattacks' {self.name}")
        attack = self._instance(UnitRangeModel(model, low, width), x)
        for part in (attack, *attack._attacks.values()):
            part.verbose = False
        return attack((x - low) / width, y).to(x) * width + low

    def _instance(self, model: UnitRangeModel, x: Tensor) -> Any:
        if not isinstance(self.attack, str):
            # A copy that holds the given model wherever the instance holds its own
            attack = copy.deepcopy(self.attack, {id(self.attack.model): model})
            attack.set_device(model.model.anchor.device)
            attack.normalization_used = None
            attack._set_normalization_applied(None)
            return attack
        options, parameters = dict(self.options), inspect.signature(self._class()).parameters
        for name in ("eps", "alpha"):
            if name in options:
                options[name] = options[name] / model.width
        if "n_classes" in parameters and "n_classes" not in options:
            with torch.no_grad():
                options["n_classes"] = model.model(x[:1]).shape[1]
        if "seed" in parameters and parameters["seed"].default is None and "seed" not in options:
            options["seed"] = int(torch.randint(2**31, ()))  # torchattacks would take the time
        attack = self._class()(model, **options)
        for part in (attack, *attack._attacks.values()) if self.targeted else ():
            # The setter of torchattacks prints
            if "targeted" not in part.supported_mode:
                raise ValueError(f"Expected an attack with a targeted mode but torchattacks' {self.name} has none.")
            part.targeted, part.attack_mode = True, "targeted(custom)"
            part._target_map_function = lambda inputs, labels: labels
        return attack

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
