"""Regenerate the pictures of README.md and docs/ from the examples.

Takes a few minutes: ``python docs/make_pictures.py``, or with the names of examples. Screenshots take Chromium.
"""

import argparse
import asyncio
import base64
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
from typing import Any

import aiohttp
from PIL import Image, ImageChops, ImageOps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "about:blank"),
)
_SCALE = 2
# What was measured, and nothing cut off; the column of settings closed
_SETTINGS = """
localStorage.setItem("_tb_global_settings", JSON.stringify({scalarSmoothing: 0, ignoreOutliers: false}));
localStorage.setItem("_ignoreYOutliers", "false");
"""
_OPEN_CARDS = """
document.querySelectorAll(".expand-button").forEach(button => button.click());
"""
_CARDS, _CHARTS = (284, 203, 1149, 1192), (372, 1195, 1076, 1800)


def quickstart(folder: Path) -> None:
    """Take the picture of the run, adversarial examples, and the charts of TensorBoard."""
    _run("quickstart.py", folder)
    _save(Image.open(folder / "robustness.png"), "robustness.png")
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    examples = events.Images("robustness/examples/pgd")[-1].encoded_image_string
    _save(Image.open(io.BytesIO(examples)), "perturbations.png")
    with _tensorboard(folder / "lightning_logs") as address:
        # The first four cards, and two rows of charts, without the columns on both sides
        _save(_shoot(f"{address}/#timeseries", (1400, 1300), _CARDS, script=_OPEN_CARDS), "board.png")
        _save(_shoot(f"{address}/#custom_scalars&_smoothingWeight=0", (1400, 1900), _CHARTS), "custom_scalars.png")


def robust_overfitting(folder: Path) -> None:
    """Take the curves of a run that overfits, and the epoch that is kept."""
    _run("robust_overfitting.py", folder)
    _save(Image.open(folder / "robust_overfitting.png"), "robust_overfitting.png")


def adversarial_training(folder: Path) -> None:
    """Take the curves of one network, trained in several ways."""
    _run("adversarial_training.py", folder)
    _save(Image.open(folder / "adversarial_training.png"), "adversarial_training.png")


def compare_models(folder: Path) -> None:
    """Take the top of the page that compares models."""
    _run("compare_models.py", folder)
    _save(_shoot((folder / "report.html").as_uri(), (1000, 1068)), "report.png")


EXAMPLES: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (quickstart, robust_overfitting, adversarial_training, compare_models)
}


def _run(example: str, folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / example], cwd=folder, check=True)


def _save(picture: Image.Image, name: str) -> None:
    """Save a picture with a narrow white margin, in 128 colours, which is a fraction of the size."""
    picture = picture.convert("RGB")
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, "white")).getbbox()
    ImageOps.expand(picture.crop(box), border=16, fill="white").quantize(128).save(IMAGES / name, optimize=True)


def _shoot(
    address: str, size: tuple[int, int], box: tuple[int, int, int, int] | None = None, script: str = ""
) -> Image.Image:
    """Take a picture of a page, or of a box in it, at twice its size, once a script has run in it."""
    picture = Image.open(io.BytesIO(asyncio.run(_capture(address, size, script))))
    return picture if box is None else picture.crop(tuple(_SCALE * side for side in box))


async def _capture(address: str, size: tuple[int, int], script: str) -> bytes:
    """Let a browser show a page for a while, by its debugging protocol: a page's own clock runs too fast for WebGL."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError("Expected Chromium or Chrome, which takes screenshots, but neither is installed.")
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen([browser, *_OPTIONS, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
        try:
            while not (port := Path(profile) / "DevToolsActivePort").exists() or not port.read_text():
                await asyncio.sleep(0.1)
            async with aiohttp.ClientSession(f"http://localhost:{port.read_text().split()[0]}") as session:
                pages = await (await session.get("/json")).json()
                target = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
                async with session.ws_connect(target, max_msg_size=0) as socket:

                    async def call(method: str, **params: object) -> dict[str, Any]:
                        await socket.send_json({"id": 1, "method": method, "params": params})
                        while "id" not in (message := await socket.receive_json()):
                            pass  # events
                        return message["result"]

                    view = {"width": size[0], "height": size[1], "deviceScaleFactor": _SCALE, "mobile": False}
                    await call("Emulation.setDeviceMetricsOverride", **view)
                    await call("Page.addScriptToEvaluateOnNewDocument", source=_SETTINGS)
                    await call("Page.enable")
                    await call("Page.navigate", url=address)
                    await asyncio.sleep(12)
                    await call("Runtime.evaluate", expression=script)
                    await asyncio.sleep(3)
                    return base64.b64decode((await call("Page.captureScreenshot"))["data"])
        finally:
            process.terminate()
            process.wait()


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
