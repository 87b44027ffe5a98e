"""How far the streaming mode of RDI and ROBY is from the formulas, and in how much memory."""

import math
import warnings

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection

from lightning_robustness.functional import robustness_difference_index, roby
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from lightning_robustness.metrics import _base as class_statistics
from tests.metrics.tester import update_in_batches

METRICS = {
    "rdi": (RobustnessDifferenceIndex, robustness_difference_index, {}, 1e-3),
    "roby": (ROBY, roby, {}, 5e-3),
    "roby_inf": (ROBY, roby, {"p": math.inf}, 5e-3),
}
each_metric = pytest.mark.parametrize("name", METRICS)


def gaussians(counts, width=64, separation=1.0):
    """Classes of several spreads, most of whose variance is in a few directions, in random order."""
    num_classes = len(counts)
    preds = torch.arange(num_classes).repeat_interleave(torch.as_tensor(counts))
    preds = preds[torch.randperm(len(preds))]
    scales = torch.exp(-torch.arange(width) / 10) * (0.3 * torch.randn(num_classes, 1)).exp()
    noise = torch.randn(len(preds), width) * (0.2 * torch.randn(len(preds), 1)).exp()
    return noise * scales[preds] + separation * 0.3 * torch.randn(num_classes, width)[preds], preds


def check(name, features, preds, num_classes, batch_size=500):
    metric_class, function, options, tolerance = METRICS[name]
    metric = metric_class(num_classes, storage="streaming", **options)
    value = update_in_batches(metric, batch_size, features, preds).compute()
    assert value.item() == pytest.approx(function(features, preds, **options).item(), abs=tolerance)
    return metric


def is_thinned(metric):
    return len(metric.sketch_samples) + sum(map(len, metric.features)) < int(metric.sketch_counts.sum())


@each_metric
@pytest.mark.parametrize(("per_class", "thinned"), [(50, False), (100, True)])
def test_a_thousand_classes(name, per_class, thinned):
    metric = check(name, *gaussians([per_class] * 1000), 1000)
    assert is_thinned(metric) == thinned


@each_metric
def test_skewed_predictions(name):
    metric = check(name, *gaussians([20_000] * 4 + [2 + k % 40 for k in range(996)]), 1000)
    assert is_thinned(metric)


def features_of_digits(network, images, layer):
    """Forty passes with noise, in random order: more samples than are kept."""
    with torch.no_grad():
        embedding = network[:-1](images)
        logits = network[-1](embedding)
    features = (embedding if layer == "embedding" else logits).repeat(40, 1)
    order = torch.randperm(len(features))
    features = features + 0.1 * features.std(dim=0) * torch.randn_like(features)
    return features[order], logits.argmax(1).repeat(40)[order]


@each_metric
@pytest.mark.parametrize("layer", ["embedding", "logits"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_network(name, layer, is_trained, digits, digits_network):
    layers = nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    network = digits_network if is_trained else nn.Sequential(*layers)
    assert is_thinned(check(name, *features_of_digits(network, digits[0], layer), 10))


@each_metric
def test_samples_sorted_by_class(name):
    features, preds = gaussians([5000] * 10)
    order = preds.argsort(stable=True)
    assert is_thinned(check(name, features[order], preds[order], 10))


@each_metric
@pytest.mark.parametrize("num_classes", [10, 200])
@pytest.mark.parametrize("shape", ["drift", "jump"])
def test_features_that_change_along_the_data(name, num_classes, shape):
    """From end to end by twice the spread of a class, in another direction for each."""
    features, preds = gaussians([60_000 // num_classes] * num_classes)
    time = torch.linspace(-1, 1, len(features)).unsqueeze(1)
    change = 0.25 * torch.randn(num_classes, features.shape[1])[preds]
    moved = features + change * (time if shape == "drift" else time.sign())
    assert is_thinned(check(name, moved, preds, num_classes))


@each_metric
@pytest.mark.parametrize("batch_size", [1, 32, 1000, 6000])
def test_size_of_batches(name, batch_size, monkeypatch):
    monkeypatch.setattr(class_statistics, "EXACT_BYTES", 2**17)  # 2,048 samples, since batches of 1 take their time
    metric = check(name, *gaussians([300] * 20, width=16), 20, batch_size=batch_size)
    assert is_thinned(metric)


@pytest.mark.parametrize("storage", ["auto", "streaming"])
def test_memory_does_not_grow(storage, monkeypatch):
    monkeypatch.setattr(class_statistics, "EXACT_BYTES", 2**23)  # for "auto"; streaming takes less here
    num_classes, width = 5, 16
    metric = ROBY(num_classes, storage=storage)
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(150):
            metric.update(torch.randn(2000, width), torch.randint(num_classes, (2000,)))
            states = [getattr(metric, name) for name in metric._defaults]
            tensors = [t for state in states for t in (state if isinstance(state, list) else [state])]
            sizes.append(sum(t.numel() * t.element_size() for t in tensors))
    # Features with labels and keys, a quarter of them waiting, and three float64 vectors for each class
    bound = 1.25 * 32768 * (width * 4 + 16) + 25 * num_classes * width + 2000 * (width * 4 + 8)
    assert max(sizes[100:]) < bound
    if storage == "streaming":
        assert max(sizes) < bound


# Storage "auto"


@pytest.fixture
def _small_limit(monkeypatch):
    monkeypatch.setattr(class_statistics, "EXACT_BYTES", 100_000)


@pytest.mark.usefixtures("_small_limit")
@each_metric
def test_auto_is_exact_up_to_the_limit_and_streaming_beyond(name):
    metric_class, function, options, tolerance = METRICS[name]
    features, preds = gaussians([500] * 5, width=25)
    metric = metric_class(5, storage="auto", **options)
    update_in_batches(metric, 100, features[:1000], preds[:1000])  # 100,000 bytes
    assert sum(len(batch) for batch in metric.features) == 1000
    assert metric.compute() == function(features[:1000], preds[:1000], **options)
    message = rf"{metric_class.__name__} has collected 0.00011 GB of features, .* Switching to streaming"
    with pytest.warns(UserWarning, match=message) as record:
        update_in_batches(metric, 100, features[1000:], preds[1000:])
    assert len(record) == 1
    assert is_thinned(metric)
    assert metric.compute().item() == pytest.approx(function(features, preds, **options).item(), abs=tolerance)

    metric.reset()  # the next epoch is exact again, and the switch is old news
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update_in_batches(metric, 100, features, preds)
    assert is_thinned(metric)


@pytest.mark.usefixtures("_small_limit")
def test_auto_in_forward_and_merge():
    features, preds = gaussians([500] * 5, width=25)
    metrics = [RobustnessDifferenceIndex(5) for _ in range(3)]
    metrics[0](features[:900], preds[:900])
    with pytest.warns(UserWarning, match="Switching to streaming"):
        metrics[0](features[900:], preds[900:])
    assert is_thinned(metrics[0])
    for metric, half in zip(metrics[1:], (slice(None, 900), slice(900, 1800)), strict=True):
        metric.update(features[half], preds[half])
    with pytest.warns(UserWarning, match="Switching to streaming"):
        metrics[1].merge_state(metrics[2])
    assert is_thinned(metrics[1])
    for metric, count in zip(metrics, (2500, 1800), strict=False):
        exact = robustness_difference_index(features[:count], preds[:count])
        assert metric.compute().item() == pytest.approx(exact.item(), abs=1e-3)


@pytest.mark.usefixtures("_small_limit")
def test_exact_warns_once_of_its_size_and_goes_on():
    features, preds = gaussians([500] * 5, width=25)
    metric = RobustnessDifferenceIndex(5, storage="exact")
    update_in_batches(metric, 100, features[:1000], preds[:1000])
    message = (
        r"has collected 0.00011 GB of features, and each 10,000 samples to come take another 0.001 GB. Pass storage"
    )
    with pytest.warns(UserWarning, match=message) as record:
        update_in_batches(metric, 100, features[1000:], preds[1000:])
    assert len(record) == 1
    assert metric.compute() == robustness_difference_index(features, preds)


def test_metrics_of_other_settings_share_no_state():
    metrics = {"rdi": RobustnessDifferenceIndex(5), "roby": ROBY(5), "roby_inf": ROBY(5, p=math.inf)}
    collection = MetricCollection(metrics | {"streaming": ROBY(5, storage="streaming")})
    features, preds = gaussians([50] * 5, width=25)
    collection.update(features, preds)
    assert sorted(sorted(group) for group in collection.compute_groups.values()) == [
        ["rdi", "roby"],
        ["roby_inf"],
        ["streaming"],
    ]
    values = collection.compute()
    assert values["rdi"] == robustness_difference_index(features, preds)
    assert values["roby_inf"] == roby(features, preds, p=math.inf)


# Two processes


def evaluate_share(rank, name, storage, shares, limit):
    torch.manual_seed(0)
    features, preds = gaussians([1000] * 5, width=25)
    metric_class, _, options, _ = METRICS[name]
    metric = metric_class(5, storage=storage, **options)
    usual, class_statistics.EXACT_BYTES = class_statistics.EXACT_BYTES, limit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start, end = shares[rank]
            if end > start:
                update_in_batches(metric, 100, features[start:end], preds[start:end])
            value = metric.compute()
    finally:
        class_statistics.EXACT_BYTES = usual
    has_sketch = metric.sketch_samples.shape[1] > 0
    return value.item(), sum(len(batch) for batch in metric.features), has_sketch and is_thinned(metric)


@pytest.mark.parametrize("storage", ["auto", "streaming"])
@pytest.mark.parametrize(
    "shares",
    [
        ((0, 2500), (2500, 5000)),
        ((0, 4500), (4500, 5000)),
        ((0, 500), (500, 5000)),
        ((0, 5000), (5000, 5000)),
        ((0, 0), (0, 5000)),
    ],
    ids=["both thinned", "first thinned", "second thinned", "second empty", "first empty"],
)
@each_metric
def test_two_processes_in_different_states_equal_one(two_processes, name, shares, storage):
    features, preds = gaussians([1000] * 5, width=25)
    _, function, options, tolerance = METRICS[name]
    exact = function(features, preds, **options).item()
    results = two_processes(evaluate_share, name, storage, shares, 100_000)
    assert results[0][0] == results[1][0] == pytest.approx(exact, abs=tolerance)
    for (_, collected, thinned), (start, end) in zip(results, shares, strict=True):
        assert thinned == (end - start > 1000)
        if storage == "auto" and not thinned:  # still exact, also after the synchronisation
            assert collected == end - start
