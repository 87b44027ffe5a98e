import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_robustness.losses import rdi_loss
from tests.references import rdi


def features_and_labels(seed, num_samples=12, num_classes=3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return features, torch.arange(num_samples) % num_classes


@given(seed=st.integers(0, 2**31), num_classes=st.integers(2, 5))
def test_one_minus_rdi(seed, num_classes):
    features, y = features_and_labels(seed, num_classes=num_classes)
    assert rdi_loss(features, y).item() == pytest.approx(1 - rdi(features, y)["rdi"], rel=1e-9)


@pytest.mark.parametrize("spread", [0.2, 5.0])  # InterD is the larger distance, or IntraD
def test_gradcheck(spread):
    features, y = features_and_labels(0)
    features = spread * features + torch.eye(4, dtype=torch.float64)[y] * 3
    assert torch.autograd.gradcheck(lambda t: rdi_loss(t, y), features.requires_grad_())


def test_one_class_has_no_gradient_but_a_backward_pass():
    features = torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is none of the network's faults
        loss = rdi_loss(features, torch.zeros(3).long())
    loss.backward()
    assert loss.item() == 2.0
    assert not features.grad.any()
