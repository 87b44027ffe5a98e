"""Embeddings of what a loader gives, such as tokens, in adversarial training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_robustness._isolation.sandbox import sandbox


def embed(pl_module: LightningModule, embed_fn: Callable[..., Any], x: Tensor, eval_mode: bool) -> Tensor:
    """Return the embeddings of inputs, without a trace in the module."""
    with sandbox(pl_module, x, eval_mode=eval_mode, precise=False) as (x,), torch.no_grad():
        embeddings = embed_fn(pl_module, x)
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point() or len(embeddings) != len(x):
        came = f"shape {tuple(embeddings.shape)}" if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise TypeError(
            f"Expected `embed_fn` to return a floating point tensor with one row for each of {len(x)} inputs but got "
            f"{came}. Return the output of an embedding layer: `module.embedding(tokens)`."
        )
    return embeddings


def find_layer(pl_module: LightningModule, embed_fn: Callable[..., Any], x: Tensor) -> nn.Module:
    """Find the submodule whose output the embeddings are, so that a training step can be given others."""
    calls: list[tuple[nn.Module, Any]] = []
    with register_module_forward_hook(lambda module, args, output: calls.append((module, output))):
        embeddings = embed(pl_module, embed_fn, x, eval_mode=True)
    for module, output in calls:
        if output is embeddings:
            return module
    raise MisconfigurationException(
        "Expected `embed_fn` to return the output of a submodule, to which the perturbation can be added while "
        "`training_step` runs, but got something else. Return `module.embedding(tokens)`, for instance, and add "
        "positions in `forward_fn`; or train with `loss='trades'` or `loss='mart'`, which need `forward_fn` alone."
    )


@contextmanager
def perturbed(layer: nn.Module, perturbation: Tensor) -> Iterator[None]:
    """Add a perturbation to the output of a layer, through which its weights still get gradients."""
    num_calls = 0

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal num_calls
        if output.shape != perturbation.shape:  # of other inputs
            return None
        num_calls += 1
        return output + perturbation.to(output.dtype)

    with layer.register_forward_hook(add):
        yield
    if num_calls == 0:
        raise MisconfigurationException(
            f"Expected `training_step` to embed its batch with {layer}, whose output `embed_fn` returns, for inputs "
            f"of shape {tuple(perturbation.shape)} but it did not: it would train on clean inputs. Let `embed_fn` use "
            "the layer that `training_step` uses, without `torch.compile`."
        )
