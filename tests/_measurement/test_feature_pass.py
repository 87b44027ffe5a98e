import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import accuracy_score
from torch import nn

from lightning_robustness._measurement.feature_pass import CONSTANT, LOGITS, FeaturePass, doubt_logits
from lightning_robustness._model.batch import Batch
from lightning_robustness._model.head import HeadCall
from lightning_robustness._processes import Processes
from lightning_robustness.functional import robustness_difference_index, roby
from tests import references
from tests._measurement.subjects import CPU


def features(num_classes=4, dtype=torch.float32, number=60):
    """Embeddings, logits in clusters, and labels."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (number,), generator=generator)
    logits = 2 * nn.functional.one_hot(y, num_classes) + torch.randn(number, num_classes, generator=generator)
    return torch.randn(number, 6, generator=generator).to(dtype), logits.to(dtype), y


def add(features, embedding, logits, y, positions):
    batch = Batch(torch.zeros(len(logits), 1), y, positions=positions)
    features.add(batch, HeadCall(embedding, logits))


def measure_features(features, embedding, logits, y, batch_size, first=0):
    for rows in torch.arange(len(logits)).split(batch_size):
        parts = (None if part is None else part[rows] for part in (embedding, logits, y))
        add(features, *parts, first + rows)
    return features.compute(Processes())


@pytest.mark.parametrize("storage", ["exact", "streaming"])
@pytest.mark.parametrize(("num_classes", "dtype"), [(4, torch.float32), (4, torch.float64), (2, torch.float32)])
@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_features(storage, num_classes, dtype, batch_size):
    embedding, logits, y = features(num_classes, dtype)
    preds = logits.argmax(dim=1)
    found = measure_features(FeaturePass(num_classes, storage, CPU), embedding, logits, y, batch_size)
    values = found.values
    rdi, overlap = references.rdi(logits, preds), references.roby(embedding, preds)
    expected = {
        "rdi": rdi["rdi"],
        "rdi_intra": rdi["intra"],
        "rdi_inter": rdi["inter"],
        "rdi_embedding": references.rdi(embedding, preds)["rdi"],
        **{name: overlap[name] for name in ("roby", "fsa", "fsd")},
        "samples": 60,
        "acc": accuracy_score(y, preds),
    }
    if num_classes == 2:
        expected = {name: value for name, value in expected.items() if name not in ("roby", "fsa", "fsd")}
    assert values == pytest.approx(expected, abs=1e-6)
    assert values["rdi"] == pytest.approx(robustness_difference_index(logits, preds).item(), abs=1e-6)
    if num_classes > 2:
        assert values["roby"] == pytest.approx(roby(embedding, preds).item(), abs=1e-6)
    assert 0 < values["acc"] < 1
    assert found.distances["rdi"].tolist() == pytest.approx(rdi["distances"], abs=1e-6)
    assert found.distances["roby"].tolist() == pytest.approx(references.rdi(embedding, preds)["distances"], abs=1e-6)


def test_features_without_labels():
    embedding, logits, _ = features()
    found = measure_features(FeaturePass(4, "exact", CPU), embedding, logits, None, 7)
    values = found.values
    assert "acc" not in values
    assert len(found.margins) == 0
    assert values["rdi"] == pytest.approx(references.rdi(logits, logits.argmax(dim=1))["rdi"], abs=1e-6)


def test_without_embeddings():
    _, logits, y = features()
    found = measure_features(FeaturePass(4, "exact", CPU, has_embedding=False), None, logits, y, 60)
    values = found.values
    assert values.keys() == {"rdi", "rdi_intra", "rdi_inter", "samples", "acc"}
    assert values["rdi"] == pytest.approx(references.rdi(logits, logits.argmax(dim=1))["rdi"], abs=1e-6)
    assert found.distances.keys() == {"rdi"}


OUTPUTS = {
    "logits": (lambda z: z, "logits"),
    "tiny logits": (lambda z: 1e-7 * z, "logits"),
    "a single sample": (lambda z: z[:1], "logits"),
    "log-probabilities": (lambda z: z.log_softmax(dim=1), "log-probabilities"),
    "a constant": (lambda z: z[:1].expand_as(z), "constant"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("change", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_kinds_of_outputs(change, expected, dtype):
    _, logits, _ = features(100, dtype)
    found = measure_features(FeaturePass(100, "exact", CPU, has_embedding=False), None, change(logits), None, 7)
    assert found.outputs == expected


@pytest.mark.parametrize(("num_predicted", "is_there"), [(1, True), (2, False), (3, True)])
def test_roby_is_left_out_where_two_classes_are_predicted(num_predicted, is_there):
    """Its normalised value would be 0, the best one, whatever the network."""
    embedding, logits, _ = features()
    logits[:, num_predicted:] = -100
    values = measure_features(FeaturePass(4, "exact", CPU), embedding, logits, None, 60).values
    assert ("roby" in values) is ("fsa" in values) is ("fsd" in values) is is_there
    assert "rdi_embedding" in values


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_have_a_class(label):
    embedding, logits, y = features()
    y[3] = label
    with pytest.raises(ValueError, match="from 0 to 3, for 4 classes, but got values from"):
        measure_features(FeaturePass(4, "exact", CPU), embedding, logits, y, 60)


def test_batches_without_samples_change_nothing():
    embedding, logits, y = features()
    expected = measure_features(FeaturePass(4, "exact", CPU), embedding, logits, y, 60)
    features_pass = FeaturePass(4, "exact", CPU)
    add(features_pass, embedding[:0], logits[:0], y[:0], torch.arange(0))
    assert measure_features(features_pass, embedding, logits, y, 60).values == expected.values


def test_margins_are_those_of_probabilities():
    embedding, logits, y = features()
    margins = measure_features(FeaturePass(4, "exact", CPU), embedding, logits, y, 7, first=100).margins
    p = softmax(logits.double().numpy(), axis=1)
    others = np.where(np.arange(4) == y.numpy()[:, None], -1, p).max(axis=1)
    assert margins["margin"].numpy() == pytest.approx(p[np.arange(60), y] - others, abs=1e-6)
    assert margins.positions.tolist() == list(range(100, 160))
    assert torch.equal(margins["margin"] > 0, logits.argmax(dim=1) == y)


def measure_features_of_share(rank, sizes, storage, dtype):
    share = [value.split(sizes)[rank] for value in features(dtype=dtype)]
    return measure_features(FeaturePass(4, storage, CPU), *share, batch_size=7, first=rank * sizes[0])


SIZES = [[20, 40], [60, 0], [0, 60]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("storage", "dtype"), [("exact", torch.float32), ("exact", torch.float64), ("streaming", torch.float32)]
)
def test_features_of_two_processes_equal_those_of_one(two_processes, sizes, storage, dtype):
    expected = measure_features(FeaturePass(4, storage, CPU), *features(dtype=dtype), batch_size=60)
    for found in two_processes(measure_features_of_share, sizes, storage, dtype):
        assert found.values == pytest.approx(expected.values, abs=1e-6)
        torch.testing.assert_close(found.distances, expected.distances)
        assert torch.equal(found.margins.positions, expected.margins.positions)
        assert torch.equal(found.margins["margin"], expected.margins["margin"])


@pytest.mark.parametrize("storage", ["exact", "streaming"])
def test_order_of_the_distance_in_roby(storage):
    torch.manual_seed(0)
    embedding, logits = torch.randn(60, 3, dtype=torch.double), torch.randn(60, 4)
    found = measure_features(FeaturePass(4, storage, CPU, roby_p=np.inf), embedding, logits, None, 60).values
    groups = [embedding.numpy()[logits.argmax(1).numpy() == k] for k in range(4)]
    centres = [group.mean(axis=0) for group in groups]
    spread = [np.abs(group - centre).max(axis=1).mean() for group, centre in zip(groups, centres, strict=True)]
    pairs = [spread[i] + spread[j] - np.abs(centres[i] - centres[j]).max() for i in range(4) for j in range(i)]
    assert found["roby"] == pytest.approx(np.mean((pairs - np.min(pairs)) / np.ptp(pairs)), abs=1e-5)


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_masked_classes_are_no_collapse(value):
    embedding, logits, y = features()
    masked = torch.cat([logits, torch.full((60, 1), value)], dim=1)
    found = measure_features(FeaturePass(5, "exact", CPU), embedding, masked, y, 7)
    assert found.outputs == LOGITS
    constant = masked[:1].expand(60, -1)
    assert measure_features(FeaturePass(5, "exact", CPU), embedding, constant, y, 7).outputs == CONSTANT


def test_a_single_logit_far_from_zero_is_no_collapse():
    embedding, logits, y = features()
    wide = torch.stack([torch.zeros(60), -1e5 * logits.exp()[:, 0]], dim=1)
    found = measure_features(FeaturePass(2, "exact", CPU), embedding, wide, y.clamp(max=1), 7)
    assert found.outputs != CONSTANT


def doubts(logits, y):
    """What a pass over logits of any width says."""
    features = FeaturePass(logits.shape[1], "exact", CPU)
    for rows in torch.arange(len(y)).split(50):
        add(features, None, logits[rows], y[rows], rows)
    return doubt_logits(features.compute(Processes()))


def classes(number, num_classes=10, right=1.0, width=None, shift=0):
    """Logits of that many outputs, with a share of right predictions and the others at random, and labels."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (number,), generator=generator)
    random = torch.randint(width or num_classes, (number,), generator=generator)
    is_right = torch.rand(number, generator=generator) < right
    preds = torch.where(is_right, (y + shift) % num_classes, random)
    return nn.functional.one_hot(preds, width or num_classes).float() + 0.1 * torch.rand(number, 1), y


EMBEDDINGS = {
    "64 features": (classes(500, right=0.0, width=64), "of classes that no label has"),
    "clusters": ((classes(500, width=64, shift=0)[0].roll(20, 1), classes(500)[1]), "500 of 500"),
    "other classes": (classes(500, shift=1), "0 of 500 predictions are right"),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_in_the_place_of_logits_give_a_doubt(name):
    (logits, y), expected = EMBEDDINGS[name]
    assert expected in doubts(logits, y)
    assert "`forward_fn=`" in doubts(logits, y)


def one_class(logits, y):
    return torch.zeros_like(logits).index_fill_(1, torch.tensor([7]), 1.0), y


HONEST = {
    "trained": classes(500),
    "chance": classes(500, right=0.0),
    "label noise": classes(500, right=0.15),
    "1,000 classes, 10 of them": classes(500, right=0.8, width=1000),
    "poor, 1,000 classes, 10 of them": classes(500, right=0.1, width=1000),
    "one class": one_class(*classes(500)),
    "one class without labels": one_class(*classes(500, num_classes=5, width=10)),
    "tiny": classes(8, right=0.0),
    "tiny, 1,000 classes": classes(64, num_classes=1000, right=0.0),
    "two classes": classes(500, num_classes=2, right=0.5, shift=1),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_networks_give_no_doubt(name):
    assert doubts(*HONEST[name]) is None


def test_untrained_networks_give_no_doubt():
    """Inputs in clusters, of which a network that has learned nothing sends each to any class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (400,), generator=generator)
    x = torch.randn(10, 32, generator=generator)[y] + 0.3 * torch.randn(400, 32, generator=generator)
    for seed in range(20):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        assert doubts(network(x).detach(), y) is None
