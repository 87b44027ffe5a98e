import os

import pytest
import torch
from hypothesis import settings
from sklearn.datasets import load_digits

from tests.networks import train_network
from tests.processes import start_processes

# Networks here are so small that threads cost more than they gain
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start
# The same examples in every run, however slow the machine is
settings.register_profile("reproducible", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def two_processes():
    """Callable that runs a function in two gloo processes and returns both results."""
    with start_processes() as run:
        yield run


@pytest.fixture(scope="session")
def digits():
    """Images in [0, 1] of shape (1797, 1, 8, 8) and labels; networks are trained on the first 1,200."""
    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


@pytest.fixture(scope="session")
def digits_network(digits):
    return train_network(digits[0][:1200], digits[1][:1200])


@pytest.fixture(scope="session")
def robust_digits_network(digits):
    return train_network(digits[0][:1200], digits[1][:1200], eps=0.15, epochs=15)
