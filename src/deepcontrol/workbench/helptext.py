"""Tidy the help of commands: optional values without `{None}`, defaults in words.

tyro shows an optional number as `{None}|INT` with "(default: None)". Here it is `INT`, and the
description says what happens without it.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

T = TypeVar("T")
_ARG = type(tyro.conf.arg())
REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def optional(
    info: PrimitiveTypeInfo,
) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Read a value of type `X | None` as an X."""
    if info.type_origin not in (typing.Union, types.UnionType):
        return None
    options = [option for option in typing.get_args(info.type) if option is not types.NoneType]
    if len(options) != 1:
        return None
    of_value = PrimitiveTypeInfo.make(options[0], parent_markers=info.markers)
    spec = ConstructorRegistry.get_primitive_spec(of_value)
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else spec.str_from_instance(value)
        ),
    )


def parse(settings: type[T], args: list[str], default: T | None = None, **options: Any) -> T:
    """Parse arguments to a dataclass as tyro.cli does, with tidied help.

    Args:
        settings: A dataclass. Its fields are described by strings below them.
        args: The arguments.
        default: Values for the arguments that are not given.
        options: For tyro.cli.
    """
    if not dataclasses.fields(settings):  # type: ignore[arg-type]
        return tyro.cli(settings, args=args, registry=REGISTRY, **options)
    tidy = tidied(settings)
    if default is not None:
        options["default"] = tidy(**vars(default))
    found = tyro.cli(tidy, args=args, registry=REGISTRY, **options)
    return settings(**vars(found))


def tidied(settings: type[T]) -> type[Any]:
    """Return a subclass whose fields have joined descriptions, and no default None."""
    if not dataclasses.fields(settings):  # type: ignore[arg-type]
        return settings
    hints = typing.get_type_hints(settings, include_extras=True)
    texts = _descriptions(settings)
    annotations, values = {}, {}
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        if field.name not in texts:
            continue
        own = [a for a in getattr(hints[field.name], "__metadata__", ()) if isinstance(a, _ARG)]
        about: Any = own[0] if own else tyro.conf.arg()
        changes: dict[str, Any] = {"help": texts[field.name]} if about.help is None else {}
        if about.help_behavior_hint is None and _is_unset(field.default):
            changes["help_behavior_hint"] = _hint
        tidied = dataclasses.replace(about, **changes)
        kind = hints[field.name]
        if field.default is None:
            kind = kind | None  # a field that is filled in later is typed without None
        annotations[field.name] = Annotated[kind, tidied]
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    body = {"__annotations__": annotations, "__doc__": settings.__doc__, **values}
    subclass = type(settings.__name__, (settings,), body)
    return dataclasses.dataclass(frozen=True, kw_only=True)(subclass)


def _is_unset(default: object) -> bool:
    return default is None or default == ()


def _hint(default: str) -> str:
    """Return the text behind a description. A resumed run has defaults of its own."""
    return "" if default in ("None", "") else f"(default: {default})"


def _descriptions(settings: type) -> dict[str, str]:
    """Return the strings below the fields of a dataclass and its bases, each as one line."""
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for before, node in itertools.pairwise(statements):
            match before, node:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    joined = " ".join(text.split())
                    found[name] = re.sub(r"\bNone: ", "Default: ", joined)
    return found
