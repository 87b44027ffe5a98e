"""Regenerate the pictures of README.md and docs/ from the examples.

Takes a few minutes: ``python docs/make_pictures.py``, or with the names of examples. Screenshots take Chromium.
"""

import argparse
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageChops
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def quickstart(folder: Path) -> None:
    """Take the picture of the run, adversarial examples, and the charts of TensorBoard."""
    _run("quickstart.py", folder)
    _save(Image.open(folder / "robustness.png"), "robustness.png")
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    examples = events.Images("robustness/examples/pgd")[-1].encoded_image_string
    _save(Image.open(io.BytesIO(examples)), "perturbations.png")
    with _tensorboard(folder / "lightning_logs") as address:
        page = _screenshot(f"{address}/#custom_scalars", folder / "board.png", (1400, 1200))
    _save(page.crop((362, 68, 1084, 1118)), "board.png")  # without the column of settings, two rows of charts


def adversarial_training(folder: Path) -> None:
    """Take the curves of one network, trained in several ways."""
    _run("adversarial_training.py", folder)
    _save(Image.open(folder / "adversarial_training.png"), "adversarial_training.png")


def compare_models(folder: Path) -> None:
    """Take the top of the page that compares models."""
    _run("compare_models.py", folder)
    page = _screenshot((folder / "report.html").as_uri(), folder / "report.png", (1000, 1100))
    _save(page, "report.png")


EXAMPLES: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (quickstart, adversarial_training, compare_models)
}


def _run(example: str, folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / example], cwd=folder, check=True)


def _save(picture: Image.Image, name: str) -> None:
    """Save a picture without its empty margin, in 128 colours, which is a fraction of the size."""
    picture = picture.convert("RGB")
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, "white")).getbbox()
    picture.crop(box).quantize(128).save(IMAGES / name, optimize=True)


def _screenshot(address: str, file: Path, size: tuple[int, int]) -> Image.Image:
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        raise FileNotFoundError("Expected Chromium or Chrome, which takes screenshots, but neither is installed.")
    options = [
        "--headless",
        "--no-sandbox",
        "--use-gl=angle",
        "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
    ]
    options += [f"--window-size={size[0]},{size[1]}", f"--user-data-dir={file.parent / 'browser'}"]
    subprocess.run([browser, *options, f"--screenshot={file}", address], check=True, capture_output=True)
    return Image.open(file)


@contextmanager
def _tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder; yield the address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://localhost:{port}"
        for _ in range(120):
            try:
                # Runs are listed once their events are loaded
                if urllib.request.urlopen(f"{address}/data/runs").read() not in (b"", b"[]"):
                    break
            except OSError:
                pass
            time.sleep(0.5)
        time.sleep(5)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Run the examples that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("examples", nargs="*", help="names of examples; by default all")
    for name in parser.parse_args().examples or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            EXAMPLES[name](Path(folder))


if __name__ == "__main__":
    main()
