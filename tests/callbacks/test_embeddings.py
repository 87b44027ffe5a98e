"""Adversarial training on the embeddings of tokens."""

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining
from lightning_robustness.attacks import PGD
from lightning_robustness.losses import trades_loss
from tests.callbacks.modules import make_trainer

ATTACK = PGD(eps=0.3, alpha=0.1, steps=3, all_steps=True)
SPACE = AdversarialTraining(embed_fn=lambda module, tokens: tokens).access.input_space


class Reader(L.LightningModule):
    """Classifies sequences of tokens, with a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen = []

    def forward(self, input_ids=None, mask=None, inputs_embeds=None):
        embeddings = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        self.seen.append(embeddings.detach().clone())
        weights = mask.to(embeddings).unsqueeze(2)
        return self.body((embeddings * weights).sum(dim=1) / weights.sum(dim=1))

    def training_step(self, batch, batch_idx):
        self.seen.clear()
        return nn.functional.cross_entropy(self(batch["input_ids"], batch["mask"]), batch["label"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def embed(module, tokens):
    return module.embedding(tokens)


def loader(size=48):
    torch.manual_seed(7)
    tokens, lengths = torch.randint(20, (size, 5)), torch.randint(2, 6, (size,))
    mask = (torch.arange(5) < lengths.unsqueeze(1)).long()
    rows = zip(tokens, mask, tokens[:, 0] % 3, strict=True)
    samples = [{"input_ids": x, "mask": m, "label": y} for x, m, y in rows]
    return DataLoader(samples, batch_size=16, generator=torch.Generator())


def fit(path, callback, *others, module=Reader, epochs=2):
    L.seed_everything(3, verbose=False)
    module = module()
    trainer = make_trainer(path, callback, *others, max_epochs=epochs)
    trainer.fit(module, loader())
    return module, trainer


def by_hand(epochs, compute_loss):
    """Perturb embeddings, and add the perturbation to those of the step, as Miyato et al. do."""
    L.seed_everything(3, verbose=False)
    module, index = Reader(), 0
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for batch in loader():
            x, mask, y = batch["input_ids"], batch["mask"], batch["label"]
            clean = module.embedding(x).detach()

            def forward(embeddings, mask=mask):
                return module(mask=mask, inputs_embeds=embeddings)

            delta = ATTACK(forward, clean, y, input_space=SPACE, index=index) - clean
            optimizer.zero_grad()
            compute_loss(forward, module.embedding(x), delta, y).backward()
            optimizer.step()
            index += 1
    return module


def assert_same(first, second):
    for (name, value), other in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6, msg=name)


def cross_entropy(forward, clean, delta, y):
    return nn.functional.cross_entropy(forward(clean + delta), y)


def concatenated(forward, clean, delta, y):
    logits = torch.cat([forward(clean), forward(clean + delta)])
    return nn.functional.cross_entropy(logits, torch.cat([y, y]))


def trades(forward, clean, delta, y):
    return trades_loss(forward, clean, y, weight=6.0, x_adv=clean + delta)


@pytest.mark.parametrize(
    ("options", "compute_loss"),
    [({}, cross_entropy), ({"combine": "concat"}, concatenated), ({"loss": "trades"}, trades)],
    ids=["replace", "concat", "trades"],
)
def test_weights_are_those_of_a_loop_by_hand(tmp_path, options, compute_loss):
    module, trainer = fit(tmp_path, AdversarialTraining(ATTACK, embed_fn=embed, **options))
    expected = by_hand(2, compute_loss)
    assert_same(module, expected)
    assert not torch.equal(module.embedding.weight, Reader().embedding.weight)
    assert 0 <= trainer.callback_metrics["adversarial_training/adv_acc"] <= 1
    with pytest.raises(AssertionError, match="embedding"):
        assert_same(module, by_hand(2, lambda forward, clean, delta, y: compute_loss(forward, clean, 0 * delta, y)))


def test_the_step_sees_perturbed_embeddings(tmp_path):
    module, _ = fit(tmp_path, AdversarialTraining(ATTACK, embed_fn=embed, combine="mix", ratio=0.25), epochs=1)
    *_, batch = loader()
    with torch.no_grad():
        weight = by_hand_weights(module)
    distance = (module.seen[-1] - nn.functional.embedding(batch["input_ids"], weight)).abs().flatten(1).amax(dim=1)
    assert sorted(distance.gt(1e-6).tolist()) == [False] * 12 + [True] * 4
    assert distance.max().item() == pytest.approx(0.3, abs=1e-5)
    assert not module.embedding._forward_hooks


def by_hand_weights(module):
    """The weights of the embeddings before the last step."""
    return module.embedding.weight + 0.5 * module.embedding.weight.grad


class Positions(Reader):
    """Uses other embeddings than those that are attacked."""

    def __init__(self):
        super().__init__()
        self.other = nn.Embedding(20, 6)


@pytest.mark.parametrize(
    ("embed_fn", "error", "message"),
    [
        (lambda module, tokens: module.other(tokens), MisconfigurationException, "`training_step` to embed its batch"),
        (lambda module, tokens: 2 * module.embedding(tokens), MisconfigurationException, "output of a submodule"),
        (lambda module, tokens: tokens, TypeError, "`embed_fn` to return a floating point tensor"),
    ],
    ids=["other layer", "no layer", "tokens"],
)
def test_embeddings_that_a_step_would_not_see_are_refused(tmp_path, embed_fn, error, message):
    with pytest.raises(error, match=message):
        fit(tmp_path, AdversarialTraining(ATTACK, embed_fn=embed_fn), module=Positions)


def test_a_loss_of_its_own_needs_no_layer(tmp_path):
    def scaled(module, tokens):
        return 2 * module.embedding(tokens)

    module, _ = fit(tmp_path, AdversarialTraining(ATTACK, embed_fn=scaled, loss="mart"), epochs=1)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
