"""Write and read a run's config.json, and compare it with resuming settings."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from ..data import DEFAULT_SIZES
from ..folders.runfolder import CONFIG, read_config
from ..folders.storage import write_json
from ..models import CUSTOM, is_code
from .config import ADDED_LATER, Train, flag_name, format_value

FORMAT = 1  # format version of config.json
# Fields that may change when a run is resumed, because no result depends on them. A run with more
# epochs is the same run for longer if its learning rate is constant; a schedule fixes them.
# The dataset may have moved: a run identifies it by its content.
CHANGEABLE = (
    "epochs", "workers", "save_steps", "sample_epochs", "out", "data_root", "patience", "minutes",
)  # fmt: skip


class ConfigChangedError(ValueError):
    """A run cannot be resumed with another configuration or other data."""


def check_code(config: Train, run: Path, confirmed: str | None) -> Train:
    """Refuse to build a network of a run folder that is a function of any module.

    Building it imports the module and calls the function. A run folder may come from others, so
    the user has to name the function. A network that was passed to `Trainer` can be built by any
    function that the user names, and is not converted.

    Args:
        config: The configuration of the run folder.
        run: The run folder.
        confirmed: The --model that the user has given, or None.

    Returns:
        The configuration from which the network can be built.

    Raises:
        ValueError: The user has not named it.
    """
    if is_code(config.model) and confirmed != config.model:
        raise ValueError(
            f"the network of {run} is {config.model}: this command would import that module and "
            f"call the function. Pass --model {config.model} if you trust it"
        )
    if config.model == CUSTOM and confirmed is not None:
        if not is_code(confirmed):
            raise ValueError(
                f"the network of {run} was passed to Trainer: expected --model module:function, a "
                f"function that builds it, got {confirmed}"
            )
        return replace(config, model=confirmed, norm="bn")  # built as it is
    return config


def load_config(run: Path) -> tuple[Train, dict[str, Any]]:
    """Read the configuration of a run and the values derived from it.

    The configuration's `out` is always `run`: a folder from another machine must not make this
    process write to a path that config.json names.

    Returns:
        The configuration, and the derived values: learning rate, classes, counts.

    Raises:
        ValueError: There is no valid config.json.
    """
    path = run / CONFIG
    content = read_config(run)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}, got {content.get('format')!r}")
    config, derived = content.get("config"), content.get("derived")
    if not isinstance(config, dict) or not isinstance(derived, dict):
        raise ValueError(f"{path}: 'config' and 'derived' must be objects")
    try:
        return from_json({**config, "out": str(run)}), derived
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def save_config(config: Train, derived: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write config.json. `about` holds versions, commit, machine and threads.

    A run writes it before its data are decoded, with empty `derived` and `about`, and again with
    both before its first step.
    """
    content = {"format": FORMAT, "config": to_json(config), "derived": derived, **about}
    write_json(config.out / CONFIG, content, indent=2)


def check_unchanged(config: Train, before: Train) -> None:
    """Raise ConfigChangedError unless a run of `before` can resume with `config`."""
    found = differences(config, before)
    if found:
        why = ""
        if before.schedule != "constant" and config.epochs != before.epochs:
            why = f"The learning rates of a {before.schedule} schedule depend on --epochs. "
        raise ConfigChangedError(
            f"{config.out} was started with other settings: {'; '.join(found)}. {why}"
            "Omit these flags to resume it, or choose another --out."
        )


def differences(config: Train, before: Train) -> list[str]:
    """List the settings that make `config` another run: "--lr was 0.5, now 0.25"."""
    may_change = changeable({"config": {"schedule": before.schedule}})
    # A default that depends on another setting, as the learning rate on the batch size, changes
    # with it and is not named in addition.
    names = [
        f.name
        for f in fields(Train)
        if f.name not in may_change and getattr(config, f.name) != getattr(before, f.name)
    ]
    pairs = {name: (_effective(before, name), _effective(config, name)) for name in names}
    return [
        f"--{flag_name(k)} was {format_value(a)}, now {format_value(b)}"
        for k, (a, b) in pairs.items()
        if a != b
    ]


def spelled_as(before: Train, config: Train) -> Train:
    """Return a resumed run's configuration with its own spelling of equal settings.

    A default may be spelled out, as --lr 0.08 in place of no --lr. The checkpoints of the run hold
    a copy of its settings, which config.json must keep to match.
    """
    may_change = changeable({"config": {"schedule": before.schedule}})
    names = [f.name for f in fields(Train) if f.name not in may_change]
    return replace(config, **{name: getattr(before, name) for name in names})


def changeable(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that may change when the run of a config.json is resumed."""
    config = content.get("config")
    schedule = config.get("schedule", "constant") if isinstance(config, dict) else "constant"
    return tuple(name for name in CHANGEABLE if name != "epochs" or schedule == "constant")


def changed_settings(config: Train) -> dict[str, Any]:
    """Return the settings with other values than the defaults, and `out`."""
    values = {f.name: (getattr(config, f.name), f.default) for f in fields(Train)}
    for name, default in config.recipe_values()._asdict().items():
        values[name] = (getattr(config, name), default)
    values["size"] = (config.sample_size, DEFAULT_SIZES[config.data])
    return {k: value for k, (value, default) in values.items() if value != default}


def _effective(config: Train, name: str) -> Any:
    """Return a setting's value; the resolved one where None stands for a default."""
    resolved = {
        "size": "sample_size",
        "augment": "augmentation",
        "channels": "in_channels",
        "lr": "learning_rate",
        "eval_batch_size": "val_batch_size",
    }
    return getattr(config, resolved.get(name, name))


def to_json(config: Train) -> dict[str, Any]:
    """Return all fields as JSON values: paths as strings, tuples as lists."""
    values = {f.name: getattr(config, f.name) for f in fields(Train)}
    values["size"] = config.sample_size  # readers need not know the defaults
    return {
        name: str(value) if isinstance(value, Path) else list(value) if type(value) is tuple
        else value
        for name, value in values.items()
    }  # fmt: skip


def from_json(values: Mapping[str, Any]) -> Train:
    """Return the configuration; raise ValueError for invalid or missing fields."""
    hints = typing.get_type_hints(Train)
    values = {**ADDED_LATER, **values}
    unknown, missing = set(values) - set(hints), set(hints) - set(values)
    if unknown or missing:
        problems = [f"unknown {name}" for name in sorted(unknown)]
        problems += [f"no {name}" for name in sorted(missing)]
        raise ValueError(", ".join(problems))
    return Train(**{name: _typed(name, values[name], hint) for name, hint in hints.items()})


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Convert a JSON value to the type of its field."""
    kind = typing.get_origin(hint)
    if kind in (types.UnionType, typing.Union):
        optional = [h for h in typing.get_args(hint) if h is not type(None)]
        return None if value is None else _typed(name, value, optional[0])
    if kind is Literal and value in typing.get_args(hint):
        return value
    if kind is tuple and isinstance(value, list) and all(type(v) is int for v in value):
        if name != "size" or (len(value) in (2, 3) and min(value) > 0):
            return tuple(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    raise ValueError(f"{name} cannot be {value!r}")
