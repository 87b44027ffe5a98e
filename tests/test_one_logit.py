"""Binary classifiers with one logit z: everything takes them as the two classes [0, z]."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining
from lightning_robustness._model.access import compute_logits
from lightning_robustness.attacks import CW, PGD, Square, run_attack
from lightning_robustness.functional import fisher_spectral_norm
from lightning_robustness.losses import mart_loss, rdi_loss, trades_loss
from lightning_robustness.metrics import FisherSpectralNorm
from tests.callbacks.modules import make_trainer

GENERATOR = torch.Generator().manual_seed(4)
X = torch.rand(32, 6, generator=GENERATOR)
WEIGHT = 3 * torch.randn(6, generator=GENERATOR)
BIAS = -(X @ WEIGHT).mean()
Z = X @ WEIGHT + BIAS
Y = torch.where(torch.rand(32, generator=GENERATOR) < 0.2, Z <= 0, Z > 0).long()


class Linear(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.weight, self.form = nn.Parameter(WEIGHT.clone()), form

    def forward(self, x):
        z = x @ self.weight + BIAS
        return {"flat": z, "column": z.unsqueeze(1), "pair": torch.stack([torch.zeros_like(z), z], dim=1)}[self.form]


FORMS = ["flat", "column"]


@pytest.mark.parametrize("form", FORMS)
def test_attacks_find_the_boundary_of_a_linear_model(form):
    """Within eps in the largest norm, z moves by eps times the sum of the absolute weights, up to the range."""
    eps = 0.1
    toward = torch.where(Y == 1, -1.0, 1.0).unsqueeze(1) * WEIGHT.sign()
    worst = (X + eps * toward).clamp(0, 1) @ WEIGHT + BIAS
    result = run_attack(Linear(form), PGD(eps=eps, steps=20), X, Y)
    assert torch.equal(result.preds, (Z > 0).long())
    right = (Z > 0) == (Y == 1)
    assert torch.equal(result.success, right & ((worst > 0) != (Y == 1)))
    assert 0 < result.success.sum() < right.sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attack", [CW(steps=20), Square(num_queries=50, eps=0.2), PGD(eps=0.5, norm="l2")])
def test_other_attacks_see_two_classes(form, attack):
    one, two = run_attack(Linear(form), attack, X, Y), run_attack(Linear("pair"), attack, X, Y)
    assert torch.equal(one.adv_preds, two.adv_preds)
    assert one.success.any()


@pytest.mark.parametrize("form", FORMS)
def test_the_fisher_information_is_that_of_logistic_regression(form):
    p = Z.sigmoid()
    expected = p * (1 - p) * WEIGHT.square().sum()
    torch.testing.assert_close(fisher_spectral_norm(Linear(form), X), expected, rtol=1e-4, atol=1e-6)
    metric = FisherSpectralNorm()
    metric.update(Linear(form), X)
    torch.testing.assert_close(metric.compute(), expected.mean(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [trades_loss, mart_loss])
def test_losses(form, loss):
    torch.testing.assert_close(loss(Linear(form), X, Y, seed=1), loss(Linear("pair"), X, Y, seed=1))
    logits = [compute_logits(Linear(kind), X) for kind in (form, "pair")]
    torch.testing.assert_close(rdi_loss(logits[0], Y), rdi_loss(logits[1], Y))


class Binary(L.LightningModule):
    """Trained with the binary cross-entropy of floating point labels, as most are."""

    def __init__(self, form="column"):
        super().__init__()
        self.net, self.seen = Linear(form), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", [None, "trades"])
def test_adversarial_training(tmp_path, form, loss):
    y = Y.float() if form == "flat" else Y.float().unsqueeze(1)
    module, attack = Binary(form), PGD(eps=0.1, steps=5, start="clean", all_steps=True)
    trainer = make_trainer(tmp_path, AdversarialTraining(attack, loss=loss))
    trainer.fit(module, DataLoader([(X, y)], batch_size=None))
    toward = torch.where(Y == 1, -1.0, 1.0).unsqueeze(1) * WEIGHT.sign()
    x_adv = (X + 0.1 * toward).clamp(0, 1)
    (x, labels) = module.seen[0]
    torch.testing.assert_close(x, X if loss else x_adv)
    assert torch.equal(labels, y)
    before = ((x_adv @ WEIGHT + BIAS > 0) == (Y == 1)).float().mean()
    assert trainer.callback_metrics["adversarial_training/adv_acc"].item() == pytest.approx(before.item())
    assert not torch.equal(module.net.weight, WEIGHT)
