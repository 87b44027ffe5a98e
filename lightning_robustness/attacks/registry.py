"""Attacks by name, and the settings of the papers."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Literal

from lightning_robustness._arguments import check_attack, check_option
from lightning_robustness.attacks.adapters.autoattack import AutoAttackAdapter
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
_STRONG_PGD = _FAST_PGD | {"steps": 20, "loss": (*_FAST_PGD["loss"], *["rivals"] * _RIVALS), "schedule": "adaptive"}
# Budgets where none is given
_EPS: dict[Norm, float] = {"linf": PGD.eps, "l2": 1.0}
_L2: dict[str, Any] = {"norm": "l2", "eps": _EPS["l2"]}


def _cascade(
    first: dict[str, Any],
    steps: int,
    num_queries: int,
    eps: float | None = None,
    norm: Norm = "linf",
    targeted: bool = False,
    all_steps: bool = False,
) -> Cascade:
    """Make a cascade of PGD, adaptive steps against each rival, and Square."""
    modes: dict[str, Any] = {"targeted": targeted, "all_steps": all_steps}
    shared = modes | {"norm": norm, "eps": _EPS.get(norm, PGD.eps) if eps is None else eps}
    loss: dict[str, Any] = {"loss": "margin"} if targeted else {"loss": "rivals", "restarts": _RIVALS}
    second = PGD(steps=steps, schedule="adaptive", **loss, **shared)
    return Cascade(attacks=(PGD(**first, **shared), second, Square(num_queries=num_queries, **shared)), **modes)


# The attack behind a name, as published
_ATTACKS: dict[str, Callable[..., Attack]] = {
    "fgsm": partial(PGD, steps=1, start="clean"),
    "rfgsm": partial(PGD, start="sign"),
    "bim": partial(PGD, start="clean"),
    "pgd": PGD,
    "pgd_l2": partial(PGD, **_L2),
    "mifgsm": partial(PGD, start="clean", momentum=1.0),
    "cw": CW,
    "ddn": DDN,
    "square": partial(Square, as_published=True),
    "siren": SirenAttack,
    "fisher": FisherStep,
    # Close to AutoAttack for a fraction of its time; each member sees only what those before it did not break
    "cascade": partial(_cascade, _FAST_PGD, 20, 1000),
    # Like the standard ensemble of AutoAttack (Croce and Hein, 2020), which has 100 steps with DLR against each rival,
    # the minimum-norm attack FAB, and 5,000 queries: they found nothing more where it was tried, and take three times
    # as long
    "ensemble": partial(_cascade, {"steps": 100, "schedule": "adaptive"}, 40, 4000),
    "autoattack": AutoAttackAdapter,
}
# What is behind it for the cheapest useful verdict, and for one to report, where that is another
_BY_STRENGTH: dict[tuple[str, str], Callable[..., Attack]] = {
    ("pgd", "fast"): partial(PGD, **_FAST_PGD),
    ("pgd", "strong"): partial(PGD, **_STRONG_PGD),
    ("pgd_l2", "fast"): partial(PGD, **_FAST_PGD, **_L2),
    ("pgd_l2", "strong"): partial(PGD, **_STRONG_PGD, **_L2),
    ("cw", "fast"): partial(MinimumNormCW, initial_steps=16, steps=2),
    ("cw", "strong"): MinimumNormCW,
    ("square", "fast"): partial(Square, num_queries=100),
    ("square", "strong"): partial(Square, num_queries=1000),
}
ATTACK_NAMES = tuple(_ATTACKS)
# Settings of the papers: budget, step size and steps of gradient attacks, steps and weight of C&W, queries of Square
_SETTINGS = {
    "mnist": (0.3, 0.01, 40, 50, 1.0, 5000),
    "cifar10": (0.1, 0.0025, 10, 10, 0.5, 200),
    "cifar100": (0.01, 0.001, 10, 10, 0.1, 200),
    "fisher": (8 / 255, 2 / 255, 20, 20, 1.0, 5000),
}
_SAME_SETTINGS = {"fashion-mnist": "mnist", "tiny-imagenet": "cifar100", "imagenet": "fisher"}
_SPEECH = {"eps": 0.5, "alpha": 0.05, "steps": 50, "gradient_steps": 50}


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
    if name and library == "torchattacks":
        if preset is not None:
            raise ValueError(f"Expected no preset for {attack!r} but got {preset!r}. Pass its arguments one by one.")
        shared = {field.name: options.pop(field.name) for field in fields(Attack) if field.name in options}
        return TorchattacksAdapter(attack=name, options=options | budget, **shared)
    if name and library == "autoattack":
        _check_options(attack, options, ("norm", *(field.name for field in fields(Attack))))
        return get_attack(library, eps, strength=strength, preset=preset, version=name, **options)
    if attack not in _ATTACKS:
        raise ValueError(
            f"Expected `attack` to be the name of an attack but got {attack!r}. Known: {', '.join(ATTACK_NAMES)}, and "
            "torchattacks:NAME for the classes of torchattacks, autoattack:VERSION for versions of AutoAttack."
        )
    make = _BY_STRENGTH.get((attack, strength), _ATTACKS[attack])
    known = tuple(inspect.signature(make).parameters)
    _check_options(attack, options, tuple(option for option in known if option != "eps"))
    settings = _preset(attack, preset)
    if "eps" in settings and eps is None and options.get("norm") == "l2":
        raise ValueError(f"Expected `eps` with norm='l2' but got preset={preset!r}, whose budget is in l-infinity.")
    return make(**(settings | (budget if "eps" in known else {}) | options))


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
    known = ["speech"] if attack == "siren" else [*_SETTINGS, *_SAME_SETTINGS]
    if not isinstance(preset, str) or preset not in known:
        raise ValueError(
            f"Expected argument `preset` for {attack!r} to be one of {', '.join(known)} but got {preset!r}."
        )
    if attack == "siren":
        return _SPEECH
    eps, alpha, steps, cw_steps, c, num_queries = _SETTINGS[_SAME_SETTINGS.get(preset, preset)]
    settings: dict[str, dict[str, Any]] = {
        "cw": {"steps": cw_steps, "lr": 0.01, "c": c},
        "square": {"eps": eps, "num_queries": num_queries},
        "pgd_l2": {"steps": steps},
    }
    if attack in ("fgsm", "cascade", "ensemble"):
        return {"eps": eps}
    return settings.get(attack, {"eps": eps, "alpha": alpha, "steps": steps})


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
