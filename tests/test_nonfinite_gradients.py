"""Gradients that are NaN or infinite, as behind the square root of 0, are reported, and mended where they arise."""

from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import nn

from lightning_robustness import AdversarialTraining, AttackFreeRegularization, evaluate
from lightning_robustness.attacks import (
    CW,
    DDN,
    PGD,
    Cascade,
    MinimumNormCW,
    SirenAttack,
    Square,
    get_attack,
    masking_signs,
    run_attack,
)
from lightning_robustness.functional import boundary_distance, clever_score, fisher_spectral_norm, lipschitz_constant
from lightning_robustness.losses import boundary_penalty, fisher_penalty, mart_loss, trades_loss
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

REMEDY = r"epsilon under the root"


class Edges(nn.Module):
    """Magnitude of the gradient of an image, with or without an epsilon under the root."""

    def __init__(self, epsilon=0.0):
        super().__init__()
        self.epsilon = epsilon
        kernel = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]) / 4
        self.register_buffer("kernels", torch.stack([kernel, kernel.T]).unsqueeze(1))

    def forward(self, x):
        edges = nn.functional.conv2d(x, self.kernels, padding=1)
        return (edges.square().sum(dim=1, keepdim=True) + self.epsilon).sqrt()


def train_pair(kind, digits):
    """Networks that begin with a root, without and with an epsilon, and end in one trained head."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    features = kind()(digits[0])
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(features), digits[1]).backward()
        optimizer.step()
    return nn.Sequential(kind(), head), nn.Sequential(kind(1e-8), head)


@pytest.fixture(scope="module")
def pair(digits):
    return train_pair(Edges, digits)


@pytest.fixture
def batch(digits):
    return digits[0][:100], digits[1][:100]


ATTACKS = {
    **{name: get_attack(name, eps=0.1) for name in ("fgsm", "bim", "mifgsm", "pgd")},
    "two losses": PGD(eps=0.1, steps=8, loss=("cross_entropy", "margin"), schedule="shrinking"),
    "l2": PGD(eps=0.5, norm="l2", start="clean"),
    "adaptive": PGD(eps=0.1, steps=20, schedule="adaptive", start="clean"),
    "cw": CW(steps=20),
    "minimum_norm_cw": MinimumNormCW(steps=5, initial_steps=20),
    "ddn": DDN(steps=20),
    "cascade": Cascade(attacks=(PGD(eps=0.03, start="clean"), PGD(eps=0.1))),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_find_what_they_find_with_an_epsilon(pair, batch, name):
    with pytest.warns(UserWarning, match=REMEDY):
        result = run_attack(pair[0], ATTACKS[name], *batch)
    expected = run_attack(pair[1], ATTACKS[name], *batch)
    assert (result.adv_preds == batch[1]).float().mean() == pytest.approx(
        (expected.adv_preds == batch[1]).float().mean().item(), abs=0.02
    )
    assert result.l2[result.success].median() == pytest.approx(expected.l2[expected.success].median().item(), rel=0.02)
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(pair[0](x).sum(), x)
    if name in ("fgsm", "bim", "mifgsm", "ddn"):  # from the clean images
        assert torch.equal(result.nonfinite_gradients, result.eligible & gradient.isnan().flatten(1).any(dim=1))
    (sign,) = [sign for sign in masking_signs([result]) if sign.name == "nonfinite_gradients"]
    assert f"{int(result.nonfinite_gradients.sum())} of {int(result.eligible.sum())}" in sign.evidence
    assert "epsilon" in sign.remedy


class Root(nn.Module):
    """Square root of pixels, many of which are 0, with or without an epsilon under the root."""

    def __init__(self, epsilon=0.0):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x):
        return (x + self.epsilon).sqrt()


@pytest.mark.parametrize("attack", [get_attack("fgsm", eps=0.1), PGD(eps=0.1), PGD(eps=0.5, norm="l2")])
def test_attacks_follow_infinite_derivatives(digits, batch, attack):
    network, with_epsilon = train_pair(Root, digits)
    with pytest.warns(UserWarning, match=REMEDY):
        result = run_attack(network, attack, *batch)
    expected = run_attack(with_epsilon, attack, *batch)
    assert result.success_rate >= expected.success_rate - 0.02


class Norm(nn.Module):
    def forward(self, x):
        x = x.flatten(1)
        return torch.stack([x.sum(dim=1), x.square().sum(dim=1).sqrt() + 3 * x[:, 0]], dim=1)


def test_siren_reports_the_samples_that_it_refines():
    x, y = torch.zeros(4, 6), torch.tensor([0, 0, 0, 0])
    x[2:] = 0.5
    attack = SirenAttack(eps=0.0, steps=1, num_particles=1, gradient_steps=2)  # stays at the input
    with pytest.warns(UserWarning, match=REMEDY):
        result = run_attack(Norm(), attack, x, y)
    assert result.nonfinite_gradients.tolist() == [True, True, False, False]


def gradient_by_hand(model, x, y):
    low, high = (x - 0.1).clamp(min=0), (x + 0.1).clamp(max=1)
    for _ in range(10):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), x)
        x = torch.min(torch.max(x + 0.02 * gradient.sign(), low), high)
    return x.detach()


def test_attacks_that_are_not_built_in(pair, batch):
    with pytest.warns(UserWarning, match=REMEDY):
        result = run_attack(pair[0], gradient_by_hand, *batch)
    expected = run_attack(pair[1], gradient_by_hand, *batch)
    assert result.nonfinite_gradients.all(dim=0) == result.eligible.all(dim=0)
    assert result.success_rate == pytest.approx(expected.success_rate, abs=0.05)  # the first step is not mended


def test_attacks_without_gradients_and_honest_networks_have_no_sign(pair, batch, digits_network):
    results = [run_attack(pair[0], Square(eps=0.1, num_queries=10), *batch)]
    results += [run_attack(digits_network, attack, *batch) for attack in (PGD(eps=0.1), CW(steps=2))]
    assert [result.nonfinite_gradients is None for result in results] == [True, False, False]
    assert not any("nonfinite_gradients" in [sign.name for sign in masking_signs([result])] for result in results)


FUNCTIONS = {
    "fisher": fisher_spectral_norm,
    "lanczos": lambda model, x: fisher_spectral_norm(model, x, method="lanczos"),
    "power": lambda model, x: fisher_spectral_norm(model, x, method="power"),
    "rayleigh": lambda model, x: fisher_spectral_norm(model, x, method="rayleigh"),
    "boundary": boundary_distance,
    "lipschitz": lipschitz_constant,
    "clever": lambda model, x: clever_score(model, x[:3], 0.5, num_batches=4, points_per_batch=10),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_needs_the_jacobian(pair, batch, name):
    with pytest.warns(UserWarning, match=REMEDY):
        value = FUNCTIONS[name](pair[0], batch[0][:40])
    torch.testing.assert_close(value, FUNCTIONS[name](pair[1], batch[0][:40]), rtol=0.01, atol=1e-6)


PENALTIES = {
    "fisher": lambda model, x, y: fisher_penalty(model, x),
    "products": lambda model, x, y: fisher_penalty(model, x, num_products=3),
    "trace": lambda model, x, y: fisher_penalty(model, x, "trace", num_products=2, seed=0),
    "boundary": lambda model, x, y: boundary_penalty(model, x, y, margin=0.3),
    "mart": lambda model, x, y: mart_loss(model, x, y, eps=0.05, seed=0),
    "trades": lambda model, x, y: trades_loss(model, x, y, eps=0.05, seed=0),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_losses_and_their_gradients(pair, batch, name):
    gradients = []
    for network in pair:
        with pytest.warns(UserWarning, match=REMEDY) if network is pair[0] else nullcontext():
            loss = PENALTIES[name](network, *(tensor[:40] for tensor in batch))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, network.parameters())]))
    assert gradients[0].isfinite().all()
    if name not in ("mart", "trades"):  # whose steps may part
        assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[1].norm()


class RootOfReLU(nn.Module):
    """Its first derivative is finite everywhere, its second one is not where a unit is off."""

    def __init__(self, epsilon):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.epsilon = nn.Linear(64, 32), nn.Linear(32, 10), epsilon

    def forward(self, x):
        return self.head((self.body(x.flatten(1)).relu() + self.epsilon).sqrt())


@pytest.mark.filterwarnings("ignore:Some gradients of the inputs are NaN")
@pytest.mark.parametrize("name", PENALTIES)
def test_second_derivatives_alone(batch, name):
    losses, gradients = [], []
    for network in (RootOfReLU(0.0), RootOfReLU(1e-10)):
        losses.append(PENALTIES[name](network, *(tensor[:40] for tensor in batch)))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(losses[-1], network.parameters())]))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    assert (gradients[0] - gradients[1]).norm() < 0.001 * gradients[1].norm()


def test_reports_have_the_sign(pair, batch):
    with pytest.warns(UserWarning, match=REMEDY):
        report = evaluate(pair[0], [batch], attacks=(), eps=0.1, fim_samples=40)
    assert [sign.name for sign in report.signs] == ["nonfinite_gradients"]
    with pytest.warns(UserWarning, match=REMEDY):
        components = fisher_spectral_norm(pair[0], batch[0][:40], return_components=True)
    assert components.nonfinite_gradients.all()


class EdgeClassifier(Classifier):
    def forward(self, x):
        return super().forward(x + 0 * x.sub(x.detach()).square().sum(dim=tuple(range(1, x.ndim)), keepdim=True).sqrt())


class RootClassifier(Classifier):
    def forward(self, x):
        return self.net[9](self.net[:8](x).relu().sqrt())


@pytest.mark.parametrize(
    ("kind", "callback"),
    [
        (EdgeClassifier, AdversarialTraining(attack="bim", eps=0.1, steps=2)),
        (EdgeClassifier, AttackFreeRegularization(fisher_weight=0.1)),
        (RootClassifier, AttackFreeRegularization(fisher_weight=0.1)),
    ],
)
def test_training_goes_on_with_finite_weights(tmp_path, kind, callback):
    L.seed_everything(1, verbose=False)
    module, trainer = kind(), make_trainer(tmp_path, callback, max_epochs=1)
    with pytest.warns(UserWarning, match=REMEDY):
        trainer.fit(module, train_loader(), val_loader())
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    if isinstance(callback, AdversarialTraining):
        assert trainer.callback_metrics["adversarial_training/nonfinite_gradients"] == 1
