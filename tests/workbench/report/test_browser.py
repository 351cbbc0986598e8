"""The study's page in a real browser: nothing is wider than the screen, dark and light."""

import os
import shutil
import subprocess
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from tests.workbench.report.test_study import make_study

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def browse(folder: Path, *flags: str) -> str:
    """What headless Chromium says, with a profile of its own and no network."""
    line = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--proxy-server=127.0.0.1:9", f"--user-data-dir={folder / 'profile'}", *flags,
    ]  # fmt: skip
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=100, env={**os.environ, "HOME": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_study(tmp_path_factory.mktemp("browser") / "study")
    assert main(["report", str(folder)]) == 0
    return folder / "index.html"


def screenshot(page: Path, folder: Path, width: int, *flags: str) -> np.ndarray:
    path = folder / "screen.png"
    size = f"--window-size={width},2400"
    browse(folder, size, "--hide-scrollbars", f"--screenshot={path}", *flags, page.as_uri())
    with Image.open(path) as image:
        return np.asarray(image.convert("L"), dtype=float)


LOOK = """<script>
const root = document.documentElement;
const wide = [...document.querySelectorAll("main *")].filter(e =>
    e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest("figure, .scroll"));
parent.postMessage(`${root.clientWidth} ${root.scrollWidth} ${wide.length}`, "*");
</script></body>"""


def test_it_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """In a frame as wide as a phone, nothing is wider, but for what scrolls by itself."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    html = page.read_text()
    assert policy in html
    html = html.replace(policy, f"{policy}; script-src 'unsafe-inline'").replace("</body>", LOOK)
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<title></title><script>onmessage = e => document.title = e.data</script>"
        f'<iframe width="390" height="800" srcdoc="{escape(html)}"></iframe>'
    )
    dom = browse(tmp_path, "--virtual-time-budget=9000", "--dump-dom", outer.as_uri())
    inner, scrolled, wide = map(int, dom.split("<title>")[1].split("</title>")[0].split())
    assert 300 < inner <= 390
    assert scrolled == inner
    assert wide == 0


def test_dark_and_light(page: Path, tmp_path: Path) -> None:
    light = screenshot(page, tmp_path, 1200)
    dark = screenshot(page, tmp_path, 1200, "--blink-settings=preferredColorScheme=0")
    assert light[:, :5].mean() > 240  # the paper beside the text
    assert dark[:, :5].mean() < 40
    for shot in (light, dark):
        assert shot.std() > 15  # there is something on it
