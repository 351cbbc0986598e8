"""The committed studies: every file that verdicts rest on carries a right checksum."""

import runpy
import shutil
from pathlib import Path

import pytest

from deepcontrol.workbench.folders.storage import parse_object, scan_records

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "results" / "checksums.py"


def test_committed_files_have_checksums() -> None:
    """After adding results of an older version, run `python results/checksums.py`."""
    paths = runpy.run_path(str(SCRIPT))["files"]()
    assert len(paths) > 100
    for path in paths:
        if path.suffix == ".jsonl":
            found = scan_records(path)
            assert found.damage == [], path
            assert found.torn == "", path
            assert all(b'"crc": "' in line.text for line in found.lines), path
        else:
            assert parse_object(path.read_bytes())[1], path


def test_script_adds_checksums_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile(SCRIPT, tmp_path / "checksums.py")
    run = tmp_path / "study" / "runs" / "x"
    run.mkdir(parents=True)
    (run / "config.json").write_text('{\n "seed": 0\n}\n')
    (run / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
    script = runpy.run_path(str(tmp_path / "checksums.py"))
    for expected in ("2 of 2 files", "0 of 2 files"):
        assert script["main"]() == 0
        assert f"{expected} had no checksum" in capsys.readouterr().out
    assert (run / "config.json").read_text().startswith('{\n "seed": 0,\n "crc": "')
    (run / "config.json").write_text((run / "config.json").read_text().replace("0,", "1,"))
    with pytest.raises(ValueError, match=r"config\.json: .* checksum"):
        script["main"]()
