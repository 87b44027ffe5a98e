from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_robustness.utilities.checks import check_model
from lightning_robustness.utilities.rank_zero import rank_zero_warn

_REMEDY = "If they are elsewhere, pass a function that returns them alone, with `forward_fn=` where there is one."


def compute_logits(model: Callable[..., Any], x: Tensor) -> Tensor:
    """Run a model and return its logits, shape ``(N, K)``.

    Args:
        model: Callable that returns logits, an object with ``.logits``, a mapping with ``"logits"``, or a tuple or list
            whose first tensor of two dimensions holds them.
        x: Inputs of shape ``(N, ...)``.

    Raises:
        TypeError: If the model is not callable, or a class.
        ValueError: If there are no logits in the output, they have the wrong shape, or there is only one class.

    """
    check_model(model)
    output = model(x)
    logits = find_logits(output)
    if logits is None:
        raise ValueError(
            f"Expected the model to return logits of shape (N, K), or something that holds them as `logits`, but got "
            f"{type(output).__name__}. {_REMEDY}"
        )
    if logits.ndim != 2 or len(logits) != len(x):
        raise ValueError(
            f"Expected logits of shape ({len(x)}, K), one row per input, but got {tuple(logits.shape)}. {_REMEDY}"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "Expected logits of at least 2 classes but got 1. For a binary classifier with one output z, return "
            "`torch.cat([torch.zeros_like(z), z], dim=1)`."
        )
    return logits


def find_logits(output: Any) -> Tensor | None:
    """Find the logits in the output of a model."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, Mapping):
        return find_logits(output.get("logits"))
    if isinstance(output, (tuple, list)):
        matrices = [value for value in output if isinstance(value, Tensor) and value.ndim == 2]
        widths = [matrix.shape[1] for matrix in matrices]
        if len(set(widths)) > 1:
            rank_zero_warn(f"The model returns matrices of widths {widths}; the first is used as logits. {_REMEDY}")
        return matrices[0] if matrices else None
    return None


def check_finite(logits: Tensor) -> None:
    """Check that logits are finite.

    Raises:
        ValueError: If they are not, with the number of affected samples.

    """
    bad = int((~logits.isfinite()).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"Expected finite logits but {bad} of {len(logits)} samples have NaN or infinite ones. "
            "Check the network for divergence, and the inputs for NaN."
        )


def check_differentiable(logits: Tensor, otherwise: str) -> None:
    """Check that logits can be differentiated with respect to the inputs.

    Args:
        logits: Logits, computed from inputs that require a gradient.
        otherwise: Alternative to changing the model, for the message.

    Raises:
        ValueError: If they cannot.

    """
    if not logits.requires_grad:
        raise ValueError(
            "Expected logits that autograd can differentiate with respect to the inputs but got some without a "
            f"gradient. Take `detach`, `no_grad` and conversions out of the model, or {otherwise}."
        )


def are_probabilities(logits: Tensor) -> bool:
    """Return whether supposed logits look like probabilities."""
    sums = logits.sum(dim=1)
    return len(logits) > 0 and bool((logits >= 0).all() & torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all())
