from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_robustness._arguments import check_tensor
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._model.access import find_logits
from lightning_robustness.functional._spectral_norms import layer_spectral_norm
from lightning_robustness.functional._spectral_propagation import (
    NO_RULE,
    SpectralRow,
    is_layer,
    module_kind,
    propagate,
    rule_text,
)
from lightning_robustness.functional.fisher_spectral_norm import FisherSettings, fisher_and_boundary
from lightning_robustness.input_space import InputSpace, check_input_space


@dataclass(frozen=True, repr=False)
class SpectralBounds:
    """Spectral norms of the layers of a network and the resulting bound of the whole; prints as a table.

    Args:
        rows: The layers, in the order in which they run.
        bound: Upper bound of the network's Lipschitz constant, or None where it is unknown.
        missing: Names of layers without a rule, or the reason why the network could not be traced.
        fisher_norm: Largest spectral norm of the Fisher information of the given inputs, where the bound is known.

    """

    rows: tuple[SpectralRow, ...]
    bound: float | None
    missing: tuple[str, ...]
    fisher_norm: float | None = None

    @property
    def fisher_bound(self) -> float | None:
        r"""Upper bound :math:`L^2 / 2` of the spectral norm of the Fisher information at any input."""
        return None if self.bound is None else self.bound**2 / 2

    def __str__(self) -> str:
        header = ("layer", "type", "norm", "rule", "bound up to here")
        cells = [header] + [(row.name, row.kind, _text(row.norm), row.rule, _text(row.bound)) for row in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        unknown = f"unknown: {NO_RULE} for {', '.join(self.missing)}"
        total = f"Bound of the network: {unknown if self.bound is None else _text(self.bound)}"
        if self.fisher_norm is not None:
            total += f"\nFisher information: at most {_text(self.fisher_bound)}, measured {_text(self.fisher_norm)}"
        return "\n".join([*(line.rstrip() for line in lines), total])

    __repr__ = __str__


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def spectral_bounds(model: nn.Module, x: Tensor, input_space: InputSpace | None = None) -> SpectralBounds:
    r"""Compute the spectral norm of each layer and a bound of the whole network, lower is more robust.

    .. math::
        \|z(x) - z(x')\|_2 \leq L \|x - x'\|_2 \quad \text{for all } x, x'

    Where :math:`z` is the output of the network and :math:`L` the bound. It is propagated from the input, where it is
    1: a layer multiplies it by its spectral norm, a sum of branches, as in a residual block, adds their bounds, and a
    concatenation, as in a dense block, takes the root of the sum of their squares. A layer or function without a rule
    is named in the table; the bound is then unknown from there on, never guessed. Attention is not Lipschitz, except
    where its inputs are bounded: there is a rule for ``nn.MultiheadAttention`` of what a layer norm returns. The model
    is evaluated in eval mode. For a classifier, :math:`L^2 / 2` bounds the spectral norm of the Fisher information,
    and is printed next to the largest value measured on ``x``.

    Spectral norms are exact for dense layers, batch norm, average pooling, common activations, and convolutions with
    circular padding that keeps the size or kernels of size 1. They are upper bounds for other convolutions (the
    norm of a circular convolution that contains them), overlapping max pooling, and for layer, group and instance norm,
    whose bound :math:`\max_i |\gamma_i| / \sqrt{\epsilon}` for all inputs is very large. The bound of a deep network
    is usually far above the local values of :func:`~lightning_robustness.functional.lipschitz_constant`.

    Args:
        model: The network; ``torch.fx`` must be able to trace it for a bound of the whole.
        x: Floating point tensor of shape ``(N, ...)``, examples of inputs: sizes matter to convolutions, values to the
            measured Fisher information alone.
        input_space: Normalisation of the input, by default none; the bound is in un-normalised units. The range does
            not matter.

    Returns:
        A table with ``rows``, the ``bound`` of the network and ``missing``, which can be printed.

    Raises:
        TypeError: If the model is not a module or the input not floating point.
        ValueError: If the input is empty.

    Example:
        >>> import torch
        >>> from lightning_robustness.functional import spectral_bounds
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 3))
        >>> _ = model[0].weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> _ = model[2].weight.data.fill_(0.5)
        >>> spectral_bounds(model, torch.zeros(1, 2))
        layer  type    norm     rule   bound up to here
        0      Linear  2        exact  2
        1      ReLU    1        exact  2
        2      Linear  1.22474  exact  2.44949
        Bound of the network: 2.44949
        Fisher information: at most 3, measured 0

    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected `model` to be a torch.nn.Module but got {type(model).__name__}. "
            "Layers can only be found in a module: wrap the function in one."
        )
    check_tensor("x", x)
    if x.ndim == 0 or len(x) == 0:
        raise ValueError(f"Expected `x` to hold at least one example but got shape {tuple(x.shape)}.")
    model = nn.Sequential(model) if is_layer(model) else model  # torch.fx would trace into a single layer
    space = replace(check_input_space(input_space), low=None, high=None)
    space.check(x)
    scale = 1 / space.scale(x).min().item()
    with sandbox(model, x[:1]) as (example,), torch.no_grad():
        expected = find_logits(model(example.clone()))  # errors here are the model's own
        try:
            propagation = propagate(model, example.clone(), scale)
        except Exception as error:  # a model may do anything with the proxies of a trace
            reason = str(error).strip().splitlines() or [type(error).__name__]
            return _untraced(model, example, f"a network that torch.fx cannot trace ({reason[0]})")
        if not _same(expected, find_logits(propagation.result)):
            return _untraced(model, example, "a network whose trace by torch.fx gives another output")
    measured = None
    if propagation.bound is not None and expected is not None and expected.ndim == 2 and expected.shape[1] > 1:
        measured = fisher_and_boundary(model, x, FisherSettings(input_space=space)).spectral_norm.max().item()
    return SpectralBounds(tuple(propagation.rows), propagation.bound, tuple(propagation.missing), measured)


def _same(expected: Tensor | None, result: Tensor | None) -> bool:
    if expected is None or result is None or expected.shape != result.shape:
        return False
    return torch.allclose(expected, result, rtol=1e-4, atol=1e-4 * expected.abs().max().item(), equal_nan=True)


def _untraced(model: nn.Module, x: Tensor, reason: str) -> SpectralBounds:
    """Compute the norms of the layers in the order in which they run, without a bound of the network."""
    rows: list[SpectralRow] = []

    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple, output: Any) -> None:
            kind, type_name = module_kind(module)
            known = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            norm = layer_spectral_norm(kind, module, args[0], output) if known else None
            rule = NO_RULE if norm is None else rule_text(norm.exact)
            rows.append(SpectralRow(name, type_name, norm.value if norm else None, rule, None))

        return add

    leaves = [(name, module) for name, module in model.named_modules() if is_layer(module)]
    handles = [module.register_forward_hook(hook(name)) for name, module in leaves]
    try:
        model(x.clone())
    finally:
        for handle in handles:
            handle.remove()
    unruled = [f"{row.name} ({row.kind})" for row in rows if row.rule == NO_RULE]
    return SpectralBounds(tuple(rows), None, (reason, *unruled))
