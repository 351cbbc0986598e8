"""README.md: its code runs, and its tables and picture match the committed results."""

import dataclasses
import json
import math
import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VERDICTS = (ROOT / "docs" / "verdicts.md").read_text()
STUDY = "results/camvid"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts of results/ importable."""
    monkeypatch.syspath_prepend(str(ROOT / "results"))
    for name in ("performance", "figure"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def figure(results: None) -> ModuleType:
    import figure  # type: ignore[import-not-found, unused-ignore]

    return figure


@pytest.fixture
def performance(results: None) -> ModuleType:
    import performance  # type: ignore[import-not-found, unused-ignore]

    return performance


def test_code_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102


def test_length() -> None:
    """At most 200 lines, none of which is long only for the count; tables and links may be."""
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "!["))] == []


def test_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\((?!https://)([^)#]*)#?([^)]*)\)", README)
    assert links
    for path, anchor in links:
        text = (ROOT / path).read_bytes() if path else README.encode()
        titles = re.findall(r"(?m)^#+ (.*)$", text.decode(errors="ignore"))
        headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not anchor or anchor in headings, f"{path}#{anchor}"


def test_paths_exist() -> None:
    for path in re.findall(r"`((?:docs|results|benchmarks|dev|src)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path


def test_short_table_matches_the_study() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    study = script["read_study"](ROOT / STUDY)
    assert _block(README, "in short") == script["in_short"](study), "run make readme"


def test_other_results_in_the_readme_match_their_runs() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    cifar, recipe = script["CLASSIFICATION"], script["RECIPE"]
    table = script["cifar_in_short"](script["read_study"](ROOT / cifar))
    assert _block(README, "in short", cifar) == table, "run make readme"
    runs = (ROOT / cifar / "runs").glob("resnet20-agc+ws-b1-lr0.003-s*")
    assert f"| AGC | {fmean(_last_errors(runs, 1)):.2f} ± " in table
    sentence = script["recipe_in_short"](script["read_study"](ROOT / recipe))
    assert _block(README, "in short", recipe) == sentence, "run make readme"
    runs = (ROOT / recipe / "runs").glob("segnet-agc+ws-b1-lr0.02-s?")
    assert f" at {fmean(_last_errors(runs, 1)):.2f} ± " in sentence


def test_errors_by_batch_size_match_the_study() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    study = script["CLASSIFICATION"]
    table = script["by_batch_size"](script["read_study"](ROOT / study))
    text = (ROOT / "docs" / "choose.md").read_text()
    assert _block(text, "by batch size", study) == table, "run make readme"
    assert "| 128 | 22.81 ± 0.18% | 26.61 ± 0.16% |" in table


def test_recipe_matches_the_study() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    study = script["RECIPE"]
    table = script["of_recipe"](script["read_study"](ROOT / study))
    text = (ROOT / "docs" / "choose.md").read_text()
    assert _block(text, "table", study) == table, "run make readme"
    assert "batch size 1 | 8.11 ± 0.02% |" in table


def test_recurrent_table_matches_its_runs(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    text = (ROOT / "docs" / "proposals.md").read_text()
    assert _block(text, "table", script["RECURRENT"]) == script["recurrent"](), "run make readme"
    rows = ["norm,batch,seed,error_8,error_32"]
    for norm in script["RECURRENT_NORMS"]:
        late = {"agc": 0.42, "bn": 0.5, "bn-per-step": 0.5}.get(norm, 0.6)
        rows += [f"{norm},{b},{s},0.40,{late + 0.01 * s}" for b in (1, 4) for s in (0, 1)]
    path = tmp_path / "recurrent.csv"
    path.write_text("\n".join(rows))
    found = script["recurrent"](path)
    assert "| AGC | 40.0% | 42.5% | 1.06 | 40.0% | 42.5% | 1.06 |" in found
    assert "These do: AGC." in found
    assert "this holds here" in found
    late = "bn-per-step,4,0,0.40,0.5"
    path.write_text("\n".join(rows).replace(late, late.replace("0.5", "0.3")))
    assert "this holds here" in script["recurrent"](path)  # at batch size 1 it does not serve
    path.write_text("\n".join(rows).replace("0.40,0.5", "0.40,0.42"))
    assert "this does not hold here" in script["recurrent"](path)


def test_verdicts_match_the_study() -> None:
    script = runpy.run_path(str(ROOT / "results" / "readme.py"))
    verdicts = script["verdicts"](script["read_study"](ROOT / STUDY))
    relative = verdicts.replace("](results/", "](../results/")
    assert _block(VERDICTS, "verdicts") == relative, "run make readme"


def test_main_figures_are_of_the_runs_that_they_name() -> None:
    for batch, lr in ((1, 0.02), (4, 0.08), (8, 0.16)):
        agc, bn = (_final_error(norm, batch, lr) for norm in ("agc", "bn"))
        row = rf"\| wrong pixels, batch {batch} \| {agc:.2f} ± \S+ % \| {bn:.2f} ± \S+ % \|"
        assert re.search(row, README), row


def test_performance_tables_match_the_benchmark(performance: ModuleType) -> None:
    for path, contents in performance.blocks().items():
        text = path.read_text()
        assert performance.fill(text, contents) == text, f"{path}: run make readme"


def test_a_missing_block_is_an_error(performance: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected one block"):
        performance.fill("no block here", {"steps": "table"})


def test_ratio_across_two_runs_is_marked(performance: ModuleType) -> None:
    """~ marks a ratio of steps that two runs of the benchmark measured."""
    steps = [s for s in performance.read_steps() if s.case == ("segnet", 8, "bf16")]
    agc = performance.find(steps, ("segnet", 8, "bf16"), "agc")[0]
    gn = performance.find(steps, ("segnet", 8, "bf16"), "gn")[0]
    gn = dataclasses.replace(gn, run=agc.run)
    assert performance._time_ratio(agc, gn) == f"{agc.ms / gn.ms:.2f}x"
    earlier = dataclasses.replace(gn, run="2026-11-16T01:41:45Z")
    assert performance._time_ratio(agc, earlier) == f"~{agc.ms / gn.ms:.2f}x"
    assert performance._time_ratio(agc, agc) == "1.00x"


def test_modes_show_the_fastest_engine_of_a_mode(performance: ModuleType) -> None:
    (some,) = performance.find(performance.read_steps(), ("segnet", 8, "bf16"), "gn")[:1]

    def step(contender: str, engine: str, ms: float, **more: object) -> object:
        return dataclasses.replace(some, contender=contender, engine=engine, ms=ms, **more)

    steps = [
        step("agc", "eager", 3.0),
        step("agc", "graph", 1.0, activations_mib=10.0),
        step("agc", "compile+graph", 2.0),
        step("agc", "reduce-overhead", 0.5, activations_mib=math.nan),  # in no column
        step("bn", "eager", 4.0),
        step("bn", "compile+graph", 2.5, activations_mib=40.0),
    ]
    (row,) = performance.main_table(steps).splitlines()[2:]
    assert row == (
        "| SegNet 256x512, 8 | 3.00 / 4.00 ms: 0.75x | - / - | 1.00 / 2.50 ms: 0.40x "
        "| 10 / 40 MiB: 0.25x |"
    )
    table = performance.contender_table([*steps, step("in", "eager", 9.0, run="")], some.case)
    assert "| AGC | 3.00 |  | 1.00 | 10 MiB |" in table
    assert "| AGC | 3.00 | 0.50 | 1.00 | 2.00 |" in performance.engine_table(steps)
    assert "| InstanceNorm | 9.00 \\* |" in table


def test_sections_appear_once_they_are_measured(performance: ModuleType, tmp_path: Path) -> None:
    steps = performance.read_steps()
    size = "96x96x96, contiguous"
    volume = dataclasses.replace(steps[0], network="nnunet", size=size, batch=1)
    found = [
        dataclasses.replace(volume, contender=contender, ms=ms)
        for contender, ms in (("agc", 3.0), ("in", 4.0), ("agc", 9.0))
    ]
    assert performance.nnunet_section([steps[0]]) == ""
    row = "| plain 96x96x96, contiguous, 1 | 3.00 | 4.00 |  |  | 0.75x | 1.00x |"
    assert row in performance.nnunet_section(found)
    assert performance.main_table([*steps, *found]) == performance.main_table(steps)
    path = tmp_path / "host.csv"
    assert performance.host_time_section(path) == ""
    parts = ("forward_us_p50", "backward_us_p50", "total_us_p50", "total_us_p20", "total_us_p80")
    path.write_text(
        f"contender,{','.join(parts)},total_vs_batchnorm_p50\nAGCConv2d,100,120,221,210,240,0.713\n"
    )
    shown = performance.host_time_section(path)
    assert "| AGCConv2d | 100 | 120 | 221 | 210 to 240 | 0.71x |" in shown


def test_picture_matches_the_results(figure: ModuleType) -> None:
    with Image.open(figure.PICTURE) as picture:
        shown = json.loads(picture.info[figure.DATA])
    steps, errors, cifar = figure.measured_steps(), figure.measured_errors(), figure.cifar_errors()
    assert shown == json.loads(figure.numbers(steps, errors, cifar)), "run make readme"
    final = {(e.norm, e.batch): e.mean for e in errors}
    assert final["agc", 1] == pytest.approx(_final_error("agc", 1, 0.02))
    assert final["bn", 8] == pytest.approx(_final_error("bn", 8, 0.16))
    (large,) = (e for e in cifar if (e.norm, e.batch) == ("bn", 128))
    runs = sorted((figure.CIFAR / "runs").glob("resnet20-bn-b128-lr0.3-s*"))
    assert large.seeds == pytest.approx([figure.final_error(run) for run in runs])


def test_picture_takes_every_norm_that_has_runs(figure: ModuleType, tmp_path: Path) -> None:
    for batch, lr in ((1, 0.02), (8, 0.16)):
        for seed in (0, 1):
            _write_run(tmp_path / f"segnet-gn-b{batch}-lr{lr}-s{seed}", [0.5] * 9 + [0.1 + seed])
    _write_run(tmp_path / "segnet-gn-b4-lr0.08-s0", [0.5], epochs=10)  # not finished
    _write_run(tmp_path / "segnet-gn-b8-lr0.16-clip1-s0", [0.5] * 10)  # another arm
    found = figure.measured_errors(tmp_path)
    assert [(e.norm, e.batch, e.seeds) for e in found] == [
        ("gn", 1, (10.0, pytest.approx(110.0))),
        ("gn", 8, (10.0, pytest.approx(110.0))),
    ]
    picture = tmp_path / "picture.png"
    figure.save(figure.draw(figure.measured_steps(), found, found), picture, "{}")
    with Image.open(picture) as image:
        assert image.width > 1500


def _block(text: str, name: str, study: str = STUDY) -> str:
    """Return the text between two marks of results/readme.py."""
    _, rest = text.split(f"<!-- {study}, {name}: made by results/readme.py -->\n")
    return rest.split(f"<!-- end of {study}, {name} -->\n")[0]


def _final_error(norm: str, batch: int, lr: float) -> float:
    """Return the mean pixel error over the last 15 epochs of all seeds, in percent."""
    runs = (ROOT / STUDY / "runs").glob(f"segnet-{norm}-b{batch}-lr{lr}-s?")
    return fmean(_last_errors(runs, 15))


def _last_errors(runs: Iterable[Path], epochs: int) -> list[float]:
    """Return the validation errors of the runs' last epochs, in percent."""
    errors = []
    for run in runs:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        errors += [100 * json.loads(line)["val_error"] for line in lines[-epochs:]]
    return errors


def _write_run(folder: Path, errors: list[float], epochs: int | None = None) -> None:
    folder.mkdir()
    config = {"config": {"epochs": len(errors) if epochs is None else epochs}}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"epoch": i + 1, "val_error": error} for i, error in enumerate(errors)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
