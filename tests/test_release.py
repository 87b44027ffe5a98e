"""What is published: versions that agree, a complete source distribution, a wheel without tests."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import lightning_robustness

ROOT = Path(__file__).parent.parent
VERSION = lightning_robustness.__version__
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", ".*cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "site"
)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == heading.groups()
    assert citation["version"] == VERSION


def read_combinations():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    return workflow["jobs"]["test"]["strategy"]["matrix"]


def test_the_workflow_tests_every_python_ours_and_what_pip_brings():
    matrix = read_combinations()
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert matrix["python"] == named
    torches = [combination["torch"] for combination in matrix["include"]]
    assert re.search(r"TORCH:-(.+?)}", (ROOT / ".ci" / "run").read_text()).group(1) in torches
    assert "" in torches  # nothing before the README's command


def test_the_workflow_tests_the_lower_bounds():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    bounds = dict(line.split(">=") for line in config["options"]["install_requires"].split() if ">=" in line)
    lowest = read_combinations()["include"][-1]
    pins = dict(pin.split("==") for pin in f"{lowest['torch']} {lowest['others']}".split())
    assert {name: pins[name] for name in bounds} == {name: f"{bound}.0" for name, bound in bounds.items()}
    assert config["options"]["python_requires"] == f">={lowest['python']}"


def test_pre_commit_runs_the_ruff_of_the_tests():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    revision = config["repos"][0]["rev"].removeprefix("v")
    pin = re.search(r"ruff==([\d.]+)\.\*", (ROOT / "setup.cfg").read_text()).group(1)
    assert revision.startswith(f"{pin}.")


@pytest.mark.slow
def test_the_distributions(tmp_path):
    pytest.importorskip("build", reason="`build` is in the extra `dev`")
    pytest.importorskip("twine", reason="`twine` is in the extra `dev`")
    shutil.copytree(ROOT, tmp_path / "source", ignore=IGNORED)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path / "source"]
    subprocess.run(command, check=True, capture_output=True)
    source, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    assert (source.name, wheel.name) == (
        f"lightning_robustness-{VERSION}.tar.gz",
        f"lightning_robustness-{VERSION}-py3-none-any.whl",
    )
    checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", source, wheel], capture_output=True)
    assert checked.returncode == 0, checked.stdout.decode()

    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        path.relative_to(tmp_path / "source").as_posix()
        for folder in (".github", "benchmarks", "docs", "examples", "lightning_robustness", "tests")
        for path in (tmp_path / "source" / folder).rglob("*")
    }
    expected |= {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "mkdocs.yml", "setup.cfg"}
    assert expected - files == set()

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = [
        path for path in (ROOT / "lightning_robustness").rglob("*.*") if path.suffix in (".py", ".css", ".typed")
    ]
    assert {name for name in names if ".dist-info/" not in name} == {str(path.relative_to(ROOT)) for path in package}
