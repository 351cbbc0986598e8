"""Both pages in a real browser: their order, their width on a phone, dark and light mode."""

import json
import os
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from tests.workbench.report.conftest import make_run
from tests.workbench.report.test_summary import make_batch_study

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def browse(folder: Path, *flags: str) -> str:
    """Return the output of headless Chromium, with its own profile and no network."""
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
    """The page of a study with long names and commands."""
    folder = make_batch_study(tmp_path_factory.mktemp("browser") / "study")
    path = folder / "study.json"
    text = path.read_text().replace("deepcontrol train", f"deepcontrol {'train' * 40}")
    study = json.loads(text)
    study.pop("crc", None)  # the checksum of the text before
    path.write_text(json.dumps(study))
    assert main(["report", str(folder)]) == 0
    return folder / "index.html"


@pytest.fixture(scope="module")
def runs_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs, one with a long name."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / name) for name in ("a", "long" * 30)]
    assert main(["report", *map(str, runs), "--out", str(folder / "page")]) == 0
    return folder / "page" / "index.html"


def screenshot(page: Path, folder: Path, width: int, *flags: str) -> np.ndarray:
    path = folder / "screen.png"
    size = f"--window-size={width},2400"
    browse(folder, size, "--hide-scrollbars", f"--screenshot={path}", *flags, page.as_uri())
    with Image.open(path) as image:
        return np.asarray(image.convert("L"), dtype=float)


# Elements in a figure or in a .scroll box may be wider than the screen: the box scrolls.
MEASURE = """<script>
const root = document.documentElement;
const opened = document.querySelectorAll("details");
opened.forEach(e => { e.open = true; });
const wide = [...document.querySelectorAll("main *")].filter(e =>
    e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest("figure, .scroll"));
const top_of = e => e ? e.getBoundingClientRect().top : null;
const tops = {};
for (const e of document.querySelectorAll("main [id]")) tops[e.id] = top_of(e);
parent.postMessage(JSON.stringify({
    inner: root.clientWidth, scrolled: root.scrollWidth, wide: wide.length, tops,
    image: top_of(document.querySelector("img")), table: top_of(document.querySelector("table")),
}), "*");
</script></body>"""


def measure(page: Path, folder: Path, width: int) -> dict[str, Any]:
    """Return sizes and places of elements in a frame of this width, with all details open."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    html = page.read_text()
    assert policy in html
    html = html.replace(policy, f"{policy}; script-src 'unsafe-inline'").replace("</body>", MEASURE)
    outer = folder / "outer.html"
    outer.write_text(
        "<title></title><script>onmessage = e => document.title = e.data</script>"
        f'<iframe width="{width}" height="800" srcdoc="{escape(html)}"></iframe>'
    )
    dom = browse(folder, "--virtual-time-budget=9000", "--dump-dom", outer.as_uri())
    return dict(json.loads(unescape(dom.split("<title>")[1].split("</title>")[0])))


@pytest.mark.parametrize("name", ["page", "runs_page"])
def test_page_fits_a_phone(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """At 390 pixels, the body does not scroll sideways."""
    found = measure(request.getfixturevalue(name), tmp_path, 390)
    assert 300 < found["inner"] <= 390
    assert found["scrolled"] == found["inner"]
    assert found["wide"] == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_pictures_come_before_verdicts(page: Path, tmp_path: Path, width: int) -> None:
    found = measure(page, tmp_path, width)
    tops = found["tops"]
    parts = ("summary", "figure-1", "verdicts", "lambda", "predictions", "runs", "methods")
    assert sorted(parts, key=lambda part: tops[part]) == list(parts)
    assert found["image"] < tops["figure-1"] < tops["verdicts"] < found["table"]
    if width == 1280:  # the first screen shows the summary and the picture
        assert max(tops["summary"], tops["final-errors"]) < 400


def test_curves_come_before_the_table(runs_page: Path, tmp_path: Path) -> None:
    found = measure(runs_page, tmp_path, 1280)
    assert found["tops"]["summary"] < found["image"] < found["table"]


def test_dark_and_light(page: Path, tmp_path: Path) -> None:
    light = screenshot(page, tmp_path, 1200)
    dark = screenshot(page, tmp_path, 1200, "--blink-settings=preferredColorScheme=0")
    assert light[:, :5].mean() > 240  # the margin
    assert dark[:, :5].mean() < 40
    for shot in (light, dark):
        assert shot.std() > 15  # there is something on it
