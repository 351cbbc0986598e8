"""Answers about shapes and strides, remembered: an eager step asks for the same again and again."""

import functools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def remembered(function: Callable[..., T], *arguments: object) -> T:
    """function(*arguments), which must depend on them alone."""
    try:
        return _answers(function, *arguments)
    except TypeError:  # a compiler's symbols, which have no hash
        return function(*arguments)


@functools.lru_cache(maxsize=1 << 14)
def _answers(function: Callable[..., T], *arguments: object) -> T:
    return function(*arguments)
