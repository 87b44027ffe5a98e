"""Bad input to the public interface: each row must give an error that names the argument and the remedy."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness import (
    AdversarialTraining,
    AdversarialWeightPerturbation,
    AttackFreeRegularization,
    InputSpace,
    RobustEarlyStopping,
    RobustModelCheckpoint,
    RobustnessMonitor,
)
from lightning_robustness.attacks import (
    CW,
    DDN,
    PGD,
    Cascade,
    SirenAttack,
    Square,
    TorchattacksAdapter,
    budget_of,
    get_attack,
    masking_signs,
    run_attack,
)
from lightning_robustness.evaluation import (
    ComparisonReport,
    RobustnessReport,
    SweepReport,
    compare,
    evaluate,
    sweep,
)
from lightning_robustness.functional import (
    attack_success_rate,
    boundary_distance,
    clever_score,
    fisher_spectral_norm,
    lipschitz_constant,
    robustness_difference_index,
    roby,
    spectral_bounds,
)
from lightning_robustness.losses import boundary_penalty, fisher_penalty, mart_loss, rdi_loss, trades_loss
from lightning_robustness.metrics import (
    ROBY,
    AttackSuccessRate,
    BoundaryDistance,
    CleverScore,
    FisherSpectralNorm,
    LipschitzConstant,
    RobustnessDifferenceIndex,
)
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

NAN, INF = math.nan, math.inf
X, Y = torch.linspace(0.0, 1.0, 12).reshape(4, 3), torch.tensor([0, 1, 0, 1])
MODEL = nn.Linear(3, 2).requires_grad_(False)
STEEP = nn.Linear(3, 2, bias=False).requires_grad_(False)
STEEP.weight.data.copy_(torch.tensor([[1e30, 1e30, 1e30], [-1e30, -1e30, -1e30]]))
LOADER = [(X, Y)]
NO_TENSORS = {"a list": X.tolist(), "an array": X.numpy(), "None": None, "text": "x", "a number": 3}

ROWS: dict[str, tuple] = {}


def row(name, call, error, match):
    """Add a row: what is wrong, a callable that does it, and the error that must come, with its message."""
    assert name not in ROWS
    ROWS[name] = (call, error, match)


def options(function, *args, **keywords):
    """Add a row for each bad value of an option; unless the message is given as a whole, it must name the option."""
    fixed = keywords.pop("fixed", {})
    for option, cases in keywords.items():
        for value, error, match in cases:
            shown = " ".join(repr(value).split())
            row(
                f"{function.__name__}({option}={shown})",
                lambda option=option, value=value: function(*args, **{**fixed, option: value}),
                error,
                match if match.startswith("Expected") else rf"`{option}`.*{match}",
            )


# Tensors: lists, arrays, None and the like

for kind, value in NO_TENSORS.items():
    came = "ndarray" if kind == "an array" else type(value).__name__
    of_floats = rf"to be a floating point tensor but got {came}. Pass `torch.as_tensor\("
    of_labels = rf"to be an integer tensor of labels but got {came}. If these are logits, pass `logits.argmax\(dim=1\)`"
    for function in (robustness_difference_index, roby, rdi_loss):
        labels = "y" if function is rdi_loss else "preds"
        name = function.__name__
        row(f"{name}(features={kind})", lambda f=function, v=value: f(v, Y), TypeError, rf"`features` {of_floats}")
        row(f"{name}({labels}={kind})", lambda f=function, v=value: f(X, v), TypeError, rf"`{labels}` {of_labels}")
    for position, argument in enumerate(("preds", "adv_preds", "target")):
        arguments = [Y, Y, Y]
        arguments[position] = value
        row(
            f"attack_success_rate({argument}={kind})",
            lambda a=arguments: attack_success_rate(*a),
            TypeError,
            f"`{argument}` {of_labels}",
        )
    for function, further in {
        fisher_spectral_norm: (),
        lipschitz_constant: (),
        clever_score: (1.0,),
        spectral_bounds: (),
        boundary_distance: (),
        boundary_penalty: (Y,),
        fisher_penalty: (),
        trades_loss: (Y,),
        mart_loss: (Y,),
    }.items():
        row(
            f"{function.__name__}(x={kind})",
            lambda f=function, v=value, a=further: f(MODEL, v, *a),
            TypeError,
            f"`x` {of_floats}",
        )
    for function in (trades_loss, mart_loss):
        name = function.__name__
        row(f"{name}(y={kind})", lambda f=function, v=value: f(MODEL, X, v), TypeError, f"`y` {of_labels}")
        row(
            f"{name}(y={kind}, x_adv=...)",
            lambda f=function, v=value: f(MODEL, X, v, x_adv=X),
            TypeError,
            f"`y` {of_labels}",
        )
        if value is not None:
            row(
                f"{name}(x_adv={kind})",
                lambda f=function, v=value: f(MODEL, X, Y, x_adv=v),
                TypeError,
                f"`x_adv` {of_floats}",
            )
    if value is not None:
        row(
            f"clever_score(targets={kind})",
            lambda v=value: clever_score(MODEL, X, 1.0, targets=v),
            TypeError,
            rf"`targets` {of_labels}",
        )
        row(
            f"AttackSuccessRate.update(distortion={kind})",
            lambda v=value: AttackSuccessRate().update(Y, Y, Y, v),
            TypeError,
            f"`distortion` {of_floats}",
        )
    row(f"run(x={kind})", lambda v=value: run_attack(MODEL, "pgd", v, Y), TypeError, f"`x` {of_floats}")
    row(f"run(y={kind})", lambda v=value: run_attack(MODEL, "pgd", X, v), TypeError, f"`y` {of_labels}")
    row(f"PGD()(x={kind})", lambda v=value: PGD()(MODEL, v, Y), TypeError, f"`x` {of_floats}")
    row(f"boundary_penalty(y={kind})", lambda v=value: boundary_penalty(MODEL, X, v), TypeError, f"`y` {of_labels}")
    row(f"DDN()(x={kind})", lambda v=value: DDN()(MODEL, v, Y), TypeError, f"`x` {of_floats}")
    row(f"CW()(y={kind})", lambda v=value: CW()(MODEL, X, v), TypeError, f"`y` {of_labels}")
    row(
        f"RobustnessDifferenceIndex.update({kind})",
        lambda v=value: RobustnessDifferenceIndex(2).update(v, Y),
        TypeError,
        f"`features` {of_floats}",
    )
    row(f"ROBY.update({kind})", lambda v=value: ROBY(2).update(X, v), TypeError, f"`preds` {of_labels}")
    for metric in (FisherSpectralNorm(), LipschitzConstant(), CleverScore(1.0), BoundaryDistance()):
        row(
            f"{type(metric).__name__}.update(x={kind})",
            lambda m=metric, v=value: m.update(MODEL, v),
            TypeError,
            f"`x` {of_floats}",
        )

# Tensors of the wrong type, shape or value

for name, function in {
    "robustness_difference_index": robustness_difference_index,
    "roby": roby,
    "rdi_loss": rdi_loss,
    "RobustnessDifferenceIndex": RobustnessDifferenceIndex(2).update,
    "ROBY(mode='streaming')": ROBY(2, mode="streaming").update,
}.items():
    labels = "y" if name == "rdi_loss" else "preds"
    for kind, features, error, match in (
        (
            "width 0",
            torch.zeros(4, 0),
            ValueError,
            r"at least one value per sample but got shape \(4, 0\). Pass the logits",
        ),
        ("integers", X.int(), TypeError, r"but got dtype torch.int32. Convert it with `features.float\(\)`"),
        ("complex", X.cfloat(), TypeError, r"but got dtype torch.complex64. Convert it with `features.float\(\)`"),
        ("one dimension", X[0], ValueError, r"but got \(3,\). For a single sample, pass `features.unsqueeze\(0\)`"),
        ("no dimension", X[0, 0], ValueError, r"but got \(\). For a single sample, pass `features.unsqueeze\(0\)`"),
        ("NaN", X / 0, ValueError, "4 of 4 samples hold NaN or infinity. Check the network for divergence"),
    ):
        row(f"{name}(features of {kind})", lambda f=function, v=features: f(v, Y), error, f"`features`.*{match}")
    for kind, preds, error, match in (
        ("too few", Y[:2], ValueError, r"to have shape \(4,\), one label for each row of `features`, but got \(2,\)"),
        ("negative", Y - 1, ValueError, "to be (non-negative|in the range 0 to 1) but got values from -1 to 0"),
        ("floats", Y.float(), TypeError, r"but got dtype torch.float32. If these are logits, pass `logits.argmax"),
        (
            "one-hot",
            torch.eye(2)[Y],
            TypeError,
            r"but got dtype torch.float32. If these are logits, pass `logits.argmax",
        ),
        ("booleans", Y.bool(), TypeError, "to be an integer tensor of labels but got dtype torch.bool"),
    ):
        row(f"{name}({kind} labels)", lambda f=function, v=preds: f(X, v), error, f"`{labels}`.*{match}")

FAILURES = {
    "width 0": r"of shape \(2, 0\) but it failed: .* Let `forward` return logits, or pass `forward_fn=`",
    "NaN": "for NaN",
    "integers": r"but it failed: .* same dtype, but got Int .* Let `forward` return logits, or pass `forward_fn=`",
    "one dimension": r"of shape \(2,\) but it failed: .* Let `forward` return logits, or pass `forward_fn=`",
}
for name, function in {
    "fisher_spectral_norm": fisher_spectral_norm,
    "lipschitz_constant": lipschitz_constant,
    "clever_score": lambda model, x: clever_score(model, x, 1.0),
    "boundary_distance": boundary_distance,
    "boundary_penalty": lambda model, x: boundary_penalty(model, x, Y[: len(x)]),
    "fisher_penalty": fisher_penalty,
    "trades_loss": lambda model, x: trades_loss(model, x, Y[: len(x)]),
    "mart_loss": lambda model, x: mart_loss(model, x, Y[: len(x)]),
    "run": lambda model, x: run_attack(model, "pgd", x, Y[: len(x)]),
    "Square()": lambda model, x: Square()(model, x, Y[: len(x)]),
    "evaluate": lambda model, x: evaluate(model, [(x, Y[: len(x)])], progress=False),
    "sweep": lambda model, x: sweep(model, [(x, Y[: len(x)])], progress=False),
}.items():
    for kind, x, error, match in (
        ("width 0", torch.zeros(4, 0), ValueError, r"`x` with at least one value per sample but got shape \(4, 0\)"),
        (
            "NaN",
            X / 0,
            ValueError,
            r"to be finite but they hold NaN or infinity. .*replace these values with `x.nan_to_num",
        ),
        ("integers", X.int(), TypeError, r"dtype torch.int32. .*convert them with `x.float\(\)`"),
        ("one dimension", X[0], ValueError, r"but got \(3,\). For a single sample, pass `x.unsqueeze\(0\)`"),
        (
            "0 to 255",
            255 * X,
            ValueError,
            r"observed \[0, 255\]. For pixels from 0 to 255, pass `InputSpace\(high=255\)`",
        ),
        (
            "normalised",
            2 * X - 1,
            ValueError,
            r"observed \[-1, 1\]. If .* normalises .*, pass `InputSpace\(mean=..., std",
        ),
    ):
        if name == "evaluate" and kind in FAILURES:  # the model runs before the inputs are checked
            error, match = ValueError, FAILURES[kind]
        row(f"{name}(x of {kind})", lambda f=function, v=x: f(MODEL, v), error, f"[Ii]nputs.*{match}")

for function in (trades_loss, mart_loss):
    name = function.__name__
    row(
        f"{name}(empty batch)",
        lambda f=function: f(MODEL, X[:0], Y[:0]),
        ValueError,
        r"`x` to hold at least one sample",
    )
    row(
        f"{name}(x_adv of another shape)",
        lambda f=function: f(MODEL, X, Y, x_adv=X[:2]),
        ValueError,
        r"`x_adv` of the same but got \(4, 3\) and \(2, 3\). Pass one adversarial input per sample",
    )
    row(
        f"{name}(labels out of range, x_adv=...)",
        lambda f=function: f(MODEL, X, Y + 5, x_adv=X),
        ValueError,
        "`y` in the range 0 to 1, for logits of 2 classes, but got 6. Count classes from 0",
    )
row(
    "boundary_penalty(empty)",
    lambda: boundary_penalty(MODEL, X[:0], Y[:0]),
    ValueError,
    "`x` to hold at least one sample",
)
row("fisher_penalty(empty)", lambda: fisher_penalty(MODEL, X[:0]), ValueError, r"`x` to hold at least one sample")
row("spectral_bounds(x=NaN)", lambda: spectral_bounds(MODEL, X / 0), ValueError, r"finite.*`x.nan_to_num\(\)`")
row(
    "spectral_bounds(no samples)", lambda: spectral_bounds(MODEL, X[:0]), ValueError, "`x` to hold at least one example"
)
row(
    "evaluate(empty batches)",
    lambda: evaluate(MODEL, [(X[:0], Y[:0])]),
    ValueError,
    "at least one sample but it is empty",
)
row("sweep(empty batches)", lambda: sweep(MODEL, [(X[:0], Y[:0])]), ValueError, "at least one sample but it is empty")
for kind, y, error, match in (
    ("out of range", Y + 5, ValueError, "in the range 0 to 1, for logits of 2 classes, but got 6"),
    ("negative", Y - 1, ValueError, "`y` to be non-negative but got values from -1 to 0"),
    ("floats", Y.float(), TypeError, "`y` to be an integer tensor of labels but got dtype torch.float32"),
    ("too few", Y[:2], ValueError, r"`y` to have shape \(4,\), one label per sample, but got \(2,\)"),
):
    row(f"run({kind} labels)", lambda y=y: run_attack(MODEL, "pgd", X, y), error, match)
    row(f"trades_loss({kind} labels)", lambda y=y: trades_loss(MODEL, X, y), error, match)
    row(f"boundary_distance({kind} labels)", lambda y=y: boundary_distance(MODEL, X, y), error, match)
    row(f"boundary_penalty({kind} labels)", lambda y=y: boundary_penalty(MODEL, X, y), error, match)
row(
    "clever_score(targets out of range)",
    lambda: clever_score(MODEL, X, 1.0, targets=Y + 5),
    ValueError,
    "`targets` to be in the range 0 to 1 but got values from 5 to 6",
)

# Models

for kind, model in {"None": None, "text": "resnet18", "a number": 3, "a class": nn.Linear}.items():
    came = "the class Linear" if kind == "a class" else type(model).__name__
    match = rf"`model` to be a callable from inputs to logits, .* but got {came}. Pass the network itself"
    for name, call in {
        "fisher_spectral_norm": lambda m: fisher_spectral_norm(m, X),
        "lipschitz_constant": lambda m: lipschitz_constant(m, X),
        "clever_score": lambda m: clever_score(m, X, 1.0),
        "boundary_distance": lambda m: boundary_distance(m, X),
        "boundary_penalty": lambda m: boundary_penalty(m, X, Y),
        "fisher_penalty": lambda m: fisher_penalty(m, X),
        "trades_loss": lambda m: trades_loss(m, X, Y),
        "mart_loss(x_adv=...)": lambda m: mart_loss(m, X, Y, x_adv=X),
        "run": lambda m: run_attack(m, "pgd", X, Y),
        "PGD()": lambda m: PGD()(m, X, Y),
    }.items():
        row(f"{name} of {kind}", lambda call=call, m=model: call(m), TypeError, match)
    module = rf"`model` to be a torch.nn.Module.* but got {came}."
    for name, call in {
        "evaluate": lambda m: evaluate(m, LOADER),
        "sweep": lambda m: sweep(m, LOADER),
        "spectral_bounds": lambda m: spectral_bounds(m, X),
    }.items():
        expected = module if name != "spectral_bounds" else "`model` to be a torch.nn.Module but got .* wrap"
        row(f"{name} of {kind}", lambda call=call, m=model: call(m), TypeError, expected)
    row(
        f"compare of {kind}",
        lambda m=model: compare({"a": m}, LOADER),
        TypeError,
        "Expected 'a' to be a module or a report of one but got",
    )

for kind, model, match in (
    ("text", lambda x: "x", "logits of shape .* but got str. If they are elsewhere, pass a function"),
    ("a scalar", lambda x: x.sum(), r"logits of shape \(\d, K\), one row per input, but got \(\). .*`forward_fn=`"),
    (
        "no class",
        lambda x: x[:, :0],
        r"logits of shape \(\d, K\), one row per input, but got \(\d, 0\). .*`forward_fn=`",
    ),
):
    row(f"run on a model that returns {kind}", lambda m=model: run_attack(m, "pgd", X, Y), ValueError, match)
    row(
        f"fisher_spectral_norm of a model that returns {kind}",
        lambda m=model: fisher_spectral_norm(m, X),
        ValueError,
        match,
    )
    row(f"trades_loss of a model that returns {kind}", lambda m=model: trades_loss(m, X, Y), ValueError, match)
row(
    "run on a model that returns NaN",
    lambda: run_attack(lambda x: MODEL(x) * NAN, "pgd", X, Y),
    ValueError,
    "finite logits but 4 of 4 samples have NaN or infinite ones. Check the network for divergence",
)
row(
    "run on a model without gradients",
    lambda: run_attack(lambda x: MODEL(x).detach(), PGD(all_steps=True), X, Y),
    ValueError,
    "Take `detach`, `no_grad` and conversions out of the model, or use an attack that needs outputs only",
)
overflow = r"float32 can hold but those of 4 of 4 samples overflow: .*pass the model and `x` in float64"
row("fisher_spectral_norm of logits of 1e30", lambda: fisher_spectral_norm(STEEP, X), ValueError, overflow)
row("clever_score of logits of 1e30", lambda: clever_score(STEEP, X, 1.0), ValueError, overflow)
row("FisherSpectralNorm of logits of 1e30", lambda: FisherSpectralNorm().update(STEEP, X), ValueError, overflow)
row("evaluate logits of 1e30", lambda: evaluate(STEEP, LOADER, progress=False), ValueError, overflow)

# Input spaces

number = "to be a finite number, or None for no bound, but got"
numbers = "to be a finite number, or a sequence of one per channel, but got (?s:.*)Pass what the loader normalises with"
options(
    InputSpace,
    low=[("0", ValueError, f"{number} '0'"), (NAN, ValueError, f"{number} nan"), ((0,), ValueError, number)],
    high=[
        ("1", ValueError, f"{number} '1'"),
        (INF, ValueError, f"{number} inf"),
        (-1, ValueError, "Expected `low` to be smaller than `high`"),
    ],
    mean=[
        (value, ValueError, numbers)
        for value in (
            "imagenet",
            NAN,
            [0.1, NAN],
            (),
            [[0.1]],
            ["a"],
            {"a": 1},
            True,
            np.zeros((2, 2)),
            torch.tensor(NAN),
        )
    ],
    std=[
        *((value, ValueError, numbers) for value in (NAN, INF, "1", ())),
        *((value, ValueError, "to be positive but got") for value in (0.0, -1, [1.0, 0.0])),
    ],
)
row(
    "InputSpace(two means, three stds)",
    lambda: InputSpace(mean=(0.5, 0.5), std=(1.0, 1.0, 1.0)),
    ValueError,
    "`mean` and `std` to have the same number of channels but got 2 and 3. Pass one value per channel",
)
row(
    "InputSpace of more channels than the inputs",
    lambda: run_attack(MODEL, "pgd", X, Y, InputSpace(mean=(0.5, 0.5))),
    ValueError,
    r"`mean` to have one value, or one per channel \(dimension 1\) of inputs of shape \(4, 3\), but got 2",
)
for kind, space in {
    "a tuple": (0, 1),
    "text": "imagenet",
    "255": 255,
    "a class": InputSpace,
    "a dict": {"high": 255},
}.items():
    for name, call in {
        "fisher_spectral_norm": lambda s: fisher_spectral_norm(MODEL, X, input_space=s),
        "lipschitz_constant": lambda s: lipschitz_constant(MODEL, X, s),
        "clever_score": lambda s: clever_score(MODEL, X, 1.0, input_space=s),
        "spectral_bounds": lambda s: spectral_bounds(MODEL, X, input_space=s),
        "boundary_distance": lambda s: boundary_distance(MODEL, X, input_space=s),
        "boundary_penalty": lambda s: boundary_penalty(MODEL, X, Y, input_space=s),
        "BoundaryDistance": lambda s: BoundaryDistance(input_space=s),
        "fisher_penalty": lambda s: fisher_penalty(MODEL, X, input_space=s),
        "trades_loss": lambda s: trades_loss(MODEL, X, Y, input_space=s),
        "mart_loss(x_adv=...)": lambda s: mart_loss(MODEL, X, Y, x_adv=X, input_space=s),
        "run": lambda s: run_attack(MODEL, "pgd", X, Y, s),
        "PGD()": lambda s: PGD()(MODEL, X, Y, input_space=s),
        "budget_of": lambda s: budget_of(get_attack("torchattacks:PGD"), s),
        "FisherSpectralNorm": lambda s: FisherSpectralNorm(input_space=s),
        "LipschitzConstant": lambda s: LipschitzConstant(input_space=s),
        "CleverScore": lambda s: CleverScore(1.0, input_space=s),
        "RobustnessMonitor": lambda s: RobustnessMonitor(input_space=s),
        "AdversarialTraining": lambda s: AdversarialTraining(input_space=s),
        "AttackFreeRegularization": lambda s: AttackFreeRegularization(input_space=s),
        "evaluate": lambda s: evaluate(MODEL, LOADER, input_space=s),
        "sweep": lambda s: sweep(MODEL, LOADER, input_space=s),
        "compare": lambda s: compare({"a": MODEL}, LOADER, input_space=s),
    }.items():
        row(
            f"{name}(input_space={kind})",
            lambda call=call, s=space: call(s),
            TypeError,
            r"`input_space` to be an InputSpace, or None, but got .*Pass `InputSpace\(low=0.0, high=1.0, mean",
        )

# Functions that adapt models and batches

for argument, value in (("forward_fn", "x"), ("forward_fn", 3), ("batch_fn", "x"), ("batch_fn", 3), ("batch_fn", (1,))):
    what = (
        "the model and inputs and returns logits"
        if argument == "forward_fn"
        else "a batch and returns inputs and labels"
    )
    for name, call in {
        "RobustnessMonitor": RobustnessMonitor,
        "AdversarialTraining": AdversarialTraining,
        "AdversarialWeightPerturbation": AdversarialWeightPerturbation,
        "AttackFreeRegularization": AttackFreeRegularization,
        "evaluate": lambda **kw: evaluate(MODEL, LOADER, **kw),
        "sweep": lambda **kw: sweep(MODEL, LOADER, **kw),
        "compare": lambda **kw: compare({"a": MODEL}, LOADER, **kw),
    }.items():
        row(
            f"{name}({argument}={value!r})",
            lambda call=call, argument=argument, value=value: call(**{argument: value}),
            TypeError,
            rf"`{argument}` to be a callable that takes {what}, or None, but got {re.escape(repr(value))}. Pass",
        )
row(
    "evaluate(batch_fn that returns inputs alone)",
    lambda: evaluate(MODEL, LOADER, batch_fn=lambda batch: batch[0], progress=False),
    TypeError,
    "`batch_fn` to return a pair of inputs and labels but got Tensor",
)

# Attacks

for kind, attacks, error, match in (
    ("[PGD]", [PGD], TypeError, r"but got the class PGD. Pass an instance, such as `PGD\(...\)`"),
    ("{'a': PGD}", {"a": PGD}, TypeError, r"but got the class PGD. Pass an instance, such as `PGD\(...\)`"),
    ("PGD", PGD, ValueError, r"`attacks` to be a list but got <class .*Pass \["),
    ("PGD()", PGD(), ValueError, r"`attacks` to be a list but got PGD\(.*Pass \[PGD\("),
    ("'pgd'", "pgd", ValueError, r"`attacks` to be a list but got 'pgd'. Pass \['pgd'\]"),
    ("3", 3, ValueError, r"`attacks` to be a list but got 3. Pass \[\] for none"),
    ("None", None, ValueError, r"`attacks` to be a list but got None. Pass \[\] for none"),
    ("[None]", [None], TypeError, r"an attack, .* but got NoneType. Pass `PGD\(\)`, or a function of your own"),
    ("['pgdd']", ["pgdd"], ValueError, "the name of an attack but got 'pgdd'. Known: fgsm, "),
    ("{'': 'pgd'}", {"": "pgd"}, ValueError, "`attacks` to be a string that is not empty but got ''"),
    ("{3: 'pgd'}", {3: "pgd"}, ValueError, "`attacks` to be a string that is not empty but got 3"),
    ("['pgd', 'pgd']", ["pgd", "pgd"], ValueError, "different names but got 'pgd' twice. Pass a mapping"),
):
    for name, call in {
        "RobustnessMonitor": lambda a: RobustnessMonitor(attacks=a),
        "evaluate": lambda a: evaluate(MODEL, LOADER, attacks=a),
        "sweep": lambda a: sweep(MODEL, LOADER, attacks=a),
        "compare": lambda a: compare({"a": MODEL}, LOADER, attacks=a),
    }.items():
        row(f"{name}(attacks={kind})", lambda call=call, a=attacks: call(a), error, match)
for kind, attack, error, match in (
    ("PGD", PGD, TypeError, r"but got the class PGD. Pass an instance, such as `PGD\(...\)`"),
    ("None", None, TypeError, r"an attack, .* but got NoneType. Pass `PGD\(\)`"),
    ("[]", [], TypeError, r"an attack, .* but got list. Pass `PGD\(\)`"),
    ("'PGD'", "PGD", ValueError, "the name of an attack but got 'PGD'. Known: fgsm"),
    ("'torchattacks:Foo'", "torchattacks:Foo", ValueError, "an attack of torchattacks but got 'Foo'. Known: "),
):
    row(f"get_attack({kind})", lambda a=attack: get_attack(a), error, match)
    row(f"run(attack={kind})", lambda a=attack: run_attack(MODEL, a, X, Y), error, match)
    row(f"AdversarialTraining(attack={kind})", lambda a=attack: AdversarialTraining(a), error, match)
row("budget_of('pgd')", lambda: budget_of("pgd"), TypeError, r"but got the name 'pgd'. Pass `get_attack\('pgd'\)`")
row("budget_of(PGD)", lambda: budget_of(PGD), TypeError, r"but got the class PGD. Pass an instance")
options(
    get_attack,
    "pgd",
    preset=[
        ("foo", ValueError, "for 'pgd' to be one of mnist, .* but got 'foo'"),
        (3, ValueError, "to be one of mnist"),
    ],
    eps=[
        (-1, ValueError, "of at least 0 but got -1"),
        ("8/255", ValueError, "a finite number of at least 0 but got '8/255'"),
    ],
)
row(
    "get_attack(epsilon=...)",
    lambda: get_attack("pgd", epsilon=0.1),
    ValueError,
    "options of 'pgd' to be among .*eps.* but got epsilon",
)
row(
    "get_attack(PGD(), eps=...)",
    lambda: get_attack(PGD(), eps=0.1),
    ValueError,
    "eps, preset and options for the name of an attack only",
)

amount = "to be a finite number of at least 0 but got"
options(
    PGD,
    eps=[(value, ValueError, amount) for value in (-1, NAN, INF, "8/255", None, [0.1], True)],
    alpha=[(value, ValueError, amount) for value in (-1, NAN, "x")],
    steps=[(value, ValueError, "to be an integer of at least 1 but got") for value in (0, 1.5, "10", None)],
    restarts=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    momentum=[(-1, ValueError, amount)],
    norm=[(value, ValueError, r"to be one of \('linf', 'l2'\) but got") for value in ("l1", 2, None)],
    start=[("random", ValueError, r"to be one of \('uniform', .* but got 'random'")],
    loss=[("dlr", ValueError, r"to be one of \('cross_entropy', .* but got 'dlr'")],
)
options(
    CW,
    c=[(value, ValueError, "to be a finite number above 0 but got") for value in (0, -1, NAN)],
    kappa=[(-1, ValueError, amount)],
    steps=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    lr=[(0, ValueError, "to be a finite number above 0 but got 0")],
    binary_search_steps=[(0, ValueError, "to be an integer of at least 1 but got 0")],
)
options(
    Square,
    eps=[(NAN, ValueError, amount)],
    num_queries=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    p=[
        (0, ValueError, "to be a finite number above 0 but got 0"),
        (2, ValueError, "to be a share of at most 1 but got 2"),
    ],
    norm=[("l1", ValueError, r"to be one of \('linf', 'l2'\) but got 'l1'")],
)
options(
    SirenAttack,
    eps=[(-1, ValueError, amount)],
    num_particles=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    inertia=[(value, ValueError, "to be two non-negative numbers but got") for value in (1.0, (1,), "ab")],
    attraction=[((NAN, 1), ValueError, "to be two non-negative numbers but got")],
)
options(
    Cascade,
    attacks=[
        ((), ValueError, "to hold at least one attack but got none"),
        ("pgd", TypeError, "to be a sequence of attacks but got 'pgd'"),
        (PGD, TypeError, "to be a sequence of attacks but got <class"),
        (None, TypeError, "to be a sequence of attacks but got None"),
    ],
)
row("Cascade([PGD])", lambda: Cascade(attacks=[PGD]), TypeError, "but got the class PGD. Pass an instance")
row(
    "Cascade(['pgd'])",
    lambda: Cascade(attacks=["pgd"]),
    TypeError,
    r"but got the name 'pgd'. Pass `get_attack\('pgd'\)`",
)
row(
    "TorchattacksAdapter(3)",
    lambda: TorchattacksAdapter(attack=3),
    TypeError,
    r"an attack, .* but got int. Pass `PGD\(\)`",
)
row(
    "TorchattacksAdapter(options=3)",
    lambda: TorchattacksAdapter(attack="PGD", options=3),
    TypeError,
    "`options` to be a mapping of arguments but got 3",
)
row(
    "TorchattacksAdapter(unknown option)",
    lambda: TorchattacksAdapter(attack="PGD", options={"epsilon": 1}),
    ValueError,
    "options of torchattacks' PGD to be among eps, .* but got epsilon",
)
row(
    "masking_signs(None)",
    lambda: masking_signs(None),
    TypeError,
    "`results` to be a list of results of `run_attack` but got None",
)
row("masking_signs([3])", lambda: masking_signs([3]), TypeError, "`results` to hold results of `run_attack` but got 3")
row("masking_signs(tolerance='x')", lambda: masking_signs([], tolerance="x"), ValueError, f"`tolerance` {amount} 'x'")
row(
    "an attack that returns None",
    lambda: run_attack(MODEL, lambda m, x, y: None, X, Y),
    TypeError,
    "to return a tensor .* but got NoneType",
)
row(
    "an attack that returns another shape",
    lambda: run_attack(
        lambda x: torch.stack([1 - x.sum(1), x.sum(1)], 1), lambda m, x, y: x[:, :1], X, torch.tensor([1, 1, 1, 1])
    ),
    ValueError,
    r"to return inputs of shape \(\d, 3\) but got",
)
for argument in ("seed", "index"):
    for value in (-1, "x", None, 1.5):
        match = f"`{argument}` to be an integer of at least 0 but got {value!r}"
        row(
            f"run({argument}={value!r})",
            lambda a=argument, v=value: run_attack(MODEL, "pgd", X, Y, **{a: v}),
            ValueError,
            match,
        )
        row(f"PGD()({argument}={value!r})", lambda a=argument, v=value: PGD()(MODEL, X, Y, **{a: v}), ValueError, match)
for function in (fisher_spectral_norm, lipschitz_constant, fisher_penalty):
    options(
        function, MODEL, X, seed=[(value, ValueError, "to be an integer of at least 0 but got") for value in (-1, "x")]
    )

# Budgets that are in the units of another range

wide = r"`eps` to be at most 1, the width of the range of inputs \[0, 1\], but got 8. .*8/255 for pixels in \[0, 1\]"
for name, call in {
    "run": lambda: run_attack(MODEL, PGD(eps=8), X, Y),
    "run(torchattacks)": lambda: run_attack(MODEL, get_attack("torchattacks:PGD", eps=8), X, Y),
    "evaluate": lambda: evaluate(MODEL, LOADER, eps=8),
    "evaluate(sweep_budgets=...)": lambda: evaluate(MODEL, LOADER, sweep_budgets=[0.1, 8]),
    "evaluate(decision_space=...)": lambda: evaluate(MODEL, LOADER, attacks=(), eps=8, decision_space="pca"),
    "sweep": lambda: sweep(MODEL, LOADER, budgets=[0.1, 8]),
    "compare": lambda: compare({"a": MODEL}, LOADER, budgets=[0.1, 8]),
    "RobustnessMonitor": lambda: RobustnessMonitor(eps=8),
    "AdversarialTraining": lambda: AdversarialTraining(eps=8),
    "trades_loss": lambda: trades_loss(MODEL, X, Y, eps=8),
    "mart_loss": lambda: mart_loss(MODEL, X, Y, eps=8),
}.items():
    row(f"{name} with eps=8 in [0, 1]", call, ValueError, wide)

# Functions

options(
    roby,
    X,
    Y,
    p=[
        (0.5, ValueError, "at least 1, or infinity, but got 0.5"),
        ("2", ValueError, "at least 1"),
        (NAN, ValueError, "at least 1"),
    ],
)
options(roby, X, Y, normalization=[("x", ValueError, r"to be one of \('pairs', 'all', 'none'\) but got 'x'")])
options(
    fisher_spectral_norm,
    MODEL,
    X,
    method=[
        ("qr", ValueError, r"to be one of \('auto', .* but got 'qr'"),
        (None, ValueError, "to be one of .* but got None"),
    ],
    tolerance=[("x", ValueError, amount)],
    max_steps=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    chunk_size=[(0, ValueError, "to be an integer of at least 1 but got 0")],
)
options(
    clever_score,
    MODEL,
    X,
    fixed={"radius": 1.0},
    radius=[(value, ValueError, "to be a finite number above 0 but got") for value in (0, None, NAN)],
    p=[(value, ValueError, "to be 1, 2 or infinity but got") for value in (3, [2], "2")],
    num_batches=[(0, ValueError, "to be an integer of at least 1 but got 0")],
)
for function in (trades_loss, mart_loss):
    weight = "beta" if function is trades_loss else "weight"
    options(
        function,
        MODEL,
        X,
        Y,
        **{weight: [(value, ValueError, amount) for value in (-1, NAN, "x")]},
        eps=[(value, ValueError, amount) for value in (-1, NAN)],
        steps=[(0, ValueError, "to be an integer of at least 1 but got 0")],
        seed=[(-1, ValueError, "to be an integer of at least 0 but got -1")],
    )
options(
    fisher_penalty,
    MODEL,
    X,
    kind=[("max", ValueError, r"to be one of \('spectral', 'trace'\) but got 'max'")],
    num_products=[(0, ValueError, "to be an integer of at least 1 but got 0")],
)
for function, further in ((boundary_distance, ()), (boundary_penalty, (Y,))):
    options(
        function,
        MODEL,
        X,
        *further,
        norm=[(v, ValueError, r"to be one of \('linf', 'l2'\) but got") for v in ("l1", 2, None)],
        num_rivals=[(v, ValueError, "to be an integer of at least 1 but got") for v in (0, 1.5, "x")],
        seed=[(v, ValueError, "to be an integer of at least 0 but got") for v in (-1, "x")],
    )
options(boundary_distance, MODEL, X, chunk_size=[(0, ValueError, "to be an integer of at least 1 but got 0")])
options(
    boundary_penalty,
    MODEL,
    X,
    Y,
    margin=[(v, ValueError, "to be a finite number above 0 but got") for v in (0, -1, NAN, "x", None)],
)
options(
    DDN,
    steps=[(v, ValueError, "to be an integer of at least 1 but got") for v in (0, 1.5, "x")],
    gamma=[
        *((v, ValueError, "to be a finite number above 0 but got") for v in (0, NAN, "x")),
        (1, ValueError, "to be a share below 1 but got 1"),
    ],
)

# Metrics

classes = "to be an integer of at least 2 but got"
options(RobustnessDifferenceIndex, num_classes=[(v, ValueError, classes) for v in (1, None, 2.5, "10")])
options(
    RobustnessDifferenceIndex,
    2,
    mode=[("fast", ValueError, r"one of \('auto', 'exact', 'streaming'\) but got 'fast'")],
)
options(
    ROBY,
    2,
    p=[(0.5, ValueError, "at least 1, or infinity")],
    normalization=[("x", ValueError, "to be one of .* but got 'x'")],
)
options(AttackSuccessRate, confidence=[(v, ValueError, "to be between 0 and 1 but got") for v in (1, "0.9", None, NAN)])
options(
    FisherSpectralNorm,
    method=[("qr", ValueError, "to be one of .* but got 'qr'")],
    floor=[(0, ValueError, "to be a finite number above 0 but got 0")],
    seed=[(v, ValueError, "to be an integer of at least 0 but got") for v in (-1, "x", 1.5)],
)
options(
    CleverScore,
    fixed={"radius": 1.0},
    radius=[(0, ValueError, "above 0 but got 0")],
    seed=[("x", ValueError, "at least 0 but got 'x'")],
)
options(
    BoundaryDistance,
    norm=[("l1", ValueError, r"to be one of \('linf', 'l2'\) but got 'l1'")],
    budgets=[
        *((v, TypeError, "to be a sequence of numbers but got .* Pass a list") for v in (0.1, "0.1", None)),
        *(([v], ValueError, amount) for v in (-1, NAN, "x")),
        ([0.2, 0.1], ValueError, r"to be increasing but got \[0.2, 0.1\]. Sort them"),
    ],
    quantiles=[
        (0.5, TypeError, "to be a sequence of numbers but got 0.5. Pass a list"),
        (["x"], ValueError, amount),
        ([1.5], ValueError, r"to be between 0 and 1 but got \[1.5\]"),
    ],
    confidence=[(v, ValueError, "to be between 0 and 1 but got") for v in (1.5, "0.9", None, NAN)],
    seed=[("x", ValueError, "to be an integer of at least 0 but got 'x'")],
)
options(LipschitzConstant, seed=[("x", ValueError, "to be an integer of at least 0 but got 'x'")])
row(
    "features of another width",
    lambda: [metric := RobustnessDifferenceIndex(2), metric.update(X, Y), metric.update(X[:, :2], Y)],
    ValueError,
    "`features` of width 3, as in the batches before, but got 2. Call `reset`",
)

# Callbacks

whole = "to be an integer of at least 0 but got"
options(
    RobustnessMonitor,
    eps=[(v, ValueError, amount) for v in (-1, NAN, "8/255")],
    attack_every_n_epochs=[
        (0, ValueError, "integer of at least 1 but got 0"),
        ("5", ValueError, "at least 1 but got '5'"),
    ],
    num_classes=[(1, ValueError, classes), ("10", ValueError, classes)],
    head=[(3, TypeError, "to be the name of a submodule, .* or the module itself but got 3. Leave it out")],
    fim_method=[("qr", ValueError, "to be one of .* but got 'qr'")],
    mode=[("fast", ValueError, r"to be one of \('auto', 'exact', 'streaming'\) but got 'fast'")],
    prefix=[(v, ValueError, "to be a string that is not empty but got") for v in ("", 3, None)],
    batch_size=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    **{name: [(-1, ValueError, whole)] for name in ("attack_samples", "dataloader_idx", "seed")},
)
options(RobustnessMonitor, seed=[("x", ValueError, whole)], fim_samples=[(1.5, ValueError, "but got 1.5")])
options(
    AdversarialTraining,
    eps=[
        *((v, ValueError, amount) for v in (-1, NAN, "0.1", ["a"])),
        ([], ValueError, "to hold at least one number but got none"),
    ],
    steps=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    alpha=[(-1, ValueError, amount)],
    mode=[("add", ValueError, r"to be one of \('replace', .* but got 'add'")],
    ratio=[(v, ValueError, "to be a number above 0 and at most 1 but got") for v in (0, 2, "x", None, NAN)],
    warmup_epochs=[(-1, ValueError, whole), (1.5, ValueError, whole)],
    measure_every_n_batches=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    overfitting_checkpoint=[("x", ValueError, "with PGD of one step .*Leave it out")],
    prefix=[(v, ValueError, "to be a string that is not empty but got") for v in ("", 3)],
)
options(
    AdversarialWeightPerturbation,
    gamma=[(v, ValueError, amount) for v in (-1, "x", None, NAN, INF)],
    warmup_epochs=[(v, ValueError, whole) for v in (-1, 0.5, "1")],
)
options(
    AttackFreeRegularization,
    rdi=[(v, ValueError, amount) for v in (-1, "x", None, NAN, INF)],
    fisher=[(-1, ValueError, amount)],
    fisher_kind=[("max", ValueError, r"to be one of \('spectral', 'trace'\) but got 'max'")],
    num_products=[(v, ValueError, "to be an integer of at least 1 but got") for v in (0, 1.5)],
    head=[(3, TypeError, "to be the name of a submodule, .* but got 3")],
    prefix=[("", ValueError, "to be a string that is not empty but got ''")],
)
options(
    RobustEarlyStopping, monitor=[(v, ValueError, "to be a string that is not empty but got") for v in (None, 3, "")]
)
options(
    RobustEarlyStopping,
    "robustness/rdi",
    patience=[(v, ValueError, whole) for v in (-1, "3", 1.5)],
    min_delta=[(v, ValueError, amount) for v in ("x", NAN)],
)
options(
    RobustModelCheckpoint, monitor=[(v, ValueError, "to be a string that is not empty but got") for v in (None, 3, "")]
)
options(RobustModelCheckpoint, "robustness/rdi", tie_margin=[(v, ValueError, amount) for v in (-1, "x", NAN)])
for callback in (RobustEarlyStopping, RobustModelCheckpoint):
    options(
        callback,
        "robustness/rdi",
        mode=[("best", ValueError, r"to be one of \('min', 'max'\) but got 'best'")],
        guard=[(v, ValueError, "to be a string that is not empty but got") for v in ("", 3)],
        guard_tolerance=[(v, ValueError, amount) for v in (-1, "x", NAN)],
        guard_mode=[("best", ValueError, r"to be one of \('min', 'max'\) but got 'best'")],
    )
    options(callback, "val_loss", mode=[(None, ValueError, "to be 'min' or 'max', whichever is better for 'val_loss'")])
options(
    AdversarialTraining,
    loss=[("kl", ValueError, "to be one of .* but got 'kl'")],
    loss_weight=[(1.0, ValueError, "with `loss` but got 1.0 alone. Leave it out")],
)
options(
    AttackFreeRegularization,
    boundary=[(v, ValueError, amount) for v in (-1, "x", NAN)],
    boundary_margin=[(0, ValueError, "to be a finite number above 0 but got 0")],
    boundary_rivals=[(0, ValueError, "to be an integer of at least 1 but got 0")],
)
options(
    RobustnessMonitor,
    final_attacks=[
        (3, TypeError, "Expected an attack, a callable .* or a name, but got int"),
        ("best", ValueError, "Expected .*'best'"),
        (PGD(eps=2.0), ValueError, "Expected `eps` to be at most 1"),
        (PGD(targeted=True), ValueError, "Expected attacks without a target"),
    ],
)
options(RobustnessMonitor, embed_fn=[(3, TypeError, "to be a callable that takes .* returns embeddings, .* but got 3")])

# Evaluation

for kind, loader, error, match in (
    ("None", None, TypeError, "`dataloader`.* but got"),
    ("3", 3, TypeError, "`dataloader` to be an iterable of batches but got int"),
    ("[]", [], ValueError, "a loader with at least one sample but it is empty"),
    ("['a']", ["a"], TypeError, "Expected a batch to be .*but got str. For other batches, pass `batch_fn=`"),
    ("lists", [([0.0], [1])], TypeError, "inputs of a batch to be a tensor .* but got list. .*pass `batch_fn=`"),
    ("inputs alone", [X], ValueError, "batches with labels, for attacks, but got none. Pass `batch_fn=`"),
    ("one-hot labels", [(X, torch.eye(2)[Y])], TypeError, r"`y` to be an integer .*`batch_fn=`.*argmax\(dim=1\)"),
):
    row(f"evaluate(dataloader={kind})", lambda v=loader: evaluate(MODEL, v, progress=False), error, match)
    row(f"sweep(dataloader={kind})", lambda v=loader: sweep(MODEL, v, progress=False), error, match)
    row(f"compare(dataloader={kind})", lambda v=loader: compare({"a": MODEL}, v, progress=False), error, match)
options(
    evaluate,
    MODEL,
    LOADER,
    fixed={"progress": False},
    eps=[(v, ValueError, amount) for v in (-1, NAN, "x")],
    head=[(3, TypeError, "to be the name of a submodule, .* but got 3"), ("foo", ValueError, "Expected .*'foo'")],
    num_classes=[(5, ValueError, "Expected 5 classes, as `num_classes` or .* has 2")],
    samples=[(-1, ValueError, whole), (1.5, ValueError, whole)],
    embed_fn=[(3, TypeError, "to be a callable that takes .* returns embeddings, .* but got 3")],
    fim_samples=[(-1, ValueError, "but got -1")],
    fim_method=[("qr", ValueError, "to be one of .* but got 'qr'")],
    clever_radius=[(0, ValueError, "to be a finite number above 0 but got 0")],
    batch_size=[(0, ValueError, "to be an integer of at least 1 but got 0")],
    sweep_budgets=[
        *((v, TypeError, "Expected the budgets of a sweep .*Pass a list") for v in (3, ["a"], None)),
        ([0.2, 0.1], ValueError, "Expected argument `eps` to hold positive, increasing budgets but got"),
    ],
    decision_space=[("umap", ValueError, "Expected the method of the decision space to be 'pca' or 'tsne' but")],
    device=[(v, ValueError, "that torch can use here, such as 'cpu'.* but got") for v in ("gpu", 3.5, "cuda:99")],
    seed=[(v, ValueError, whole) for v in (-1, "x")],
)
options(
    sweep,
    MODEL,
    LOADER,
    fixed={"progress": False},
    eps=[
        *((v, TypeError, "Expected the budgets of a sweep .*Pass a list") for v in (0.1, ["a"], None)),
        *((v, ValueError, "to hold positive, increasing budgets but got") for v in ([], [NAN], [0.2, 0.1], [-0.1])),
    ],
    samples=[(v, ValueError, "to be an integer of at least 1 but got") for v in (0, "x")],
    device=[("gpu", ValueError, "that torch can use here, such as 'cpu'.* but got 'gpu'")],
    seed=[(v, ValueError, whole) for v in (-1, "x")],
)
row("sweep(attacks=[])", lambda: sweep(MODEL, LOADER, []), ValueError, "at least one attack for a sweep but got none")
row(
    "sweep(attacks=['cw'])",
    lambda: sweep(MODEL, LOADER, ["cw"]),
    ValueError,
    r"whose budget can be set, .*Leave it out of the sweep",
)
for kind, models in {"a list": [MODEL], "a module": MODEL, "None": None, "text": "x"}.items():
    row(
        f"compare({kind})",
        lambda m=models: compare(m, LOADER),
        TypeError,
        rf"`models` to be a mapping of names to models or reports but got {type(models).__name__}. Pass a dictionary",
    )
row("compare({})", lambda: compare({}, LOADER), ValueError, "at least one model to compare but got none")
options(
    compare,
    {"a": MODEL},
    LOADER,
    fixed={"progress": False},
    prior=[
        ([1], TypeError, r"to be a mapping of metrics to weights but got \[1\]"),
        ({"foo": 1}, ValueError, "Expected prior weights for accuracy, .* but got 'foo'"),
        ({"mse": -1}, ValueError, "to hold non-negative weights, some positive, but got"),
        ({"mse": "x"}, ValueError, "to hold non-negative weights, some positive, but got"),
    ],
    balance=[(v, ValueError, r"to be in \[0, 1\) but got") for v in (1, "x", NAN)],
)

# Reports


def change(report, **fields):
    """Change fields of a report, or leave out those that are "missing"."""
    changed = {**report.to_dict(), **fields}
    return {name: value for name, value in changed.items() if value != "missing"}


def read_json(kind, fields):
    Path("x.json").write_text(json.dumps(fields))
    return kind.from_json("x.json")


for kind, report in {
    RobustnessReport: make_full_report(),
    SweepReport: make_sweep(),
    ComparisonReport: ComparisonReport({"a": make_report()}),
}.items():
    name = kind.__name__
    for value in (None, [1], "x"):
        row(
            f"{name}.from_dict({value!r})",
            lambda k=kind, v=value: k.from_dict(v),
            TypeError,
            f"`fields` to be a mapping, as `to_dict` returns it, but got {type(value).__name__}",
        )
        row(
            f"{name}.from_json of {value!r}",
            lambda k=kind, v=value: read_json(k, v),
            ValueError,
            f"a report as a JSON object in x.json but got {type(value).__name__}",
        )
    row(
        f"{name}.from_json of another kind",
        lambda k=kind: read_json(k, {"kind": "Other"}),
        ValueError,
        f"a {name} in x.json but got Other",
    )
    row(
        f"{name}.from_json(None)",
        lambda k=kind: k.from_json(None),
        TypeError,
        "`path` to be the path of a JSON file but got None",
    )
    row(
        f"{name}.from_json(no file)",
        lambda k=kind: k.from_json("none.json"),
        ValueError,
        "in none.json but it cannot be read: .*No such file",
    )
    row(
        f"{name}.from_json(a directory)",
        lambda k=kind: k.from_json("."),
        ValueError,
        r"as JSON in . but it cannot be read: .*directory",
    )
    required = {
        RobustnessReport: ("model", "num_classes", "metrics", "rates", "signs", "sweep"),
        SweepReport: ("attacks", "eps", "values", "worst", "clean_accuracy", "samples", "seconds"),
        ComparisonReport: ("reports", "prior", "balance", "missing"),
    }[kind]
    for field in required:
        for what, value in {"missing": "missing", "of another type": [{}]}.items():
            fields = change(report, **{field: value})
            row(
                f"{name}.from_dict({field} {what})",
                lambda k=kind, f=fields: k.from_dict(f),
                ValueError,
                rf"all fields of a {name} but some are missing or invalid. (?s:.*)Pass what `to_dict` returned",
            )
            row(
                f"{name}.from_json({field} {what})",
                lambda k=kind, f=fields: read_json(k, f),
                ValueError,
                rf"all fields of a {name} in x.json but some are missing or invalid. (?s:.*)Read a file that",
            )


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:The samples were predicted as 1 class")
def test_bad_input(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, error, match = ROWS[name]
    with pytest.raises(error, match=match) as raised:
        call()
    assert raised.type is error
    assert str(raised.value).startswith("Expected ")


def test_the_table_is_long():
    assert len(ROWS) >= 120


def test_remedies_for_overflow_work():
    """In float64, the Fisher information of steep logits is that of the scaled network times the squared scale."""
    flat = nn.Linear(3, 2, bias=False, dtype=torch.float64).requires_grad_(False)
    flat.weight.data.copy_(STEEP.weight.data / 1e30)
    x = torch.zeros(1, 3, dtype=torch.float64)  # where both classes have probability 1/2
    steep = fisher_spectral_norm(STEEP.to(torch.float64), x)
    STEEP.float()
    torch.testing.assert_close(steep / 1e60, fisher_spectral_norm(flat, x))
