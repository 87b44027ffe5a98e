"""Bad input to the public interface: the annotations say what is wrong for an argument, and the error must name it."""

import dataclasses
import inspect
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

import lightning_robustness
from lightning_robustness import (
    InputSpace,
    attacks,
    callbacks,
    evaluation,
    functional,
    is_sandboxed,
    losses,
    metrics,
    sandbox,
)
from lightning_robustness.attacks import PGD, get_attack, run_attack
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport, compare, evaluate, sweep
from lightning_robustness.functional import clever_score, fisher_spectral_norm
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

NAN, INF = math.nan, math.inf
X, Y = torch.linspace(0.0, 1.0, 12).reshape(4, 3), torch.tensor([0, 1, 0, 1])
MODEL = nn.Linear(3, 2).requires_grad_(False)
LOADER = [(X, Y)]
FEATURES = {"features": X, "preds": Y}
SAMPLES = {"model": MODEL, "x": X}
LABELLED = SAMPLES | {"y": Y}
CLEVER = {"radius": 1.0, "num_batches": 2, "points_per_batch": 2}
EVALUATION = {"dataloader": LOADER, "attacks": [PGD(steps=1)], "progress": False}
REPORTS = (make_full_report(), make_sweep(), ComparisonReport({"a": make_report()}))

# A valid call of every public object, and of the methods that take data
VALID: dict[Callable[..., Any], dict[str, Any]] = {
    InputSpace: {},
    is_sandboxed: {},
    sandbox: {"model": MODEL},
    attacks.CW: {},
    attacks.DDN: {},
    attacks.MinimumNormCW: {},
    attacks.PGD: {},
    attacks.AutoAttackAdapter: {},
    attacks.Cascade: {"attacks": (PGD(),)},
    attacks.FisherStep: {},
    attacks.SirenAttack: {},
    attacks.Square: {},
    attacks.TorchattacksAdapter: {"attack": "PGD"},
    PGD(steps=1).__call__: LABELLED,
    attacks.budget_of: {"attack": PGD()},
    attacks.get_attack: {"attack": "pgd"},
    attacks.masking_signs: {"results": []},
    attacks.run_attack: LABELLED | {"attack": PGD(steps=1)},
    functional.attack_success_rate: {"preds": Y, "adv_preds": Y, "target": Y},
    functional.boundary_distance: SAMPLES,
    functional.clever_score: SAMPLES | CLEVER,
    functional.fisher_spectral_norm: SAMPLES,
    functional.num_rayleigh_directions: {"num_classes": 3, "accuracy": 0.1},
    functional.smoothing_radius: {"probs": torch.eye(3), "sigma": 0.1},
    functional.lipschitz_constant: SAMPLES,
    functional.robustness_difference_index: FEATURES,
    functional.roby: FEATURES,
    functional.spectral_bounds: SAMPLES,
    metrics.ROBY: {"num_classes": 2},
    metrics.ROBY(2).update: FEATURES,
    metrics.AttackSuccessRate: {},
    metrics.AttackSuccessRate().update: {"preds": Y, "adv_preds": Y, "target": Y},
    metrics.BoundaryDistance: {},
    metrics.BoundaryDistance().update: SAMPLES,
    metrics.CleverScore: {"radius": 1.0},
    metrics.CleverScore(**CLEVER).update: SAMPLES,
    metrics.FisherSpectralNorm: {},
    metrics.FisherSpectralNorm().update: SAMPLES,
    metrics.LipschitzConstant: {},
    metrics.LipschitzConstant().update: SAMPLES,
    metrics.RobustnessDifferenceIndex: {"num_classes": 2},
    metrics.RobustnessDifferenceIndex(2).update: FEATURES,
    losses.boundary_penalty: LABELLED,
    losses.fisher_penalty: SAMPLES,
    losses.mart_loss: LABELLED,
    losses.rdi_loss: {"features": X, "y": Y},
    losses.trades_loss: LABELLED,
    evaluation.composite_scores: {"values": torch.rand(1, 1, 3, 2), "higher_is_better": (True, False)},
    evaluation.compare: EVALUATION | {"models": {"a": MODEL}, "budgets": [0.1, 0.2]},
    evaluation.evaluate: EVALUATION | {"model": MODEL, "sweep_budgets": [0.1], "sweep_attacks": [PGD(steps=1)]},
    evaluation.sweep: EVALUATION | {"model": MODEL, "budgets": [0.1]},
    callbacks.AdversarialTraining: {},
    callbacks.AdversarialWeightPerturbation: {},
    callbacks.AttackFreeRegularization: {},
    callbacks.RobustEarlyStopping: {"monitor": "robustness/rdi"},
    callbacks.RobustModelCheckpoint: {"monitor": "robustness/rdi"},
    callbacks.RobustnessMonitor: {},
} | {report.from_dict: {"fields": report.to_dict()} for report in REPORTS}
# What the package returns, and the base class of attacks: nobody has to build these
RESULTS = {"Attack", "AttackResult", "Budget", "MaskingSign", "SpectralBounds", "SpectralRow"}
RESULTS |= {"ComparisonReport", "CompositeScores", "RobustnessReport", "SweepReport"}

# Values of many types. The annotation of an argument says for which arguments one is wrong.
VALUES = [None, True, -1, 1.5, NAN, INF, "", "nonsense", [], [None], ["nonsense"], [NAN], [-1.0], (0, 1), {}]
VALUES += [{"nonsense": None}, nn.Linear, object(), X.numpy()]
# Values of the annotated type that are wrong all the same, by argument, or by function and argument
LABELS = (Y.float(), torch.eye(2)[Y], Y.bool(), Y - 1)
WRONG: dict[str, Sequence[Any]] = {
    **dict.fromkeys(["steps", "binary_search_steps", "max_steps", "num_queries", "num_particles", "restarts"], (0,)),
    **dict.fromkeys(
        ["batch_size", "points_per_batch", "chunk_size", "num_batches", "num_directions", "num_products", "num_rivals"],
        (0,),
    ),
    **dict.fromkeys(["attack_every_n_epochs", "boundary_rivals", "measure_every_n_batches"], (0,)),
    **dict.fromkeys(["c", "lr", "floor", "margin", "boundary_margin", "radius", "clever_radius", "std"], (0.0,)),
    **dict.fromkeys(["y", "adv_preds", "target", "targets"], (*LABELS, Y[:2])),
    "device": ["nonsense", "meta"],
    "prefix": ["/", " ", "\t"],
    "preset": ["nonsense"],
    "attack": ["nonsense", nn.Linear],
    "model": [nn.Linear],
    "attacks": ["pgd", PGD, PGD(), {"": "pgd"}],
    "balance": [1.0],
    "confidence": [1.5],
    "distortion": [Y],
    "features": [X.int(), X.cfloat(), X[0], X[0, 0], X / 0, torch.zeros(4, 0)],
    "high": [0.0, -1],
    "mean": [[0.5, NAN], [], [[0.5]], torch.tensor(NAN)],
    "num_classes": [1],
    "positions": [torch.zeros(4), torch.arange(3), -torch.arange(4)],
    "overfitting_checkpoint": ["a.ckpt"],
    "preds": LABELS,
    "quantiles": [[1.5]],
    "ratio": [0.0, 1.5],
    "sweep_attacks": ["pgd"],
    "AttackSuccessRate.confidence": [0.0, 1.0],
    "Cascade.attacks": [()],
    "DDN.gamma": [0.0, 1.0],
    "SirenAttack.inertia": [(1.0,), (1.0, -1.0)],
    "SirenAttack.patience": [0],
    "Square.p": [0.0, 1.5],
    "boundary_distance.y": [Y + 5],
    "boundary_penalty.y": [Y + 5],
    "clever_score.targets": [Y + 5, Y[:, None][:, :0]],
    "compare.budgets": [[], [0.2, 0.1]],
    "evaluate.num_classes": [5],
    "evaluate.sweep_budgets": [[0.2, 0.1]],
    "roby.p": [0.5],
    "roby.preds": [Y[:2]],
    "sweep.attacks": [[]],
    "sweep.attack_samples": [0],
    "sweep.budgets": [[], [0.2, 0.1]],
}
# Numbers that are negative or infinite and right all the same
TAKEN: dict[str, Sequence[Any]] = {
    "low": [-1],  # a range may begin below zero
    "mean": [-1, [-1.0]],  # and have its mean there
    "stopping_threshold": [-1],  # a monitored value may be negative
    "divergence_threshold": [-1],
    **{key: [INF] for key in ["p", "roby_p"]},  # the maximum norm
}


def accepts(hint: Any, value: Any) -> bool:
    """Return whether a value has the annotated type, is no negative or infinite number and no empty text."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(accepts(part, value) for part in parts)
    if kind is Any:
        return True
    if kind is Literal:
        return any(value is part for part in parts)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and 0 <= value < INF
    if kind is tuple and Ellipsis not in parts:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(accepts, parts, value))
    if kind in (Sequence, Iterable, list, tuple):
        return isinstance(value, list | tuple | np.ndarray) and all(accepts(parts[0], entry) for entry in value)
    if kind in (Mapping, dict):
        return isinstance(value, dict) and all(accepts(parts[1], entry) for entry in value.values())
    return isinstance(value, kind) and not (isinstance(value, str) and value == "")


def call(function: Callable[..., Any], **options: Any) -> Any:
    with function(**options) if function is sandbox else nullcontext(function(**options)):
        pass


def name_of(function: Callable[..., Any]) -> str:
    return function.__qualname__


def arguments(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the arguments of a function or class, each with its annotation."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, hints[parameter.name]) for parameter in parameters if parameter.kind in named]


def wrong_values(function: Callable[..., Any], argument: str, hint: Any) -> list[Any]:
    """Return values that a function must refuse for an argument."""
    qualified = f"{name_of(function)}.{argument}"
    taken = [repr(value) for value in TAKEN.get(argument, [])]
    values = [value for value in VALUES if not accepts(hint, value) and repr(value) not in taken]
    return [*values, *WRONG.get(argument, []), *WRONG.get(qualified, [])]


CASES = [
    pytest.param(function, argument, wrong_values(function, argument, hint), id=f"{name_of(function)}.{argument}")
    for function in VALID
    for argument, hint in arguments(function)
]


@pytest.fixture(autouse=True, scope="module")
def _directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("bad_input"))
        yield


def refusal(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises, or what it does instead."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return "accepted"


def test_no_public_object_is_missing():
    packages = (lightning_robustness, attacks, callbacks, evaluation, functional, losses, metrics)
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    assert {name for name, value in public.items() if callable(value) and value not in VALID} == RESULTS
    known = {name for f in VALID for argument, _ in arguments(f) for name in (argument, f"{name_of(f)}.{argument}")}
    assert {*WRONG, *TAKEN} <= known


@pytest.mark.parametrize("function", VALID, ids=name_of)
@pytest.mark.filterwarnings("ignore:Only one class was predicted")
def test_valid_calls_work(function, monkeypatch):
    for name in ("autoattack", "autoattack.fab_pt"):  # the package need not be installed
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    call(function, **VALID[function])


@pytest.mark.parametrize(("function", "argument", "values"), CASES)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_errors_name_the_argument(function, argument, values):
    messages = {
        repr(value): refusal(lambda v=value: call(function, **VALID[function] | {argument: v})) for value in values
    }
    assert messages
    assert {value: message for value, message in messages.items() if f"`{argument}`" not in message} == {}


@pytest.mark.parametrize(
    "function", [f for f in VALID if len(arguments(f)) < len(inspect.signature(f).parameters)], ids=name_of
)
def test_unknown_options_are_named(function):
    with pytest.raises((TypeError, ValueError), match="nonsense"):
        call(function, **VALID[function], nonsense=1)


# `spectral_bounds` is not among them: values of its example do not matter
TAKES_INPUTS = [f for f in VALID if "x" in dict(arguments(f)) and f is not functional.spectral_bounds]


@pytest.mark.parametrize("function", TAKES_INPUTS, ids=name_of)
@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        pytest.param(torch.zeros(4, 0), "`x`", id="width 0"),
        pytest.param(X[:, 0], "x.unsqueeze(0)", id="one dimension"),
        pytest.param(X / 0, "x.nan_to_num()", id="NaN"),
        pytest.param(X.int(), "x.float()", id="integers"),
        pytest.param(255 * X, "InputSpace(high=255)", id="pixels"),
        pytest.param(2 * X - 1, "InputSpace(mean=..., std=...)", id="normalised"),
    ],
)
def test_inputs(function, x, remedy):
    assert remedy in refusal(lambda: function(**VALID[function] | {"x": x}))


TAKES_MODELS = [attacks.run_attack, functional.fisher_spectral_norm, losses.trades_loss]


@pytest.mark.parametrize("function", TAKES_MODELS, ids=name_of)
@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        pytest.param(lambda x: "x", "forward_fn=", id="text"),
        pytest.param(lambda x: x.sum(), "forward_fn=", id="a scalar"),
        pytest.param(lambda x: x[:, :0], "forward_fn=", id="no class"),
        pytest.param(lambda x: MODEL(x).detach(), "`detach`", id="no gradient"),
    ],
)
def test_outputs_of_models(function, model, remedy):
    assert remedy in refusal(lambda: function(**VALID[function] | {"model": model}))


def test_overflow_asks_for_float64():
    """With it, the Fisher information of steep logits is that of the scaled network times the squared scale."""
    x = torch.zeros(1, 3)  # where both classes have probability 1/2
    weight = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    flat, steep = (lambda x, scale=scale: x @ (scale * weight.to(x).T) for scale in (1.0, 1e30))
    for measure in (fisher_spectral_norm, partial(clever_score, radius=1.0), metrics.FisherSpectralNorm().update):
        assert "float64" in refusal(lambda measure=measure: measure(steep, x))
    torch.testing.assert_close(fisher_spectral_norm(steep, x.double()) / 1e60, fisher_spectral_norm(flat, x.double()))


# What no annotation says: the argument or the remedy that the error must name
COMBINATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "means and stds": (lambda: InputSpace(mean=(0.5, 0.5), std=(1.0, 1.0, 1.0)), "`mean` and `std`.* 2 and 3"),
    "channels": (lambda: run_attack(MODEL, "pgd", X, Y, input_space=InputSpace(mean=(0.5, 0.5))), "`mean`.*got 2"),
    "labels": (lambda: run_attack(MODEL, "pgd", X, Y + 5), "`y`.* up to 6"),
    "labels of trades_loss": (lambda: losses.trades_loss(MODEL, X, Y + 5, x_adv=X), "`y`.* up to 6"),
    "labels of the boundary": (lambda: functional.boundary_distance(MODEL, X, Y + 5), "`y`.* up to 6"),
    "x_adv": (lambda: losses.mart_loss(MODEL, X, Y, x_adv=X[:2]), "`x_adv`"),
    "NaN logits": (lambda: run_attack(lambda x: MODEL(x) * NAN, "pgd", X, Y), "4 of 4 samples .*divergence"),
    "no samples": (lambda: losses.trades_loss(MODEL, X[:0], Y[:0]), "`x`"),
    "no samples to regularise": (lambda: losses.boundary_penalty(MODEL, X[:0], Y[:0]), "`x`"),
    "no example": (lambda: functional.spectral_bounds(MODEL, X[:0]), "`x`"),
    "another width": (
        lambda: [metric := metrics.ROBY(2), metric.update(X, Y), metric.update(X[:, :2], Y)],
        "`features`.* 3.* 2.*`reset`",
    ),
    "a class": (lambda: get_attack(PGD), r"`PGD\(...\)`"),
    "a name": (lambda: attacks.Cascade(attacks=["pgd"]), r"`get_attack\('pgd'\)`"),
    "an unknown name": (lambda: callbacks.RobustnessMonitor(["pgdd"]), "'pgdd'. Known: fgsm"),
    "an unknown class": (lambda: get_attack("torchattacks:Foo"), "'Foo'. Known: "),
    "equal names": (lambda: callbacks.RobustnessMonitor(["pgd", "pgd"]), "'pgd' twice. Pass a mapping.*{'pgd_weak'"),
    "an unknown option": (lambda: attacks.TorchattacksAdapter(attack="PGD", options={"epsilon": 1}), "got epsilon"),
    "options of an object": (lambda: get_attack(PGD(), eps=0.1), "for the name of an attack only"),
    "an attack that returns nothing": (lambda: run_attack(MODEL, lambda m, x, y: None, X, 1 - Y), "tensor.*NoneType"),
    "an attack that returns other shapes": (lambda: run_attack(MODEL, lambda m, x, y: x[:, :1], X, 1 - Y), "of shape"),
    "a targeted attack": (lambda: callbacks.RobustnessMonitor(final_attack=PGD(targeted=True)), "a target but got PGD"),
    "a targeted attack in a list": (lambda: evaluate(MODEL, LOADER, [attacks.CW(targeted=True)]), "targeted=True"),
    "an attack without a budget": (lambda: sweep(MODEL, LOADER, ["cw"]), "Leave it out of the sweep"),
    "a weight alone": (lambda: callbacks.AdversarialTraining(loss_weight=1.0), "`loss`.*Leave it out"),
    "a direction": (lambda: callbacks.RobustEarlyStopping("val_loss"), "`mode`.*'val_loss'"),
    "the class of a model": (lambda: evaluate(type(MODEL), LOADER), r"`model`.*Pass an instance, `\w+\(...\)`"),
    "the class of a data module": (lambda: evaluate(MODEL, L.LightningDataModule), "the data module LightningDataM"),
    "a model without gradients": (
        lambda: evaluate(MODEL, LOADER, forward_fn=lambda model, x: model(x).detach(), progress=False),
        r"`fim_method='blackbox'` and `attacks=\['square'\]`",
    ),
    "a head": (lambda: evaluate(MODEL, LOADER, head="foo", progress=False), "'foo'"),
    "a list as inputs": (lambda: evaluate(MODEL, [([0.0], [1])], progress=False), "`batch_fn=`"),
    "text as a batch": (lambda: evaluate(MODEL, ["a"], progress=False), "`batch_fn=`"),
    "no labels": (lambda: evaluate(MODEL, [X], progress=False), "`batch_fn=`"),
    "one-hot labels": (lambda: sweep(MODEL, [(X, torch.eye(2)[Y])], progress=False), "`batch_fn=`.*argmax"),
    "empty batches": (lambda: evaluate(MODEL, [(X[:0], Y[:0])], progress=False), "`dataloader`"),
    "a batch_fn": (lambda: evaluate(MODEL, LOADER, batch_fn=lambda batch: batch[0], progress=False), "`batch_fn`"),
    "no models": (lambda: compare({}, LOADER), "at least one model"),
    "negative weights": (lambda: compare({"a": MODEL}, LOADER, prior={"mse": -1}), "`prior`"),
}
# A budget of 8 is meant for pixels in [0, 255], not in [0, 1]
COMBINATIONS |= {
    f"eps=8 in {name}": (call, "`eps`.*8/255")
    for name, call in {
        "run": lambda: run_attack(MODEL, PGD(eps=8), X, Y),
        "torchattacks": lambda: run_attack(MODEL, get_attack("torchattacks:PGD", eps=8), X, Y),
        "evaluate": lambda: evaluate(MODEL, LOADER, eps=8),
        "the sweep of evaluate": lambda: evaluate(MODEL, LOADER, sweep_budgets=[0.1, 8]),
        "the decision space": lambda: evaluate(MODEL, LOADER, attacks=(), eps=8, decision_space="pca"),
        "sweep": lambda: sweep(MODEL, LOADER, budgets=[0.1, 8]),
        "compare": lambda: compare({"a": MODEL}, LOADER, budgets=[0.1, 8]),
        "RobustnessMonitor": lambda: callbacks.RobustnessMonitor(eps=8),
        "AdversarialTraining": lambda: callbacks.AdversarialTraining(eps=8),
        "trades_loss": lambda: losses.trades_loss(MODEL, X, Y, eps=8),
        "mart_loss": lambda: losses.mart_loss(MODEL, X, Y, eps=8),
    }.items()
}
# Nothing would be attacked
COMBINATIONS |= {
    f"a budget of {eps} in {name}": (lambda call=call, eps=eps: call(eps), "`eps`.*can change an input.*8/255")
    for eps in (0, 1e-30)
    for name, call in {
        "evaluate": lambda eps: evaluate(MODEL, LOADER, [PGD(eps=eps)]),
        "evaluate, by name": lambda eps: evaluate(MODEL, LOADER, eps=eps),
        "RobustnessMonitor": lambda eps: callbacks.RobustnessMonitor({"first": PGD(eps=0.1), "second": PGD(eps=eps)}),
        "without bounds": lambda eps: callbacks.RobustnessMonitor([PGD(eps=eps)], input_space=InputSpace(None, None)),
        "the final attack": lambda eps: callbacks.RobustnessMonitor(final_attack=PGD(eps=eps)),
        "AdversarialTraining": lambda eps: callbacks.AdversarialTraining(eps=eps),
        "an attack to train with": lambda eps: callbacks.AdversarialTraining(PGD(eps=eps)),
        "all epochs": lambda eps: callbacks.AdversarialTraining(budgets=[eps, eps]),
    }.items()
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(name):
    call, match = COMBINATIONS[name]
    with pytest.raises((TypeError, ValueError), match=match):
        call()


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_fields_of_reports(report):
    kind, fields = type(report), report.to_dict()
    required = {field.name for field in dataclasses.fields(kind) if field.default is field.default_factory} & {*fields}
    for name in required:
        for wrong in (fields | {name: [{}]}, {key: value for key, value in fields.items() if key != name}):
            assert "`to_dict`" in refusal(lambda wrong=wrong: kind.from_dict(wrong))
            Path("x.json").write_text(json.dumps(wrong))
            assert "x.json" in refusal(lambda: kind.from_json("x.json"))


@pytest.mark.parametrize("kind", [RobustnessReport, SweepReport, ComparisonReport])
@pytest.mark.parametrize("text", ["null", "[1]", '"x"', '{"kind": "Other"}', "{", None])
def test_files_of_reports(kind, text, tmp_path):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    for found in (path, tmp_path):
        assert found.name in refusal(lambda found=found: kind.from_json(found))
