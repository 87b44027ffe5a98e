import foolbox
import numpy as np
import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace
from lightning_robustness.functional import boundary_distance, fisher_spectral_norm
from lightning_robustness.functional._jacobian import InputJacobian
from lightning_robustness.functional.boundary_distance import quantile, share_beyond
from lightning_robustness.functional.fisher_spectral_norm import FisherSettings, fisher_and_boundary
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED

DUAL = {"linf": 1, "l2": 2}


def loop_over_classes(model, x, y, norm, std=1.0):
    """The definition, one sample and one rival at a time, in float64."""
    jacobians, logits = dense.jacobian(model, x).double() / std, model(x).detach().double()
    distances = []
    for J, z, c in zip(jacobians, logits, y.tolist(), strict=True):  # noqa: N806
        rivals = [j for j in range(len(z)) if j != c]
        distances.append(min((z[c] - z[j]) / torch.linalg.vector_norm(J[c] - J[j], ord=DUAL[norm]) for j in rivals))
    return torch.stack(distances)


@pytest.mark.gpu_like
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("num_classes", [2, 5, 30])
def test_closed_form_of_a_linear_model(norm, num_classes):
    """The perturbation of this size along the dual direction ends on the boundary of two halfspaces."""
    model = nn.Linear(6, num_classes).double()
    x, y = torch.randn(40, 6).double(), torch.randint(num_classes, (40,))
    weight, bias = model.weight.detach().numpy(), model.bias.detach().numpy()
    expected = []
    for sample, c in zip(x.numpy(), y.tolist(), strict=True):
        others = np.arange(num_classes) != c
        w, b = weight[c] - weight[others], bias[c] - bias[others]
        expected.append(((w @ sample + b) / np.linalg.norm(w, ord=DUAL[norm], axis=1)).min())
    distances = boundary_distance(model, x, y, norm, num_rivals=num_classes, input_space=UNBOUNDED)
    assert distances.numpy() == pytest.approx(np.array(expected), rel=1e-10)
    assert ((distances > 0) == (model(x).argmax(dim=1) == y)).all()
    assert 0 < (distances > 0).sum() < 40


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_a_loop_over_classes(name, norm):
    model, shape = MODELS[name]()
    model, x, y = model.eval(), torch.randn(7, *shape), torch.randint(5, (7,))
    std = [0.5 + c for c in range(shape[0])]
    scale = torch.tensor(std).reshape(-1, *[1] * (len(shape) - 1)).expand(shape).flatten()
    distances = boundary_distance(model, x, y, norm, input_space=InputSpace(None, None, std=std))
    assert distances.dtype == torch.float32
    torch.testing.assert_close(distances.double(), loop_over_classes(model, x, y, norm, scale), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu_like
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_first_step_of_deepfool(norm, digits, digits_network):
    x = digits[0][1200:1230]
    preds = digits_network(x).argmax(dim=1)
    attacks = {"linf": foolbox.attacks.LinfDeepFoolAttack, "l2": foolbox.attacks.L2DeepFoolAttack}
    attack = attacks[norm](steps=1, candidates=10, overshoot=0.0, loss="logits")
    unbounded = foolbox.PyTorchModel(digits_network, bounds=(-100, 100), device="cpu")
    _, (moved,), _ = attack(unbounded, x, preds, epsilons=[1e6])
    sizes = torch.linalg.vector_norm((moved - x).flatten(1), ord={"linf": torch.inf, "l2": 2}[norm], dim=1)
    # foolbox adds 1e-4 to the margins, so that a step ends beyond the boundary
    torch.testing.assert_close(boundary_distance(digits_network, x, norm=norm), sizes, rtol=2e-3, atol=2e-4)


def test_by_default_the_predicted_class():
    model, x = nn.Linear(6, 4), torch.rand(20, 6)
    preds = model(x).argmax(dim=1)
    distances = boundary_distance(model, x)
    assert torch.equal(distances, boundary_distance(model, x, preds))
    assert (distances > 0).all()


@pytest.mark.parametrize("options", [{}, {"num_rivals": 3}, {"num_rivals": 29}, {"num_rivals": 99}])
def test_rivals_are_those_with_the_highest_logits(options):
    model, x = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30)).double(), torch.rand(9, 6).double()
    y = torch.randint(30, (9,))
    number = min(options.get("num_rivals", 5), 29)
    logits, expected = model(x).detach(), []
    for i, c in enumerate(y.tolist()):
        rivals = [j for j in logits[i].argsort(descending=True).tolist() if j != c][:number]
        (J,) = dense.jacobian(model, x[i : i + 1])  # noqa: N806
        expected.append(min((logits[i, c] - logits[i, j]) / (J[c] - J[j]).abs().sum() for j in rivals))
    torch.testing.assert_close(boundary_distance(model, x, y, **options), torch.stack(expected))


@pytest.mark.filterwarnings("ignore:Power iteration took all 1 steps")
@pytest.mark.gpu_like
@pytest.mark.parametrize("method", ["exact", "lanczos", "power", "rayleigh"])
@pytest.mark.parametrize("num_classes", [4, 30])
def test_from_the_jacobian_of_the_fisher_information(method, num_classes):
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, num_classes)).double()
    x, y, calls = torch.rand(9, 6).double(), torch.randint(num_classes, (9,)), []
    parts = fisher_and_boundary(model, x, FisherSettings(method, chunk_size=4), "l2", y)
    rivals = num_classes if method == "exact" else None
    torch.testing.assert_close(parts.boundary, boundary_distance(model, x, y, "l2", num_rivals=rivals))

    def count(x):
        calls.append(len(x))
        return model(x)

    fisher_spectral_norm(count, x, method, max_steps=1)
    alone = len(calls)
    fisher_and_boundary(count, x, FisherSettings(method, max_steps=1), "linf")
    assert len(calls) == 2 * alone


def test_not_without_gradients():
    model, x = nn.Linear(6, 4), torch.rand(3, 6)
    assert fisher_spectral_norm(model, x, "exact", return_components=True).boundary is None
    assert fisher_and_boundary(model, x, FisherSettings("blackbox"), "linf").boundary is None


def test_rows_are_used_where_they_are_kept():
    model, x = nn.Linear(6, 4).double(), torch.rand(3, 6).double()
    jacobian = InputJacobian(model, x, UNBOUNDED)
    classes, rivals = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1])
    expected = model.weight.detach()[classes] - model.weight.detach()[rivals]
    assert not jacobian.has_rows
    torch.testing.assert_close(jacobian.margin_gradient(classes, rivals), expected)
    jacobian.rows()
    assert jacobian.has_rows
    torch.testing.assert_close(jacobian.margin_gradient(classes, rivals), expected)


@pytest.mark.gpu_like
def test_zero_gradients():
    """A margin that no perturbation changes is infinitely far away; with no margin, the boundary is here."""
    bias = torch.tensor([1.0, 0.0, 1.0])
    distances = boundary_distance(lambda x: 0 * x[:, :3] + bias, torch.rand(3, 6), torch.tensor([0, 1, 2]))
    assert distances.tolist() == [0.0, -torch.inf, 0.0]
    two = boundary_distance(lambda x: 0 * x[:, :2] + bias[:2], torch.rand(2, 6), torch.tensor([0, 1]))
    assert two.tolist() == [torch.inf, -torch.inf]
    # One rival that can be reached is enough
    some = boundary_distance(lambda x: torch.stack([0 * x[:, 0] + 2, 0 * x[:, 0], x[:, 0]], dim=1), torch.ones(1, 6))
    assert some.tolist() == [1.0]


def test_labels_go_with_their_chunks():
    model, x, y = nn.Linear(6, 4), torch.rand(9, 6), torch.randint(4, (9,))
    torch.testing.assert_close(boundary_distance(model, x, y, chunk_size=2), boundary_distance(model, x, y))


@pytest.mark.parametrize(
    ("norm", "y", "match"),
    [("linf", [0, 4], "`y`"), ("linf", [0, -1], "`y`"), ("linf", [0], "`y`"), ("l1", [0, 1], "`boundary`")],
)
def test_labels_and_norms_are_checked(norm, y, match):
    with pytest.raises(ValueError, match=match):
        fisher_and_boundary(nn.Linear(6, 4), torch.rand(2, 6), FisherSettings(), norm, torch.tensor(y))


@pytest.mark.parametrize("number", [1, 2, 9, 10])
@pytest.mark.parametrize("position", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_quantiles(number, position):
    values = torch.randn(number).double()
    assert quantile(values, position).item() == pytest.approx(np.quantile(values.numpy(), position))


def test_quantiles_of_infinite_values():
    inf = torch.inf
    assert quantile(torch.tensor([1.0, inf, inf]), 0.5) == inf
    assert quantile(torch.tensor([1.0, 2.0, inf]), 0.5) == 2
    assert quantile(torch.tensor([1.0, inf]), 0.5) == inf
    assert quantile(torch.tensor([-inf, inf]), 0.5) == -inf
    assert quantile(torch.tensor([-inf, 1.0]), 0.25) == -inf
    assert quantile(torch.zeros(0), 0.5) == 0


def test_share_beyond_is_strict_and_has_an_interval():
    share, low, high = share_beyond(torch.tensor([-1.0, 0.5, 1.0, torch.inf]), [0.5, 2.0])
    assert share.tolist() == [0.5, 0.25]
    # Closed form of the 95 % Wilson interval of 2 of 4
    assert low[0].item() == pytest.approx(0.150, abs=1e-3)
    assert high[0].item() == pytest.approx(0.850, abs=1e-3)
    assert [part.tolist() for part in share_beyond(torch.zeros(0), [0.5])] == [[0.0], [0.0], [1.0]]
