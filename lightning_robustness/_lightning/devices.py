"""Processes, devices and precision of the command line, by Lightning's Fabric."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import sleep
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_robustness._processes import rank_zero_warn

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "precision")


def make_fabric(options: Any) -> "Fabric | None":
    """Return the Fabric that the options ask for, not launched yet, or None if they ask for none."""
    given = {name: options[name] for name in _OPTIONS if options[name] is not None}
    if not given:
        return None
    names = ", ".join(f"--{name}" for name in given)
    if options.device is not None:
        raise ValueError(f"Expected either --device or {names} but got both. Leave out --device.")
    from lightning.fabric import Fabric  # takes seconds

    try:
        return Fabric(**given)
    except Exception as error:  # Lightning has errors of several kinds for wrong arguments
        raise ValueError(f"Expected {names} as Lightning's Fabric takes them. {error}") from error


@contextmanager
def launched(fabric: "Fabric | None", options: Any, models: Iterable[Any]) -> Iterator[bool]:
    """Start the processes, and convert the models to the requested precision."""
    if fabric is None:
        yield True
        return
    fabric.launch()
    try:
        options.device = str(fabric.device)
        for model in models:
            if isinstance(model, nn.Module) and options.precision is not None:
                convert(model, fabric, str(options.precision))
        yield fabric.is_global_zero
    finally:
        if dist.is_available() and dist.is_initialized():
            sleep(0.1)  # torch 2.7 keeps the GIL while it waits for threads of Gloo, which may still need it
            dist.destroy_process_group()


def convert(model: nn.Module, fabric: "Fabric", precision: str) -> None:
    """Let a model compute in a precision, whoever calls it.

    The casts are part of the graph, so an attack takes its steps in single precision.
    """
    plugin = fabric.strategy.precision
    plugin.convert_module(model)
    forward = model.forward
    if precision.startswith("16"):
        rank_zero_warn(
            f"In precision {precision!r}, small gradients are rounded to zero, so attacks on confident predictions may "
            "fail. Use 'bf16-mixed' or 'bf16-true'."
        )

    @wraps(forward)
    def converted(*args: Any, **kwargs: Any) -> Any:
        if "mixed" not in precision:  # autocast takes unconverted inputs, and rounds as late as it can
            args, kwargs = plugin.convert_input((args, kwargs))
        with plugin.forward_context():
            return forward(*args, **kwargs)

    converted.__qualname__ = f"{forward.__qualname__} in {precision}"
    model.forward = converted  # type: ignore[method-assign]
