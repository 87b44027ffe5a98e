"""Masks, embeddings and TRADES on two processes, each with its own batches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining, RobustnessMonitor
from lightning_robustness._measurement.keys import name_of
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import trades_loss
from tests.callbacks.distributed_fit import as_torchrun_would
from tests.callbacks.modules import make_trainer
from tests.test_any_batch import ALPHA, EPS, FREE, STEPS, Data, Masked, Transformer, embed, settings

ATTACK = PGD(eps=EPS, alpha=ALPHA, steps=STEPS, start="clean", all_steps=True)
RATE = 0.5


class Trained(Masked):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.own(batch), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def run(rank, path, module, form, callback, fn):
    """Run a module on every second batch."""
    as_torchrun_would(rank)
    loader = DataLoader(list(Data(module).batches(form))[rank::2], batch_size=None)
    trainer = make_trainer(path, callback, strategy="ddp", devices=2, use_distributed_sampler=False)
    getattr(trainer, fn)(module, loader)
    return trainer.callback_metrics, module.state_dict()


def watch(rank, path):
    monitor = RobustnessMonitor(**settings(embed_fn=embed), log_figures=False)
    metrics, _ = run(rank, path, Transformer(), "tokens", monitor, "validate")
    return {name: value.item() for key, value in metrics.items() if (name := name_of("robustness", key))}


@pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked")
def test_masks_and_embeddings(tmp_path, two_processes):
    first, second = two_processes(watch, tmp_path)
    Data(Transformer()).check(first, FREE)
    assert first == second


def train(rank, path):
    callback = AdversarialTraining(ATTACK, loss="trades")
    return dict(run(rank, path, Trained(), "mapping", callback, "fit")[1])


def test_trades_with_masks(tmp_path, two_processes):
    module = Trained()
    optimizer = module.configure_optimizers()
    batches = list(Data(module).batches())
    for pair in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        losses = []
        for batch in pair:

            def forward(x, mask=batch["mask"]):
                return module.classify(x, mask)

            x, y = batch["x"], batch["labels"]
            losses.append(trades_loss(forward, x, y, weight=6.0, x_adv=ATTACK(forward, x, y)))
        (sum(losses) / 2).backward()
        optimizer.step()
    first, second = two_processes(train, tmp_path)
    for name, weights in module.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weights)
        assert not torch.equal(weights, Trained().state_dict()[name])
