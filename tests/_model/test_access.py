"""Remedies that messages name for models and batches of another form, followed."""

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import AdversarialTraining, evaluate
from lightning_robustness._model.access import (
    are_probabilities,
    check_differentiable,
    check_finite,
    compute_logits,
    pick_entry,
    try_forward,
)
from tests.callbacks.modules import make_trainer

X, Z = torch.randn(4, 2), torch.randn(4, 3)


@pytest.mark.parametrize(
    "output", [Z, SimpleNamespace(logits=Z), {"loss": X.sum(), "logits": Z}, (X.sum(), Z), [Z, Z + 1]]
)
def test_logits_are_found(output):
    assert torch.equal(compute_logits(lambda x: output, X), Z)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"scores": Z}, "got dict.*forward_fn"),
        ("text", r"but got str"),
        (Z[:3], r"\(4, K\).* \(3, 3\)"),
        (Z[:, :, None], r"but got \(4, 3, 1\).*\.flatten\(1\)"),
        (Z[:, :, None, None], r"\.flatten\(1\)"),
        (Z[:, None], r"\.flatten\(1\)"),
        (Z[:, :, None].expand(4, 3, 2), r"but got \(4, 3, 2\)\. Let the model return only the logits"),
        (Z.argmax(dim=1), "argmax"),
    ],
)
def test_bad_output(output, match):
    with pytest.raises(ValueError, match=match):
        compute_logits(lambda x: output, X)


@pytest.mark.parametrize("output", [Z[:, 0], Z[:, :1], (Z[:, :1], X[0]), {"logits": Z[:, 0]}, [Z[:, 0], X.sum()]])
def test_one_logit_is_two_classes(output):
    logits = compute_logits(lambda x: output, X)
    assert torch.equal(logits, torch.stack([torch.zeros(4), Z[:, 0]], dim=1))
    assert torch.equal(logits.argmax(dim=1), (Z[:, 0] > 0).long())


def test_one_logit_of_one_sample_that_squeeze_left_without_a_dimension():
    assert torch.equal(compute_logits(lambda x: Z[0, 0], X[:1]), torch.tensor([[0.0, Z[0, 0]]]))
    with pytest.raises(ValueError, match=r"\(4, K\).* \(\)"):
        compute_logits(lambda x: Z[0, 0], X)


def test_the_entry_of_a_tuple():
    assert torch.equal(compute_logits(pick_entry(lambda x: (X, Z), 1), X), Z)
    assert pick_entry(compute_logits, None) is compute_logits


def test_finite():
    check_finite(Z)
    with pytest.raises(ValueError, match="2 of 4 samples have NaN or infinite ones"):
        check_finite(torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [0.0, 1.0], [torch.inf, torch.nan]]))


def test_classes_masked_by_infinity_have_a_remedy():
    masked = torch.tensor([False, True, False])
    with pytest.raises(ValueError, match=r"2 of 2 samples .*To mask classes, .* such as -1e4"):
        check_finite(torch.ones(2, 3).masked_fill(masked, -torch.inf))
    check_finite(torch.ones(2, 3).masked_fill(masked, -1e4))
    with pytest.raises(ValueError, match="for divergence"):
        check_finite(torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))


def test_several_matrices_of_different_widths_are_refused():
    with pytest.raises(ValueError, match=r"widths \[3, 2\].*`lambda x: model\(x\)\[1\]`.*`forward_fn="):
        compute_logits(lambda x: (Z, X), X)
    assert torch.equal(compute_logits(lambda x: (Z, -Z), X), Z)


def test_differentiable():
    check_differentiable(Z.clone().requires_grad_(), "use another model")
    with pytest.raises(ValueError, match=r"Take `detach`.* out of the model"):
        check_differentiable(Z, "use another model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_probabilities(dtype):
    z = torch.randn(40, 10).to(dtype)
    assert are_probabilities(z.softmax(dim=1))
    assert are_probabilities(z.softmax(dim=1).float())
    assert not are_probabilities(z)
    assert not are_probabilities(2 * z.softmax(dim=1))
    assert not are_probabilities(z[:0])


# What takes no trained network
QUICK = {"attacks": [], "fim_samples": 0, "progress": False}


class WithoutForward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesBatch(WithoutForward):
    def forward(self, batch):
        x, _ = batch
        return self.net(x)


def make_data():
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0.5).long())


@pytest.mark.parametrize("kind", [WithoutForward, TakesBatch])
def test_adversarial_training_names_forward_fn_as_the_monitor_does(tmp_path, kind):
    def fit(**options):
        trainer = make_trainer(tmp_path, AdversarialTraining("pgd", eps=0.1, steps=1, **options))
        trainer.fit(kind(), DataLoader(make_data(), batch_size=3))
        return trainer

    with pytest.raises(ValueError, match=r"`forward_fn=`.*lambda module, x: module\.net\(x\)"):
        fit()
    trainer = fit(forward_fn=lambda module, x: module.net(x))
    assert trainer.callback_metrics["adversarial_training/loss"].isfinite()


class Masked(nn.Linear):
    def forward(self, x, *, mask=None):
        return super().forward(x if mask is None else x * mask.unsqueeze(1))


def test_what_batch_fn_names_is_taken():
    def measured(name, model, forward_fn=None):
        loader = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0.0, 1.0, 0.0, 1.0]))]
        options = {"batch_fn": lambda batch: (*batch[:2], {name: batch[2]}), "forward_fn": forward_fn}
        return evaluate(model, loader, **options, **QUICK).metrics["acc"]

    model = Masked(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
        model.bias.copy_(torch.tensor([3.0, 0.0]))
    assert measured("mask", model) == 1
    assert measured("mask", model, lambda module, x, **others: module(x, **others)) == 1
    with pytest.raises(ValueError, match=r"`forward` takes x, mask but not 'maks'\. Rename"):
        measured("maks", model)
    assert measured("mask", model, lambda module, x, mask: module(x, mask=1 - mask)) == 0


def test_what_fails_is_named():
    def fail(*_):
        raise AssertionError

    x, model = torch.rand(3, 4), nn.Sequential(OrderedDict(net=nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"^`forward_fn` failed on .*\(3, 4\): AssertionError\. .*\(module, x\)`\.$"):
        try_forward(model, partial(fail, model), x)
    with pytest.raises(ValueError, match=r"but it failed: AssertionError\. .*If `net` does: .*, of 2 classes\.$"):
        try_forward(model, fail, x)
    with pytest.raises(ValueError, match=r"returns logits\.$"):  # the child's outputs are no matrix
        try_forward(model, fail, x.unsqueeze(1))


def test_a_model_without_values():
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        evaluate(nn.Linear(4, 2, device="meta"), DataLoader(make_data(), batch_size=3), **QUICK)


def test_single_samples_are_no_batches():
    data = make_data()
    for samples in (data, [(x, int(y)) for x, y in data]):
        with pytest.raises(TypeError, match=r"single samples.*DataLoader\(dataset, batch_size=128\)"):
            evaluate(nn.Linear(4, 2), list(samples), **QUICK)
        loader = DataLoader(samples, batch_size=128)
        assert evaluate(nn.Linear(4, 2), loader, **QUICK).metrics["samples"] == len(data)


def test_inputs_and_labels_are_no_loader():
    with pytest.raises(TypeError, match=r"TensorDataset\(x, y\)"):
        evaluate(nn.Linear(4, 2), make_data().tensors, **QUICK)
