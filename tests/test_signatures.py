"""Arguments of one name mean the same thing everywhere: one annotation, one default, keyword-only."""

import inspect
from collections import defaultdict

import pytest

from lightning_robustness import (
    AdversarialTraining,
    AdversarialWeightPerturbation,
    AttackFreeRegularization,
    RobustnessMonitor,
    compare,
    evaluate,
    sweep,
)

CALLABLES = {
    kind.__name__: inspect.signature(kind)
    for kind in (
        RobustnessMonitor,
        evaluate,
        sweep,
        compare,
        AdversarialTraining,
        AdversarialWeightPerturbation,
        AttackFreeRegularization,
    )
}
# How a model and its batches are read, and what is measured
SHARED = (
    *("input_space", "num_classes", "head", "forward_fn", "embed_fn", "batch_fn"),
    *("attack_samples", "fim_samples", "fim_method", "clever_samples", "clever_radius"),
    *("storage", "roby_p", "batch_size", "seed", "device", "resume"),
    *("attacks", "budgets", "decision_space", "per_sample", "num_examples"),
)
# The same name with another default or type, and why
EXCEPTIONS = {
    ("sweep", "attack_samples"): "None attacks all samples",
    ("RobustnessMonitor", "attacks"): "the attacks of a run; those of a sweep are the CMMR paper's",
    ("evaluate", "attacks"): "the attacks of a run",
    ("AdversarialTraining", "budgets"): "one per epoch, instead of the only one",
}


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_argument_is_the_same_everywhere(name):
    forms = defaultdict(list)
    for owner, signature in CALLABLES.items():
        parameter = signature.parameters.get(name)
        if parameter is not None and (owner, name) not in EXCEPTIONS:
            forms[parameter.annotation, parameter.default].append(owner)
    assert len(forms) == 1, dict(forms)


@pytest.mark.parametrize("name", CALLABLES)
def test_few_arguments_are_positional(name):
    positional = [
        parameter.name
        for parameter in CALLABLES[name].parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert set(positional) <= {"model", "models", "dataloader", "attack", "attacks", "eps", "budgets", "gamma"}


def test_exceptions_are_needed():
    for owner, name in EXCEPTIONS:
        own = CALLABLES[owner].parameters[name]
        others = [
            signature.parameters[name]
            for other, signature in CALLABLES.items()
            if name in signature.parameters and (other, name) not in EXCEPTIONS
        ]
        assert all((own.annotation, own.default) != (other.annotation, other.default) for other in others)
