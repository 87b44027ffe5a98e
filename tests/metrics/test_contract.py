"""What all metrics have in common; RDI and ROBY, which have a state of their own, also in test_class_statistics."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

from lightning_robustness import InputSpace, functional, metrics
from tests.metrics.tester import check_metric_contract, update_in_batches
from tests.networks import perturb

FEW = {"num_batches": 3, "points_per_batch": 4}
X = torch.rand(30, 6, generator=torch.Generator().manual_seed(1))
PREDS, ADV_PREDS, LABELS = torch.randint(4, (3, 30), generator=torch.Generator().manual_seed(2))
RATES = (PREDS, ADV_PREDS, LABELS, X[:, 0])


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).to(dtype).eval()


def mean_of(function, *arguments, **options):
    return lambda x: function(network(), x, *arguments, **options).mean()


def median_distance(x, y):
    return functional.boundary_distance(network(x.dtype), x, y).quantile(0.5).float()


def success_rate(preds, adv_preds, target, distortion):
    return functional.attack_success_rate(preds, adv_preds, target, distortion=distortion)


class Case(NamedTuple):
    """A metric: how it is made, the function that it equals, what both are given, and its parts of one direction."""

    make: Callable[..., Any]
    function: Callable[..., Any]
    tensors: tuple
    takes_model: bool = True
    atol: float = 1e-5
    parts: tuple[str, ...] = ()
    factor: float = 1.0  # how much better a robust network is at least


FISHER = ("max", "trace", "jacobian_norm", "lipschitz")
CASES = {
    "asr": Case(metrics.AttackSuccessRate, success_rate, RATES, False, 1e-10, factor=1.5),
    "rdi": Case(
        partial(metrics.RobustnessDifferenceIndex, 4), functional.robustness_difference_index, (X, PREDS), False, 1e-6
    ),
    "roby": Case(partial(metrics.ROBY, 4), functional.roby, (X, PREDS), False, 1e-6),
    "boundary": Case(metrics.BoundaryDistance, median_distance, (X, LABELS), True, 1e-7, ("beyond",), 1.5),
    "boundary64": Case(metrics.BoundaryDistance, median_distance, (X.double(), LABELS), True, 1e-7),
    "clever": Case(
        partial(metrics.CleverScore, 0.5, **FEW), mean_of(functional.clever_score, 0.5, **FEW), (X,), factor=1.1
    ),
    "fisher": Case(metrics.FisherSpectralNorm, mean_of(functional.fisher_spectral_norm), (X,), True, 1e-6, FISHER),
    "lipschitz": Case(metrics.LipschitzConstant, mean_of(functional.lipschitz_constant), (X,), True, 1e-6, ("max",)),
}
each_case = pytest.mark.parametrize("name", CASES)


def model_of(case):
    """A function, with which a metric that stored it could not be pickled."""
    if not case.takes_model:
        return ()
    model = network(case.tensors[0].dtype)
    return (lambda x: model(x),)


def updated(name, first=0, last=None):
    case = CASES[name]
    metric = case.make()
    metric.update(*model_of(case), *(tensor[first:last] for tensor in case.tensors))
    return metric


def test_all_metrics_are_here():
    made = {type(case.make()) for case in CASES.values()}
    assert made == {getattr(metrics, name) for name in metrics.__all__}


@each_case
def test_contract(name):
    case = CASES[name]
    check_metric_contract(case.make, case.function, case.tensors, case.atol, model_of(case))


@each_case
def test_plot(name):
    metric = updated(name)
    _, axis = metric.plot()
    assert axis.lines[0].get_ydata()[0] == pytest.approx(metric.compute().item())
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    if None not in (low, high):
        margin = (high - low) / 10
        assert axis.get_ylim() == pytest.approx((low - margin, high + margin))
    elif low is not None:
        assert axis.get_ylim()[0] <= low
    _, axis = metric.plot([torch.tensor(0.1), torch.tensor(0.4)])
    assert list(axis.lines[0].get_ydata()) == pytest.approx([0.1, 0.4])


SPACE = InputSpace(mean=0.5, std=0.25)
OPTIONS = {
    "boundary": (
        metrics.BoundaryDistance,
        functional.boundary_distance,
        {"norm": "l2", "num_rivals": 1, "chunk_size": 3, "input_space": SPACE},
    ),
    "clever": (
        metrics.CleverScore,
        functional.clever_score,
        {"radius": 0.3, "norm": "linf", "chunk_size": 8, "seed": 3, "input_space": SPACE, **FEW},
    ),
    "fisher": (
        metrics.FisherSpectralNorm,
        functional.fisher_spectral_norm,
        {"method": "rayleigh", "num_directions": 3, "distribution": "rademacher", "seed": 5, "input_space": SPACE},
    ),
    "lipschitz": (
        metrics.LipschitzConstant,
        functional.lipschitz_constant,
        {"norm": "spectral", "input_space": SPACE},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_function_and_parts_are_those_of_all_samples(name):
    kind, function, options = OPTIONS[name]
    metric = update_in_batches(kind(**options), 7, SPACE.normalize(X), model=(network(),))
    values, parts = function(network(), SPACE.normalize(X), **options), metric.compute_components()
    expected = {"mean": values.mean(), "max": values.amax(), "min": values.amin(), "median": values.quantile(0.5)}
    assert parts["count"] == len(X)
    assert metric.compute() == next(iter(parts.values()))
    for part in expected.keys() & parts.keys():
        torch.testing.assert_close(parts[part], expected[part], rtol=1e-5, atol=1e-7)
    default = update_in_batches(CASES[name].make(), 7, X, model=(network(),)).compute()
    assert metric.compute() != pytest.approx(default.item(), rel=1e-2)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (metrics.AttackSuccessRate, [{}, {"confidence": 0.9}]),
        (metrics.BoundaryDistance, [{}, {"num_rivals": 1}]),
        (metrics.CleverScore, [{"radius": 0.5, **FEW}, {"radius": 0.4, **FEW}]),
        (metrics.FisherSpectralNorm, [{}, {"input_space": InputSpace(std=0.5)}]),
        (metrics.LipschitzConstant, [{}, {"norm": "spectral"}]),
    ],
)
def test_a_collection_shares_nothing_between_metrics_with_other_settings(kind, settings):
    """Whatever is equal on the first batch, where the logits hardly depend on the inputs."""
    alone = {str(number): kind(**options) for number, options in enumerate(settings)}
    collection = MetricCollection({name: metric.clone() for name, metric in alone.items()})
    models = [lambda x: network()(0 * x), network()]
    for model in models:
        for metric in (collection, *alone.values()):
            metric.update(*((PREDS, ADV_PREDS, LABELS) if kind is metrics.AttackSuccessRate else (model, X)))
    assert len(collection.compute_groups) == 2
    assert collection.compute() == {name: metric.compute() for name, metric in alone.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rdi", "roby")])
def test_without_samples(name):
    metric = CASES[name].make()
    with pytest.warns(UserWarning, match="called before the ``update`` method"):
        assert metric.compute() == 0
    empty = updated(name, last=0)
    assert empty.compute() == 0
    assert empty.compute_components()["count"] == 0


def measured(name, model, digits):
    metric, x, y = CASES[name].make(), digits[0][1200:], digits[1][1200:]
    if name == "asr":
        metric.update(model(x).argmax(1), model(perturb(model, x, y, eps=0.15)).argmax(1), y)
    elif name == "clever":
        metric = metrics.CleverScore(radius=0.2, norm="linf", num_batches=15, points_per_batch=10)
        metric.update(model, x[:40])
    elif name in ("rdi", "roby"):
        metric = type(metric)(10)
        metric.update(model(x) if name == "rdi" else model[:-1](x), model(x).argmax(1))
    else:
        metric.update(model, x, *[y] * (len(CASES[name].tensors) - 1))
    return metric.compute(), metric.compute_components()


@pytest.mark.parametrize("name", [name for name in CASES if name != "boundary64"])
def test_adversarial_training_moves_it_in_the_robust_direction(name, digits, digits_network, robust_digits_network):
    (natural, of_natural), (robust, of_robust) = (
        measured(name, model, digits) for model in (digits_network, robust_digits_network)
    )
    better, worse = (robust, natural) if CASES[name].make().higher_is_better else (natural, robust)
    assert better - worse > (CASES[name].factor - 1) * abs(worse)
    for part in CASES[name].parts:
        better, worse = (of_robust, of_natural) if CASES[name].make().higher_is_better else (of_natural, of_robust)
        assert (better[part] > worse[part]).all()


def evaluate_share(rank, name, share):
    """The first process takes this many samples; where the other has none, it is updated with none, or not at all."""
    first, is_updated = share
    if rank == 1 and not is_updated:
        return CASES[name].make().compute_components()
    return updated(name, *((0, first) if rank == 0 else (first, None))).compute_components()


@pytest.mark.filterwarnings("ignore:.*called before the ``update`` method")
@pytest.mark.parametrize("share", [(11, True), (30, True), (30, False)])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rdi", "roby")])
def test_two_processes_equal_one(two_processes, name, share):
    expected = updated(name).compute_components()
    for found in two_processes(evaluate_share, name, share):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=CASES[name].atol, equal_nan=True)
