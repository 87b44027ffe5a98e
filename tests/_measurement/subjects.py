import torch

from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness.input_space import InputSpace

CPU = torch.device("cpu")


def subject(model, space=None, **options):
    """A model on the CPU."""
    return Subject(model, space or InputSpace(), CPU, **options)


def samples(x, y=None):
    """Samples at the first positions of a data set."""
    return Samples(x, y, torch.arange(len(x)))
