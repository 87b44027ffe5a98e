"""What is measured on a GPU that rounds to TF32 and by batch size is what is measured on a CPU."""

from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

from lightning_robustness import AdversarialTraining, RobustnessMonitor, is_sandboxed
from lightning_robustness._isolation.sandbox import full_precision, sandbox
from lightning_robustness._measurement.feature_pass import FeaturePass
from lightning_robustness._measurement.inspection import inspect, largest_difference
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness._numbers import decompose, exponents, read_clock
from lightning_robustness.attacks import DDN, PGD, Cascade, MinimumNormCW, Square, masking_signs, run_attack
from lightning_robustness.attacks._classifier import open_classifier
from lightning_robustness.attacks.ddn import Goal, retreat, search
from lightning_robustness.functional import (
    _fisher_estimators,
    boundary_distance,
    fisher_spectral_norm,
    lipschitz_constant,
)
from lightning_robustness.functional._jacobian import InputJacobian
from lightning_robustness.input_space import InputSpace
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from tests._measurement.subjects import samples, subject
from tests.callbacks.modules import Classifier, make_trainer, train_loader, val_loader
from tests.gpu_like import GpuLike, Synchronisations, WithoutFloat64, multiplies_in_tf32, to_tf32

NETWORKS = ["digits_network", "robust_digits_network"]


@pytest.fixture(autouse=True)
def _as_lightning_advises():
    torch.set_float32_matmul_precision("high")  # or "medium", which is bfloat16 on a CPU with AMX
    yield
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def batch(digits):
    return digits[0][:150], digits[1][:150]


# The mode itself


def test_rounding_to_ten_bits():
    values = torch.randn(10000) * 10.0 ** torch.randint(-30, 30, (10000,))
    mantissa, exponent = np.frexp(values.double().numpy())
    expected = np.ldexp(np.round(mantissa * 2**11), exponent - 11)  # one bit of eleven is implicit; half to even
    assert (to_tf32(values).double().numpy() == expected).all()
    assert to_tf32(torch.tensor([torch.inf, 1 + 2**-11, 1 + 3 * 2**-11])).tolist() == [torch.inf, 1.0, 1 + 2**-9]


def layers():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return {
        "linear": (nn.Linear(8, 3), torch.rand(4, 8)),
        "linear of sequences": (nn.Linear(8, 3), torch.rand(4, 5, 8)),
        "convolution": (nn.Conv2d(2, 3, 3), torch.rand(4, 2, 6, 6)),
        "attention": (lambda x: attention(x, x, x)[0], torch.rand(4, 5, 4)),
    }


@pytest.mark.parametrize("name", layers())
def test_forward_backward_and_forward_mode_are_rounded(name):
    layer, x = layers()[name]

    def differentiate():
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        (gradient,) = torch.autograd.grad(y.square().sum(), inputs)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return y.detach(), gradient, tangent.detach()

    with full_precision():
        exact = differentiate()
    with GpuLike(tf32_noise=0.0) as mode:
        rounded = differentiate()
    assert mode.num_rounded > 0
    assert mode.num_precise == 0
    for value, expected in zip(rounded, exact, strict=True):
        error = (value - expected).abs().max() / expected.abs().max()
        assert 1e-6 < error < 1e-2
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    with GpuLike(float32_noise=0.0) as mode:
        precise = differentiate()
    assert mode.num_rounded == 0
    for value, expected in zip(precise, exact, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def test_distances_are_rounded():
    x = 10 + torch.rand(60, 8)
    with GpuLike(tf32_noise=0.0):
        rounded = torch.cdist(x, x)
        torch.set_float32_matmul_precision("highest")
        precise = torch.cdist(x, x)
    torch.set_float32_matmul_precision("high")
    expected = torch.cdist(x.double(), x.double(), compute_mode="donot_use_mm_for_euclid_dist").float()
    assert (precise - expected).abs().max() < 0.05
    assert (rounded - expected).abs().max() > 0.5


def test_results_depend_on_the_batch_size_and_on_nothing_else(digits, digits_network):
    x = digits[0][:64]
    with GpuLike(), torch.no_grad():
        first, again, few = digits_network(x), digits_network(x), digits_network(x[:8])
    assert torch.equal(first, again)
    assert 1e-5 < ((first[:8] - few).abs().max() / few.abs().max()).item() < 1e-2


# What is measured


@pytest.mark.parametrize("network", NETWORKS)
def test_no_sign_of_masking_for_an_honest_network(batch, request, network):
    network = request.getfixturevalue(network)
    with GpuLike() as mode:
        results = [run_attack(network, attack, *batch) for attack in (PGD(eps=0.1), Square(eps=0.1, num_queries=50))]
    assert masking_signs(results) == []
    assert mode.num_rounded == 0
    assert mode.num_precise > 0


class Noisy(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x + 1e-3 * torch.randn_like(x))


class Dropping(Noisy):
    def forward(self, x):
        return self.network(nn.functional.dropout(x, 0.01))  # regardless of the mode


@pytest.mark.parametrize("random", [Noisy, Dropping])
def test_a_random_network_has_a_sign(batch, digits_network, random):
    with GpuLike():
        result = run_attack(random(digits_network), PGD(eps=0.1), *batch)
    assert "random_outputs" in [sign.name for sign in masking_signs([result])]


@pytest.mark.parametrize("attack", [DDN(steps=30), MinimumNormCW(steps=20, initial_steps=20)])
@pytest.mark.parametrize("network", NETWORKS)
def test_no_success_is_lost(batch, request, network, attack):
    network = request.getfixturevalue(network)
    cascade = Cascade(attacks=(PGD(eps=0.05, steps=5), attack))  # the second one has a smaller batch than the check
    for tried in (attack, cascade):
        plain = run_attack(network, tried, *batch)
        with GpuLike():
            result = run_attack(network, tried, *batch)
        assert torch.equal(plain.success, plain.eligible)
        assert torch.equal(result.success, plain.success)
        assert result.l2.mean().item() == pytest.approx(plain.l2.mean().item(), rel=0.02)


def test_bisection_ends_where_a_check_of_the_whole_batch_confirms(batch, digits_network):
    # So much noise that the boundary of a batch of another size is another one
    with GpuLike(float32_noise=1e-3), open_classifier(digits_network, *batch) as (model, x, y):
        goal = Goal(model, targeted=False)
        found, _ = search(goal, x, y, 6, 0.35)
        assert found.succeeded.all()
        is_missing = torch.arange(len(x)) < 40
        found = found._replace(
            x_adv=torch.where(is_missing.view(-1, 1, 1, 1), x, found.x_adv),
            distance=found.distance.masked_fill(is_missing, torch.inf),
        )
        nearer = retreat(goal, x, y, found).x_adv
        assert torch.equal(nearer[:40], x[:40])
        assert (model(nearer)[40:].argmax(1) != y[40:]).all()
        assert (model(nearer[40:]).argmax(1) != y[40:]).float().mean() < 1  # or the noise would be too small to tell
        assert ((nearer - x).flatten(1).norm(dim=1) < found.distance)[40:].any()


@pytest.mark.parametrize(("num_classes", "rel"), [(10, 1e-5), (300, 1e-4)])
def test_rdi_and_roby(num_classes, rel):
    generator = torch.Generator().manual_seed(0)
    preds = torch.arange(3000) % num_classes
    centers = torch.randn(num_classes, 32, generator=generator)
    features = 100 + centers[preds] + 0.1 * torch.randn(3000, 32, generator=generator)
    values = []
    for mode, dtype in ((nullcontext(), torch.float64), (GpuLike(), torch.float32)):
        with mode:
            metrics = RobustnessDifferenceIndex(num_classes), ROBY(num_classes)
            for metric in metrics:
                metric.update(features.to(dtype), preds)
            values.append([metric.compute().item() for metric in metrics])
    assert values[1] == pytest.approx(values[0], rel=rel)


@pytest.mark.parametrize("method", ["exact", "lanczos"])
def test_fisher_information(batch, digits_network, method):
    values = []
    for mode in (nullcontext(), GpuLike()):
        with mode:
            values.append(fisher_spectral_norm(digits_network, batch[0][:32], method=method))
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-9)


def test_boundary_distance(batch, digits_network):
    plain = boundary_distance(digits_network, batch[0])
    with GpuLike():
        result = boundary_distance(digits_network, batch[0])
    torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["_product_by_double_backward", "_product_by_forward_mode"])
def test_products_with_the_jacobian_pass_their_own_check(batch, digits_network, way):
    with GpuLike(), sandbox(digits_network, batch[0][:16]) as (x,):
        jacobian = InputJacobian(digits_network, x, InputSpace(), twice=True)
        jacobian._ways = [getattr(jacobian, way)]
        u = torch.randn(16, 10)
        product = jacobian.gram_product(u)
    with sandbox(digits_network, batch[0][:16]) as (x,):
        rows = InputJacobian(digits_network, x, InputSpace()).rows().double()
    expected = (rows @ (rows.mT @ u.double().unsqueeze(2))).squeeze(2)
    assert ((product - expected).norm(dim=1) <= 1e-4 * expected.norm(dim=1)).all()


# In training


def fit(path, *callbacks):
    L.seed_everything(1, verbose=False)
    module = Classifier()
    with GpuLike() as mode:
        trainer = make_trainer(path, *callbacks, max_epochs=2)
        trainer.fit(module, train_loader(), val_loader())
    return module, trainer, mode


def test_the_monitor_raises_no_alarm_and_changes_nothing(tmp_path):
    monitor = RobustnessMonitor(
        attacks=("pgd", "square"),
        eps=0.1,
        attack_every_n_epochs=1,
        fim_samples=32,
        attack_samples=64,
        log_figures=False,
    )
    plain, *_ = fit(tmp_path)
    watched, trainer, mode = fit(tmp_path, monitor)
    assert trainer.callback_metrics["robustness/masking"] == 0
    assert mode.num_rounded > 0  # training, and the module's own validation
    assert mode.num_precise > 0  # what is measured
    for expected, value in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


def test_adversarial_training_attacks_in_the_precision_of_training(tmp_path):
    module, passes = Classifier(), []

    def record(_, args):
        if is_sandboxed() and len(args[0]) > 3:  # where the logits are is found out on three samples, exactly
            passes.append((torch.is_grad_enabled(), multiplies_in_tf32()))

    module.net.register_forward_pre_hook(record)
    trainer = make_trainer(tmp_path, AdversarialTraining(eps=0.1, steps=2), max_epochs=1)
    trainer.fit(module, train_loader(), val_loader())
    assert (True, True) in passes
    assert (True, False) not in passes
    assert (False, False) in passes  # the accuracy that it reports


# Waiting for the device


def test_what_waits_is_counted_with_its_place():
    mask, x = torch.tensor([True, False]), torch.rand(2, 3)
    with Synchronisations() as counter:
        mask.any().item(), mask.nonzero(), x[mask], x.tolist(), x.cpu(), bool(mask.all())
        assert counter.total == 0  # not by the package
        run_attack(nn.Linear(3, 2), PGD(eps=0.1, steps=1), x, torch.tensor([0, 1]))
    assert any(place.startswith("attacks/pgd.py:") for place in counter.places)
    for act in (mask.any().item, mask.nonzero, lambda: x[mask], x.tolist, x.cpu, lambda: bool(mask.all())):
        with Synchronisations() as counter:
            counter.note = lambda counter=counter: counter.places.update(["here"])
            act()
        assert counter.total == 1


@pytest.mark.parametrize("all_steps", [False, True])
def test_pgd_waits_once_a_step(batch, digits_network, all_steps):
    totals = []
    for steps in (8, 15):  # gradients that are looked at are the first, second, fourth and eighth
        with Synchronisations() as counter:
            run_attack(digits_network, PGD(eps=0.01, steps=steps, all_steps=all_steps), *batch)
        totals.append(counter.total)
    assert totals[1] - totals[0] == (0 if all_steps else 7)


@pytest.mark.parametrize("all_steps", [False, True])
def test_square_waits_once_a_query(batch, digits_network, all_steps):
    totals = []
    for num_queries in (10, 40):
        with Synchronisations() as counter:
            run_attack(digits_network, Square(eps=0.1, num_queries=num_queries, all_steps=all_steps), *batch)
        totals.append(counter.total)
    assert totals[1] - totals[0] == (0 if all_steps else 30)


# Where devices lack something


@pytest.mark.parametrize("size", [1, 3, 200])
def test_decomposition(size):
    a = torch.randn(4, size, size)
    matrices = a @ a.mT
    matrices[1] = 0
    matrices[2, 0, 0] = torch.nan
    values, vectors = decompose(torch.linalg.eigh, matrices)
    expected = torch.from_numpy(np.linalg.eigvalsh(matrices[[0, 1, 3]].double().numpy()))
    assert torch.equal(decompose(torch.linalg.eigvalsh, matrices)[:, -1].isnan(), torch.arange(4) == 2)
    torch.testing.assert_close(values[[0, 1, 3]].double(), expected, rtol=1e-4, atol=1e-3)
    assert values[2].isnan().all()
    assert vectors.isfinite().all()
    assert values.dtype == vectors.dtype == torch.float32


def test_small_matrices_are_decomposed_in_float64_on_the_cpu():
    seen = []

    def solver(matrix):
        seen.append((matrix.device.type, matrix.dtype))
        return torch.linalg.eigvalsh(matrix)

    for size in (3, 200):
        decompose(solver, torch.eye(size).expand(2, size, size))
    assert seen == [("cpu", torch.float64), ("cpu", torch.float32)]


class Scaled(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x.float() / 255)


def test_devices_without_float64(monkeypatch, batch, digits_network):
    pixels = Batch((255 * batch[0][:20]).byte(), None, positions=torch.arange(20))
    expected = [lipschitz_constant(digits_network, batch[0][:20], norm=norm) for norm in ("classes", "spectral")]
    features = FeaturePass(10, "exact", torch.device("cpu"))
    features.add(pixels, HeadCall(None, digits_network(pixels.x / 255).detach()))
    with pytest.raises(TypeError), WithoutFloat64():
        batch[0].double()
    monkeypatch.setattr(_fisher_estimators, "accumulation_dtype", lambda device: torch.float32)  # as for that device
    with WithoutFloat64():
        measured, found = inspect(subject(Scaled(digits_network), InputSpace(high=255)), pixels, needs_gradients=True)
        assert largest_difference(measured, samples(pixels.x), features.outputs()) < 1e-5
        values = [lipschitz_constant(digits_network, batch[0][:20], norm=norm) for norm in ("classes", "spectral")]
    assert not found.is_discrete
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


def test_exponents_are_those_of_numpy():
    values = torch.tensor([[0.0, 0.5, 1.0, 3.0, 1e-30]])
    assert exponents(values).tolist() == np.frexp(values.numpy())[1].tolist()


def test_the_clock_waits_for_the_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    assert read_clock(torch.device("cpu")) <= read_clock(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]
