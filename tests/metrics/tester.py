import pickle

import torch


def update_in_batches(metric, batch_size, *tensors, model=()):
    for batch in zip(*(tensor.split(batch_size) for tensor in tensors), strict=True):
        metric.update(*model, *batch)
    return metric


def check_metric_contract(make_metric, function, tensors, atol=1e-10, model=()):
    """Check what torchmetrics' users rely on, for a metric that equals a function of the whole data.

    ``model`` is empty, or holds the model that the metric is updated with before the tensors.
    """
    expected = function(*tensors)
    metric = make_metric()
    flags = ("is_differentiable", "higher_is_better", "full_state_update", "plot_lower_bound", "plot_upper_bound")
    assert all(hasattr(metric, flag) for flag in flags)
    assert metric.full_state_update is False

    for batch_size in (1, 7, len(tensors[0])):
        metric.reset()
        found = update_in_batches(metric, batch_size, *tensors, model=model).compute()
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)
    half = len(tensors[0]) // 2
    restored = pickle.loads(pickle.dumps(metric)), metric.clone()
    assert not metric.state_dict()
    assert not list(metric.children())
    for copy in restored:
        torch.testing.assert_close(copy.compute(), expected, atol=atol, rtol=0)

    metric.reset()
    for batch in zip(*(tensor.split(half) for tensor in tensors), strict=True):
        torch.testing.assert_close(metric(*model, *batch), function(*batch), atol=atol, rtol=0)
    torch.testing.assert_close(metric.compute(), expected, atol=atol, rtol=0)

    first, second = make_metric(), make_metric()
    first.update(*model, *(tensor[:half] for tensor in tensors))
    second.update(*model, *(tensor[half:] for tensor in tensors))
    first.compute()  # not to be returned again after the merge
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), expected, atol=atol, rtol=0)
    torch.testing.assert_close(second.compute(), function(*(tensor[half:] for tensor in tensors)), atol=atol, rtol=0)

    results = [tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
    metric.reset()
    assert metric(*model, *results).requires_grad == metric.is_differentiable
    assert not metric.compute().requires_grad
