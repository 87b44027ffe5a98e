"""The docs site: every page is in it, every public name is in the API reference, and mkdocs has no complaint."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_every_page_is_in_the_navigation():
    navigation = re.search(r"^nav:\n((?: .*\n)+)", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE).group(1)
    pages = re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)
    assert len(set(pages)) == len(pages)
    assert set(pages) == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


@pytest.fixture
def site_markup():
    pytest.importorskip("griffe", reason="the extra `docs` is not installed")
    spec = importlib.util.spec_from_file_location("site_markup", ROOT / "docs" / "site_markup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGES = ("attacks", "callbacks", "evaluation", "functional", "losses", "metrics")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package, site_markup):
    names = site_markup.public(f"lightning_robustness.{package}")
    exported = importlib.import_module(f"lightning_robustness.{package}").__all__
    assert sorted(name.rpartition(".")[2] for name in names) == sorted(exported)
    reference = site_markup.on_page_markdown((ROOT / "docs" / "api.md").read_text(), {"repo_url": ""})
    assert all(f"\n::: {name}\n" in reference for name in names)


def test_docstrings_become_markdown(site_markup):
    docstring = r"""Compute it.

    .. math::
        a = b \quad
        c = d

    Where :math:`a` is as in :func:`~torch.nn.functional.relu`.

    .. math:: e = \|f\|

    Example:
        >>> 1
        1
    """
    expected = r"""Compute it.


    $$
    a = b \quad
    c = d
    $$

    Where $a$ is as in `relu`.


    $$
    e = \|f\|
    $$

    Examples:
        >>> 1
        1
    """
    assert re.sub(r"\n\s*\n+", "\n\n", site_markup.to_markdown(docstring)) == re.sub(r"\n\s*\n+", "\n\n", expected)
    page = "[a](../README.md#b) [c](monitor.md) ![d](images/board.png)"
    assert site_markup.on_page_markdown(page, {"repo_url": "https://host/x"}) == (
        "[a](https://host/x/blob/main/README.md#b) [c](monitor.md) ![d](images/board.png)"
    )


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    reference = (tmp_path / "api" / "index.html").read_text()
    assert 'id="lightning_robustness.functional.roby.roby"' in reference
    assert not re.search(r":math:|\.\. math::|:func:|:class:", reference)
