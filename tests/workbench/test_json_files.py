"""JSON files: limits and checksums."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from deepcontrol.workbench.folders import json_files
from deepcontrol.workbench.folders.json_files import (
    ChecksumError,
    parse_json,
    read_json,
    write_json,
)


@pytest.mark.parametrize("indent", [1, 2])
@pytest.mark.parametrize("content", [{"a": 1}, {"a": {"crc": "00000000"}}, {"a": ["}\n", "é"]}])
def test_round_trip(content: dict[str, Any], indent: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, content, indent)
    assert read_json(path) == content
    text = path.read_text()
    assert json.loads(text) == content | {"crc": json.loads(text)["crc"]}
    assert text.startswith(json.dumps(content, indent=indent).removesuffix("\n}"))


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


def test_300_of_300_flipped_bits_change_no_value(tmp_path: Path) -> None:
    path, rng = tmp_path / "x.json", random.Random(0)
    content = {"seed": 3, "momentum": 0.9, "classes": ["sky", "car"]}
    write_json(path, content, 2)
    intact, refused = path.read_bytes(), 0
    for _ in range(300):
        damaged = bytearray(intact)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            found = read_json(path)
        except ValueError:
            refused += 1
        else:  # in the white space around the checksum
            assert found == content
    assert refused > 290


def test_wrong_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"seed": 3}, 2)
    path.write_text(path.read_text().replace("3", "2", 1))
    with pytest.raises(ChecksumError, match="does not match its checksum") as caught:
        read_json(path)
    assert caught.value.content == {"seed": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1e400}', "1e400 is out of range"),
        ('{"a": -1e400}', "-1e400 is out of range"),
        ('{"a": 1.7e308}', "1.7e308 is out of range"),
        ('{"a": 9223372036854775808}', "out of range"),
        ("9" * 5000, "out of range"),
        ("[Infinity]", "Infinity is not a number"),
        ("NaN", "NaN is not a number"),
        ("[" * 65 + "]" * 65, "nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
        ("[" * 10**5 + "]" * 10**5, "nested too deeply"),
        ("[" * 10**5, "nested too deeply"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_limits(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_values_within_the_limits() -> None:
    text = "[" * 64 + "9223372036854775807, -9223372036854775807, 1e99" + "]" * 64
    assert json.dumps(parse_json(text)) == text.replace("1e99", "1e+99")
    assert parse_json('{"a": [NaN, -Infinity]}', null_constants=True) == {"a": [None, None]}
    with pytest.raises(UnicodeDecodeError):  # a ValueError
        parse_json(b"\xff")


def test_only_regular_files_of_a_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(path)
    path.unlink()
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="has 6 bytes, expected at most 5"):
        json_files.read_bytes(path, limit=5)
    with pytest.raises(OSError, match="directory"):
        read_json(tmp_path)
