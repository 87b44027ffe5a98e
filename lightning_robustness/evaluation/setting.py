"""The setting of an evaluation: a whole model in each process, and the facts that results depend on."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_robustness.evaluation.fingerprint import fingerprint_weights
from lightning_robustness.evaluation.processes import Processes
from lightning_robustness.evaluation.resume import Records

# By name: importing them takes long
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, which each process can use by itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def open_setting(model: nn.Module, processes: Processes, records: Records, facts: Mapping[str, Any]) -> None:
    """Check that all processes have the same whole model, and that earlier results are of this evaluation.

    Args:
        model: The model.
        processes: The processes that evaluate together.
        records: Finished results.
        facts: Settings that results depend on, by name.

    Raises:
        RuntimeError: If another process failed.
        ValueError: If the model is sharded or wrapped, weights differ between processes, or earlier results are of
            something else.

    """
    weights = ""
    with processes.step():
        if processes.number > 1:
            _check_whole(model)
        if processes.number > 1 or records.is_kept:
            weights = fingerprint_weights(model)
    if len(set(processes.gather(weights))) > 1:
        raise ValueError(
            "Expected the same weights in all processes but they differ. Load the same checkpoint in each of them, or "
            "seed before the model is made."
        )
    described = {name: _describe(value) for name, value in facts.items()}
    own = {"model": type(model).__name__, "forward": _describe(model.forward), "weights": weights}
    records.open({**own, "torch": torch.__version__, **described})


def _check_whole(model: nn.Module) -> None:
    for module in model.modules():
        names = _WRAPPERS & {parent.__name__ for parent in type(module).__mro__}
        if names:
            raise ValueError(
                f"Expected a model that each process can use by itself but got {names.pop()} inside of "
                f"{type(model).__name__}. Pass the module within, such as `model.module`, whole in each process."
            )
    is_sharded = any(hasattr(p, "ds_id") or type(p).__name__ == "DTensor" for p in model.parameters())
    if is_sharded or any(type(p.data).__name__ == "DTensor" for p in model.parameters()):
        raise ValueError(
            f"Expected a model that is whole in each process but the parameters of {type(model).__name__} are sharded. "
            "Evaluate a checkpoint of it, loaded in each process."
        )


def _describe(value: Any) -> str:
    if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", value if isinstance(value, str) else repr(value))
