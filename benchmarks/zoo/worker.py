"""Measure models in a process of their own, so that a crash costs one model.

The models of a library share a process, because importing a library takes seconds.
"""

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from tests.zoo.conftest import declare_torchvision_operators

from .measure import Row, identity, measure
from .models import ZOO, Entry


class Worker:
    """Measures models in another process.

    Args:
        function: Measures the model with the given key there.
    """

    def __init__(self, function: Callable[[str], Row] | None = None) -> None:
        self._function = function or measure_key
        self._library = ""
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def measure(self, entry: Entry) -> Row:
        """Return the row of a model, or one with its error."""
        if self._pool is None or entry.library != self._library:
            self._stop()
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start)
            self._library = entry.library
        try:
            return self._pool.submit(self._function, entry.key).result()
        except BrokenProcessPool:
            self._stop()
            return {**identity(entry), "error": "the process ended"}

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _start() -> None:
    os.nice(5)
    torch.set_num_threads(1)
    declare_torchvision_operators()
    # Of the libraries: deprecations, among others. The rows have what matters.
    warnings.simplefilter("ignore")


def measure_key(key: str) -> Row:
    """Return the row of a model, or one with its error."""
    entry = next(e for e in ZOO if e.key == key)
    try:
        return measure(entry)
    except Exception as error:  # any error of the library or of the conversion is a row
        return {**identity(entry), "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        gc.collect()
