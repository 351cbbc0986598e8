"""The classes of a user's own folder, from classes.yaml or classes.txt.

They have names, and mask values or colors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..folders.storage import read_bytes
from .sample import DataError, Palette, distinct_colors

YAML, TEXT = "classes.yaml", "classes.txt"
MOST_BYTES = 2**18  # largest class file
MOST_CLASSES = 254  # labels are bytes, and 255 marks pixels without a label
LARGEST_ID = 65535  # largest value of a 16-bit mask

Color = tuple[int, int, int]
Range = tuple[float, float]


@dataclass(frozen=True)
class ClassFile:
    """The classes of a dataset folder, in the order of the network's outputs.

    A pixel of a mask is either an id (one channel: index and palette images) or a color (RGB).

    Args:
        names: Name of each class.
        ids: Value of each class in the masks; empty if the masks hold colors.
        colors: Color of each class: in the masks if there are no ids, and in pictures.
        ignored_ids: Values of pixels without a label.
        ignored_colors: Colors of pixels without a label.
        value_range: Values of images with more than 8 bits that become 0 and 255.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    colors: Palette
    ignored_ids: tuple[int, ...] = ()
    ignored_colors: tuple[Color, ...] = ()
    value_range: Range | None = None

    @property
    def has_ids(self) -> bool:
        """Whether the masks hold ids, not colors."""
        return bool(self.ids)

    @property
    def expected(self) -> str:
        """The valid values of a mask, as text."""
        known: list[str] = [str(i) for i in self.ids] or [hex_color(c) for c in self.colors]
        ignored = [str(i) for i in self.ignored_ids] or [hex_color(c) for c in self.ignored_colors]
        text = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        return f"{text}, or {', '.join(ignored)} to ignore" if ignored else text


def find_class_file(root: Path) -> Path | None:
    """Return the path of the class file of a folder, or None if it has none."""
    return next((root / name for name in (YAML, TEXT) if (root / name).is_file()), None)


def read_class_file(root: Path) -> ClassFile:
    """Read classes.yaml or classes.txt of a dataset folder.

    Raises:
        DataError: There is no such file, or it is invalid.
    """
    path = find_class_file(root)
    if path is None:
        raise DataError(
            root,
            f"has no {YAML} or {TEXT} with the names of the classes: "
            f"`deepcontrol data init {root}` writes one",
        )
    try:
        text = read_bytes(path, MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DataError(path, f"cannot be read: {error}") from None
    try:
        return parse_yaml(text) if path.name == YAML else parse_text(text)
    except ValueError as error:
        raise DataError(path, str(error)) from None


def parse_yaml(text: str) -> ClassFile:
    """Parse the content of classes.yaml; raise ValueError if it is invalid.

    >>> parse_yaml("classes: [{name: sky, id: 0}, {name: road, id: 7}]").ids
    (0, 7)
    """
    yaml = _yaml()
    try:
        # A few lines of aliases to aliases can stand for more values than any memory holds.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("aliases (*name) are not supported: write the values out")
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not a YAML file: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict) or not isinstance(content.get("classes"), list):
        raise ValueError("expected `classes:` with a list of classes, each with a name")
    unknown = sorted(str(key) for key in set(content) - {"classes", "ignore", "range"})
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}: expected classes, ignore and range")
    entries = [_entry(number, entry) for number, entry in enumerate(content["classes"])]
    ignored = content.get("ignore")
    ignored = [] if ignored is None else ignored if isinstance(ignored, list) else [ignored]
    if len(ignored) == 3 and all(type(v) is int for v in ignored) and "id" not in entries[0]:
        ignored = [ignored]  # one color
    return _checked(entries, ignored, _range(content.get("range")))


def parse_text(text: str) -> ClassFile:
    r"""Parse the content of classes.txt; raise ValueError if it is invalid.

    A line has the name of a class, and before or after it the color in the masks. Without colors,
    the ids in the masks are 0, 1, ... in the order of the lines. A class named "ignore" has the
    color of pixels without a label. Empty lines and lines that start with # are skipped.

    >>> parse_text("sky 70 130 180 \nroad #804080").colors
    ((70, 130, 180), (128, 64, 128))
    """
    entries: list[dict[str, Any]] = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("# ") or line == "#":
            continue
        number = r"(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})"
        if match := re.fullmatch(rf"(.*[^\s,:])[\s,:]+{number}", line):
            entries.append({"name": match[1], "color": [int(match[i]) for i in (2, 3, 4)]})
        elif match := re.fullmatch(rf"{number}[\s,:]+(\S.*)", line):
            entries.append({"name": match[4], "color": [int(match[i]) for i in (1, 2, 3)]})
        elif match := re.fullmatch(r"(.*\S)\s+(#[0-9a-fA-F]{6})", line):
            entries.append({"name": match[1], "color": match[2]})
        else:
            entries.append({"name": line})
    has_colors = any("color" in entry for entry in entries)
    ignored = [e["color"] for e in entries if e["name"] == "ignore" and "color" in e]
    kept = [e for e in entries if e["name"] != "ignore"]
    if not has_colors:
        kept = [{**entry, "id": number} for number, entry in enumerate(kept)]
    entries = [_entry(number, entry) for number, entry in enumerate(kept)]
    return _checked(entries, ignored or ([] if has_colors else [255]), None)


def format_yaml(classes: ClassFile, notes: Mapping[str, str]) -> str:
    """Return the content of classes.yaml, with a comment after each class.

    Args:
        classes: The classes.
        notes: Comments by class name.
    """
    lines = [
        "# Classes of the masks, in the order of the network's outputs. Change the names as you",
        "# like: they appear in tables, pictures and exported files.",
        "classes:",
    ]
    for number, (name, color) in enumerate(zip(classes.names, classes.colors, strict=True)):
        value = f", id: {classes.ids[number]}" if classes.has_ids else ""
        note = f"  # {notes[name]}" if name in notes else ""
        lines.append(f'  - {{name: "{name}"{value}, color: "{hex_color(color)}"}}{note}')
    if classes.has_ids:
        lines.append("# Values of pixels without a label. Losses and metrics skip them.")
        lines.append(f"ignore: [{', '.join(map(str, classes.ignored_ids))}]")
    else:
        lines.append("# Colors of pixels without a label. Losses and metrics skip them.")
        colors = ", ".join(f'"{hex_color(color)}"' for color in classes.ignored_colors)
        lines.append(f"ignore: [{colors}]")
    if classes.value_range is not None:
        low, high = classes.value_range
        lines.append("# Values of the images (more than 8 bits) that become black and white.")
        lines.append(f"range: [{low:g}, {high:g}]")
    return "\n".join(lines) + "\n"


def hex_color(color: Iterable[int]) -> str:
    """Format a color.

    >>> hex_color((128, 64, 128))
    '#804080'
    """
    return "#" + "".join(f"{part:02x}" for part in color)


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError(
            f'{YAML} needs PyYAML: pip install ".[workbench]", or write {TEXT} instead'
        ) from None
    return yaml


def _entry(number: int, entry: object) -> dict[str, Any]:
    """Validate one class: its name, id and color."""
    where = f"class {number + 1} of the list"
    if isinstance(entry, (str, int)):
        entry = {"name": str(entry), "id": number}
    if not isinstance(entry, dict) or not str(entry.get("name", "")).strip():
        raise ValueError(f"{where} is {entry!r}: expected a name, and an id or a color")
    unknown = sorted(str(key) for key in set(entry) - {"name", "id", "color"})
    if unknown:
        raise ValueError(f"{where} has unknown {', '.join(unknown)}: expected name, id and color")
    found: dict[str, Any] = {"name": str(entry["name"]).strip()}
    if "id" in entry:
        found["id"] = _id(f"the id of {where}", entry["id"])
    if "color" in entry:
        found["color"] = _color(f"the color of {where}", entry["color"])
    return found


def _checked(
    entries: list[dict[str, Any]], ignored: list[Any], value_range: Range | None
) -> ClassFile:
    if not 2 <= len(entries) <= MOST_CLASSES:
        raise ValueError(f"{len(entries)} classes, expected 2 to {MOST_CLASSES}")
    names = tuple(entry["name"] for entry in entries)
    with_ids = [entry for entry in entries if "id" in entry]
    if with_ids and len(with_ids) < len(entries):
        missing = next(entry["name"] for entry in entries if "id" not in entry)
        raise ValueError(f"class {missing!r} has no id, but others have: give an id to all or none")
    ids = tuple(entry["id"] for entry in with_ids)
    if not ids and any("color" not in entry for entry in entries):
        missing = next(entry["name"] for entry in entries if "color" not in entry)
        raise ValueError(f"class {missing!r} has neither an id nor a color")
    defaults = distinct_colors(len(entries))
    colors = tuple(e.get("color", d) for e, d in zip(entries, defaults, strict=True))
    ignored_ids = tuple(_id("ignore", value) for value in ignored) if ids else ()
    ignored_colors = () if ids else tuple(_color("ignore", value) for value in ignored)
    _check_distinct("name", names)
    if ids:
        _check_distinct("id", (*ids, *ignored_ids))
    else:
        _check_distinct("color", tuple(map(hex_color, (*colors, *ignored_colors))))
    return ClassFile(names, ids, colors, ignored_ids, ignored_colors, value_range)


def _check_distinct(what: str, values: tuple[object, ...]) -> None:
    twice = sorted({str(value) for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"{what} {twice[0]} appears twice")


def _id(what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_ID:
        raise ValueError(f"{what} must be an integer from 0 to {LARGEST_ID}, got {value!r}")
    return value


def _color(what: str, value: object) -> Color:
    if isinstance(value, str) and re.fullmatch(r"#[0-9a-fA-F]{6}", value):
        return int(value[1:3], 16), int(value[3:5], 16), int(value[5:7], 16)
    if isinstance(value, list) and len(value) == 3 and all(v in range(256) for v in value):
        return int(value[0]), int(value[1]), int(value[2])
    raise ValueError(f'{what} must be "#rrggbb" or three values from 0 to 255, got {value!r}')


def _range(value: object) -> Range | None:
    if value is None:
        return None
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(v) in (int, float) for v in value)
        and value[0] < value[1]
    ):
        return float(value[0]), float(value[1])
    raise ValueError(f"range must be the lowest and the highest value, as [0, 4095]; got {value!r}")
