"""Padded, masked and tokenised batches of several shapes, against a loop over single samples."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_robustness import AdversarialTraining, InputSpace, RobustnessMonitor
from lightning_robustness._model.access import find_extra_inputs
from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import evaluate, sweep
from tests import references
from tests.callbacks.modules import make_trainer
from tests.zoo import affine, wide

pytestmark = [
    pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked"),
]

EPS, ALPHA, STEPS = 0.1, 0.05, 3
LENGTHS = [[3, 5, 2, 5], [4, 4, 1, 3], [2, 2, 2, 2], [3, 5, 4, 1]]


class Masked(L.LightningModule):
    """The mean of the positions that are no padding, between two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.body.weight.mul_(3)
            self.head.weight.mul_(6)

    def classify(self, x, mask):
        weights = mask.to(x.dtype).unsqueeze(2)
        return self.head((self.body(x).relu() * weights).sum(dim=1) / weights.sum(dim=1))

    def forward(self, x, mask):
        return self.classify(x, mask)

    def own(self, batch):
        return self(batch["x"], batch["mask"])

    def validation_step(self, batch, batch_idx):
        y = batch["labels"] if isinstance(batch, dict) else batch[2]
        self.log("val_acc", (self.own(batch).argmax(dim=1) == y).float().mean(), batch_size=len(y))

    def alone(self, x):
        """Logits of a sample without padding, from the weights."""
        return affine(self.head, affine(self.body, x).clamp(min=0).mean(dim=0))


class Keywords(Masked):
    """As modules around Hugging Face models are: ``self(**batch)``."""

    def forward(self, **batch):
        assert "labels" not in batch or batch["labels"] is not None
        return {"logits": self.classify(batch["x"], batch["mask"])}

    def own(self, batch):
        return self(**batch)["logits"]


class Transformer(Masked):
    """The arguments of a Hugging Face model of text, which takes tokens or their embeddings."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None):
        if inputs_embeds is None:
            inputs_embeds = self.words(input_ids)
        return {"logits": self.classify(inputs_embeds, attention_mask)}

    def own(self, batch):
        return self(**batch)["logits"]


class Unmasked(Masked):
    """Batches of different lengths, without padding."""

    def forward(self, x):
        return self.classify(x, torch.ones(x.shape[:2]))

    def own(self, batch):
        return self(batch["x"])


class Images(L.LightningModule):
    """Takes bytes and scales them itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(12, 3)
        nn.init.normal_(self.head.weight)

    def forward(self, x):
        return self.head(x.float().flatten(1) / 255)

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean(), batch_size=len(batch[0]))


class Data:
    """Samples of several lengths, their padded batches, and what to expect of the samples one by one."""

    def __init__(self, module, lengths=LENGTHS, padding=0.5):
        generator = torch.Generator().manual_seed(5)
        self.module, self.lengths, self.padding = module, lengths, padding
        self.samples = [torch.rand(n, 4, generator=generator) for batch in lengths for n in batch]
        self.tokens = [torch.randint(10, (n,), generator=generator) for batch in lengths for n in batch]
        if isinstance(module, Transformer):
            self.samples = [wide(module.words.weight)[ids].float() for ids in self.tokens]
        self.logits = torch.stack([module.alone(x.double()) for x in self.samples])
        self.preds = self.logits.argmax(dim=1)
        noise = torch.rand(len(self.preds), generator=generator) < 0.2
        self.y = torch.where(noise, (self.preds + 1) % 3, self.preds)

    def batches(self, form="mapping"):
        number = 0
        for lengths in self.lengths:
            longest, rows = max(lengths), range(number, number + len(lengths))
            x = torch.full((len(lengths), longest, 4), self.padding)
            ids = torch.full((len(lengths), longest), 7)
            mask = torch.zeros(len(lengths), longest, dtype=torch.long)
            for i, row in enumerate(rows):
                x[i, : lengths[i]], ids[i, : lengths[i]], mask[i, : lengths[i]] = self.samples[row], self.tokens[row], 1
            y = self.y[rows.start : rows.stop]
            number += len(lengths)
            if form == "tokens":
                yield {"input_ids": ids, "attention_mask": mask, "labels": y}
            elif form == "tuple":
                yield x, mask, y
            else:
                yield {"x": x, "mask": mask, "index": torch.tensor(list(rows)), "labels": y}

    def loader(self, form="mapping"):
        return DataLoader(list(self.batches(form)), batch_size=None)

    def adv_acc(self, space):
        """Attack each sample alone."""
        low, high = space.low, space.high
        survivors = 0
        for sample, y in zip(self.samples, self.y, strict=True):
            x = sample.double()
            x_adv, right = x.clone(), self.module.alone(x).argmax() == y
            for _ in range(STEPS):
                x_adv.requires_grad_()
                loss = nn.functional.cross_entropy(self.module.alone(x_adv), y)
                (gradient,) = torch.autograd.grad(loss, x_adv)
                x_adv = x + (x_adv.detach() + ALPHA * gradient.sign() - x).clamp(-EPS, EPS)
                x_adv = x_adv if low is None else x_adv.clamp(low, high)
                right &= self.module.alone(x_adv).argmax() == y
            survivors += int(right)
        return survivors / len(self.samples)

    def check(self, values, space):
        acc = (self.preds == self.y).double().mean().item()
        assert values["acc"] == pytest.approx(acc)
        assert values["rdi"] == pytest.approx(references.rdi(self.logits, self.preds)["rdi"], abs=1e-4)
        assert values["adv_acc/pgd"] == pytest.approx(self.adv_acc(space))
        assert values["adv_acc/pgd"] < acc
        assert values["samples_attacks"] == values["samples_fim"] == len(self.y)
        assert values["fim"] > 0
        return acc


def third(batch):
    return batch[0], batch[2], {"mask": batch[1]}


class Tuples(Masked):
    def own(self, batch):
        return self(batch[0], batch[1])


def embed(module, tokens):
    return module.words(tokens)


FREE = InputSpace(low=None, high=None)
CASES = {
    "mask": (Masked, "mapping", {}, InputSpace()),
    "keywords": (Keywords, "mapping", {}, InputSpace()),
    "tuple": (Tuples, "tuple", {"batch_fn": third}, InputSpace()),
    "forward_fn": (Keywords, "mapping", {"forward_fn": lambda module, x, mask: module(x=x, mask=mask)}, InputSpace()),
    "tokens": (Transformer, "tokens", {"embed_fn": embed}, FREE),
    "embeddings": (
        Transformer,
        "tokens",
        {
            "embed_fn": embed,
            "forward_fn": lambda module, e, attention_mask: module(None, attention_mask, inputs_embeds=e),
        },
        FREE,
    ),
}


def monitored(path, module, loader, **options):
    trainer = make_trainer(path, RobustnessMonitor(log_figures=False, **options))
    (logged,) = trainer.validate(module, loader, verbose=False)
    return {key.removeprefix("robustness/").removeprefix("robustness_details/"): value for key, value in logged.items()}


def settings(**options):
    return {"attacks": {"pgd": PGD(eps=EPS, alpha=ALPHA, steps=STEPS, start="clean")}, "fim_samples": 99, **options}


@pytest.mark.parametrize("name", CASES)
def test_padded_batches_are_attacked_sample_by_sample(tmp_path, name):
    kind, form, options, space = CASES[name]
    module = kind()
    data = Data(module)
    values = monitored(tmp_path, module, data.loader(form), **settings(**options))
    assert values["val_acc"] == pytest.approx(data.check(values, space))
    report = evaluate(module, data.loader(form), **settings(**options), batch_size=2, progress=False, per_sample=True)
    data.check(report.metrics, space)
    assert sorted(report.per_sample["index"]) == list(range(16))
    for index, y, pred in zip(*(report.per_sample[key] for key in ("index", "y", "preds")), strict=True):
        assert (y, pred) == (data.y[index], data.preds[index])


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_takes_the_same_batches(name):
    kind, form, options, space = CASES[name]
    module = kind()
    data, attacks = Data(module), {"pgd": PGD(alpha=ALPHA, steps=STEPS, start="clean")}
    curves = sweep(module, data.loader(form), attacks, [EPS / 2, EPS], **options, progress=False)
    both = {"sweep_budgets": [EPS / 2, EPS], "sweep_attacks": attacks, **options}
    expected = evaluate(module, data.loader(form), (), **both, progress=False).sweep
    for metric in ("accuracy", "mse"):
        assert curves.values[metric][0] == pytest.approx(expected.values[metric][0])
    assert curves.values["accuracy"][0][1] == pytest.approx(data.adv_acc(space))
    assert curves.clean_accuracy == expected.clean_accuracy
    assert curves.clean_accuracy == pytest.approx((data.preds == data.y).double().mean().item())


def test_batches_of_different_lengths_without_padding(tmp_path):
    module = Unmasked()
    data = Data(module, lengths=[[2, 2, 2], [5, 5, 5], [1, 1, 1], [5, 5, 5], [3, 3, 3]])
    values = monitored(tmp_path, module, data.loader(), **settings())
    assert values["val_acc"] == pytest.approx(data.check(values, InputSpace()))
    data.check(evaluate(module, data.loader(), **settings(), progress=False).metrics, InputSpace())
    # "index" is in the batch too, but the module does not take it: it must not split batches
    report = sweep(module, data.loader(), ["fgsm"], budgets=[0.05], progress=False)
    assert report.clean_accuracy == pytest.approx((data.preds == data.y).double().mean().item())


def test_tokens_alone_have_the_values_that_need_no_attack(tmp_path):
    module = Transformer()
    data = Data(module)
    with pytest.warns(UserWarning, match=r"integers \(torch.int64\), which cannot be perturbed.*`embed_fn=`"):
        values = monitored(tmp_path, module, data.loader("tokens"))
    with pytest.warns(UserWarning, match="cannot be perturbed"):
        report = evaluate(module, data.loader("tokens"), sweep_budgets=[0.1], decision_space="pca", progress=False)
    for found in (values, report.metrics):
        assert found["rdi"] == pytest.approx(references.rdi(data.logits, data.preds)["rdi"], abs=1e-4)
        assert found["acc"] == pytest.approx((data.preds == data.y).double().mean().item())
        assert not {"fim", "adv_acc/pgd", "adv_acc/worst"} & found.keys()


def test_embeddings_are_those_of_the_weights_at_the_time(tmp_path):
    """The sample keeps tokens, and training changes what they are embedded as."""

    class Trained(Transformer):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.own(batch), batch["labels"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Trained()
    data = Data(module)
    monitor = RobustnessMonitor(**settings(embed_fn=embed), log_figures=False, attack_every_n_epochs=1)
    make_trainer(tmp_path, monitor, max_epochs=3).fit(module, data.loader("tokens"), data.loader("tokens"))
    report = evaluate(module, data.loader("tokens"), **settings(embed_fn=embed), progress=False)
    for key in ("acc", "adv_acc/pgd", "fim", "rdi"):
        assert monitor.history[-1][key] == pytest.approx(report.metrics[key], rel=1e-4)
    assert monitor.history[0]["fim"] != pytest.approx(monitor.history[-1]["fim"], rel=1e-2)


def as_floats(module, x):
    return x.float()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_bytes_that_the_module_scales_itself(tmp_path, dtype):
    module, generator = Images(), torch.Generator().manual_seed(0)
    x = torch.randint(256, (24, 3, 2, 2), generator=generator, dtype=dtype)
    logits = affine(module.head, x.double().flatten(1) / 255)
    preds = logits.argmax(dim=1)
    y = torch.where(torch.rand(24, generator=generator) < 0.2, (preds + 1) % 3, preds)
    loader = DataLoader([(x[:16], y[:16]), (x[16:], y[16:])], batch_size=None)
    options = {"input_space": InputSpace(high=255), "fim_samples": 4}
    values = monitored(tmp_path, module, loader, attacks=["fgsm"], eps=8, **options)
    embedded = monitored(tmp_path, module, loader, attacks=["fgsm"], eps=8, embed_fn=as_floats, **options)
    assert not [name for name in values if embedded[name] != values[name] and not name.startswith("seconds/")]
    weight = wide(module.head.weight)
    x_adv, right = x.double().flatten(1), preds == y
    gradient = (logits.softmax(dim=1) - nn.functional.one_hot(y, 3)) @ weight
    x_adv = (x_adv + 8 * gradient.sign()).clamp(0, 255)
    right &= affine(module.head, x_adv / 255).argmax(dim=1) == y
    assert values["acc"] == values["val_acc"] == pytest.approx((preds == y).double().mean().item())
    assert values["adv_acc/fgsm"] == pytest.approx(right.double().mean().item())
    assert values["adv_acc/fgsm"] < values["acc"]


@pytest.mark.parametrize("options", [{}, {"combine": "mix", "ratio": 0.5}, {"loss": "trades"}])
def test_adversarial_training_takes_the_mask_along(tmp_path, options):
    class Trained(Masked):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch["x"])
            return nn.functional.cross_entropy(self.own(batch), batch["labels"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    attack = PGD(eps=EPS, alpha=ALPHA, steps=STEPS, start="clean", all_steps=True)
    module = Trained()
    data, expected = Data(module), Masked()
    make_trainer(tmp_path, AdversarialTraining(attack, **options)).fit(module, data.loader())
    for batch, seen in zip(data.batches(), module.seen, strict=True):
        by_hand = attack(lambda x, mask=batch["mask"]: expected.classify(x, mask), batch["x"], batch["labels"])
        changed = (seen != batch["x"]).flatten(1).any(dim=1)
        assert torch.equal(seen[changed], by_hand[changed])
        assert changed.sum() == {0: 4, 1: 2}.get("combine" in options) * ("loss" not in options)


def test_attacks_that_drop_samples_cannot_take_a_mask_along():
    extra = find_extra_inputs(Masked(), "x", ["mask"])
    bound = extra.bind(Masked(), {"mask": torch.ones(4, 2)})
    with pytest.raises(ValueError, match=r"as many inputs as mask have rows but got 3.*`all_steps=True`"):
        bound(torch.rand(3, 2, 4))


def test_what_a_model_takes_from_a_batch():
    def found(model, name, *extras):
        extra = find_extra_inputs(model, name, extras)
        return None if extra is None else (extra.names, extra.keyword)

    assert found(Masked(), "image", "mask", "index") == (("mask",), None)
    assert found(Keywords(), "x", "mask", "index") == (("mask", "index"), "x")
    assert found(Transformer(), "inputs_embeds", "attention_mask") == (("attention_mask",), "inputs_embeds")
    assert found(Unmasked(), "x", "mask") is None
    assert found(lambda x, **others: x, "x", "mask") is None
    assert found(lambda x, *, mask: x, "x", "mask", "index") == (("mask",), None)
    assert found(max, None) is None
