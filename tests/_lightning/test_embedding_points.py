import torch

from lightning_robustness._lightning.board import EmbeddingPoints
from lightning_robustness._measurement.meters.attack import Examples
from lightning_robustness._measurement.subject import Samples

SAMPLES = Samples(torch.rand(3, 2), torch.tensor([0, 1, 2]), torch.arange(3))
X, X_ADV, Y = torch.rand(2, 2), torch.rand(2, 2), torch.tensor([1, 2])
PAIR = Examples(X, X_ADV, Y, Y, Y + 1)


def test_lines_lead_from_clean_to_adversarial_inputs():
    one = Examples(*(part[:1] for part in PAIR))
    (x, y, positions, _), kinds, following = EmbeddingPoints.of(SAMPLES, {"pgd": PAIR, "cw": one})
    assert torch.equal(x, torch.cat([SAMPLES.x, X, X_ADV, X[:1], X_ADV[:1]]))
    assert y.tolist() == [0, 1, 2, 1, 2, 1, 2, 1, 1]
    assert kinds == [*["clean"] * 5, "pgd", "pgd", "clean", "cw"]
    assert following == [None, None, None, 5, 6, None, None, 8, None]
    assert len(positions) == 9


def test_other_inputs_stay_alone():
    text = Samples([torch.zeros(2), torch.zeros(3)], Y, torch.arange(2))
    masked = SAMPLES._replace(extras=[{"mask": torch.ones(1)}] * 3)
    for samples in (text, SAMPLES._replace(y=None), masked):
        points = EmbeddingPoints.of(samples, {"pgd": PAIR})
        assert points.samples is samples
        assert points.kinds == ["clean"] * len(samples.x)
        assert points.following == [None] * len(samples.x)
    other = Examples(X[:, :1], X_ADV[:, :1], Y, Y, Y)
    assert EmbeddingPoints.of(SAMPLES, {"pgd": other}).kinds == ["clean"] * 3
