from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_robustness.functional.batch_statistics import find_training_layers, held_batch_statistics
from lightning_robustness.functional.jacobian import InputJacobian, check_samples_are_independent
from lightning_robustness.utilities.checks import check_not_empty
from lightning_robustness.utilities.input_space import InputSpace, check_input_space
from lightning_robustness.utilities.sandbox import find_modules, sandbox


@contextmanager
def training_jacobian(
    model: Callable[..., Any], x: Tensor, input_space: InputSpace | None = None, seed: int = 0
) -> Iterator[InputJacobian]:
    """Open a sandbox with a Jacobian that can be differentiated in the weights, for a training loss.

    The model runs in eval mode, except for BatchNorm layers in train mode: these normalise by the statistics of the
    batch, which are held fixed when a sample is differentiated with respect to its input. (With running statistics,
    which lag behind the weights, training would find weights with a small penalty and a broken network.)

    Args:
        model: Callable from inputs to logits.
        x: Inputs of shape ``(N, ...)`` as the model sees them.
        input_space: Range and normalisation of the inputs, by default values in [0, 1] that are not normalised.
        seed: Seed of the random state inside.

    Raises:
        TypeError: If the inputs are not floating point.
        ValueError: If the batch is empty, inputs are outside the range, or logits cannot be differentiated or depend on
            other samples.

    """
    space = check_input_space(input_space)
    space.check(x)
    check_not_empty("x", x)
    weights = [p for module in find_modules(model) for p in module.parameters() if p.requires_grad]
    layers = find_training_layers(model)
    with sandbox(model, x, seed=seed, precise=False) as (x,):
        check_samples_are_independent(model, x)
        for weight in weights:
            weight.requires_grad_()
        with held_batch_statistics(layers, lambda: model(x)):
            jacobian = InputJacobian(model, x, space, create_graph=True)
        yield jacobian
