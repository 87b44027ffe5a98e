import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_robustness._lightning.devices import convert
from lightning_robustness.attacks import PGD


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_gradients_pass_through_the_precision(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)), torch.rand(5, 1, 4, 4)
    y = model(x).argmax(1)
    (expected,) = torch.autograd.grad(model(x.requires_grad_()).logsumexp(1).sum(), x)
    weights = [parameter.detach().double() for parameter in model.parameters()]
    convert(model, fabric, precision)
    dtype = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    for parameter, before in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach().double(), before, atol=2e-3, rtol=0)
    logits = model(x)
    assert logits.dtype == (torch.float64 if precision == "64-true" else torch.bfloat16)
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), x)
    assert gradient.dtype == torch.float32
    tolerance = 1e-6 if precision == "64-true" else 0.02
    torch.testing.assert_close(gradient, expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    # Perturbations are in single precision: more than bfloat16 can tell apart
    x_adv = PGD(eps=0.01, steps=3)(model, x.detach(), y)
    assert x_adv.dtype == torch.float32
    assert (x_adv - x).abs().max().item() == pytest.approx(0.01, rel=1e-4)


def test_half_precision_has_a_warning():
    fabric = Fabric(accelerator="cpu", devices=1, precision="16-true")
    with pytest.warns(UserWarning, match="'16-true', small gradients"):
        convert(nn.Linear(2, 2), fabric, "16-true")
