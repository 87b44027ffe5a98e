import torch

from lightning_robustness.attacks._steps import l2_norm, nonzero


def test_l2_norm_broadcasts():
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [6.0, 8.0]]])
    assert l2_norm(x).tolist() == [[[5.0]], [[10.0]]]
    assert l2_norm(x, 2).tolist() == [[[5.0], [0.0]], [[0.0], [10.0]]]


def test_nonzero_can_be_divided_by():
    values = torch.tensor([0.0, 2.0])
    assert (values / nonzero(values)).tolist() == [0.0, 1.0]
