import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
CIFAR10 = runpy.run_path(str(EXAMPLES / "cifar10_data.py"))
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def test_the_network_is_a_resnet18():
    network = runpy.run_path(str(EXAMPLES / "resnet18.py"))["resnet18"]()
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_173_962  # as usual for CIFAR-10
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_python_version_of_the_data_set_is_read(tmp_path):
    generator = np.random.default_rng(0)
    pixels = generator.integers(256, size=(6, 2, 3072), dtype=np.uint8)
    for name, data in zip(NAMES, pixels, strict=True):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": data, b"labels": [3, 7]}, protocol=4))
    train, test = CIFAR10["cifar10"](tmp_path)
    assert (len(train), len(test)) == (10, 2)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    images = pixels[5].reshape(2, 3, 32, 32) / 255
    expected = (images - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(test.tensors[0].numpy(), expected, atol=1e-6)
    assert test.tensors[1].tolist() == [3, 7]
    assert train.tensors[1].tolist() == [3, 7] * 5


def test_a_file_of_python_2_is_read(tmp_path):
    """The published files name classes by NumPy's old modules."""
    published = pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]}, protocol=4)
    old = published.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    assert old != published
    # a frame says how long it is; without one, the shorter name does no harm
    assert old[2:3] == b"\x95"
    (tmp_path / "test_batch").write_bytes(old[:2] + old[11:])
    assert CIFAR10["load"](tmp_path, "test_batch").tensors[1].tolist() == [1]


def test_a_pickle_that_names_code_is_refused(tmp_path):
    class Intruder:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)

    (tmp_path / "test_batch").write_bytes(pickle.dumps(Intruder()))
    with pytest.raises(pickle.UnpicklingError, match=r"NumPy arrays .* got \w+\."):
        CIFAR10["load"](tmp_path, "test_batch")
    assert not (tmp_path / "touched").exists()
