import pytest
import torch
from torch import nn

from lightning_robustness.functional._fisher_estimators import FisherOperator
from lightning_robustness.functional._jacobian import InputJacobian
from tests.functional import dense
from tests.functional.models import MODELS, UNBOUNDED


def factor(model, x):
    """The matrix L J with the rows sqrt(p_k) grad log p_k, shape ``(N, K, n)``."""
    p = model(x).detach().softmax(dim=1).unsqueeze(2)
    return p.sqrt() * dense.jacobian(lambda t: model(t).log_softmax(dim=1), x)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["convolution", "attention"])
def test_products_equal_the_dense_matrix(name, create_graph):
    model, shape = MODELS[name]()
    model, x = model.double().eval(), torch.randn(3, *shape).double()
    operator = FisherOperator(InputJacobian(model, x, UNBOUNDED, create_graph=create_graph, twice=True))
    Q, c = factor(model, x), torch.randn(3, 5, 1).double()  # noqa: N806
    torch.testing.assert_close(operator.gram().detach(), Q @ Q.mT)
    torch.testing.assert_close(operator.transposed_product(c.squeeze(2)).detach(), (Q.mT @ c).squeeze(2))
    torch.testing.assert_close(operator.gram_product(c.squeeze(2)), (Q @ Q.mT @ c).squeeze(2))
    assert operator.gram().requires_grad == operator.transposed_product(c.squeeze(2)).requires_grad == create_graph
    assert not operator.gram_product(c.squeeze(2)).requires_grad


@pytest.mark.parametrize("margin", [0.0, 5.0, 50.0])
def test_start_is_the_gradient_of_the_predicted_class(margin):
    model = nn.Linear(6, 4).double()
    model.bias.data[2] = margin
    x = torch.randn(3, 6).double()
    operator = FisherOperator(InputJacobian(model, x, UNBOUNDED))
    c = operator.start()
    torch.testing.assert_close(c.norm(dim=1), torch.ones(3).double())
    # The gradient of log p of class c is the sum of p_k (W_c - W_k) over the other classes, which does not cancel
    p, preds = model(x).softmax(dim=1).detach(), model(x).argmax(dim=1)
    weight = model.weight.detach()
    gradient = (p.unsqueeze(2) * (weight[preds].unsqueeze(1) - weight)).sum(dim=1)
    directions = (nn.functional.normalize(v, eps=1e-300) for v in (operator.transposed_product(c), gradient))
    torch.testing.assert_close(*directions)


def test_probabilities_that_underflow():
    operator = FisherOperator(InputJacobian(lambda x: x, torch.tensor([[1e4, 0.0]]), UNBOUNDED, twice=True))
    for value in (operator.gram(), operator.start(), operator.gram_product(torch.ones(1, 2).double())):
        assert not value.any()
