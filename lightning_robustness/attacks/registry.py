"""Attacks by name, and the settings of the papers."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, NamedTuple, cast, get_args

from lightning_robustness._arguments import check_attack, check_option
from lightning_robustness.attacks.adapters.autoattack import AutoAttackAdapter, Version
from lightning_robustness.attacks.adapters.torchattacks import TorchattacksAdapter
from lightning_robustness.attacks.attack import Attack, Cascade, Norm
from lightning_robustness.attacks.cw import CW, MinimumNormCW
from lightning_robustness.attacks.ddn import DDN
from lightning_robustness.attacks.fisher_step import FisherStep
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.siren import SirenAttack
from lightning_robustness.attacks.square import Square

Strength = Literal["fast", "strong", "paper"]
# Other classes that are attacked one by one, as in AutoAttack, if there are as many
_RIVALS = 9
# The strongest verdict that 16 gradients buy; and with 1,000 queries of Square, within a point of AutoAttack
_FAST_PGD: dict[str, Any] = {"steps": 8, "loss": ("cross_entropy", "margin"), "schedule": "shrinking"}
_STRONG_PGD = {"steps": 20, "loss": ("cross_entropy", "margin", *["rivals"] * _RIVALS), "schedule": "adaptive"}
# Budgets where none is given
_EPS: dict[Norm, float] = {"linf": PGD.eps, "l2": 1.0}
_L2: dict[str, Any] = {"norm": "l2", "eps": _EPS["l2"]}


def cascade(eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False) -> Cascade:
    """Make a cascade that is close to AutoAttack for a fraction of its time.

    Fast PGD, 20 adaptive steps against each of the nine highest rivals of the label, and Square with 1,000 queries;
    each sees only what those before it did not break.
    """
    return _cascade(_FAST_PGD, 20, 1000, eps, norm, targeted, all_steps)


def ensemble(eps: float | None = None, norm: Norm = "linf", targeted: bool = False, all_steps: bool = False) -> Cascade:
    """Make an ensemble like the standard one of AutoAttack (Croce and Hein, 2020) from the attacks here.

    As published, there are 100 steps with DLR against each rival, the minimum-norm attack FAB, and 5,000 queries: they
    found nothing more where it was tried, and take three times as long.
    """
    return _cascade({"steps": 100, "schedule": "adaptive"}, 40, 4000, eps, norm, targeted, all_steps)


def _cascade(
    first: dict[str, Any],
    steps: int,
    num_queries: int,
    eps: float | None,
    norm: Norm,
    targeted: bool,
    all_steps: bool,
) -> Cascade:
    """Make a cascade of PGD, adaptive steps against each rival, and Square."""
    modes: dict[str, Any] = {"targeted": targeted, "all_steps": all_steps}
    shared = modes | {"norm": norm, "eps": _EPS.get(norm, PGD.eps) if eps is None else eps}
    loss: dict[str, Any] = {"loss": "margin"} if targeted else {"loss": "rivals", "restarts": _RIVALS}
    second = PGD(steps=steps, schedule="adaptive", **loss, **shared)
    return Cascade(attacks=(PGD(**first, **shared), second, Square(num_queries=num_queries, **shared)), **modes)


class _Setting(NamedTuple):
    make: Callable[..., Attack]
    options: dict[str, Any]


def _always(make: Callable[..., Attack], **options: Any) -> dict[Strength, _Setting]:
    return dict.fromkeys(get_args(Strength), _Setting(make, options))


# The attack behind a name, by strength: the cheapest useful verdict, one to report, and the attack as published
_ATTACKS: dict[str, dict[Strength, _Setting]] = {
    "fgsm": _always(PGD, steps=1, start="clean"),
    "rfgsm": _always(PGD, start="sign"),
    "bim": _always(PGD, start="clean"),
    "pgd": {"fast": _Setting(PGD, _FAST_PGD), "strong": _Setting(PGD, _STRONG_PGD), "paper": _Setting(PGD, {})},
    "pgd_l2": {
        "fast": _Setting(PGD, _FAST_PGD | _L2),
        "strong": _Setting(PGD, _STRONG_PGD | _L2),
        "paper": _Setting(PGD, _L2),
    },
    "mifgsm": _always(PGD, start="clean", momentum=1.0),
    "cw": {
        "fast": _Setting(MinimumNormCW, {"initial_steps": 16, "steps": 2}),
        "strong": _Setting(MinimumNormCW, {}),
        "paper": _Setting(CW, {}),
    },
    "ddn": _always(DDN),
    "square": {
        "fast": _Setting(Square, {"num_queries": 100}),
        "strong": _Setting(Square, {"num_queries": 1000}),
        "paper": _Setting(Square, {"as_published": True}),
    },
    "siren": _always(SirenAttack),
    "fisher": _always(FisherStep),
    "cascade": _always(cascade),
    "ensemble": _always(ensemble),
    "autoattack": _always(AutoAttackAdapter),
}
ATTACK_NAMES = tuple(_ATTACKS)
# Settings that a preset gives an attack, where these are not all of its group
_TAKEN = {"fgsm": ("eps",), "pgd_l2": ("steps",), "cascade": ("eps",), "ensemble": ("eps",)}


def _settings(
    eps: float, alpha: float, steps: int, cw_steps: int, c: float, num_queries: int
) -> dict[str, dict[str, float | int]]:
    return {
        "steps": {"eps": eps, "alpha": alpha, "steps": steps},
        "cw": {"steps": cw_steps, "lr": 0.01, "c": c},
        "square": {"eps": eps, "num_queries": num_queries},
    }


_MNIST = _settings(eps=0.3, alpha=0.01, steps=40, cw_steps=50, c=1.0, num_queries=5000)
_CIFAR100 = _settings(eps=0.01, alpha=0.001, steps=10, cw_steps=10, c=0.1, num_queries=200)
_FISHER = _settings(eps=8 / 255, alpha=2 / 255, steps=20, cw_steps=20, c=1.0, num_queries=5000)
_PRESETS = {
    "mnist": _MNIST,
    "fashion-mnist": _MNIST,
    "cifar10": _settings(eps=0.1, alpha=0.0025, steps=10, cw_steps=10, c=0.5, num_queries=200),
    "cifar100": _CIFAR100,
    "tiny-imagenet": _CIFAR100,
    "imagenet": _FISHER,
    "fisher": _FISHER,
    "speech": {"siren": {"eps": 0.5, "alpha": 0.05, "steps": 50, "gradient_steps": 50}},
}


def get_attack(
    attack: str | Callable[..., Any],
    eps: float | None = None,
    *,
    strength: Strength = "paper",
    preset: str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Get an attack by its name.

    Args:
        attack: ``"fgsm"``, ``"rfgsm"``, ``"bim"``, ``"pgd"``, ``"pgd_l2"``, ``"mifgsm"``, ``"cw"``, ``"ddn"``,
            ``"square"``, ``"siren"``, ``"fisher"``, ``"cascade"``, ``"ensemble"``, or ``"autoattack"``, the one of its
            authors, where their package is installed, which has the versions ``"autoattack:plus"`` and
            ``"autoattack:rand"``. ``"torchattacks:NAME"`` is a class of torchattacks. An instance of a class of
            torchattacks, or any other callable ``(model, x, y) -> x_adv``, works too, and takes no further arguments.
        eps: Largest distance from the input, in un-normalised units; it overrides the preset and the attack's default.
            C&W and DDN have no budget and ignore it.
        strength: How hard ``"pgd"``, ``"pgd_l2"``, ``"cw"`` and ``"square"`` try; the other names have one setting.
            ``"fast"`` is what the monitor runs: 8 shrinking steps of PGD with cross-entropy and 8 with the margin, C&W
            from a DDN start with 16 + 2 steps, 100 queries. ``"strong"`` is what ``evaluate`` and ``compare`` run: 20
            adaptive steps of PGD with each of cross-entropy, margin, and nine rivals of the label, C&W from a DDN start
            with 50 + 50 steps, 1,000 queries. ``"paper"`` is the attack as published, which is weak on robust networks.
        preset: Settings of the papers, which imply ``strength="paper"``; cascades take the budget only. The RDI paper
            gives them for ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"cifar100"``, ``"tiny-imagenet"`` and
            (SirenAttack alone) ``"speech"``; the Fisher information paper for ``"imagenet"`` or, by the name
            ``"fisher"``, its other data sets.
        options: Further arguments of the attack, which override the preset; for cascades ``norm`` and the arguments
            that all attacks share, such as ``targeted``.

    Raises:
        TypeError: If the attack is neither a name nor callable.
        ValueError: If a name, preset or option is unknown.

    Example:
        >>> from lightning_robustness.attacks import get_attack
        >>> get_attack("fgsm", eps=0.1)
        PGD(eps=0.1, alpha=None, steps=1, norm='linf', start='clean', restarts=None, momentum=0.0,
            loss='cross_entropy', schedule='constant')
        >>> get_attack("square", eps=0.1, strength="fast")
        Square(eps=0.1, num_queries=100, norm='linf', p=0.8, loss='margin', as_published=False)

    """
    if not isinstance(attack, str):
        return _from_object(attack, given=eps is not None or preset is not None or bool(options))
    check_option("strength", strength, Strength)
    if preset is not None and strength != "paper":
        raise ValueError(
            f"Expected strength='paper' with `preset`, as presets are the papers' settings, but got {strength!r} and "
            f"{preset!r}. Leave one of them out."
        )
    budget: dict[str, Any] = {} if eps is None else {"eps": eps}
    library, _, name = attack.partition(":")
    if name and library in ("torchattacks", "autoattack"):
        if preset is not None:
            raise ValueError(f"Expected no preset for {attack!r} but got {preset!r}. Pass its arguments one by one.")
        if library == "autoattack":
            _check_options(attack, options, ("norm", *_shared()))
            return AutoAttackAdapter(version=cast(Version, name), **budget, **options)
        shared = {option: options.pop(option) for option in _shared() if option in options}
        return TorchattacksAdapter(attack=name, options=options | budget, **shared)
    if attack not in _ATTACKS:
        raise ValueError(
            f"Expected `attack` to be the name of an attack but got {attack!r}. Known: {', '.join(ATTACK_NAMES)}, and "
            "torchattacks:NAME for the classes of torchattacks, autoattack:VERSION for versions of AutoAttack."
        )
    make, defaults = _ATTACKS[attack][strength]
    known = tuple(inspect.signature(make).parameters)
    _check_options(attack, options, tuple(option for option in known if option != "eps"))
    settings = _preset(attack, preset)
    if "eps" in settings and eps is None and options.get("norm") == "l2":
        raise ValueError(f"Expected `eps` with norm='l2' but got preset={preset!r}, whose budget is in l-infinity.")
    return make(**(defaults | settings | (budget if "eps" in known else {}) | options))


def _from_object(attack: Callable[..., Any], given: bool) -> Callable[..., Any]:
    check_attack(attack)
    if given:
        raise ValueError(f"Expected eps, preset and options for the name of an attack only but got {attack!r}.")
    is_foreign = any(parent.__module__.split(".")[0] == "torchattacks" for parent in type(attack).__mro__)
    return TorchattacksAdapter(attack=attack) if is_foreign else attack


def _preset(attack: str, preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    if attack in ("ddn", "fisher", "autoattack"):
        raise ValueError(
            f"Expected no preset for {attack!r}, as the papers have none, but got {preset!r}. Leave it out."
        )
    group = attack if attack in ("cw", "square", "siren") else "steps"
    known = [name for name, groups in _PRESETS.items() if group in groups]
    if not isinstance(preset, str) or preset not in known:
        raise ValueError(
            f"Expected argument `preset` for {attack!r} to be one of {', '.join(known)} but got {preset!r}."
        )
    settings = _PRESETS[preset][group]
    return {name: settings[name] for name in _TAKEN.get(attack, tuple(settings))}


def _shared() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Attack))


def _check_options(attack: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"Expected options of {attack!r} to be among {', '.join(known)} but got {', '.join(unknown)}.")


_LOSSES = {"cross_entropy": "cross-entropy", "margin": "the margin", "kl": "the divergence"}
_STARTS = {"clean": " from the input", "sign": " after a random step", "gaussian": " from the input with noise"}
_MAX_MEMBERS = 4


def describe_settings(attack: Callable[..., Any]) -> str:
    """Describe how hard an attack tries: its steps, losses, restarts and queries, as far as it tells.

    Example:
        >>> from lightning_robustness.attacks.registry import describe_settings, get_attack
        >>> describe_settings(get_attack("pgd", strength="fast"))
        '8 shrinking steps with each of cross-entropy and the margin'

    """
    if isinstance(attack, Cascade):
        members = [describe_settings(member) or type(member).__name__ for member in attack.attacks[:_MAX_MEMBERS]]
        return " then ".join([*members, *(["others"] if len(attack.attacks) > _MAX_MEMBERS else [])])
    steps, queries = getattr(attack, "steps", None), getattr(attack, "num_queries", None)
    restarts = 1 if isinstance(attack, PGD) else getattr(attack, "num_restarts", 1)
    parts = [f"{steps} step{'s' if steps != 1 else ''}"] if isinstance(steps, int) else []
    if isinstance(attack, MinimumNormCW):
        parts = [f"C&W from a DDN start, {attack.initial_steps} + {steps} steps"]
    elif isinstance(attack, CW):
        parts = [f"C&W as published, c = {attack.c:g}, {steps} steps"]
    elif isinstance(attack, FisherStep):
        parts = ["1 step along the principal eigenvector of the Fisher information"]
    elif isinstance(attack, PGD):
        parts = [_describe_steps(attack)]
    parts += [f"{restarts} restarts"] if isinstance(restarts, int) and restarts > 1 else []
    parts += [f"at most {queries} queries"] if isinstance(queries, int) else []
    parts += ["as published"] if isinstance(attack, Square) and attack.as_published else []
    return ", ".join(parts)


def _describe_steps(attack: PGD) -> str:
    schedule = "" if attack.schedule == "constant" else f"{attack.schedule} "
    momentum = f" with momentum {attack.momentum:g}" if attack.momentum else ""
    steps = f"{attack.steps} {schedule}step{'s' if attack.steps != 1 else ''}{_STARTS.get(attack.start, '')}{momentum}"
    starts = Counter(attack.losses[number % len(attack.losses)] for number in range(attack.num_restarts))
    rivals = starts.pop("rivals", 0)
    names = [_LOSSES[loss] for loss in starts]
    names += [f"{rivals} rival{'s' if rivals > 1 else ''} of the label"] if rivals else []
    every = "each of " if len(names) > 1 or rivals > 1 else ""
    listed = ", ".join([*names[:-2], " and ".join(names[-2:])])
    losses = "" if listed == _LOSSES["cross_entropy"] else f" with {every}{listed}"
    restarts = max(starts.values(), default=1)
    return steps + losses + (f", {restarts} restarts" if restarts > 1 else "")
