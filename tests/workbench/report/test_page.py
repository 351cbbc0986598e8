"""`deepcontrol report` on runs: the page is self-contained, escaped, and starts with pictures."""

import base64
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.folders.runfolder import read_run
from deepcontrol.workbench.imagefile import as_jpeg
from deepcontrol.workbench.report.figures import COLORS, DASHES, line_style
from deepcontrol.workbench.report.layers import left_out, track
from tests.workbench.report.conftest import LAYERS, layers, make_run


class Tags(HTMLParser):
    """Parse a page into its tags with attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def sources(self) -> list[str]:
        return [str(attributes["src"]) for tag, attributes in self.found if tag == "img"]


def report(*runs: Path, out: Path) -> Tags:
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    assert [p.name for p in out.iterdir()] == ["index.html"]
    return Tags((out / "index.html").read_text())


def test_pictures_are_embedded(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "a"), make_run(tmp_path / "b", norm="bn"), out=tmp_path / "o")
    kinds = [source.split(";")[0] for source in page.sources()]
    svg, jpeg = "data:image/svg+xml", "data:image/jpeg"
    # Error and loss; run a: two samples, lambda twice, the rest; run b: no lambda.
    assert kinds == [svg, svg, *[jpeg, jpeg, svg, svg, svg], *[jpeg, jpeg, svg]]
    for source in page.sources():
        content = base64.b64decode(source.split(",", 1)[1])
        assert content.startswith((b"<?xml", b"\xff\xd8"))
    assert all(attributes.get("alt") for tag, attributes in page.found if tag == "img")
    assert {tag for tag, _ in page.found}.isdisjoint({"script", "link", "iframe", "object"})
    links = [str(a["href"]) for tag, a in page.found if tag == "a"]
    assert links == ["#run-1", "#run-2"]
    assert "37.50" in page.text
    assert "25.00" in page.text


def test_curves_come_before_the_table(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    page = report(*runs, out=tmp_path / "o")
    tags = [tag for tag, _ in page.found]
    assert tags.index("img") < tags.index("table")
    assert "The lowest validation error is 25.00% after epoch 2, by a." in page.text


def test_nothing_is_fetched(tmp_path: Path) -> None:
    report(make_run(tmp_path / "a"), out=tmp_path / "o")
    html = (tmp_path / "o" / "index.html").read_text()
    without_pictures = re.sub(r"data:image/[^\"]*", "", html)
    assert not re.search(r"https?:|url\(|@import", without_pictures)


def test_text_is_escaped(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>".replace("/", "_")
    folder = make_run(tmp_path / name, norm="<img src=x onerror=1>")
    page = report(folder, out=tmp_path / "o")
    assert {tag for tag, _ in page.found}.isdisjoint({"script"})
    assert all(source.startswith("data:image/") for source in page.sources())
    assert name in page.text


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    name = "_hidden $x_1$ 100% näme 名前"
    folder = make_run(tmp_path / name)
    path = folder / "layers.jsonl"
    path.write_text(path.read_text().replace("decoder.0", "$x_$ 名前"))
    assert name in report(folder, out=tmp_path / "o").text


def test_run_without_epochs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", epochs=0)
    for picture in (folder / "samples").iterdir():
        picture.unlink()
    page = report(folder, out=tmp_path / "o")
    assert "0 of 5" in page.text
    assert "no sample pictures yet" in page.text
    for name in ("metrics.jsonl", "layers.jsonl"):
        (folder / name).unlink()
    assert "there is no layers.jsonl" in report(folder, out=tmp_path / "o").text


def test_unreadable_picture_is_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    (folder / "samples" / "epoch-0003.png").write_text("no picture")
    page = report(folder, out=tmp_path / "o")
    assert "epoch-0003.png is not a readable picture" in page.text
    assert sum(source.startswith("data:image/jpeg") for source in page.sources()) == 1


def test_page_is_deterministic(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    pages = []
    for out in (tmp_path / "o", tmp_path / "p"):
        report(folder, out=out)
        pages.append((out / "index.html").read_bytes())
    assert pages[0] == pages[1]


def test_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o"
    page = report(make_run(tmp_path / "a"), tmp_path / "gone", out=out)
    assert "gone is not a run folder" in page.text
    assert "skipped: " in capsys.readouterr().out
    assert main(["report", str(tmp_path / "gone"), "--out", str(out)]) == 1
    assert "gone is not a run folder" in capsys.readouterr().err
    assert main(["report", "--out", str(out)]) == 1
    assert "no run folder given" in capsys.readouterr().err


def test_line_styles_differ() -> None:
    styles = {line_style(i) for i in range(len(COLORS) * len(DASHES))}
    assert len(styles) == len(COLORS) * len(DASHES)


def test_torch_is_not_imported() -> None:
    """The report package must not import torch. The library does, so a stub replaces it."""
    script = """
import sys, types
stub = types.ModuleType("deepcontrol")
import importlib.util
stub.__path__ = list(importlib.util.find_spec("deepcontrol").submodule_search_locations)
sys.modules["deepcontrol"] = stub
import deepcontrol.workbench.report
assert "torch" not in sys.modules
print("clean")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "clean\n", done.stderr


def make_classifier(folder: Path, classes: int = 3) -> Path:
    """A run of a classifier: errors per class, and no IoU."""
    make_run(folder, model="resnet20")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    names = [f"<class {i}>" for i in range(classes)]
    content["derived"] |= {"task": "classification", "classes": names}
    path.write_text(json.dumps(content))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["val_mean_iou"]
        row["val_class_error"] = [None, *(0.5 / i for i in range(1, classes))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_page_of_a_classifier(tmp_path: Path) -> None:
    page = report(make_classifier(tmp_path / "a"), out=tmp_path / "o")
    assert "percentage of wrong images" in page.text
    assert "mean IoU" not in page.text
    assert "Wrong predictions are red" in page.text
    charts = [a["alt"] for tag, a in page.found if tag == "img"]
    assert "Validation error of each class by epoch" in charts
    errors = read_run(tmp_path / "a").last_by_class
    assert errors == {"<class 1>": 0.5, "<class 2>": 0.25}  # class 0 has no validation images


def test_page_of_both_tasks(tmp_path: Path) -> None:
    runs = make_classifier(tmp_path / "a", classes=100), make_run(tmp_path / "b")
    page = report(*runs, out=tmp_path / "o")
    assert "percentage of wrong pixels or images" in page.text
    assert "mean IoU" in page.text


def test_class_errors_that_do_not_fit_the_classes_are_left_out(tmp_path: Path) -> None:
    run = make_classifier(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "val_class_error": [0.5]}\n')
    assert read_run(run).last_by_class == {}
    report(run, out=tmp_path / "o")


@pytest.mark.parametrize("size", [(1, 6400), (6400, 1), (1, 1), (3000, 2000)])
def test_pictures_stay_small(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "x.png")
    with Image.open(io.BytesIO(as_jpeg(tmp_path / "x.png"))) as picture:
        assert picture.width <= 1600
        assert picture.height <= 4800


def test_huge_pictures_are_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (24_000, 3_000)).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"3000x24000 pixels, expected at most"):
        as_jpeg(tmp_path / "x.png")


def test_charts_of_many_layers_and_epochs_are_thinned(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", epochs=1)
    names = [f"layer{i}" for i in range(5000)]
    lines = [{"epoch": 0, "layers": {name: layers(0, "agc")[LAYERS[0]] for name in names}}]
    lines += [{"epoch": i, "layers": {}} for i in range(1, 2000)]
    lines += [{**lines[0], "epoch": 2000}]
    (folder / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    found = track(run, "mean_scale")
    assert found is not None
    assert (len(found.names), len(found.epochs)) == (120, 1000)
    assert (found.names[0], found.names[-1], found.epochs[-1]) == ("layer0", "layer4999", 2000)
    assert left_out(run) == [
        "layers.jsonl has 5,000 layers; the charts show 120 of them",
        "layers.jsonl has 2,001 epochs; the charts show 1,000 of them",
    ]


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = make_run(tmp_path / os.fsdecode(b"caf\xe9"))
    assert "caf\\xe9" in report(folder, out=tmp_path / "o").text
