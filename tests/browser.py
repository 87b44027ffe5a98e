"""A page as a real browser shows it: Chromium without a window."""

import json
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (390, 820, 1400)
# Runs inside the page, and tells the page around it what it finds
PROBE = """<script>
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("svg text")].filter(text => text.getBoundingClientRect().width > 0);
  const scale = text => text.ownerSVGElement.getScreenCTM().a;
  const isCut = text => {
    const [inner, outer] = [text, text.ownerSVGElement].map(element => element.getBoundingClientRect());
    return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2
      || inner.bottom > outer.bottom + 2;
  };
  parent.postMessage({
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    smallest: Math.min(99, ...shown.map(text => parseFloat(getComputedStyle(text).fontSize) * scale(text))),
    cut: shown.filter(isCut).map(text => text.textContent),
    texts: shown.length,
    background: getComputedStyle(document.body).backgroundColor,
    ink: shown.length ? getComputedStyle(shown[0]).fill : "",
  }, "*");
});
</script></head>"""
# An iframe has the width that it is told; the window of the browser itself has a least width
AROUND = """<!DOCTYPE html><html><body><pre id="found"></pre><script>
const found = [];
addEventListener("message", message => {
  found.push(message.data);
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>%s</body></html>"""


class Shown(NamedTuple):
    """What a browser made of a page: measurements by width, console messages, and requests to hosts."""

    by_width: dict[int, dict]
    console: list[str]
    requests: list[str]


def show(page, folder, dark=False):
    """Show a page at several widths; skip the test where there is no browser."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    assert "</head>" in page
    (folder / "page.html").write_text(page.replace("</head>", PROBE, 1), encoding="utf-8")
    frames = "".join(
        f'<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>' for width in WIDTHS
    )
    around, log = folder / "around.html", folder / "net.json"
    around.write_text(AROUND % frames, encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    flags = "--headless --no-sandbox --hide-scrollbars --disable-gpu --disable-background-networking "
    flags += "--disable-component-update --disable-sync --no-first-run --enable-logging=stderr "
    flags += "--virtual-time-budget=5000 --dump-dom"
    files = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"]
    command = [browser, *flags.split(), *scheme, *files, "--host-resolver-rules=MAP * ~NOTFOUND", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL).group(1))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Shown({entry["width"]: entry for entry in found}, console, _requests(log))


def _requests(log):
    """Return the addresses of all requests that a page made, rather than the browser for itself."""
    events = (event.get("params", {}) for event in json.loads(log.read_text(encoding="utf-8"))["events"])
    made = [params["url"] for params in events if params.get("initiator", "not an origin") != "not an origin"]
    return sorted({url for url in made if not url.startswith(("file:", "data:"))})
