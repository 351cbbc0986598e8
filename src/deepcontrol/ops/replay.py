"""Repeat the kernel launches of an op with little host time.

In eager mode, preparing a launch in Python (choosing a tiling, checking layouts, naming arguments)
takes longer than most kernels run. For tensors of the same shapes all of it has the same result,
except for the addresses. So a `Replay` records which tensors a function allocates and which kernels
it launches, and repeats these from then on.

This file does not depend on Triton: `ops/triton/launch.py` reports its launches to the recorder of
the thread.
"""

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MAX_REPLAYS = 8192  # the cache starts over if shapes keep changing
RECORDED_DEVICES = ["cuda"]  # tests add "cpu", for Triton's interpreter

Result = Tensor | tuple[Tensor | None, ...]

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
    )
)
_VIEWS = frozenset((_aten.select.int, _aten.detach.default))  # to ask for sizes; move no data

_recorders = threading.local()
_replays: dict[Hashable, Any] = {}


class KernelHandle(NamedTuple):
    """A compiled kernel as the CUDA driver launches it.

    Attributes:
        function: Handle of the kernel, a CUfunction.
        threads: Threads per block.
        shared: Bytes of dynamic shared memory.
        types: Triton's types of its arguments, "constexpr" for those that are compiled in.
    """

    function: int
    threads: int
    shared: int
    types: tuple[str, ...]


class RecordedLaunch(NamedTuple):
    """A launch: call run(grid..., stream, *fixed, *arguments).

    Attributes:
        run: The launcher of a compiled kernel, which takes addresses; on a CPU that of Triton's
            interpreter, which takes tensors.
        grid: The three sizes of the grid.
        fixed: The arguments between the stream and those of the kernel.
        arguments: Arguments of the kernel, in order: tensors, numbers and None.
        kernel: Handle for a launch without Python, or None if the kernel needs more than the
            driver's simplest launch.
    """

    run: Callable[..., None]
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    arguments: Sequence[Any]
    kernel: KernelHandle | None = None


TensorLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides, dtype


class Recording(NamedTuple):
    """All that a Replay repeats, for the compiled helper (ops/native).

    Indices count the tensors given, then the tensors allocated, then the constants.

    Attributes:
        inputs: The layout of each argument; None where None was given.
        allocations: The layouts of the tensors allocated.
        constants: Numbers and None among the arguments of kernels.
        launches: Each launch, without its tensors, and the indices of its arguments.
        results: The index of each result, or None.
        device: The index of the GPU, or None on a CPU.
    """

    inputs: list[TensorLayout | None]
    allocations: list[TensorLayout]
    constants: list[Any]
    launches: list[tuple[RecordedLaunch, list[int]]]
    results: list[int | None]
    device: int | None


def record_launch(make: Callable[[], RecordedLaunch]) -> None:
    """Report a launch to the recorder of this thread, if there is one."""
    recorder = getattr(_recorders, "current", None)
    if recorder is not None:
        recorder.launches.append(make())


class Recorder(TorchDispatchMode):
    """Note a function's allocations and launches, and whether it does anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[RecordedLaunch] = []
        self.repeatable = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif func not in _VIEWS:
            self.repeatable = False
        return result

    def __enter__(self) -> "Recorder":
        self._outer = getattr(_recorders, "current", None)
        _recorders.current = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _recorders.current = self._outer
        super().__exit__(*exception)


class Replay:
    """A function of tensors that repeats its kernel launches.

    Every call passes tensors of the same shapes, dtypes and device, and None in the same places.
    Layouts may vary and are checked: gradients come from other ops, and saved tensors through hooks
    that may have moved them. The first call runs the function, the second one records it, and later
    ones repeat what was recorded. A function that runs other ops, such as plain PyTorch or a copy
    to another layout, is not recorded and runs at each call.

    Args:
        function: Takes tensors and None; returns a tensor, or a tuple of tensors and None. Besides
            the tensors its result must depend on nothing that changes between calls.
    """

    __slots__ = (
        "_allocations",
        "_constants",
        "_device",
        "_empty",
        "_launches",
        "_results",
        "_strides",
        "_tries_left",
        "calls",
        "function",
        "recording",
    )

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0
        self._tries_left = 8
        self.recording: Recording | None = None
        self._launches: list[tuple[Any, ...]] | None = None
        self._results: Callable[[list[Tensor]], Any]

    @property
    def recorded(self) -> bool:
        """Whether calls are repeated from now on."""
        return self._launches is not None

    def __call__(self, *inputs: Tensor | None) -> Any:
        launches = self._launches
        if launches is None:
            return self._run(inputs)
        device = self._device
        table = [a for a in inputs if a is not None]
        if [a.stride() for a in table] != self._strides:
            return self.function(*inputs)
        if device is not None and current_device() != device:
            return self.function(*inputs)
        empty = self._empty
        for allocation in self._allocations:
            table.append(empty(*allocation))
        addresses: list[Any] = [a.data_ptr() for a in table]
        # Triton specializes a kernel for addresses that are multiples of 16.
        if functools.reduce(operator.or_, addresses) & 15:
            return self.function(*inputs)
        values = (table if device is None else addresses) + self._constants
        stream = None if device is None else raw_stream(device)
        for run, x, y, z, fixed, arguments in launches:
            run(x, y, z, stream, *fixed, *arguments(values))
        return self._results(table)

    def _run(self, inputs: tuple[Tensor | None, ...]) -> Any:
        self.calls += 1
        first = inputs[0]
        # Recording starts at the second call: sizes that occur once are not worth it.
        if self.calls != 2 or first is None or first.device.type not in RECORDED_DEVICES:
            return self.function(*inputs)
        with Recorder() as recorder:
            result = self.function(*inputs)
        if recorder.repeatable and recorder.launches:
            self._keep(recorder, inputs, result)
        return result

    def _keep(self, recorder: Recorder, inputs: tuple[Tensor | None, ...], result: Any) -> None:
        given = [a for a in inputs if a is not None]
        results = (result,) if isinstance(result, Tensor) else result
        # Compared by address: a dispatch mode sees other tensor objects than its caller.
        used = {a.data_ptr() for a in results if a is not None}
        used |= {
            a.data_ptr() for each in recorder.launches for a in each.arguments
            if isinstance(a, Tensor)
        }  # fmt: skip
        allocated = [a for a in recorder.allocated if a.data_ptr() in used]
        addresses = [a.data_ptr() for a in (*given, *allocated)]
        place = {address: i for i, address in enumerate(addresses)}
        if len(place) < len(addresses):  # one tensor in two roles: other calls may pass two
            self._tries_left -= 1
            self.calls = 1 if self._tries_left else self.calls
            return
        # A tensor that is neither given nor allocated, such as a cached one, may differ next time.
        if not used <= place.keys() or functools.reduce(operator.or_, addresses) & 15:
            return
        constants: list[Any] = []

        def index(a: Any) -> int:
            if isinstance(a, Tensor):
                return place[a.data_ptr()]
            constants.append(a)
            return len(addresses) + len(constants) - 1

        indexed = [
            (each._replace(arguments=()), [index(a) for a in each.arguments])
            for each in recorder.launches
        ]
        launches = [
            (each.run, *each.grid, each.fixed, _getter(indices)) for each, indices in indexed
        ]
        first = given[0]
        self._device = first.device.index
        self._empty = _empty_strided if self._device is None else _empty_strided_cuda
        self._strides = [a.stride() for a in given]
        self._allocations = [_layout(a) for a in allocated]
        self._constants = constants
        places = [None if a is None else place[a.data_ptr()] for a in results]
        if isinstance(result, Tensor):
            self._results = operator.itemgetter(place[result.data_ptr()])
        else:
            self._results = _result_getter(places)
        layouts = [None if a is None else _layout(a) for a in inputs]
        self.recording = Recording(
            layouts, self._allocations, constants, indexed, places, self._device
        )
        self._launches = launches


def replay_of(key: Hashable, make: Callable[[], Any]) -> Any:
    """Return what `make` made for that key: a Replay, or several.

    The key describes the function and all tensors that it is called with.
    """
    try:
        found = _replays.get(key)
    except TypeError:  # symbolic sizes have no hash
        return make()
    if found is None:
        if len(_replays) >= MAX_REPLAYS:
            _replays.clear()
        found = _replays[key] = make()
    return found


def _layout(a: Tensor) -> TensorLayout:
    return tuple(a.shape), a.stride(), a.dtype


def _getter(indices: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    return operator.itemgetter(*indices) if len(indices) > 1 else lambda a: (a[indices[0]],)


def _result_getter(indices: list[int | None]) -> Callable[[list[Tensor]], tuple[Any, ...]]:
    if None not in indices:
        return _getter([i for i in indices if i is not None])

    def results(table: list[Tensor]) -> tuple[Any, ...]:
        return tuple([None if i is None else table[i] for i in indices])

    return results


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# On a GPU, torch's public functions for these three check more than a replay needs and take several
# times as long. Models compiled by torch call the same private ones. They exist with CUDA alone.
_empty_strided_cuda: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards,
    "_empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)
