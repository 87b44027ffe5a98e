import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import nn

from lightning_robustness.functional import robustness_difference_index, roby
from lightning_robustness.measurement.feature_meter import FeatureMeter
from lightning_robustness.utilities.head import HeadCall
from tests import references
from tests.measurement.subjects import CPU

pytestmark = [pytest.mark.filterwarnings("ignore:The samples were predicted as")]


def features(num_classes=4, dtype=torch.float32, number=60):
    """Embeddings, logits in clusters, and labels."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (number,), generator=generator)
    logits = 2 * nn.functional.one_hot(y, num_classes) + torch.randn(number, num_classes, generator=generator)
    return torch.randn(number, 6, generator=generator).to(dtype), logits.to(dtype), y


def measure_features(meter, embedding, logits, y, batch_size):
    for rows in torch.arange(len(logits)).split(batch_size):
        meter.update(HeadCall(embedding[rows], logits[rows]), None if y is None else y[rows])
    return meter.compute()


@pytest.mark.parametrize("mode", ["exact", "streaming"])
@pytest.mark.parametrize(("num_classes", "dtype"), [(4, torch.float32), (4, torch.float64), (2, torch.float32)])
@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_features(mode, num_classes, dtype, batch_size):
    embedding, logits, y = features(num_classes, dtype)
    preds = logits.argmax(dim=1)
    meter = FeatureMeter(num_classes, mode, CPU)
    values = measure_features(meter, embedding, logits, y, batch_size)
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
    assert meter.distances["rdi"].tolist() == pytest.approx(rdi["distances"], abs=1e-6)
    assert meter.distances["roby"].tolist() == pytest.approx(references.rdi(embedding, preds)["distances"], abs=1e-6)


def test_features_without_labels():
    embedding, logits, _ = features()
    values = measure_features(FeatureMeter(4, "exact", CPU), embedding, logits, None, 7)
    assert "acc" not in values
    assert values["rdi"] == pytest.approx(references.rdi(logits, logits.argmax(dim=1))["rdi"], abs=1e-6)


def test_without_embeddings():
    _, logits, y = features()
    meter = FeatureMeter(4, "exact", CPU, has_embedding=False)
    meter.update(HeadCall(None, logits), y)
    values = meter.compute()
    assert values.keys() == {"rdi", "rdi_intra", "rdi_inter", "samples", "acc"}
    assert values["rdi"] == pytest.approx(references.rdi(logits, logits.argmax(dim=1))["rdi"], abs=1e-6)
    assert meter.distances.keys() == {"rdi"}


@pytest.mark.parametrize(("num_predicted", "is_there"), [(1, True), (2, False), (3, True)])
def test_roby_is_left_out_where_two_classes_are_predicted(num_predicted, is_there):
    """Its normalised value would be 0, the best one, whatever the network."""
    embedding, logits, _ = features()
    logits[:, num_predicted:] = -100
    values = measure_features(FeatureMeter(4, "exact", CPU), embedding, logits, None, 60)
    assert ("roby" in values) is ("fsa" in values) is ("fsd" in values) is is_there
    assert "rdi_embedding" in values


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_have_a_class(label):
    embedding, logits, y = features()
    y[3] = label
    with pytest.raises(ValueError, match="from 0 to 3, for 4 classes"):
        measure_features(FeatureMeter(4, "exact", CPU), embedding, logits, y, 60)


def test_batches_without_samples_change_nothing():
    embedding, logits, y = features()
    expected = measure_features(FeatureMeter(4, "exact", CPU), embedding, logits, y, 60)
    meter = FeatureMeter(4, "exact", CPU)
    meter.update(HeadCall(embedding[:0], logits[:0]), y[:0])
    assert measure_features(meter, embedding, logits, y, 60) == expected


def measure_features_of_share(rank, sizes, mode, dtype):
    meter = FeatureMeter(4, mode, CPU)
    share = [value.split(sizes)[rank] for value in features(dtype=dtype)]
    values = measure_features(meter, *share, batch_size=7) if sizes[rank] else meter.compute()
    return values, meter.distances


SIZES = [[20, 40], [60, 0], [0, 60]]


@pytest.mark.filterwarnings("ignore:.*called before the ``update`` method")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("mode", "dtype"), [("exact", torch.float32), ("exact", torch.float64), ("streaming", torch.float32)]
)
def test_features_of_two_processes_equal_those_of_one(two_processes, sizes, mode, dtype):
    meter = FeatureMeter(4, mode, CPU)
    expected = measure_features(meter, *features(dtype=dtype), batch_size=60)
    for values, distances in two_processes(measure_features_of_share, sizes, mode, dtype):
        assert values == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(distances, meter.distances)
