"""Remedies that messages name for models and batches of another form, followed."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import AdversarialTraining, RobustnessMonitor, evaluate
from lightning_robustness._model.access import compute_logits, try_forward
from lightning_robustness._model.batch import check_label_range, read_extras


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


def test_a_column_of_logits_names_squeeze():
    x = torch.rand(3, 4)
    with pytest.raises(ValueError, match=r"squeeze\(1\)"):
        compute_logits(lambda x: x.unsqueeze(1), x)
    assert compute_logits(lambda x: x.unsqueeze(1).squeeze(1), x).shape == (3, 4)


def test_integers_are_no_logits():
    with pytest.raises(ValueError, match="argmax"):
        compute_logits(lambda x: x.argmax(dim=1), torch.rand(3, 4))


def test_labels_of_minus_one_and_one_keep_both_classes():
    y = torch.tensor([-1, 1, 1])
    with pytest.raises(ValueError, match=r"\(batch\[1\] \+ 1\) // 2"):
        check_label_range(y, 2)
    check_label_range((y + 1) // 2, 2)
    with pytest.raises(ValueError, match="ignore_index"):
        check_label_range(torch.tensor([-1, 0, 1]), 2)


@pytest.mark.parametrize("third", [5, torch.zeros(3), {"mask": "text"}])
def test_the_third_value_of_batch_fn_is_a_dictionary_of_tensors(third):
    with pytest.raises(TypeError, match="third value of `batch_fn`"):
        read_extras(None, lambda batch: (torch.zeros(3, 1), None, third), 3)


@pytest.mark.parametrize("size", [(), (1,), (2, 4), (4, 4)])
def test_the_third_value_of_batch_fn_has_a_row_per_sample(size):
    def batch_fn(batch):
        return *batch, {"mask": torch.ones(size)}

    with pytest.raises(ValueError, match=r"third value of `batch_fn` .*3 rows.*'mask'"):
        read_extras((torch.zeros(3, 1), None), batch_fn, 3)


def test_a_child_is_proposed_where_it_may_return_logits():
    class ProtoNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Linear(4, 6)

        def forward(self, support, query):
            return self.enc(query)

    with pytest.raises(ValueError, match=r"If `enc` does: `forward_fn=lambda module, x: module.enc\(x\)`"):
        try_forward(ProtoNet(), ProtoNet(), torch.rand(2, 4))


def test_inputs_and_labels_are_no_loader():
    x, y = make_loader().dataset.tensors
    options = {"attacks": [], "fim_samples": 0, "progress": False}
    with pytest.raises(TypeError, match=r"TensorDataset\(x, y\)"):
        evaluate(nn.Linear(4, 2), (x, y), **options)
    model = nn.Linear(4, 2)
    nn.init.eye_(model.weight)
    report = evaluate(model, DataLoader(TensorDataset(x, y), batch_size=128), **options)
    assert report.metrics["samples"] == len(x)


def test_the_meta_device_does_not_cost_the_weights():
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="`device`"):
        evaluate(model, make_loader(), device="meta")
    assert model.weight.device.type == "cpu"


@pytest.mark.parametrize("prefix", ["/", " ", "\t"])
def test_a_prefix_has_letters(prefix):
    with pytest.raises(ValueError, match="`prefix`"):
        RobustnessMonitor(prefix=prefix)
