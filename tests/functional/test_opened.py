"""What all functions check that measure each sample by itself, and losses from them."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_robustness import InputSpace, functional, losses

METHODS = ("auto", "exact", "lanczos", "power", "rayleigh", "blackbox")
FUNCTIONS = {
    "boundary_distance": functional.boundary_distance,
    "clever_score": partial(functional.clever_score, radius=0.1, num_batches=2, points_per_batch=3),
    "lipschitz_constant": functional.lipschitz_constant,
    **{method: partial(functional.fisher_spectral_norm, method=method) for method in METHODS},
}
LOSSES = {
    "boundary_penalty": partial(losses.boundary_penalty, y=torch.tensor([0, 1, 0])),
    "fisher_penalty": losses.fisher_penalty,
}
UNBOUNDED = InputSpace(low=None, high=None)


@pytest.mark.parametrize("name", FUNCTIONS | LOSSES)
def test_samples_that_depend_on_each_other(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="treats each sample by itself"):
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
