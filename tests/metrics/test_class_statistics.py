"""The state that RDI and ROBY have in common."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

from lightning_robustness.functional import robustness_difference_index, roby
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex
from tests import references
from tests.metrics.tester import check_metric_contract, update_in_batches

METRICS = [
    (RobustnessDifferenceIndex, robustness_difference_index, {}),
    (ROBY, roby, {}),
    (ROBY, roby, {"p": math.inf, "normalization": "all"}),
    (ROBY, roby, {"p": 1.0, "normalization": "none"}),
]
each_metric = pytest.mark.parametrize(("metric_class", "function", "options"), METRICS)
each_storage = pytest.mark.parametrize("storage", ["auto", "exact", "streaming"])


def data(num_samples=150, num_classes=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    preds = torch.randint(num_classes - 1, (num_samples,), generator=generator)  # the last class is never predicted
    means = torch.randn(num_classes, 6, dtype=dtype, generator=generator)
    return torch.randn(num_samples, 6, dtype=dtype, generator=generator) + 2 * means[preds], preds


@each_metric
@each_storage
def test_contract(metric_class, function, options, storage):
    features, preds = data()
    check_metric_contract(
        lambda: metric_class(num_classes=8, storage=storage, **options),
        lambda f, k: function(f, k, **options),
        (features, preds),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_storage
def test_precision_of_the_features(dtype, storage):
    features, preds = data(dtype=torch.float32)
    features = (features + 30).to(dtype)
    metric = update_in_batches(RobustnessDifferenceIndex(8, storage=storage), 32, features, preds)
    assert metric.compute().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert metric.compute().item() == pytest.approx(references.rdi(features.double(), preds)["rdi"], abs=1e-6)


@each_metric
def test_streaming_forward_and_merge_beyond_what_is_kept(metric_class, function, options):
    features, preds = data(num_samples=60_000)
    updated, forwarded, other = (metric_class(8, storage="streaming", **options) for _ in range(3))
    for batch in zip(features[:40_000].split(500), preds[:40_000].split(500), strict=True):
        updated.update(*batch)
        forwarded(*batch)
    assert torch.equal(updated.compute(), forwarded.compute())
    updated.merge_state(update_in_batches(other, 500, features[40_000:], preds[40_000:]))
    exact = function(features, preds, **options)
    assert updated.compute() == pytest.approx(exact.item(), rel=5e-3, abs=5e-3)


def test_exact_features_can_be_kept_on_the_cpu():
    features, preds = data()
    metric = RobustnessDifferenceIndex(8, compute_on_cpu=True)
    metric.update(features, preds)
    assert metric.features[0].device.type == "cpu"
    assert metric.compute() == robustness_difference_index(features, preds)


def test_exact_features_do_not_keep_what_they_were_sliced_from():
    metric = RobustnessDifferenceIndex(8)
    tokens, preds = torch.randn(10, 50, 6), data(10)[1]
    metric.update(tokens[:, 0], preds)
    assert metric.features[0].untyped_storage().nbytes() == 10 * 6 * 4


@each_storage
def test_forward_of_features_with_a_graph_keeps_no_graph(storage):
    metric = RobustnessDifferenceIndex(8, storage=storage)
    features, preds = data()
    features.requires_grad_()
    metric(features, preds).backward()
    assert features.grad.abs().sum() > 0
    states = [getattr(metric, name) for name in metric._defaults]
    assert not any(t.requires_grad for state in states for t in (state if isinstance(state, list) else [state]))


@each_storage
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ((torch.randn(5), torch.zeros(5).long()), "at least 2 dimensions"),
        ((torch.randn(5, 6), torch.zeros(4).long()), "`preds` to have shape"),
        ((torch.randn(5, 6), torch.full((5,), 8)), "`preds` to be from 0 to 7"),
        ((torch.full((5, 6), float("nan")), torch.zeros(5).long()), "5 of 5 samples hold NaN or infinity"),
        ((torch.randn(5, 7), torch.zeros(5).long()), "`features` of width 6.* 7"),
    ],
)
def test_bad_batch_is_refused_and_the_state_stays_usable(storage, bad, match):
    features, preds = data()
    metric = RobustnessDifferenceIndex(8, storage=storage)
    metric.update(features[:50], preds[:50])
    with pytest.raises(ValueError, match=match):
        metric.update(*bad)
    metric.update(features[50:], preds[50:])
    torch.testing.assert_close(metric.compute(), robustness_difference_index(features, preds))


@each_storage
def test_merging_of_another_width_is_refused_and_the_state_stays_usable(storage):
    features, preds = data()
    metric, other = (RobustnessDifferenceIndex(8, storage=storage) for _ in range(2))
    metric.update(features[:, :5], preds)
    other.update(features, preds)
    with pytest.raises(ValueError, match=r"`features` of width 6.* 5"):
        metric.merge_state(other)
    torch.testing.assert_close(other.compute(), robustness_difference_index(features, preds))


@pytest.mark.parametrize("metric_class", [RobustnessDifferenceIndex, ROBY])
@each_storage
def test_compute_before_update_warns_and_is_the_worst(metric_class, storage):
    metric = metric_class(3, storage=storage)
    with pytest.warns(UserWarning, match="called before the ``update`` method"):
        worst = metric.compute()
    assert worst == (1 if metric_class is ROBY else -1)
    metric.update(torch.randn(0, 4), torch.zeros(0, dtype=torch.long))
    with pytest.warns(UserWarning, match="No class was predicted"):
        assert metric.compute() == worst


@pytest.mark.parametrize("metric_class", [RobustnessDifferenceIndex, ROBY])
@each_storage
def test_one_populated_class_warns_once(metric_class, storage):
    metric = metric_class(3, storage=storage)
    metric.update(torch.randn(6, 4), torch.ones(6, dtype=torch.long))
    with pytest.warns(UserWarning, match="Only one class was predicted") as record:
        assert metric.compute_components()["counts"].tolist() == [0, 6, 0]
    assert len(record) == 1
    assert metric.compute().isfinite()


# Two processes


def evaluate_share(rank, metric_class, options, shares):
    metric = metric_class(8, **options)
    features, preds = data()
    share = shares[rank]
    if len(share):
        update_in_batches(metric, 20, features[share], preds[share])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns in a process that holds nothing
        values = metric.compute_components()
    assert metric._is_synced is False
    if len(share):  # the state of this process is its own again
        metric.update(features[share], preds[share])
    return values


FIRST_CLASS_ALONE = (data()[1] == 0).nonzero().squeeze(1), (data()[1] != 0).nonzero().squeeze(1)


@each_storage
@pytest.mark.parametrize("metric_class", [RobustnessDifferenceIndex, ROBY])
@pytest.mark.parametrize(
    "shares",
    [
        (torch.arange(75), torch.arange(75, 150)),
        (torch.arange(110), torch.arange(110, 150)),
        FIRST_CLASS_ALONE,
        (torch.arange(150), torch.arange(0)),
        (torch.arange(0), torch.arange(150)),
    ],
    ids=["equal", "unequal", "class on one", "second empty", "first empty"],
)
def test_two_processes_equal_one(two_processes, storage, metric_class, shares):
    metric = metric_class(8, storage="exact")
    metric.update(*data())
    expected = metric.compute_components()
    for result in two_processes(evaluate_share, metric_class, {"storage": storage}, shares):
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, atol=1e-10, rtol=0, equal_nan=True)


def evaluate_nothing(rank, storage):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RobustnessDifferenceIndex(8, storage=storage).compute()


@each_storage
def test_two_processes_without_data(two_processes, storage):
    assert two_processes(evaluate_nothing, storage) == [-1, -1]


def evaluate_two_widths(rank, storage):
    metric = RobustnessDifferenceIndex(2, storage=storage)
    metric.update(torch.randn(4, 3 + rank), torch.arange(4) % 2)
    with pytest.raises(ValueError, match=r"width.*\[3, 4\]"):
        metric.compute()
    dist.barrier()
    return True


@each_storage
def test_two_processes_with_features_of_two_widths(two_processes, storage):
    assert two_processes(evaluate_two_widths, storage) == [True, True]
