"""What all functions have in common that measure each sample by itself, and losses from them."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace, functional, losses
from tests._isolation.test_sandbox import assert_same, snapshot, trained_once
from tests.functional.models import UNBOUNDED

METHODS = ("auto", "exact", "lanczos", "power", "rayleigh", "blackbox")
NORMS = {
    "boundary_distance": ("linf", "l2"),
    "clever_score": ("l1", "l2", "linf"),
    "lipschitz_constant": ("classes", "spectral"),
}
FUNCTIONS = {
    f"{name} {norm}": partial(getattr(functional, name), norm=norm) for name, norms in NORMS.items() for norm in norms
}
FUNCTIONS |= {method: partial(functional.fisher_spectral_norm, method=method, max_steps=1000) for method in METHODS}
FUNCTIONS = {
    name: partial(function, radius=0.1, num_batches=2, points_per_batch=3) if "clever" in name else function
    for name, function in FUNCTIONS.items()
}
LOSSES = {
    "boundary_penalty": partial(losses.boundary_penalty, y=torch.tensor([0, 1, 0]), margin=1.0),
    "spectral_penalty": losses.fisher_penalty,
    "trace_penalty": partial(losses.fisher_penalty, kind="trace"),
    "spectral_penalty_by_products": partial(losses.fisher_penalty, num_products=100),
}


def network():
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)
    return nn.Sequential(*layers).double().eval()


def inputs(number):
    return torch.rand(number, 2, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS | LOSSES)
def test_samples_that_depend_on_each_other(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"treats each sample by itself.*BatchNorm"):
        (FUNCTIONS | LOSSES)[name](model, x=torch.rand(3, 3))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_logits_that_are_not_finite(name):
    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [1.0, -2.0]])
    with pytest.raises(ValueError, match="2 of 3 samples have NaN or infinite ones"):
        FUNCTIONS[name](lambda x: x.log(), x=x, input_space=UNBOUNDED)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_samples(name, dtype):
    values = FUNCTIONS[name](nn.Linear(3, 2).to(dtype), x=torch.zeros(0, 3, dtype=dtype))
    assert (values.shape, values.dtype) == ((0,), dtype)


@pytest.mark.parametrize("name", FUNCTIONS | LOSSES)
def test_values_are_in_unnormalised_units(name):
    function, model, pixels = (FUNCTIONS | LOSSES)[name], network(), inputs(3)
    space = InputSpace(mean=(0.5, 0.2), std=(0.25, 2.0))
    found = function(model, x=space.normalize(pixels), input_space=space)
    torch.testing.assert_close(found, function(lambda x: model(space.normalize(x)), x=pixels), rtol=1e-6, atol=0)
    assert not torch.allclose(found, function(model, x=space.normalize(pixels), input_space=UNBOUNDED), rtol=0.1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_do_not_depend_on_batches_and_chunks(name):
    function, model, x = FUNCTIONS[name], network(), inputs(7)
    whole = function(model, x=x)
    single = torch.cat([function(model, x=sample) for sample in x.split(1)])
    torch.testing.assert_close(single, whole, rtol=1e-9, atol=0)
    for chunk_size in (1, 3, 1000) if "lipschitz" not in name else ():
        torch.testing.assert_close(function(model, x=x, chunk_size=chunk_size), whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "blackbox"])
def test_precision(name, dtype):
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.rand(5, 6)
    expected = FUNCTIONS[name](model.double(), x=x.double())
    result = FUNCTIONS[name](model.to(dtype), x=x.to(dtype))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0.05, atol=2e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_everything_is_as_before(name):
    model, x, function = trained_once(), torch.rand(6, 4), FUNCTIONS[name]
    before = snapshot(model)
    expected = function(model, x=x)
    assert_same(before, snapshot(model))
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert torch.equal(function(model, x=x.clone()), expected)
    model.requires_grad_(False).eval()
    assert torch.equal(function(model, x=x), expected)
