"""What an evaluation works with: a model on its device, a loader, all processes, and a folder for results."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from lightning_robustness._arguments import check_device, check_flag, check_module
from lightning_robustness._display.provenance import describe_data, describe_run
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import Access
from lightning_robustness._processes import Processes
from lightning_robustness.evaluation.resume import ResumeFolder, check_folder, open_folder


class Session(NamedTuple):
    """A model under evaluation, the processes that share its samples, and the folder of their results."""

    subject: Subject
    processes: Processes
    folder: ResumeFolder

    def origin(self, dataloader: Any) -> dict[str, str]:
        """Describe where results come from, in the words of the first process."""
        own = describe_run(self.subject.device) | describe_data(dataloader) | {"seed": str(self.subject.seed)}
        return self.processes.gather(own)[0]


@contextmanager
def open_session(
    model: nn.Module,
    dataloader: Any,
    access: Access,
    facts: Mapping[str, Any],
    device: str | torch.device | None,
    batch_size: int,
    seed: int,
    progress: bool,
    resume: str | Path | None,
) -> Iterator[Session]:
    """Open the folder, whose results must be of the same facts, and have the model on the device meanwhile."""
    check_module(model, "which can be moved to a device")
    check_session(dataloader, device, progress, resume)
    processes = Processes()
    if isinstance(model, DistributedDataParallel):
        model = model.module  # which each process can use by itself
    folder = open_folder(resume, model, processes, facts)
    shown = progress and processes.rank == 0
    with processes.together(on_device(model, device)) as place:
        # Tensors are split by integers of Python only
        subject = Subject(model, access, access.forward(model), place, int(batch_size), seed, shown)
        yield Session(subject, processes, folder)


@contextmanager
def on_device(model: nn.Module, device: str | torch.device | None) -> Iterator[torch.device]:
    """Move a model to a device and back afterwards; with None it stays where it is."""
    own = next((p.device for p in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device is None or torch.device(device) == own:
        yield own
        return
    try:
        model.to(device)
        yield torch.device(device)
    finally:
        model.to(own)


def check_session(
    dataloader: Any, device: str | torch.device | None, progress: bool, resume: str | Path | None
) -> None:
    """Check what does not depend on the model."""
    check_loader(dataloader)
    check_folder(resume)
    check_device(device)
    check_flag("progress", progress)


def check_loader(dataloader: Any) -> None:
    """Check that there is a loader."""
    if hasattr(dataloader, "test_dataloader"):
        kind = dataloader if isinstance(dataloader, type) else type(dataloader)
        found = f"the data module {kind.__name__}. Pass one of its loaders, such as `test_dataloader()`."
    elif isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset):
        found = f"the data set {type(dataloader).__name__}. Pass `DataLoader(dataset, batch_size=128)`."
    elif isinstance(dataloader, tuple | list) and len(dataloader) == 2 and _are_columns(*dataloader):
        are_tensors = all(isinstance(own, Tensor) for own in dataloader)
        columns = "x, y" if are_tensors else "torch.as_tensor(x), torch.as_tensor(y)"
        found = f"inputs and labels. Pass `DataLoader(TensorDataset({columns}), batch_size=128)`."
    elif isinstance(dataloader, str | Mapping) or not (
        hasattr(dataloader, "__iter__") or hasattr(dataloader, "__getitem__")
    ):
        found = f"{type(dataloader).__name__}."
    else:
        return
    raise TypeError(f"Expected `dataloader` to be an iterable of batches but got {found}")


def _are_columns(x: Any, y: Any) -> bool:
    """Return whether two entries are inputs and labels, not two batches of inputs."""
    are_arrays = all(isinstance(own, Tensor | np.ndarray) for own in (x, y))
    return are_arrays and x.ndim > 1 and tuple(y.shape) == tuple(x.shape[:1])
