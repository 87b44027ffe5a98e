import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_robustness._isolation.module_state import is_lazy
from lightning_robustness._model.head import HeadTap
from tests import zoo
from tests._isolation.test_sandbox import assert_same, snapshot, trained_once
from tests._model.heads import assert_call, count_hooks, expected_call, find_head, inputs, inputs_of, tap_of


class Images(nn.Module):
    """A network that takes its inputs in many ways, with modules beside it, as a LightningModule holds them."""

    def __init__(self):
        super().__init__()
        self.network = zoo.Zoo()
        self.normalize = nn.BatchNorm2d(1, affine=False)
        self.augment = nn.Dropout(0.5)
        self.loss = nn.MSELoss()
        self.eval()
        self.augment.train()

    def forward(self, mask=None, images=None):
        return self.network(images)

    head_name = "network.head"


OWN = {
    "alone": lambda model, x: model.network(x),
    "first": lambda model, x: (model.network(x), model.network(1 - x)),
    "last": lambda model, x: (model.network(1 - x), model.network(x)),
    "between": lambda model, x: (model.network(1 - x), model.network(x), model.network(x + 0.1)),
    "twice": lambda model, x: (model.network(x), model.network(x), model.network(1 - x)),
    "keyword": lambda model, x: (model(images=1 - x), model(images=x)),
    "mask": lambda model, x: (model(torch.ones_like(x, dtype=torch.bool), images=x), model(None, 1 - x)),
    "forward": lambda model, x: (model.forward(images=x), model.forward(images=1 - x)),
    "flattened": lambda model, x: (model.network(x.flatten(1)), model.network((1 - x).flatten(1))),
    "copy": lambda model, x: (model.network(1 - x), model.network(x.clone()), model.network(1 - x)),
    "flattened copy": lambda model, x: model.network(x.clone().flatten(1)),
    "other layout": lambda model, x: model.network(x.expand(-1, 1, 2, 4).contiguous(memory_format=torch.channels_last)),
    "by parts": lambda model, x: model.network.head(model.network.body(x.flatten(1)).relu()),
    "by parts, then another": lambda model, x: (OWN["by parts"](model, x), OWN["by parts"](model, 1 - x)),
    "by parts, after another": lambda model, x: (OWN["by parts"](model, 1 - x), OWN["by parts"](model, x)),
    "after augmentation": lambda model, x: (model.network(model.augment(x)), model.network(x)),
    "after adversarial inputs": lambda model, x: (model.network(attack(model, x)), model.network(x)),
    "before adversarial inputs": lambda model, x: (model.network(x), model.network(attack(model, x))),
    "after a loss": lambda model, x: (model.loss(1 - x, x), model.network(x)),
    "before other features": lambda model, x: (model.network(x), model.network.head(torch.rand(len(x), 6))),
    "larger batch first": lambda model, x: (model.network(torch.cat([x, x])), model.network(x)),
    "smaller batch first": lambda model, x: (model.network(x[:2]), model.network(x)),
    "views of torch.func": lambda model, x: (torch.func.jacrev(model.network)(x), model.network(x)),
}


def attack(model, x):
    """One step up the gradient, from a random start."""
    x_adv = (x + 0.01).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(model.network(x_adv).logsumexp(dim=1).sum(), x_adv)
    return x_adv.detach() + 0.1 * gradient.sign()


@pytest.mark.parametrize("step", OWN)
def test_the_pass_on_the_announced_inputs_counts(step):
    model, x = Images(), inputs()
    expected = expected_call(model.network, x)
    with HeadTap(model, model.head_name) as tap:
        for context in (torch.enable_grad, torch.no_grad):
            tap.listen(x)
            with context():
                OWN[step](model, x)
            call = tap.take()
            assert_call(call, expected)
            assert not any(tensor.requires_grad for tensor in call)


def test_listening_in_inference_mode():
    model = Images()
    expected = expected_call(model.network, inputs())
    with torch.inference_mode(), HeadTap(model, model.head_name) as tap:
        x = inputs()
        tap.listen(x)
        model.network(1 - x), model.network(x)
        assert_call(tap.take(), expected)


OTHER = {
    "nothing": lambda model, x: None,
    "other inputs": lambda model, x: model.network(1 - x),
    "the head alone": lambda model, x: model.network.head(torch.rand(len(x), 6)),
    "more rows": lambda model, x: model.network(torch.cat([x, 1 - x])),
    "fewer rows": lambda model, x: model.network(x[:-1]),
    "other order": lambda model, x: model.network(x.flip(0)),
    "augmentation": lambda model, x: model.network(model.augment(x)),
    "normalization elsewhere": lambda model, x: model.network(model.normalize(x)),
    "features for something else": lambda model, x: (model.network.body(x.flatten(1)), model.network(1 - x)),
    "a loss of the inputs": lambda model, x: (model.loss(1 - x, x), model.network(1 - x)),
    "more rows by parts": lambda model, x: model.network.head(model.network.body(x.flatten(1)).repeat(2, 1)),
    "the body alone": lambda model, x: model.network.body(x.flatten(1)),
    "a mask that looks like them": lambda model, x: model(mask=x.bool(), images=1 - x),
    "one row": lambda model, x: [model.network(row[None]) for row in x],
    "heads in the order of bodies": lambda model, x: [model.network.head(f) for f in features(model, 1 - x, x)],
}


def features(model, *views):
    """What enters the head, with the bodies of all views before any head."""
    return [model.network.body(view.flatten(1)).relu() for view in views]


@pytest.mark.parametrize("step", OTHER)
def test_what_is_not_on_the_announced_inputs_does_not_count(step):
    model, x = Images(), inputs()
    with HeadTap(model, model.head_name) as tap, torch.no_grad():
        tap.listen(x)
        OTHER[step](model, x)
        assert tap.take() is None
        model.network(x)
        assert tap.take() is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_in_another_precision(dtype):
    model, x = Images(), inputs()
    model.network.to(dtype)
    with HeadTap(model, model.head_name) as tap, torch.no_grad():
        tap.listen(x)
        model.network((1 - x).to(dtype)), model.network(x.to(dtype))
        assert_call(tap.take(), expected_call(model.network, x.to(dtype)), rtol=0, atol=torch.finfo(dtype).eps)


def test_autocast():
    model, x = Images(), inputs()
    with HeadTap(model, model.head_name) as tap, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tap.listen(x)
        model.network(1 - x)
        logits = model.network(x)
        call = tap.take()
        assert logits.dtype == call.logits.dtype == torch.bfloat16
        assert torch.equal(call.logits, logits)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 3)])
def test_small_inputs(shape):
    """A batch of one, a single feature, and features as many as the inputs have."""
    network, x = nn.Sequential(nn.Linear(shape[1], shape[1]), nn.Tanh(), nn.Linear(shape[1], 2)), torch.rand(shape)
    model = nn.ModuleDict({"network": network, "scale": nn.Identity()})
    with HeadTap(model, "network.2") as tap, torch.no_grad():
        tap.listen(x)
        model["scale"](torch.tensor(2.0)), network(1 - x)
        logits = network(x)
        assert_call(tap.take(), (network[:2](x), logits), rtol=0, atol=0)


def test_features_that_look_like_inputs():
    """Behind augmentation and behind an encoder of the same width, modules see the same: neither is taken for sure."""
    network, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.rand(5, 3)
    with HeadTap(network, "1") as tap, torch.no_grad():
        tap.listen(x)
        network[1](network[0](x))
        assert tap.take() is None


def test_a_head_that_is_called_twice_counts_the_last_time():
    network, x = zoo.HeadCalledTwice(), inputs()
    with HeadTap(network, "head") as tap, torch.no_grad():
        tap.listen(x)
        network(1 - x), network(x), network(1 - x)
        assert_call(tap.take(), expected_call(network, x))


def test_logits_are_what_forward_returns_whatever_the_head_computes():
    network, x = zoo.LastCallIsAnother(), inputs()
    assert torch.equal(HeadTap(network, "head").run(network, x).logits, network(x))
    assert HeadTap(network, None).run(network, x).embedding is None


def test_the_network_of_a_distillation_that_is_meant():
    network, x = zoo.Distillation(), inputs()
    nn.init.normal_(network.teacher.head.weight)
    for first, second in [("student", "teacher"), ("teacher", "student")]:
        with HeadTap(network, "student.head") as tap, torch.no_grad():
            tap.listen(x)
            network.get_submodule(first)(x), network.get_submodule(second)(x)
            assert_call(tap.take(), expected_call(network, x))


class InPlace(zoo.Zoo):
    def forward(self, x):
        embedding = self.embed(x)
        logits = self.head(embedding)
        embedding.zero_()
        return logits.mul_(100).add_(1)


def test_changes_in_place_do_not_reach_what_was_kept():
    network, x = InPlace(), inputs()
    with torch.no_grad():
        embedding = network.embed(x)
        expected = embedding, 100 * network.head(embedding) + 1
    with tap_of(network, x) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        call = tap.take()
    assert_call(call, expected)
    assert_call(tap.run(network, x), expected)


def test_hooks_are_there_between_attach_and_detach_only():
    network, x = zoo.Zoo(), inputs()
    own = network.head.register_forward_hook(lambda *args: None)
    tap = HeadTap(network, "head")
    assert count_hooks(network) == 1
    tap.attach()
    attached = count_hooks(network)
    tap.attach()
    assert count_hooks(network) == attached > 1
    tap.run(network, x)
    assert count_hooks(network) == attached
    tap.listen(x)
    network(x)
    tap.detach()
    assert count_hooks(network) == 1
    assert tap.take() is None
    tap.detach()
    tap.run(network, x)
    with pytest.raises(ZeroDivisionError), tap:  # noqa: PT012
        tap.listen(x)
        raise ZeroDivisionError
    assert count_hooks(network) == 1
    assert own.id in network.head._forward_hooks


class Failing(zoo.Zoo):
    fails = True

    def forward(self, x):
        logits = super().forward(x)
        if self.fails:
            raise ZeroDivisionError
        return logits


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_pass_that_fails_leaves_nothing_behind(is_attached):
    network, x = Failing(), inputs()
    tap = HeadTap(network, "head")
    if is_attached:
        tap.attach()
    hooks = count_hooks(network)
    with pytest.raises(ZeroDivisionError):
        tap.run(network, x)
    assert count_hooks(network) == hooks
    assert tap.take() is None
    with tap:
        tap.listen(x)
        with pytest.raises(ZeroDivisionError):
            network(1 - x)
        network.fails = False
        network(x)
        assert_call(tap.take(), expected_call(network, x))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_model_is_left_alone(context):
    network = trained_once()
    embedding = nn.Sequential(network.body, network.frozen)
    before = snapshot(network)
    with context(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        assert find_head(network, x) == "head"
        call = HeadTap(network, "head").run(network, x)
        # also where nothing shows that the callable uses the network
        hidden = {"network": network}
        again = HeadTap(network, "head").run(lambda x: hidden["network"](x), x)
        assert find_head(network, x, forward=lambda x: hidden["network"](x)) == "head"
    assert_same(before, snapshot(network))
    assert_call(again, call, rtol=0, atol=0)
    network.eval()
    with torch.no_grad():
        assert_call(call, (embedding(x), network.head(embedding(x))))
    assert not any(tensor.requires_grad or tensor.is_inference() for tensor in call)


def test_a_tap_keeps_nothing_alive():
    model = Images()
    tap = HeadTap(model, model.head_name)
    references = []
    gc.disable()  # so that only reference counts free anything
    try:
        for step in [*OWN.values(), *OTHER.values()]:
            x = inputs()
            tap.attach()
            tap.listen(x)
            with torch.no_grad():
                step(model, x)
            call = tap.take()
            references += [weakref.ref(tensor) for tensor in (x, *(call or ()))]
            tap.run(model.network, x)
            tap.listen(x)
            tap.detach()
            del x, call
        assert [reference for reference in references if reference() is not None] == []
        model_reference = weakref.ref(model)
        del model, tap
        assert model_reference() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripted_modules_are_left_out():
    network, x = zoo.Zoo(), inputs()
    network.body = torch.jit.script(network.body)
    assert find_head(network, x) == "head"
    with HeadTap(network, "head") as tap, torch.no_grad():
        tap.listen(x)
        network(1 - x), network(x)
        assert_call(tap.take(), expected_call(network, x))


def test_encoder_layers_keep_their_fused_kernels(monkeypatch):
    calls, fused = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: (calls.append(1), fused(*a))[1])
    network = zoo.Encoder()
    x = inputs_of(network)
    with HeadTap(network, network.head_name) as tap, torch.no_grad():
        tap.listen(x)
        network(x)
        assert len(calls) == 1
        assert_call(tap.take(), expected_call(network, x))


def test_lazy_networks_are_left_uninitialised():
    network, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)), torch.rand(5, 2)
    assert find_head(network, x) == "3"
    call = HeadTap(network, "3").run(network, x)
    assert (call.embedding.shape, call.logits.shape) == ((5, 4), (5, 3))
    assert is_lazy(network)
    with HeadTap(network, "3") as tap:  # the pass that initialises it, of somebody else
        tap.listen(x)
        logits = network(x)
        call = tap.take()
    assert torch.equal(call.logits, logits)
    assert not is_lazy(network)
