"""Accuracy, RDI and accuracy under PGD of many kinds of classifiers and batches, against plain algebra and loops."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_robustness import InputSpace, RobustnessMonitor
from lightning_robustness.attacks import PGD, run_attack
from lightning_robustness.evaluation import evaluate, sweep
from tests import references, zoo
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the outputs are log-probabilities"),
    pytest.mark.filterwarnings("ignore:RobustnessMonitor. gradients seem to be masked"),
]

NUMBER, BATCH_SIZE = 24, 10
EPS, ALPHA, STEPS = 0.1, 0.05, 3
Named = namedtuple("Named", ["x", "label"])


@dataclass
class Bundle:
    image: Tensor
    target: Tensor | None = None


@dataclass
class Case:
    """A module, what its batches look like, and what a user passes for it."""

    kind: type
    space: InputSpace | None = None
    labels: str = "plain"
    batch: str = "pair"
    options: dict | None = None

    @property
    def name(self):
        low = "" if self.space is None else str(self.space.low)
        return " ".join([self.kind.__name__, self.labels, self.batch, low, *(self.options or ())])


LABELS = {
    "plain": lambda y: y,
    "column": lambda y: y.unsqueeze(1),
    "float": lambda y: y.float(),
    "float column": lambda y: y.float().unsqueeze(1),
    "boolean": lambda y: y.bool(),
    "small": lambda y: y.to(torch.uint8),
}
BATCHES = {
    "pair": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "image": lambda x, y: {"image": x, "label": y},
    "pixels": lambda x, y: {"pixel_values": x, "labels": y},
    "with index": lambda x, y: (x, y, torch.arange(len(x))),
    "named tuple": Named,
    "data class": Bundle,
    "other names": lambda x, y: {"signal": x, "class": y},
    "index first": lambda x, y: (torch.arange(len(x)), x, y),
    "lengths": lambda x, y: (x, torch.full((len(x),), 99), y),
}
UNLABELLED = {
    "pair": lambda x: (x,),
    "list": lambda x: [x],
    "image": lambda x: {"image": x},
    "pixels": lambda x: {"pixel_values": x},
    "data class": Bundle,
}

KINDS = [
    *(zoo.Zoo, zoo.TwoLogits, zoo.Temperature, zoo.TemperatureInline, zoo.ReluEnd, zoo.LogSoftmaxEnd, zoo.SoftmaxEnd),
    *(zoo.LogSoftmaxBesideValidation, zoo.BatchNormEnd, zoo.Cosine, zoo.ArcFace, zoo.FunctionalHead, zoo.Prototypes),
    *(zoo.Capsules, zoo.Maxout, zoo.PointwiseConvolution, zoo.WideConvolution, zoo.WeightNorm, zoo.SpectralNorm),
    *(zoo.Logistic, zoo.Ensemble, zoo.EnsembleOfProbabilities, zoo.WideAndDeep, zoo.MixtureOfExperts),
    *(zoo.InDictionary, zoo.InObject, zoo.LogitsAndFeatures, zoo.FeaturesAndLogits, zoo.NamedOutputs),
    *(zoo.LossAndLogits, zoo.Auxiliary, zoo.Lightnings, zoo.Normalized, zoo.Recurrent, zoo.PooledTokens),
    *(zoo.Attention, zoo.Encoder, zoo.Distilled, zoo.Tokens, zoo.TokenTransformer, zoo.Double, zoo.InnerGradient),
]
CASES = [
    *(Case(kind) for kind in KINDS),
    Case(zoo.InnerGradient, options={"fim_samples": 0}),
    *(Case(zoo.OneLogit, labels=labels) for labels in LABELS),
    *(Case(kind, labels="float") for kind in (zoo.OneLogitFlat, zoo.OneLogitConvolution, zoo.OneLogitInDictionary)),
    *(Case(zoo.Zoo, labels=labels) for labels in ("column", "small")),
    *(Case(zoo.Zoo, batch=batch) for batch in ("list", "image", "pixels", "with index", "named tuple", "data class")),
    Case(zoo.Zoo, batch="other names", options={"batch_fn": lambda batch: (batch["signal"], batch.get("class"))}),
    Case(zoo.Zoo, space=InputSpace(mean=0.5, std=0.25)),
    Case(zoo.WideConvolution, space=InputSpace(mean=(0.4,), std=(0.3,))),
    Case(zoo.Pixels, space=InputSpace(high=255)),
    Case(zoo.Audio, space=InputSpace(low=-1)),
    Case(zoo.Zoo, space=InputSpace(low=None, high=None, mean=1.0, std=2.0)),
]


class Data:
    """Inputs as the model sees them, labels of which about a fifth are wrong, and the results to expect."""

    def __init__(self, case, module):
        generator = torch.Generator().manual_seed(2)
        self.space, self.case = case.space or InputSpace(), case
        low, high = self.space.low or 0.0, self.space.high or 1.0
        self.unit = high - low
        x = low + self.unit * torch.rand(NUMBER, *module.shape, generator=generator)
        self.x = self.space.normalize(x).to(next(module.parameters()).dtype)
        if isinstance(module, zoo.Tokens):
            self.x = torch.randint(20, (NUMBER, *module.shape), generator=generator)
        self.logits = module.reference(self.x.double())
        self.preds = self.logits.argmax(dim=1)
        noise = torch.rand(NUMBER, generator=generator) < 0.2
        self.y = torch.where(noise, (self.preds + 1) % self.logits.shape[1], self.preds)
        self.acc = (self.preds == self.y).double().mean().item()
        self.rdi = references.rdi(self.logits, self.preds)["rdi"]
        self.adv_acc = self.attack(module) if module.is_differentiable else None

    def attack(self, module):
        """Share of samples that are right before and after each step of PGD."""
        x, y = self.space.unnormalize(self.x.double()), self.y
        x_adv, right = x.clone(), self.preds == y
        for _ in range(STEPS):
            x_adv.requires_grad_()
            loss = nn.functional.cross_entropy(module.reference(self.space.normalize(x_adv)), y, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, x_adv)
            step = x_adv.detach() + ALPHA * self.unit * gradient.sign()
            x_adv = x + (step - x).clamp(-EPS * self.unit, EPS * self.unit)
            x_adv = x_adv.clamp(self.space.low, self.space.high) if self.space.low is not None else x_adv
            right &= module.reference(self.space.normalize(x_adv)).argmax(dim=1) == y
        return right.double().mean().item()

    def loader(self, labelled=True):
        y = LABELS[self.case.labels](self.y)
        parts = zip(self.x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)
        make, bare = BATCHES[self.case.batch], UNLABELLED.get(self.case.batch, lambda x: (x,))
        return DataLoader([make(x, y) if labelled else bare(x) for x, y in parts], batch_size=None)

    def options(self, module, labelled=True):
        attacks = {"pgd": PGD(eps=EPS * self.unit, alpha=ALPHA * self.unit, steps=STEPS, start="clean")}
        can_attack = labelled and module.is_differentiable
        return {
            "attacks": attacks if can_attack else {},
            "input_space": self.case.space,
            "fim_samples": 2 if can_attack else 0,
            **(self.case.options or {}),
        }

    def check(self, module, values, labelled):
        assert values["rdi"] == pytest.approx(self.rdi, abs=1e-4)
        assert values["samples"] == NUMBER
        assert ("rdi_embedding" in values) is module.has_embedding
        assert ("acc" in values) is labelled
        if labelled:
            assert 0.5 < self.acc < 1
            assert values["acc"] == pytest.approx(self.acc)
        if labelled and module.is_differentiable:
            assert values["adv_acc/pgd"] == pytest.approx(self.adv_acc)
            assert values["adv_acc/pgd"] <= values["acc"]
            assert values["asr/pgd"] == pytest.approx(1 - self.adv_acc / self.acc)
            assert values["fim"] > 0 if self.case.options != {"fim_samples": 0} else "fim" not in values


class Unpacked:
    """Reads batches of all forms in the step of a module, as its author would."""

    def __init__(self, case):
        self.case = case

    def __call__(self, batch):
        if isinstance(batch, Bundle):
            return batch.image, batch.target
        if isinstance(batch, dict):
            values = list(batch.values())
            return values[0], values[1] if len(values) > 1 else None
        if self.case.batch == "index first":
            return batch[1], batch[2]
        return batch[0], batch[-1 if self.case.batch == "lengths" else 1] if len(batch) > 1 else None


def monitored(path, module, data, labelled=True, **kwargs):
    monitor = RobustnessMonitor(**{**data.options(module, labelled), **kwargs}, log_figures=False)
    trainer = make_trainer(path, monitor)
    (logged,) = trainer.validate(module, data.loader(labelled), verbose=False)
    values = {
        key.removeprefix("robustness/").removeprefix("robustness_details/"): value for key, value in logged.items()
    }
    return values, logged.get("val_acc")


def made(case):
    module = case.kind()
    module.unpack = Unpacked(case)
    return module, Data(case, module)


@pytest.mark.filterwarnings("ignore:The outputs of .* look like probabilities", "ignore:.*has no last layer")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_monitor_and_evaluate(tmp_path, case):
    module, data = made(case)
    values, own = monitored(tmp_path, module, data)
    assert own == pytest.approx(data.acc)
    data.check(module, values, labelled=True)
    report = evaluate(module, data.loader(), **data.options(module), progress=False)
    data.check(module, report.metrics, labelled=True)


@pytest.mark.filterwarnings("ignore:The outputs of .* look like probabilities", "ignore:.*has no last layer")
@pytest.mark.parametrize("case", [c for c in CASES if c.batch in UNLABELLED], ids=lambda case: case.name)
def test_without_labels(tmp_path, case):
    module, data = made(case)
    values, _ = monitored(tmp_path, module, data, labelled=False)
    data.check(module, values, labelled=False)
    report = evaluate(module, data.loader(False), **data.options(module, False), progress=False)
    data.check(module, report.metrics, labelled=False)


LABELS |= {
    "from one": lambda y: y + 1,
    "with gaps": lambda y: torch.where(torch.arange(len(y)) % 5 == 0, -100, y),
    "one-hot": lambda y: nn.functional.one_hot(y, 3),
    "soft": lambda y: nn.functional.one_hot(y, 3).float(),
}


def head_of_forward(module, x):
    return module.head(module(x))


def head_of_relu(module, x):
    return module.head(module(x).relu())


# What is refused before training begins, the message, and what it advises, after which the numbers are right
REFUSED = {
    "embedding": (
        Case(zoo.EmbeddingForward),
        r"also runs 'head'.* 6 features.* `forward_fn=lambda module, x: module\.head\(module\(x\)\)`\.",
        {"forward_fn": head_of_forward},
    ),
    "embedding before ReLU": (
        Case(zoo.ReluBeforeHead),
        r"also runs 'head'.* `forward_fn=lambda module, x: module\.head\(module\(x\)\.relu\(\)\)`\.",
        {"forward_fn": head_of_relu},
    ),
    "prepared inputs": (
        Case(zoo.PreparesInputs),
        r"runs it on other inputs and gets other logits.*`forward_fn=`",
        {"forward_fn": lambda module, x: module(4 * x - 2)},
    ),
    "no forward": (
        Case(zoo.NoForward),
        r"`NoForward\(x\)` to return logits.*If `net` does: `forward_fn=lambda module, x: module\.net\(x\)`",
        {"forward_fn": lambda module, x: module.net(x)},
    ),
    "sigmoid": (
        Case(zoo.Sigmoid, labels="float"),
        r"returns a probability, the sigmoid of one.*forward_fn=lambda module, x: module\(x\)\.logit\(eps=1e-6\)",
        {"forward_fn": lambda module, x: module(x).logit(eps=1e-6)},
    ),
    "two tasks": (
        Case(zoo.TwoTasks),
        r"matrices of widths 5 \(entry 0\), 3 \(entry 1\).*forward_fn=lambda module, x: module\(x\)\[1\]",
        {"forward_fn": lambda module, x: module(x)[1]},
    ),
    "labels from one": (
        Case(zoo.Zoo, labels="from one"),
        r"from 0 to 2, for 3 classes, .* from 1 to 3.*`batch_fn=lambda batch: \(batch\[0\], batch\[1\] - 1\)",
        {"batch_fn": lambda batch: (batch[0], batch[1] - 1)},
    ),
    "one-hot": (
        Case(zoo.Zoo, labels="one-hot"),
        r"3 labels per sample.*`lambda batch: \(batch\[0\], batch\[1\]\.argmax\(dim=1\)\)",
        {"batch_fn": lambda batch: (batch[0], batch[1].argmax(dim=1))},
    ),
    "whole numbers": (
        Case(zoo.Zoo, labels="float"),
        r"whole numbers in floating point, from 0 to 2.*`batch_fn=lambda batch: \(batch\[0\], batch\[1\]\.long\(\)\)`",
        {"batch_fn": lambda batch: (batch[0], batch[1].long())},
    ),
    "soft": (
        Case(zoo.Zoo, labels="soft"),
        r"One-hot or soft labels.*`lambda batch: \(batch\[0\], batch\[1\]\.argmax\(dim=1\)\)",
        {"batch_fn": lambda batch: (batch[0], batch[1].argmax(dim=1))},
    ),
    "index first": (
        Case(zoo.Zoo, batch="index first"),
        r"looks like indices.*`batch_fn=lambda batch: \(batch\[1\], batch\[2\]\)`",
        {"batch_fn": lambda batch: (batch[1], batch[2])},
    ),
    "lengths": (
        Case(zoo.Zoo, batch="lengths"),
        r"but got values from 99 to 99.*such as lengths.*`lambda batch: \(batch\[0\], batch\[2\]\)`",
        {"batch_fn": lambda batch: (batch[0], batch[2])},
    ),
    "not normalised": (
        Case(zoo.Zoo, options={"input_space": InputSpace(mean=0.5, std=0.25)}),
        r"normalised with mean=0.5.* already lie in \[0.0, 1.0\].*`InputSpace\(low=0.0, high=1.0\)`",
        {"input_space": InputSpace(low=0.0, high=1.0)},
    ),
    "member as head": (
        Case(zoo.Ensemble, options={"head": "members.0.2"}),
        r"'members.0.2' is not, because the logits come from 2 layers.*Leave `head` out",
        {"head": None},
    ),
}


def own_predictions(module, case):
    """Make the step of a module read the labels of its own loader, of whatever form."""
    unpack = Unpacked(case)

    def read(batch):
        x, y = unpack(batch)
        y = {"from one": lambda: y - 1, "one-hot": lambda: y.argmax(dim=1), "soft": lambda: y.argmax(dim=1)}.get(
            case.labels, lambda: y
        )()
        return x, y

    module.unpack = read
    return module


@pytest.mark.filterwarnings("ignore:.*has no last layer", "ignore:.*take another forward pass")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_the_remedy(tmp_path, name):
    case, match, remedy = REFUSED[name]
    module, data = own_predictions(case.kind(), case), Data(case, case.kind())
    with pytest.raises(MisconfigurationException, match=f"(?s){match}"):
        monitored(tmp_path, module, data)
    values, own = monitored(tmp_path, module, data, **remedy)
    assert own == pytest.approx(data.acc)
    data.check(module, values, labelled=True)
    options = {**data.options(module), **remedy}
    data.check(module, evaluate(module, data.loader(), **options, progress=False).metrics, labelled=True)


@pytest.mark.parametrize(
    "name", [name for name in REFUSED if name not in ("embedding", "embedding before ReLU", "prepared inputs")]
)
def test_evaluate_refuses_the_same(name):
    """Except for what only a validation step can show."""
    case, match, _ = REFUSED[name]
    module, data = case.kind(), Data(case, case.kind())
    with pytest.raises((ValueError, TypeError), match=f"(?s){match}"):
        evaluate(module, data.loader(), **data.options(module), progress=False)


def test_evaluate_warns_of_a_head_that_forward_does_not_run():
    module, data = made(Case(zoo.EmbeddingForward))
    remedy = r"`forward_fn=lambda module, x: module\.get_submodule\('head'\)\(module\(x\)\)`"
    with pytest.warns(UserWarning, match=rf"does not run 'head', a layer that takes 6 features.*{remedy}"):
        evaluate(module, data.loader(), **data.options(module), progress=False)
    options = {**data.options(module), "forward_fn": lambda module, x: module.get_submodule("head")(module(x))}
    data.check(module, evaluate(module, data.loader(), **options, progress=False).metrics, labelled=True)


class Prototypes(Classifier):
    """Returns an embedding, which the steps compare with a prototype of each class."""

    def __init__(self):
        super().__init__(64)
        generator = torch.Generator().manual_seed(0)
        self.prototypes = nn.Parameter(torch.randn(10, 64, generator=generator))

    def classify(self, x):
        return 10 * nn.functional.normalize(self(x)) @ nn.functional.normalize(self.prototypes).T

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.classify(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.classify(batch[0])


@pytest.mark.filterwarnings("ignore:.*no last layer to take embeddings from")
@pytest.mark.filterwarnings("ignore:.*validation does not run the network on the unchanged inputs")
def test_an_embedding_as_wide_as_logits_gets_one_warning_with_the_remedy(tmp_path):
    torch.manual_seed(0)
    module, options = Prototypes(), {"attacks": [], "fim_samples": 0}
    trainer = make_trainer(tmp_path, RobustnessMonitor(**options), max_epochs=3)
    with pytest.warns(UserWarning, match=r"If the model returns an embedding.*`forward_fn=`") as record:
        trainer.fit(module, train_loader(), val_loader(size=300))
    assert sum("embedding, all values are wrong" in str(warning.message) for warning in record) == 1
    assert trainer.callback_metrics["robustness/acc"] < 0.2
    with pytest.warns(UserWarning, match=r"Prototypes: .*`forward_fn=`"):
        evaluate(module, val_loader(size=300), progress=False, **options)
    options["forward_fn"] = lambda module, x: module.classify(x)
    trainer = make_trainer(tmp_path, RobustnessMonitor(**options), max_epochs=1)
    trainer.fit(module, train_loader(), val_loader(size=300))  # a warning would fail the test
    report = evaluate(module, val_loader(size=300), progress=False, **options)
    assert report.metrics["acc"] > 0.2


@pytest.mark.filterwarnings("ignore:.*take another forward pass")
def test_samples_without_a_class_can_be_left_out(tmp_path):
    """The remedy for labels of -100 leaves fewer samples."""
    case = Case(zoo.Zoo, labels="with gaps")
    module, data = case.kind(), Data(case, case.kind())
    with pytest.raises(MisconfigurationException, match=r"but got values from -100 to 2.*`ignore_index`"):
        monitored(tmp_path, module, data)
    batch_fn = lambda batch: (batch[0][batch[1] >= 0], batch[1][batch[1] >= 0])  # noqa: E731
    values, _ = monitored(tmp_path, module, data, batch_fn=batch_fn)
    kept = torch.arange(NUMBER) % 5 != 0
    assert values["samples"] == kept.sum() == 19
    assert values["acc"] == pytest.approx((data.preds == data.y)[kept].double().mean().item())
    assert values["rdi"] == pytest.approx(references.rdi(data.logits[kept], data.preds[kept])["rdi"], abs=1e-4)


@pytest.mark.parametrize(
    ("y", "match"),
    [
        (torch.rand(8), "single-label classification.*real numbers.*regression"),
        (torch.ones(8, 3), "single-label classification.*3 numbers per sample that do not sum to 1.*multi-label"),
        (torch.zeros(8, 4, 4, dtype=torch.long), "single-label classification.*for each position.*segmentation"),
        (torch.rand(8, 1, 4, 4), "single-label classification.*looks like other inputs.*Siamese"),
    ],
)
def test_other_tasks_are_refused_in_the_sanity_check(tmp_path, y, match):
    class Untrained(zoo.WideConvolution):
        def training_step(self, batch, batch_idx):
            pytest.fail("training began")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def validation_step(self, batch, batch_idx):
            self(batch[0])

    data = DataLoader([(torch.rand(8, 1, 4, 4), y, y)], batch_size=None)
    with pytest.raises(MisconfigurationException, match=match):
        make_trainer(tmp_path, RobustnessMonitor(attacks=[])).fit(Untrained(), data, data)


@pytest.mark.parametrize("eps", [1.5, 8.0])
def test_a_budget_beyond_the_range_is_refused_everywhere(eps):
    match = rf"`eps` to be at most 1, the width of the range of inputs \[0, 1\], but got {eps:g}"
    module, data = made(Case(zoo.Zoo))
    with pytest.raises(ValueError, match=match):
        RobustnessMonitor(attacks=["pgd"], eps=eps)
    with pytest.raises(ValueError, match=match):
        evaluate(module, data.loader(), ["pgd"], eps=eps, progress=False)
    with pytest.raises(ValueError, match=match):
        evaluate(module, data.loader(), (), sweep_budgets=[0.1, eps], progress=False)
    with pytest.raises(ValueError, match=match):
        sweep(module, data.loader(), ["fgsm"], budgets=[0.1, eps], progress=False)
    with pytest.raises(ValueError, match=match):
        run_attack(module, PGD(eps=eps), data.x, data.y)


def test_a_budget_below_one_grey_level_gets_a_warning():
    module, data = made(Case(zoo.Pixels, space=InputSpace(high=255)))
    with pytest.warns(UserWarning, match=r"eps=0\.0313725 is below one grey level.*`eps=8`"):
        RobustnessMonitor(input_space=InputSpace(high=255))
    with pytest.warns(UserWarning, match="below one grey level"):
        evaluate(module, data.loader(), ["pgd"], eps=0.5, input_space=data.space, fim_samples=0, progress=False)


def test_there_are_enough_kinds():
    assert len({case.name for case in CASES}) == len(CASES) >= 40
