import pytest
import torch
from torch import nn

from lightning_robustness._measurement.feature_pass import FeaturePass
from lightning_robustness._measurement.inspection import Found, agree, inspect, largest_difference, rehearse
from lightning_robustness._measurement.meters.fisher import FisherMeter
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import Access
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import PGD, Square, run_attack
from tests._measurement.subjects import CPU, samples, subject

X = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), *more)


def batch(x=X, y=None, **extras):
    return Batch(x, y, None, extras, torch.arange(len(x)))


def route_of(model, x=X, y=None, **access):
    measured, found = inspect(Subject(model, Access(**access), model, CPU), batch(x, y), needs_gradients=True)
    assert measured.route is found.route
    return found.route


def test_head_features_and_classes():
    model = network()
    route = route_of(model)
    assert (route.head, route.num_features, route.num_classes) == ("2", 5, 3)
    assert route_of(model, head=model[2], num_classes=3).head == "2"


def test_another_number_of_classes():
    with pytest.raises(ValueError, match=r"Expected 4 classes, as `num_classes`.* has 3"):
        route_of(network(), num_classes=4)
    with pytest.raises(ValueError, match=r"from 0 to 2, for 3 classes, but got values from 0 to 7"):
        route_of(network(), y=torch.arange(8))


def test_a_model_that_fails():
    with pytest.raises(ValueError, match=r"`Linear\(x\)` to return logits.*\(3, 6\) but it failed.*forward_fn="):
        route_of(nn.Linear(5, 3))


def test_probabilities_get_a_warning():
    with pytest.warns(UserWarning, match="The outputs of Sequential look like probabilities"):
        route_of(network(nn.Softmax(dim=1)))


class Masked(nn.Module):
    """Takes a mask from the batch, next to its inputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x, mask):
        return self.head(x * mask)


def test_other_entries_that_a_model_takes():
    model, mask = Masked(), torch.ones(8, 6)
    measured, found = inspect(subject(model), batch(mask=mask, length=torch.arange(8)), needs_gradients=True)
    assert measured.extra_names == ("mask",)
    assert found == Found(measured.route, is_discrete=False, is_image=False)
    logits = measured.logits_of(batch(mask=0 * mask))(X)
    torch.testing.assert_close(logits, model.head.bias.expand(8, -1))


def test_inputs_that_cannot_be_perturbed():
    model = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(20, 3))
    tokens = torch.arange(8).reshape(2, 4)
    with pytest.warns(UserWarning, match=r"Inputs are integers \(torch.int64\).*`embed_fn="):
        _, found = inspect(subject(model), batch(tokens), needs_gradients=True)
    assert found.is_discrete
    assert not inspect(subject(model), batch(tokens), needs_gradients=False)[1].is_discrete
    with pytest.raises(ValueError, match=r"inputs in the range \[0.0, 1.0\] but observed"):
        inspect(subject(network()), batch(X + 1), needs_gradients=True)


class Some(Processes):
    """The first of two processes; the other one has found something else."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def gather(self, value):
        return [value, self.other]


def test_processes_without_samples_learn_from_the_others():
    route = route_of(network())
    found = Found(route, is_discrete=False, is_image=True)
    assert agree(Some(None), None) is None
    assert agree(Some(found), None) == agree(Some(None), found) == found
    # A part that any process must leave out is left out in all of them
    assert agree(Some(found._replace(is_discrete=True)), found).is_discrete


def test_rehearsal_finds_what_cannot_work():
    def cut(x):
        return network()(x.detach())

    def broken(model, x, y):
        raise RuntimeError("no luck")

    meters = [FisherMeter(8, "exact")]
    rehearse(subject(network()), batch(), meters, {"pgd": PGD(), "mine": lambda model, x, y: x})
    with pytest.raises(ValueError, match=r"Fisher information cannot be computed: .*`fim_samples=0`, or .*blackbox"):
        rehearse(subject(cut), batch(), meters, {})
    with pytest.raises(RuntimeError, match=r"'mine' failed: .*no luck"):
        rehearse(subject(network()), batch(), [], {"mine": broken})


class Rounding(torch.autograd.Function):
    """An operation without a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.round()


def test_a_gradient_attack_is_rehearsed_where_no_meter_is():
    model = network()
    cut = subject(lambda x: model(x.detach()))
    rounding = subject(lambda x: model(Rounding.apply(x)))
    with pytest.raises(ValueError, match=r"'pgd' failed: .*such as Square"):
        rehearse(cut, batch(), [], {"square": Square(), "pgd": PGD()})
    with pytest.raises(NotImplementedError, match=r"'pgd' failed: .*`attacks=\[\"square\"\]`"):
        rehearse(rounding, batch(), [], {"square": Square(), "pgd": PGD()})
    with pytest.raises(ValueError, match=r'Fisher information cannot be computed: .*`fim_method="blackbox"`'):
        rehearse(rounding, batch(), [FisherMeter(8, "auto")], {})
    for measured in (cut, rounding):
        rehearse(measured, batch(), [FisherMeter(8, "blackbox")], {"square": Square()})


def test_a_forward_that_changes_its_input_is_named_with_a_remedy_that_helps():
    model = network()
    in_place = subject(lambda x: model(x.sub_(0.5)))
    for meters, attacks in (([FisherMeter(8, "auto")], {}), ([], {"pgd": PGD()}), ([FisherMeter(8, "blackbox")], {})):
        with pytest.raises(ValueError, match=r"`x = x\.clone\(\)`\.$"):
            rehearse(in_place, batch(), meters, attacks)
    rehearse(subject(lambda x: model(x.clone().sub_(0.5))), batch(), [FisherMeter(8, "auto")], {"pgd": PGD()})
    with pytest.raises(ValueError, match=r"`x = x\.clone\(\)`"):
        run_attack(in_place.model, PGD(), X, torch.zeros(8, dtype=torch.long))


def test_the_remedy_works_where_the_graph_is_cut():
    rehearse(subject(lambda x: network()(x.detach())), batch(), [FisherMeter(8, "blackbox")], {})


def test_rehearsal_has_the_other_entries_of_the_batch():
    measured, _ = inspect(subject(Masked()), batch(mask=torch.ones(8, 6)), needs_gradients=True)
    seen = []
    rehearse(measured, batch(mask=torch.ones(8, 6)), [], {"mine": lambda model, x, y: seen.append(model(x)) or x})
    torch.testing.assert_close(seen[0], measured.model(X[:1], torch.ones(1, 6)))


def outputs_of(logits):
    """What tells the outputs of a pass apart, as validation keeps them."""
    features = FeaturePass(3, "exact", CPU)
    features.add(batch(), HeadCall(None, logits.detach()))
    return features.outputs()


CHANGES = {
    "the largest logit": lambda z: torch.where(z == z.amax(dim=1, keepdim=True), 1.02 * z + 0.02, z),
    "another class": lambda z: z[:, [1, 2, 0]],
    "the others": lambda z: torch.where(z == z.amax(dim=1, keepdim=True), z, z - 0.3),
    "two of the others": lambda z: z.scatter(1, z.argsort(dim=1)[:, :2], z.sort(dim=1).values[:, [1, 0]]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_logits_that_differ_from_those_of_validation_are_seen(change):
    model = network()
    outputs = outputs_of(model(X))
    assert largest_difference(subject(model), samples(X), outputs) < 1e-6
    assert largest_difference(subject(lambda x: change(model(x))), samples(X), outputs) > 0.01


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_logits_of_any_size_are_compared(size):
    model = network()
    outputs = outputs_of(size * model(X))
    assert largest_difference(subject(lambda x: size * model(x)), samples(X), outputs) < 1e-6
    moved = subject(lambda x: 1.02 * size * model(x))
    assert largest_difference(moved, samples(X), outputs) == pytest.approx(0.02, rel=0.01)


MASKS = [-1e3, -1e4, -1e9, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("value", MASKS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_masked_classes_hide_no_difference(change, value):
    """The logits of classes that are not available are a large negative number, and say nothing."""

    def mask(z):
        return torch.cat([z, torch.full_like(z[:, :1], value)], dim=1)

    model = network()
    outputs = outputs_of(mask(model(X)))
    assert largest_difference(subject(lambda x: mask(model(x))), samples(X), outputs) < 1e-6
    assert largest_difference(subject(lambda x: mask(change(model(x)))), samples(X), outputs) > 0.01
    assert largest_difference(subject(lambda x: mask(model(x) * 1.0001)), samples(X), outputs) < 0.002


@pytest.mark.parametrize("make", [lambda z: z * 1e5, lambda z: (z * 1e5).log_softmax(dim=1)])
def test_large_logits_are_compared(make):
    model = network()
    outputs = outputs_of(make(model(X)))
    assert largest_difference(subject(lambda x: make((1 + 1e-6) * model(x))), samples(X), outputs) < 1e-3
    assert largest_difference(subject(lambda x: make(1.05 * model(x))), samples(X), outputs) > 0.01


def test_the_rounding_of_a_collapsed_network_is_no_difference():
    model = network()
    outputs = outputs_of((model(X).sum(dim=1, keepdim=True) * 1e-7).expand(-1, 3))
    assert largest_difference(subject(lambda x: 0 * model(x)), samples(X), outputs) < 0.005
    outputs = outputs_of(model(X) * 100 - 1000)  # log-probabilities, for instance
    shifted = subject(lambda x: model(x) * 100 - 1000 + 1e-4)
    assert largest_difference(shifted, samples(X), outputs) < 1e-6


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.network, self.generator = network(), torch.Generator()

    def forward(self, x):
        return self.network(x + torch.rand(x.shape, generator=self.generator))


class Queue(Noisy):
    """Subtracts the mean of what it has seen before."""

    seen = ()

    def forward(self, x):
        mean = torch.stack(self.seen).mean(dim=0) if self.seen else 0.0
        self.seen = (*self.seen, x.mean(dim=0))
        return self.network(x - mean)


@pytest.mark.parametrize("make", [Noisy, Queue])
def test_a_network_that_depends_on_earlier_passes_cannot_be_compared(make):
    model = make()
    assert largest_difference(subject(model), samples(X), outputs_of(model(X))) == 0
