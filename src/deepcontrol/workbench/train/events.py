"""TensorBoard's events, which a run can do without."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Events:
    """Writes scalars until that fails, say on a full disk; says so once, and the run goes on."""

    def __init__(self, folder: Path, next_epoch: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._writer: Any = None
        with self._spared():
            from torch.utils.tensorboard import SummaryWriter  # a machine may be without it

            self._writer = SummaryWriter(str(folder), purge_step=next_epoch)

    def write(self, values: Mapping[str, float], epoch: int) -> None:
        """One value for each name, on the disk when this returns."""
        with self._spared():
            if self._writer is not None:
                for name, value in values.items():
                    self._writer.add_scalar(name, value, epoch)
                self._writer.flush()

    def close(self) -> None:
        with self._spared():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _spared(self) -> Iterator[None]:
        try:
            yield
        except ImportError as error:
            self._say(f"nothing is written for TensorBoard: {error}")
        except OSError as error:
            self._writer = None
            self._say(f"TensorBoard stopped: {error}")
