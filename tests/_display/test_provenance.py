import getpass
import hashlib
import platform
import re
import socket

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import __version__
from lightning_robustness._display.provenance import describe_checkpoint, describe_data, describe_run, write_command


def test_run_is_described_without_names():
    run = describe_run()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", run["date"])
    assert run["versions"].startswith(f"lightning-robustness {__version__}, torch {torch.__version__}, lightning ")
    assert run["machine"].startswith(f"{platform.system()} {platform.machine()}, ")
    words = " ".join(run.values()).split()
    assert not {socket.gethostname(), getpass.getuser()} & set(words)


def test_machine_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    assert describe_run("cuda:1")["machine"].endswith(", card 1")
    assert describe_run("mps")["machine"].endswith(", mps")
    (tmp_path / "cpuinfo").touch()
    monkeypatch.setattr("lightning_robustness._display.provenance.Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert describe_run()["machine"].endswith("unknown processor")


def test_library_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr("lightning_robustness._display.provenance._LIBRARIES", ("no-such-library", "pytest"))
    assert describe_run()["versions"].endswith(f"torch {torch.__version__}, pytest {pytest.__version__}")


def test_checkpoints_have_a_hash(tmp_path):
    content = bytes(range(256)) * 5000  # more than one block
    (tmp_path / "x.ckpt").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert describe_checkpoint(str(tmp_path / "x.ckpt")) == {"checkpoint": "x.ckpt", "checkpoint SHA-256": expected}
    assert describe_checkpoint(None) == {"checkpoint": "none"}


def test_data():
    loader = DataLoader(TensorDataset(torch.zeros(7)))
    assert describe_data(loader) == {"data": "TensorDataset, 7 samples"}
    assert describe_data([1, 2]) == {"data": "list"}


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("a=pkg.module:Net@/home/ann/a.ckpt", "a=pkg.module:Net@a.ckpt"),
        ("C:\\Users\\ann\\a.ckpt", "a.ckpt"),
        ("{root: /data/sets/x, other: /home/ann lee/y}", "'{root: x, other: y}'"),
        ('{"root": "/usr/share/a b/c"}', '\'{"root": "c"}\''),
        ("{root: /home/ann}", "'{root: ~}'"),
        ("/home/ann", "'~'"),
        ("~/runs/a.ckpt", "a.ckpt"),
        ("--config=/etc/x/y.yaml", "--config=y.yaml"),
        ("runs/a.ckpt", "runs/a.ckpt"),
        ("../runs/a.ckpt", "../runs/a.ckpt"),
        ("8/255", "8/255"),
        ("pkg.module:Class", "pkg.module:Class"),
    ],
)
def test_commands_name_no_directories(argument, written):
    assert write_command(["evaluate", argument]) == f"evaluate {written}"
