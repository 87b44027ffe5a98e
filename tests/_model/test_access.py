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
from lightning_robustness._model.batch import check_label_range, read_batch

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
        (Z[:, :, None], r"but got \(4, 3, 1\)"),
        (Z[:, None], r"squeeze\(1\)"),
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
    assert not are_probabilities(z)
    assert not are_probabilities(2 * z.softmax(dim=1))
    assert not are_probabilities(z[:0])


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


def make_loader(num_samples=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0.5).long()), batch_size=3)


def fit(model, **options):
    callback = AdversarialTraining("pgd", eps=0.1, steps=1, **options)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, make_loader())
    return trainer


@pytest.mark.parametrize("kind", [WithoutForward, TakesBatch])
def test_adversarial_training_names_forward_fn_as_the_monitor_does(kind):
    with pytest.raises(ValueError, match=r"`forward_fn=`.*lambda module, x: module\.net\(x\)"):
        fit(kind())
    trainer = fit(kind(), forward_fn=lambda module, x: module.net(x))
    assert trainer.callback_metrics["adversarial_training/loss"].isfinite()


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("values", [[-1, 1, 1], [-1, -1, -1]])
def test_labels_of_minus_one_and_one_keep_both_classes(values, dtype):
    batch = torch.rand(3, 2), torch.tensor(values, dtype=dtype)
    with pytest.raises(ValueError, match=r"`batch_fn=lambda batch: \(batch\[0\], \(batch\[1\] > 0\)\.long\(\)\)`"):
        check_label_range(read_batch(batch).y, 2)
    y = read_batch(batch, lambda batch: (batch[0], (batch[1] > 0).long())).y
    check_label_range(y, 2)
    assert (2 * y - 1).tolist() == values


def test_a_label_of_minus_one_among_others_is_no_class():
    with pytest.raises(ValueError, match="ignore_index"):
        check_label_range(torch.tensor([-1, 0, 1]), 2)


@pytest.mark.parametrize(
    ("third", "found"), [(5, "int"), (torch.zeros(3), "Tensor"), ({"mask": "text"}, "str for 'mask'")]
)
def test_the_third_value_of_batch_fn_is_a_dictionary_of_tensors(third, found):
    with pytest.raises(TypeError, match=f"third value of `batch_fn` .* but got {found}"):
        read_batch(None, lambda batch: (torch.zeros(3, 1), None, third))


@pytest.mark.parametrize("size", [(), (1,), (2, 4), (4, 4)])
def test_the_third_value_of_batch_fn_has_a_row_per_sample(size):
    def batch_fn(batch):
        return *batch, {"mask": torch.ones(size)}

    with pytest.raises(ValueError, match=r"third value of `batch_fn` .*3 rows.*'mask'"):
        read_batch((torch.zeros(3, 1), None), batch_fn)


class Masked(nn.Linear):
    def forward(self, x, *, mask=None):
        return super().forward(x if mask is None else x * mask.unsqueeze(1))


def test_what_batch_fn_names_is_taken():
    def measured(name, model, forward_fn=None):
        loader = [(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0.0, 1.0, 0.0, 1.0]))]
        options = {"attacks": [], "fim_samples": 0, "progress": False, "forward_fn": forward_fn}
        return evaluate(model, loader, batch_fn=lambda batch: (*batch[:2], {name: batch[2]}), **options).metrics["acc"]

    model = Masked(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    assert measured("mask", model) == 1
    assert measured("mask", model, lambda module, x, **others: module(x, **others)) == 1
    with pytest.raises(ValueError, match=r"`forward` takes x, mask but not 'maks'\. Rename"):
        measured("maks", model)
    assert measured("mask", model) > measured("mask", model, lambda module, x, mask: module(x, mask=0 * mask))


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
        evaluate(nn.Linear(4, 2, device="meta"), make_loader(), attacks=[], progress=False)


def test_single_samples_are_no_batches():
    data = make_loader().dataset
    options = {"attacks": [], "fim_samples": 0, "progress": False}
    for samples in (data, [(x, int(y)) for x, y in data]):
        with pytest.raises(TypeError, match=r"single samples.*DataLoader\(dataset, batch_size=128\)"):
            evaluate(nn.Linear(4, 2), list(samples), **options)
        loader = DataLoader(samples, batch_size=128)
        assert evaluate(nn.Linear(4, 2), loader, **options).metrics["samples"] == len(data)


def test_inputs_and_labels_are_no_loader():
    x, y = make_loader().dataset.tensors
    options = {"attacks": [], "fim_samples": 0, "progress": False}
    with pytest.raises(TypeError, match=r"TensorDataset\(x, y\)"):
        evaluate(nn.Linear(4, 2), (x, y), **options)
    model = nn.Linear(4, 2)
    nn.init.eye_(model.weight)
    report = evaluate(model, DataLoader(TensorDataset(x, y), batch_size=128), **options)
    assert report.metrics["samples"] == len(x)
