"""The folder of a page, and pages that follow a training."""

import time
from pathlib import Path

import pytest

from deepcontrol.workbench.cli import main
from deepcontrol.workbench.report import page_folder, page_key, watch
from tests.workbench.report.conftest import append, make_run, metrics


def write_page(folder: Path, *runs: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    head = f'<meta name="generator" content="deepcontrol report {page_key(runs)}">'
    (folder / "index.html").write_text(head)


def test_pages_about_different_runs_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b, c = map(Path, "abc")
    assert page_folder([a], None) == (Path("a/report"), "")
    assert page_folder([a, b], None) == (Path("out/report"), "")
    write_page(Path("out/report"), a, b)
    assert page_folder([b, c], None) == (Path("out/report-2"), "")
    assert page_folder([b, tmp_path / "a"], None) == (Path("out/report"), "")  # the same runs
    Path("out/report-2").mkdir()
    (Path("out/report-2") / "index.html").write_text("a page of something else")
    assert page_folder([b, c], None) == (Path("out/report-3"), "")


def test_a_named_folder_is_used_and_a_replaced_page_is_named(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert page_folder([a], tmp_path) == (tmp_path, "")
    write_page(tmp_path, a)
    assert page_folder([a], tmp_path) == (tmp_path, "")
    note = f"replaces the page about other runs in {tmp_path}"
    assert page_folder([b], tmp_path) == (tmp_path, note)


def test_a_link_in_a_run_folder_does_not_choose_where_its_page_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    (run / "report").symlink_to(tmp_path / "mine")
    assert main(["report", str(run)]) == 1
    assert "symbolic link" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())


REFRESH = '<meta http-equiv="refresh" content="5">\n'


def test_a_page_is_rewritten_when_files_change_until_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page, said = tmp_path / "a", tmp_path / "index.html", []
    looks, pages = 0, 0

    def write() -> tuple[Path, bool]:
        nonlocal pages
        if not run.exists():
            raise ValueError("no such folder")
        pages += 1
        page.write_text(f"{REFRESH}page {pages}")
        return page, pages == 3

    def between_looks(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            make_run(run, epochs=1)
        elif looks in (5, 9):
            append(run / "metrics.jsonl", metrics(2))

    monkeypatch.setattr(time, "sleep", between_looks)
    assert watch([run], write, said.append) == 0
    assert (looks, pages) == (9, 3)
    assert said[0] == "no such folder. Waiting for it; Ctrl-C ends this command."
    assert said[1] == f"Open {page.as_uri()}"
    assert said[-2:] == ["All runs are finished.", f"Page: {page}"]
    assert page.read_text() == "page 3"  # it no longer reloads


def test_ctrl_c_ends_a_watch_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a")
    page = run / "report" / "index.html"

    def interrupt(_: float) -> None:
        # As long as an epoch takes.
        assert '<meta http-equiv="refresh" content="30">' in page.read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert main(["report", "--watch", str(run)]) == 0
    found = capsys.readouterr()
    assert found.out.endswith(f"Page: {page}\n")
    assert not found.err
    assert 'http-equiv="refresh"' not in page.read_text()
