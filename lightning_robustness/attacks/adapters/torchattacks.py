import copy
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_robustness._arguments import check_attack, check_number
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks.adapters import ForeignAttack, UnitRangeModel, draw_seed
from lightning_robustness.attacks.attack import Budget
from lightning_robustness.input_space import InputSpace

_BLACK_BOX = {"GN", "OnePixel", "Pixle", "Square", "VANILA"}
_MINIMUM_L2 = {"CW", "DeepFool"}
# Passes of attacks that have neither steps nor queries: AutoAttack is mostly Square
_PASSES = {"AutoAttack": 5000, "Pixle": 200}


@dataclass(frozen=True, kw_only=True, repr=False)
class TorchattacksAdapter(ForeignAttack):
    """An attack of torchattacks, isolated from everything around it.

    It sees inputs that are mapped to [0, 1], the only range that torchattacks knows, and a model that takes these and
    normalises them itself. Its messages are switched off.

    Args:
        attack: Name of a class of torchattacks, or an instance. Of an instance, a copy attacks the model that is
            given in the call; its budget is in units of [0, 1].
        options: Arguments of the class, if a name is given: a mapping, or pairs. ``eps`` and ``alpha`` are in the units
            of the range; ``eps`` is left out for classes that have no budget. Where all steps of the default ``alpha``
            together cannot reach a given ``eps``, ``alpha`` grows in proportion to ``eps``; a given ``alpha``, or an
            instance's, stays, with a warning. ``n_classes``, 10 in torchattacks, defaults to the number of classes of
            the model.
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
        super().__post_init__()
        pairs = tuple(self.options.items()) if isinstance(self.options, Mapping) else self.options
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"Expected argument `options` to be a mapping of arguments but got {self.options!r}.")
        options, is_name = dict(sorted(pairs)), isinstance(self.attack, str)
        if not is_name:
            check_attack(self.attack)
        parameters = dict(inspect.signature(self._class()).parameters) if is_name else {}
        if is_name and "eps" not in parameters:
            options.pop("eps", None)
        object.__setattr__(self, "options", tuple(options.items()))
        if not is_name and (options or self.targeted):
            raise ValueError(
                f"Expected neither options nor targeted mode with an instance of torchattacks but got "
                f"options={options}, targeted={self.targeted}. Set them on the instance."
            )
        unknown = [name for name in options if name not in parameters]
        if "norm" in unknown:
            raise ValueError(
                f"Expected no `norm` for torchattacks' {self.attack}, whose norm cannot be changed, but got "
                f"{options['norm']!r}. Use torchattacks:PGDL2 in l2, or a class that takes `norm`, such as APGD."
            )
        if unknown:
            raise ValueError(
                f"Expected options of torchattacks' {self.attack} to be among {', '.join(list(parameters)[1:])} "
                f"but got {', '.join(unknown)}."
            )
        if "eps" in options:
            check_number("eps", options["eps"])

    @property
    def name(self) -> str:
        """Name that its values are reported under, so that it can run next to the attack of this package."""
        return f"torchattacks_{self._kind.lower()}"

    @property
    def _kind(self) -> str:
        """Name of torchattacks' class."""
        return self.attack if isinstance(self.attack, str) else type(self.attack).__name__

    @property
    def steps(self) -> int | None:
        """Number of steps, if it has one."""
        return self._setting("steps")

    @property
    def num_queries(self) -> int | None:
        """Number of queries, if it has one."""
        return self._setting("n_queries")

    @property
    def passes(self) -> int | None:
        """Approximate number of passes, if it has neither steps nor queries."""
        return _PASSES.get(self._kind)

    @property
    def num_restarts(self) -> int | None:
        """Number of restarts, if it has one."""
        return self._setting("n_restarts")

    def _setting(self, name: str) -> Any:
        if not isinstance(self.attack, str):
            return getattr(self.attack, name, None)
        return dict(self.options).get(name, self._default(name))

    @property
    def white_box(self) -> bool:
        """Return whether the attack uses gradients."""
        return self._kind not in _BLACK_BOX

    @property
    def norm(self) -> str | None:
        """The norm that an attack without a budget minimises, if it is l2."""
        return "l2" if self._kind in _MINIMUM_L2 else None

    def budgets_in(self, input_space: InputSpace) -> list[Budget | None]:
        """Return the budget in the units of a range, as the only entry."""
        eps = self._setting("eps")
        if eps is None:
            return [None]
        norm = self._setting("norm") or ("L2" if "L2" in self._kind else "Linf")
        _, width = self._range(input_space)
        return [Budget(str(norm).lower(), eps if "eps" in dict(self.options) else eps * width)]

    def _attack(self, model: UnitRangeModel, x: Tensor, y: Tensor) -> Tensor:
        attack = self._instance(model, x)
        for part in (attack, *attack._attacks.values()):
            part.verbose = False
            self._check_reach(part)
        x_adv: Tensor = attack(x, y)
        return x_adv

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
            options["n_classes"] = model.count_classes(x)
        if "seed" in parameters and parameters["seed"].default is None and "seed" not in options:
            options["seed"] = draw_seed()
        attack = self._class()(model, **options)
        for part in (attack, *attack._attacks.values()) if self.targeted else ():
            # The setter of torchattacks prints
            if "targeted" not in part.supported_mode:
                raise ValueError(f"Expected an attack with a targeted mode but torchattacks' {self._kind} has none.")
            part.targeted, part.attack_mode = True, "targeted(custom)"
            part._target_map_function = lambda inputs, labels: labels
        return attack

    def _check_reach(self, part: Any) -> None:
        """Let a default step size grow until all steps together reach the budget, and warn where it was given."""
        settings: Any = (getattr(part, name, None) for name in ("eps", "alpha", "steps"))
        eps, alpha, steps = settings
        if None in (eps, alpha, steps) or alpha * steps >= eps * (1 - 1e-6):
            return
        default = self._default("eps") if isinstance(self.attack, str) and "alpha" not in dict(self.options) else None
        if default:
            part.alpha = alpha * eps / default
            return
        rank_zero_warn(
            f"{steps} steps of {alpha:g} cannot reach the budget {eps:g} of torchattacks' {type(part).__name__}, in "
            f"units of [0, 1]: it will look weak. Pass `alpha` of at least {eps / steps:g}, or the name of the class "
            "without `alpha`.",
            stacklevel=1,  # once in a run, not once per batch
        )

    def _default(self, name: str) -> Any:
        parameter = inspect.signature(self._class()).parameters.get(name)
        return None if parameter is None else parameter.default

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
            raise ValueError(
                f"Expected `attack` to be an attack of torchattacks but got {self.attack!r}. Known: {', '.join(known)}."
            )
        return found
