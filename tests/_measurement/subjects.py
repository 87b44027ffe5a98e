import torch

from lightning_robustness._measurement.measure import measure
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import Access
from lightning_robustness._processes import Processes

CPU = torch.device("cpu")


def subject(model, space=None, **options):
    """A model on the CPU."""
    return Subject(model, Access(space), model, CPU, **options)


def samples(x, y=None, first=0):
    """Samples at positions from the first on."""
    return Samples(x, y, first + torch.arange(len(x)))


def rows_of(meter, model, x, y=None, space=None, first=0, **options):
    """Rows of all processes that a meter measures."""
    return measure(meter, subject(model, space, **options), samples(x, y, first), Processes())
