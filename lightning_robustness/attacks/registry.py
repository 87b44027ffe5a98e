"""Attacks by name, and the settings of the papers."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, cast

from lightning_robustness.attacks import ensembles
from lightning_robustness.attacks.attack import Attack
from lightning_robustness.attacks.autoattack_adapter import AutoAttackAdapter, Version
from lightning_robustness.attacks.cw import CW, MinimumNormCW
from lightning_robustness.attacks.ddn import DDN
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.siren import SirenAttack
from lightning_robustness.attacks.square import Square
from lightning_robustness.attacks.torchattacks_adapter import TorchattacksAdapter
from lightning_robustness.utilities.checks import check_attack

_ATTACKS: dict[str, tuple[type[Attack], dict[str, Any]]] = {
    "fgsm": (PGD, {"steps": 1, "start": "clean"}),
    "rfgsm": (PGD, {"start": "sign"}),
    "bim": (PGD, {"start": "clean"}),
    "pgd": (PGD, {}),
    "strong_pgd": (PGD, ensembles.STRONG_PGD),
    "pgd_l2": (PGD, {"norm": "l2", "eps": 1.0}),
    "mifgsm": (PGD, {"start": "clean", "momentum": 1.0}),
    "cw": (CW, {}),
    "minimum_norm_cw": (MinimumNormCW, {}),
    "ddn": (DDN, {}),
    "square": (Square, {}),
    "siren": (SirenAttack, {}),
}
_ENSEMBLES = {"worst": ensembles.worst, "autoattack": ensembles.autoattack}
ATTACK_NAMES = (*_ATTACKS, *_ENSEMBLES)
# Settings that a preset gives an attack, where these are not all of its group
_TAKEN = {"fgsm": ("eps",), "pgd_l2": ("steps",), "strong_pgd": ("eps",), "worst": ("eps",), "autoattack": ("eps",)}


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
    attack: str | Callable[..., Any], eps: float | None = None, preset: str | None = None, **options: Any
) -> Callable[..., Any]:
    """Get an attack by its name.

    Args:
        attack: ``"fgsm"``, ``"rfgsm"``, ``"bim"``, ``"pgd"``, ``"strong_pgd"``, ``"pgd_l2"``, ``"mifgsm"``, ``"cw"``,
            ``"minimum_norm_cw"``, ``"ddn"``, ``"square"``, ``"siren"``, or a cascade, ``"worst"`` or ``"autoattack"``.
            ``"pgd"`` and ``"cw"`` are the attacks as published, which are weak on robust networks; ``"strong_pgd"``
            takes 8 shrinking steps with cross-entropy and 8 with the margin on what is left, ``"minimum_norm_cw"``
            starts from DDN. ``"torchattacks:NAME"`` is a class of torchattacks, ``"autoattack:standard"`` AutoAttack by
            its authors, where their package is installed. An instance of a class of torchattacks, or any other callable
            ``(model, x, y) -> x_adv``, works too, and takes no further arguments.
        eps: Largest distance from the input, in un-normalised units, instead of that of the preset or the default of
            the attack. C&W and DDN have no budget, and take no notice.
        preset: Settings of the papers, which are weak on robust networks; of those, ``"strong_pgd"`` and cascades take
            the budget only. Those of the RDI paper for ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"``, ``"cifar100"``,
            ``"tiny-imagenet"`` and (SirenAttack alone) ``"speech"``; those of the Fisher information paper for
            ``"imagenet"`` or, by the name ``"fisher"``, its other data sets.
        options: Further arguments of the attack, instead of those of the preset; for cascades ``norm`` and those that
            all attacks share, such as ``targeted``.

    Raises:
        TypeError: If the attack is neither a name nor callable.
        ValueError: If a name, preset or option is unknown.

    Example:
        >>> from lightning_robustness.attacks import get_attack
        >>> get_attack("fgsm", eps=0.1)
        PGD(eps=0.1, alpha=None, steps=1, norm='linf', start='clean', restarts=1, momentum=0.0, loss='cross_entropy',
            schedule='constant')
        >>> get_attack("square", preset="mnist", num_queries=1000)
        Square(eps=0.3, num_queries=1000, norm='linf', p=0.8, loss='margin')

    """
    if not isinstance(attack, str):
        return _from_object(attack, given=eps is not None or preset is not None or bool(options))
    if attack.startswith("torchattacks:"):
        if preset is not None:
            raise ValueError(f"Expected no preset for {attack!r} but got {preset!r}. Pass its arguments one by one.")
        shared = {name: options.pop(name) for name in _shared() if name in options}
        options |= {} if eps is None else {"eps": eps}
        return TorchattacksAdapter(attack=attack.removeprefix("torchattacks:"), options=options, **shared)
    if attack.startswith("autoattack:"):
        _check_options(attack, options, ("norm", *_shared()))
        if preset is not None:
            raise ValueError(f"Expected no preset for {attack!r} but got {preset!r}. Pass its `eps`.")
        options |= {} if eps is None else {"eps": eps}
        return AutoAttackAdapter(version=cast(Version, attack.removeprefix("autoattack:")), **options)
    if attack in _ENSEMBLES:
        _check_options(attack, options, ("norm", *_shared()))
        if preset is not None and eps is None and options.get("norm") == "l2":
            raise ValueError(f"Expected `eps` with norm='l2' but got preset={preset!r}, whose budget is in l-infinity.")
        return _ENSEMBLES[attack](**(_preset(attack, preset) | ({} if eps is None else {"eps": eps}) | options))
    if attack not in _ATTACKS:
        raise ValueError(
            f"Expected the name of an attack but got {attack!r}. Known: {', '.join(ATTACK_NAMES)}, and "
            "torchattacks:NAME for the classes of torchattacks, autoattack:VERSION for AutoAttack by its authors."
        )
    kind, defaults = _ATTACKS[attack]
    known = tuple(field.name for field in fields(kind))
    _check_options(attack, options, known)
    budget = {"eps": eps} if eps is not None and "eps" in known else {}
    return kind(**(defaults | _preset(attack, preset) | budget | options))


def _from_object(attack: Callable[..., Any], given: bool) -> Callable[..., Any]:
    check_attack(attack)
    if given:
        raise ValueError(f"Expected eps, preset and options for the name of an attack only but got {attack!r}.")
    is_foreign = any(parent.__module__.split(".")[0] == "torchattacks" for parent in type(attack).__mro__)
    return TorchattacksAdapter(attack=attack) if is_foreign else attack


def _preset(attack: str, preset: str | None) -> dict[str, Any]:
    if preset is None:
        return {}
    if attack in ("minimum_norm_cw", "ddn"):
        raise ValueError(
            f"Expected no preset for {attack!r}, as the papers have none, but got {preset!r}. Leave it out."
        )
    group = attack if attack in ("cw", "square", "siren") else "steps"
    known = [name for name, groups in _PRESETS.items() if group in groups]
    if preset not in known:
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
