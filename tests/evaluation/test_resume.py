import errno
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness._measurement.rows import Rows
from lightning_robustness._model.batch import Batch
from lightning_robustness._processes import Processes, write_file
from lightning_robustness.attacks import PGD, Cascade
from lightning_robustness.evaluation import compare, evaluate, sweep
from lightning_robustness.evaluation.resume import (
    ResumeFolder,
    describe_fingerprint,
    fingerprint_data,
    fingerprint_weights,
)
from tests.evaluation.distributed_evaluation import EPS, make_data, make_network, without_times
from tests.processes import run_in_a_process


class Passes:
    """Forward passes until an error; not in the module, whose attributes are restored."""

    left = math.inf


class Flaky(nn.Module):
    """Interrupts or fails after a number of forward passes."""

    def __init__(self, error=KeyboardInterrupt):
        super().__init__()
        self.network = make_network()
        self.error = error

    def forward(self, x):
        Passes.left -= 1
        if Passes.left < 0:
            raise self.error("enough")
        return self.network(x)


def sweep_of(model, **options):
    loader = DataLoader(make_data(), batch_size=8)
    return sweep(model, loader, ["pgd"], [0.01, EPS], batch_size=6, progress=False, per_sample=True, **options)


def test_interrupted_sweep_resumes(tmp_path, monkeypatch):
    model = Flaky()
    expected = without_times(sweep_of(model))
    monkeypatch.setattr(Passes, "left", 64)
    with pytest.warns(UserWarning, match="covers 6 of 37 samples"):
        assert sweep_of(model, resume=tmp_path).samples == 6
    Passes.left = math.inf
    assert without_times(sweep_of(model, resume=str(tmp_path))) == expected
    Passes.left = 4  # everything is finished; two passes find the logits, and two compare outputs and gradients
    assert without_times(sweep_of(model, resume=tmp_path)) == expected


def evaluate_some(folder, model=None, data=None, **options):
    model, data = model or make_network(), data or make_data()
    options = {"attacks": {"pgd": PGD(eps=EPS, steps=2)}, "fim_samples": 12, "attack_samples": 12, **options}
    return evaluate(model, DataLoader(data, batch_size=8), progress=False, resume=folder, **options)


def changed_data(label=0, shift=0.0):
    x, y = (tensor.clone() for tensor in make_data()[:])
    y[20] = (y[20] + label) % 4
    return TensorDataset(x + shift, y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": make_network(1)}, "weights: [0-9a-f]{16} there, [0-9a-f]{16} here"),
        ({"attacks": {"pgd": PGD(eps=EPS, steps=3)}}, "steps=2.* there, .*steps=3.* here"),
        ({"seed": 3}, "seed: 0 there, 3 here"),
        ({"attacks": ["cw"], "eps": 0.5}, r"minimum-norm attacks: .*there, .*eps=0\.5.* here"),
        ({"forward_fn": lambda model, x: model(x)}, "forward_fn: None there, .*<lambda> here"),
        ({"data": changed_data(label=1)}, "labels: [0-9a-f]{16} there, [0-9a-f]{16} here"),
        ({"data": changed_data(shift=1e-6)}, "inputs: [0-9a-f]{16} there, [0-9a-f]{16} here"),
        ({"data": make_data(36)}, "samples: 37 there, 36 here; labels:"),
    ],
)
def test_results_of_something_else_are_refused(tmp_path, changes, message):
    evaluate_some(tmp_path, **({"attacks": ["cw"], "eps": EPS} if "eps" in changes else {}))
    with pytest.raises(ValueError, match=f"same model, data and settings in .*{message}"):
        evaluate_some(tmp_path, **changes)


class Switched(nn.Module):
    """Computes something else with the same weights, as an activation, an attribute or a closure says."""

    def __init__(self, activation=None, is_reversed=False, scale=None):
        super().__init__()
        self.network = make_network()
        self.activation = activation
        self.is_reversed = is_reversed
        self.scale = scale or (lambda logits: logits)

    def forward(self, x):
        logits = self.scale(self.network(x))
        logits = logits if self.activation is None else self.activation(logits)
        return logits.flip(1) if self.is_reversed else logits


def times(factor):
    return lambda logits: factor * logits


@pytest.mark.parametrize("run", [evaluate_some, lambda folder, model: sweep_of(model, resume=folder)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"activation": nn.Tanh()}, {"activation": nn.Softsign()}),
        ({"is_reversed": False}, {"is_reversed": True}),  # the largest logits are the same
        ({"scale": times(1.0)}, {"scale": times(1.1)}),
    ],
    ids=["activation", "attribute", "closure"],
)
def test_results_of_a_model_that_computes_something_else_are_refused(tmp_path, run, before, after):
    before = {"scale": times(8.0)} | before
    run(tmp_path, Switched(**before))
    run(tmp_path, Switched(**before))
    with pytest.raises(ValueError, match=r"the model computes something else: outputs of the first samples") as error:
        run(tmp_path, Switched(**before | after))
    assert not re.search(r"\d\.\d", str(error.value).replace(str(tmp_path), ""))  # numbers would not help


class StraightThrough(nn.Module):
    """Has the same outputs with and without a surrogate gradient."""

    def __init__(self, passes_gradients):
        super().__init__()
        self.network = make_network()
        self.passes_gradients = passes_gradients

    def forward(self, x):
        z = self.network((8 * x).round() / 8)
        return z + (x - x.detach()).flatten(1).sum(1, keepdim=True) * z.detach() if self.passes_gradients else z


@pytest.mark.parametrize("run", [evaluate_some, lambda folder, model: sweep_of(model, resume=folder)])
def test_results_of_a_model_with_other_gradients_are_refused(tmp_path, run):
    expected = without_times(run(tmp_path / "masked", StraightThrough(passes_gradients=False)))
    assert without_times(run(tmp_path / "masked", StraightThrough(passes_gradients=False))) == expected
    with pytest.raises(ValueError, match=r"the model computes something else: gradients of the first"):
        run(tmp_path / "masked", StraightThrough(passes_gradients=True))


def step(eps=EPS, steps=1, is_random=False):
    """An attack that settings do not describe: its budget and its steps are in a closure."""

    def attack(model, x, y):
        start = x + torch.empty_like(x).uniform_(-eps, eps) if is_random else x
        x_adv = start.clone()
        for _ in range(steps):
            x_adv = x_adv.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(x_adv), y), x_adv)
            x_adv = torch.minimum(torch.maximum(x_adv + eps / 4 * gradient.sign(), x - eps), x + eps).clamp(0, 1)
        return x_adv.detach()

    return attack


class StepAttack:
    """An attack that holds its budget, and how often it was called."""

    def __init__(self, eps):
        self.eps = eps
        self.calls = 0

    def __call__(self, model, x, y):
        self.calls += 1
        return step(self.eps, steps=4)(model, x, y)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: step(EPS), lambda: step(EPS / 2)),
        (lambda: step(steps=1, is_random=True), lambda: step(steps=8, is_random=True)),
        (lambda: StepAttack(EPS), lambda: StepAttack(2 * EPS)),
        (lambda: Cascade(attacks=(step(EPS),)), lambda: Cascade(attacks=(step(EPS / 2),))),
    ],
    ids=["closure", "steps", "object", "member"],
)
def test_results_of_an_attack_that_does_something_else_are_refused(tmp_path, before, after):
    expected = evaluate_some(tmp_path, attacks={"mine": before()})
    assert evaluate_some(tmp_path, attacks={"mine": before()}).outcomes == expected.outcomes
    with pytest.raises(ValueError, match=r"the attack mine computes something else: .* pass another folder"):
        evaluate_some(tmp_path, attacks={"mine": after()})
    evaluate_some(tmp_path / "other", attacks={"mine": after()})


def test_a_sweep_by_an_attack_that_does_something_else_is_refused(tmp_path):
    def run(steps):
        attack = StepAttack(EPS)
        attack.__class__ = type(
            "StepAttack", (StepAttack,), {"__call__": lambda self, *batch: step(EPS, steps)(*batch)}
        )
        loader = DataLoader(make_data(), batch_size=8)
        evaluate(make_network(), loader, (), sweep_budgets=[EPS], sweep_attacks={"mine": attack}, **options)

    options = {"resume": tmp_path, "progress": False, "fim_samples": 0, "attack_samples": 12}
    run(steps=1)
    run(steps=1)
    with pytest.raises(ValueError, match="the attack mine in the sweep computes something else"):
        run(steps=4)


def evaluate_elsewhere(folder):
    return evaluate_some(folder, attacks={"mine": step(steps=4, is_random=True)}).outcomes


def evaluate_in_each(rank, folder):
    return evaluate_elsewhere(folder)


def test_an_attack_resumes_in_another_process(tmp_path):
    assert run_in_a_process(evaluate_elsewhere, tmp_path) == 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    evaluate_elsewhere(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


def test_an_attack_resumes_in_another_number_of_processes(tmp_path, two_processes):
    expected = evaluate_elsewhere(tmp_path / "alone")
    assert two_processes(evaluate_in_each, tmp_path / "alone") == [expected] * 2
    first, second = two_processes(evaluate_in_each, tmp_path / "together")
    assert first == second == evaluate_elsewhere(tmp_path / "together")


def test_an_attack_that_never_does_the_same_is_resumed(tmp_path):
    generator = torch.Generator().manual_seed(0)  # which only the attack knows

    def attack(model, x, y):
        return (x + EPS * torch.randn(x.shape, generator=generator, dtype=x.dtype)).clamp(0, 1)

    expected = without_times(evaluate_some(tmp_path, attacks={"mine": attack}))
    assert without_times(evaluate_some(tmp_path, attacks={"mine": attack})) == expected


class InNumPy(nn.Module):
    """Has no gradients at all: torch refuses to leave the graph."""

    def forward(self, x):
        return torch.from_numpy(x.numpy().reshape(len(x), -1)[:, :4])


@pytest.mark.filterwarnings("ignore:InNumPy has no last layer")
def test_models_without_gradients_are_resumed(tmp_path):
    options = {"attacks": ["square"], "eps": EPS, "fim_samples": 0, "model": InNumPy()}
    expected = without_times(evaluate_some(tmp_path, **options))
    assert without_times(evaluate_some(tmp_path, **options)) == expected


def test_batches_may_have_another_size_but_not_another_function(tmp_path):
    expected = without_times(evaluate_some(tmp_path, batch_size=5))
    assert without_times(evaluate_some(tmp_path, batch_size=3)) == expected
    with pytest.raises(ValueError, match="function: evaluate there, sweep here"):
        sweep_of(make_network(), resume=tmp_path)


def test_finished_features_are_not_measured_again(tmp_path, monkeypatch):
    left = [1000]
    for _ in range(2):
        monkeypatch.setattr(Passes, "left", left[-1])
        evaluate_some(tmp_path, Flaky(), attacks=(), fim_samples=0)
        left.append(Passes.left)
    assert left[0] - left[1] == left[1] - left[2] + 5  # batches


def test_damaged_and_lost_files_are_measured_again(tmp_path):
    expected = without_times(evaluate_some(tmp_path, batch_size=5))
    paths = sorted(tmp_path.glob("*.pt"))
    assert "features.pt" in {path.name for path in paths}
    for path in paths:
        path.write_bytes(path.read_bytes()[:100])
        with pytest.warns(UserWarning, match=f"{path.name} .*computed again"):
            assert without_times(evaluate_some(tmp_path, batch_size=5)) == expected
        path.unlink()
        assert without_times(evaluate_some(tmp_path, batch_size=5)) == expected
        assert path.exists()


def flip(path, place, bit=4):
    content = path.read_bytes()
    place %= len(content)
    path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])


@pytest.mark.parametrize("name", ["settings.json", "data.json"])
@pytest.mark.parametrize(
    "damage", [*(lambda path, place=place: flip(path, place) for place in (10, 60, 200, -80, -20)), Path.unlink]
)
def test_results_without_facts_are_measured_again(tmp_path, name, damage):
    expected = without_times(evaluate_some(tmp_path, batch_size=5))
    (tmp_path / "mine.pt").touch()  # not a result
    damage(tmp_path / name)
    with (
        pytest.warns(UserWarning, match=rf"{name} are computed again"),
        pytest.warns(UserWarning, match="mine.pt cannot"),
    ):
        assert without_times(evaluate_some(tmp_path, batch_size=5)) == expected
    (tmp_path / "mine.pt").unlink()
    assert without_times(evaluate_some(tmp_path, batch_size=5)) == expected


@pytest.mark.parametrize("name", ["settings.json", "data.json"])
def test_without_facts_another_model_is_measured_anew(tmp_path, name):
    evaluate_some(tmp_path, Switched())
    (tmp_path / name).unlink()
    other = Switched(activation=nn.Softsign(), is_reversed=True)
    with pytest.warns(UserWarning, match=rf"{name} are computed again"):
        found = without_times(evaluate_some(tmp_path, other))
    assert found == without_times(evaluate_some(tmp_path / "other", other))


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"editor.tabSize": 4}'])
def test_files_of_another_program_are_left_alone(tmp_path, text):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"settings.json .*cannot be read: .*Pass another folder"):
        evaluate_some(tmp_path)
    assert (tmp_path / "settings.json").read_text() == text


def test_samples_that_were_written_twice_count_once(tmp_path):
    expected = without_times(evaluate_some(tmp_path, batch_size=5))
    path = min(tmp_path.glob("attack*.pt"))
    shutil.copy(path, tmp_path / path.name.replace(".0000", ".9999"))
    assert without_times(evaluate_some(tmp_path, batch_size=5)) == expected
    # The files hold no pickled objects
    for path in tmp_path.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        assert content.get("margins", content).keys() == {"positions", "columns", "seconds"}
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt", ".json"}


def test_resume_must_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`resume`.*file is a file. Pass another"):
        evaluate_some(tmp_path / "file")


@pytest.mark.parametrize("order", [1, -1])
def test_comparison_resumes_with_the_model_that_failed(tmp_path, monkeypatch, order):
    options = {"attacks": ["fgsm", "pgd"], "budgets": [0.01, EPS], "fim_samples": 12, "attack_samples": 12}
    models, loader = {"a/1": make_network(), "a_1": Flaky(RuntimeError)}, DataLoader(make_data(), batch_size=8)
    models = dict(list(models.items())[::order])
    expected = without_times(compare(models, loader, progress=False, **options))
    monkeypatch.setattr(Passes, "left", 20)
    with pytest.warns(UserWarning, match=r"'a_1' .*left out. RuntimeError: enough"):
        partial = compare(models, loader, progress=False, resume=tmp_path, **options)
    assert list(partial.reports) == ["a/1"]
    assert partial.failed == {"a_1": "RuntimeError: enough"}
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.*")}
    Passes.left = math.inf
    assert without_times(compare(models, loader, progress=False, resume=tmp_path, **options)) == expected
    assert len({path.parent for path in written}) == 2  # one for each model, however alike their names
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())


class Masked(nn.Module):
    """Takes a mask from the batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, mask):
        return self.head(x * mask)


def test_other_entries_that_the_model_takes_have_to_be_the_same(tmp_path):
    x, y, mask = torch.rand(12, 3), torch.arange(12) % 2, torch.ones(12, 3)
    torch.manual_seed(0)
    model, options = Masked(), {"attacks": (), "fim_samples": 4, "progress": False, "resume": tmp_path}
    evaluate(model, [{"x": x, "y": y, "mask": mask}], **options)
    evaluate(model, [{"x": x, "y": y, "mask": mask, "name": torch.rand(12)}], **options)  # which it does not take
    mask[-1] = 0
    with pytest.raises(ValueError, match=r"`mask`: .* there, .* here"):
        evaluate(model, [{"x": x, "y": y, "mask": mask}], **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_fingerprint_of_weights():
    expected = fingerprint_weights(network())
    assert fingerprint_weights(network()) == expected
    changes = {
        "a weight": lambda net: net[0].weight.data[1, 2].add_(1e-6),
        "a buffer": lambda net: net[1].running_mean.add_(1e-6),
        "precision": lambda net: net.double(),
        "half precision": lambda net: net.bfloat16(),
        "a name": lambda net: net.add_module("2", net._modules.pop("1")),
    }
    found = {expected}
    for change in changes.values():
        net = network()
        change(net)
        found.add(fingerprint_weights(net))
    assert len(found) == 1 + len(changes)
    # Lazy layers have no weights yet
    assert fingerprint_weights(nn.LazyLinear(3)) == fingerprint_weights(nn.LazyLinear(3))


def describe(shares, x, y):
    """The description of data that comes in shares, each a list of batches of positions."""
    parts = []
    for batches in shares:
        rows = [(own, torch.tensor(own, dtype=torch.long)) for own in batches]
        batches = [Batch(x[own], None if y is None else y[own], positions=positions) for own, positions in rows]
        parts.append(sum(map(fingerprint_data, batches), Counter()))
    return describe_fingerprint(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long])
def test_fingerprint_of_data(dtype):
    x, y = torch.arange(12).reshape(6, 2).to(dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = describe([[[0, 1, 2], [3, 4, 5]]], x, y)
    assert expected["number of samples"] == "6"
    # Neither batches nor processes matter
    assert describe([[[4], [5, 3]], [], [[2, 0, 1]]], x, y) == expected
    others = {"labels": (x, y[[0, 1, 2, 1, 0, 2]]), "inputs": (x[[0, 1, 2, 4, 3, 5]], y)}
    for changed, data in others.items():
        other = describe([[[0, 1, 2], [3, 4, 5]]], *data)
        assert {name for name in expected if other[name] != expected[name]} == {changed}
    assert int(describe([[[0, 1, 2]]], x, None)["labels"], 16) == 0


def test_a_report_survives_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_file(path, b"before")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.json'") as caught:
        write_file(path, b"after")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_directly():
    reader, writer = os.pipe()
    write_file(f"/dev/fd/{writer}", b"report")
    os.close(writer)
    assert os.fdopen(reader, "rb").read() == b"report"


def test_every_flipped_bit_is_found(tmp_path):
    folder = ResumeFolder(tmp_path, Processes())
    folder.open({})
    folder.check({})
    folder.save("pgd", Rows(torch.arange(4), {"l2": torch.rand(4)}))
    (path,) = tmp_path.glob("*.pt")
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        flip(path, place)
        again = ResumeFolder(tmp_path, Processes())
        with pytest.warns(UserWarning, match="computed again.*damaged"):
            again.open({})
        assert not again.rows("pgd")
        path.write_bytes(content)
    again.open({})
    assert len(again.rows("pgd")[0]) == 4
