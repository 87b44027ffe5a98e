import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from lightning_robustness._measurement.inspection import inspect
from lightning_robustness._measurement.meters import measure
from lightning_robustness._model.batch import Batch
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import PGD
from lightning_robustness.evaluation import evaluate
from lightning_robustness.evaluation.decision_space import DecisionSpaceMeter, project
from tests._measurement.subjects import samples, subject


def embedding_model():
    """A model whose embedding is its input."""
    return nn.Sequential(nn.Identity(), nn.Linear(5, 3))


def still(model, x, y):
    return x


def embed_and_project(model, x, y, attack, name, method="pca", **options):
    """Embed batch by batch and project all together, as ``evaluate`` does."""
    measured, _ = inspect(subject(model, **options), Batch(x, y), needs_gradients=True)
    meter = DecisionSpaceMeter(len(x), name, attack, method)
    return project(meter, measure(meter, measured, samples(x, y), Processes()), measured)


def test_pca_equals_that_of_scikit_learn():
    model, x, y = embedding_model(), torch.rand(30, 5), torch.arange(30) % 3
    space = embed_and_project(model, x, y, still, "none", batch_size=7)
    assert space.method == "PCA"
    assert space.attack == "none"
    assert space.labels == y.tolist()
    torch.testing.assert_close(torch.tensor(space.adversarial), torch.tensor(space.clean))
    expected = torch.tensor(PCA(2).fit_transform(torch.cat([x, x]).numpy()))[:30]
    torch.testing.assert_close(torch.tensor(space.clean).abs(), expected.abs(), atol=1e-5, rtol=0)


def test_adversarial_samples_are_projected_with_the_clean_ones():
    model, x = embedding_model(), torch.rand(20, 5)
    y = model(x).argmax(1)
    space = embed_and_project(model, x, y, PGD(eps=0.3, start="clean"), "pgd")
    assert space.attack == "pgd, $\\epsilon$ = 0.3"
    x_adv = PGD(eps=0.3, start="clean")(model, x, y)
    expected = torch.tensor(PCA(2).fit_transform(torch.cat([x, x_adv]).numpy()))
    torch.testing.assert_close(torch.tensor(space.adversarial).abs(), expected[20:].abs(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_one_dimensional_embeddings_get_a_second_dimension(method):
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 2))
    x = torch.tensor([[0.0], [0.5], [1.0]])
    space = embed_and_project(model, x, torch.zeros(3, dtype=torch.long), still, "none", method)
    assert torch.tensor(space.clean).shape == (3, 2)
    if method == "pca":
        torch.testing.assert_close(torch.tensor(space.clean), torch.tensor([[-0.5, 0.0], [0.0, 0.0], [0.5, 0.0]]))


def test_tsne_keeps_neighbours_together():
    torch.manual_seed(0)
    model, y = embedding_model(), torch.arange(20) % 2
    x = 0.05 * torch.rand(20, 5) + 0.9 * y.unsqueeze(1)
    space = embed_and_project(model, x, y, still, "none", method="tsne")
    assert space.method == "t-SNE"
    points = torch.tensor(space.clean)
    distances = torch.cdist(points, points) + 1e9 * torch.eye(20)
    assert (y[distances.argmin(dim=1)] == y).all()


def test_models_without_a_head_have_their_logits_embedded():
    class Plain(nn.Module):
        def forward(self, x):
            return x[:, :3] - x[:, 2:]

    x = torch.rand(12, 5)
    loader, options = [(x, torch.arange(12) % 3)], {"fim_samples": 0, "num_examples": 0, "progress": False}
    with pytest.warns(UserWarning, match="no last layer to take embeddings from"):
        report = evaluate(Plain(), loader, (), 1e-6, decision_space="pca", **options)
    expected = torch.tensor(PCA(2).fit_transform(torch.cat([Plain()(x)] * 2).numpy()))[:12]
    found = torch.tensor(report.decision_space.clean)
    torch.testing.assert_close(found.abs(), expected.abs(), atol=1e-4, rtol=0)
