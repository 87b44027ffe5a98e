import logging
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from sklearn.datasets import load_digits

from tests.gpu_like import GpuLike
from tests.networks import train_network
from tests.processes import start_processes

# Networks here are so small that threads cost more than they gain
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start
# The same examples in every run, however slow the machine is
settings.register_profile("reproducible", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("reproducible")
# Scripts silence these
LOGGERS = "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("gpu_like"):
        metafunc.parametrize("_device", [False, True], ids=["cpu", "gpu"], indirect=True)


@pytest.fixture(autouse=True)
def _device(request):
    """The CPU or, once more for tests that are marked so, one that rounds as a GPU does in most programs."""
    if not getattr(request, "param", False):
        yield
        return
    torch.set_float32_matmul_precision("high")  # or "medium", which is bfloat16 on a CPU with AMX
    with GpuLike():
        yield
    torch.set_float32_matmul_precision("highest")


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
def digits_network(digits, tmp_path_factory):
    return _shared("natural", tmp_path_factory, lambda: train_network(digits[0][:1200], digits[1][:1200]))


@pytest.fixture(scope="session")
def robust_digits_network(digits, tmp_path_factory):
    x, y = digits[0][:1200], digits[1][:1200]
    return _shared("robust", tmp_path_factory, lambda: train_network(x, y, eps=0.15, epochs=15))


def _shared(name, tmp_path_factory, make):
    """Make something once for all workers that run tests side by side: the second waits for the first."""
    path = tmp_path_factory.getbasetemp().parent / f"{name}.pt"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            torch.save(make(), path)
        return torch.load(path, weights_only=False)


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Callable that runs a script of this repository as the command line does; returns its names and its output."""
    modules = dict(sys.modules)
    levels = {name: logging.getLogger(name).level for name in LOGGERS}

    def run(path, *arguments):
        script = Path(__file__).parents[1] / path
        monkeypatch.syspath_prepend(str(script.parent))
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        names = runpy.run_path(str(script), run_name="__main__")
        return names, capsys.readouterr().out

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    scripts = str(Path(__file__).parents[1] / "benchmarks")
    for name in sys.modules.keys() - modules:  # scripts of other folders have modules of the same names
        if str(getattr(sys.modules[name], "__file__", "")).startswith(scripts):
            del sys.modules[name]
