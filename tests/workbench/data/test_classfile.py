"""classes.yaml and classes.txt: every mistake is named."""

from pathlib import Path

import pytest

from deepcontrol.workbench.data import DataError
from deepcontrol.workbench.data.classfile import (
    ClassFile,
    format_yaml,
    parse_text,
    parse_yaml,
    read_class_file,
)


def test_written_files_read_alike() -> None:
    for classes in (
        ClassFile(("sky", "a: road #1"), (0, 7), ((1, 2, 3), (255, 0, 16)), (255,)),
        ClassFile(("a", "b"), (), ((0, 0, 0), (9, 9, 9)), (), ((255, 255, 255),), (0.0, 4095.0)),
    ):
        assert parse_yaml(format_yaml(classes, {"sky": "40% of the pixels"})) == classes


def test_text() -> None:
    names = parse_text("# my classes\nsky\n\nroad\n")
    assert names.names == ("sky", "road")
    assert names.ids == (0, 1)
    assert names.ignored_ids == (255,)
    colors = parse_text("128 0 0 old house\nroad: 1, 2, 3\nignore 0 0 0\n")
    assert colors.names == ("old house", "road")
    assert colors.colors == ((128, 0, 0), (1, 2, 3))
    assert colors.ignored_colors == ((0, 0, 0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("classes: [", "not a YAML file"),
        ("names: [a, b]", "expected `classes:` with a list"),
        ("classes: [a, b]\ncolour: 1", "unknown colour"),
        ("classes: [a]", "1 classes, expected 2 to 254"),
        ("classes: [a, a]", "name a appears twice"),
        ("classes: [{name: a, id: 3}, {name: b, id: 3}]", "id 3 appears twice"),
        ("classes: [{name: a, id: 0}, {name: b, id: 1}]\nignore: 1", "id 1 appears twice"),
        ("classes: [{name: a, id: 0}, {name: b}]", "class 'b' has no id, but others have"),
        ("classes: [{name: a}, {name: b}]", "class 'a' has neither an id nor a color"),
        ("classes: [{id: 1}, {name: b}]", "class 1 of the list is .* expected a name"),
        ("classes: [{name: a, id: -1}, b]", "id of class 1 of the list must be an integer"),
        ("classes: [{name: a, value: 1}, b]", "class 1 of the list has unknown value"),
        ("classes: [{name: a, color: red}, b]", 'must be "#rrggbb" or three values'),
        ("classes: [a, b]\nrange: [5, 1]", "range must be the lowest and the highest value"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_class_file(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "classes.yaml"))


def test_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"`deepcontrol data init {tmp_path}` writes one"):
        read_class_file(tmp_path)


@pytest.mark.slow
def test_files_that_expand_are_refused() -> None:
    aliases = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]
    with pytest.raises(ValueError, match="aliases"):
        parse_yaml("\n".join([*aliases, "classes: [{name: *a59, id: 0}, {name: b, id: 1}]"]))
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_yaml("classes: " + "[" * 5000 + "]" * 5000)


def test_large_files_and_fifos_are_refused(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("sky\n" * 100_000)
    with pytest.raises(DataError, match="expected at most"):
        read_class_file(tmp_path)
