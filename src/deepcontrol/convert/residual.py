"""Find the additions of a model, and the layers that end their operands.

A residual block adds a branch to its shortcut. AGC (automatic gain control) does not divide by a
measured spread, so the last layer of each branch has to start small: see branch_gain.

The additions come from the graphs of torch.fx or, if torch.fx cannot trace the model, from running
an example. Both become the same record, a list of values in the order in which they are computed.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..nn import AGC1d, AGC2d, AGC3d
from ..nn.init import branch_gain
from .dataflow import Dataflow, is_leaf
from .dry_run import copy_model, run_example

Op = Literal["add", "multiply", "concat", "part", "resize", "activation", "layer", "norm", "other"]

NORMS = (_NormBase, AGC1d, AGC2d, AGC3d, nn.GroupNorm, nn.LayerNorm)
_IDENTITIES = (nn.Identity, _DropoutNd)
_FUNCTIONS: dict[str, Op] = {
    **dict.fromkeys(("add", "add_", "iadd", "__add__", "__iadd__", "__radd__"), "add"),
    **dict.fromkeys(("mul", "mul_", "imul", "__mul__", "__imul__", "__rmul__"), "multiply"),
    **dict.fromkeys(("cat", "concat", "concatenate"), "concat"),
    **dict.fromkeys(("split", "chunk", "unbind", "tensor_split"), "part"),
    **dict.fromkeys(("interpolate", "upsample"), "resize"),
    **dict.fromkeys(("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_"), "activation"),
    **dict.fromkeys(("silu", "gelu", "elu", "mish", "hardswish", "hardtanh"), "activation"),
    **dict.fromkeys(("sigmoid", "hardsigmoid", "tanh", "softmax", "clamp"), "activation"),
}
_NOT_MAPS = (
    *("size", "dim", "numel", "new_empty", "new_zeros", "new_ones", "new_full"),
    *("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like"),
)
_SHAPED_LIKE = ("view_as", "reshape_as", "expand_as", "type_as")  # like the second operand
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")


@dataclass(frozen=True)
class LayerGain:
    """The initial gain of a layer that ends an operand of an addition.

    Attributes:
        gain: Factor of the layer's gamma, or of its filters if it has no gamma.
        branch: Whether the layer ends a residual branch; else the addition has no shortcut.
        operands: Number of operands of the addition.
    """

    gain: float
    branch: bool
    operands: int

    def __str__(self) -> str:
        if self.branch:
            return "last of a residual branch"
        return f"one of {self.operands} summed maps"


@dataclass(frozen=True)
class Additions:
    """The additions of a model.

    Attributes:
        blocks: Number of residual additions.
        gains: Initial gains of the BatchNorms, AGC layers, convolutions and linear layers that end
            a residual branch or another operand of a sum.
        linear: Norms whose outputs reach the next layer or an addition without an activation.
        missing: Why additions may be missing, or None if all code was seen.
    """

    blocks: int = 0
    gains: dict[nn.Module, LayerGain] = field(default_factory=dict)
    linear: frozenset[nn.Module] = frozenset()
    missing: str | None = None


def find_additions(model: nn.Module, flow: Dataflow, example: Any = None) -> Additions:
    """Find additions and the initial gains that keep the variance of their sums.

    A residual addition has one shortcut: an operand with at most one convolution, linear layer or
    norm and no activation since the operands parted. Its branches have more layers. The last layer
    of each starts at branch_gain(blocks), divided by sqrt(k) if k branches are added at once. All
    other sums (feature pyramids, fusions of resolutions) start with each of their n operands at
    1 / sqrt(n). A layer does not change if its output is used elsewhere too.

    Args:
        model: The model, which is not changed.
        flow: The dataflow of the model, with the graphs of torch.fx.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. The model
            runs on it if torch.fx could not trace all of the model.
    """
    missing = None
    if model in flow.graphs:
        values = [[_from_fx(graph, model) for graph in flow.graphs[model]]]
    elif example is not None:
        values = [[_from_example(model, example)]]
    else:
        values = [
            [_from_fx(graph, part) for graph in graphs] for part, graphs in flow.graphs.items()
        ]
        missing = "torch.fx could not trace the whole model; pass example="
    sums = [[list(_sums(graph)) for graph in paths] for paths in values]
    # Paths through the same code share their blocks; the parts of a model do not.
    blocks = sum(max(sum(s.branch for s in path) for path in paths) for paths in sums)
    gains: dict[nn.Module, LayerGain] = {}
    for paths in sums:
        for path in paths:
            for module, gain in _gains(path, blocks):
                if module not in gains or gain.gain < gains[module].gain:
                    gains[module] = gain
    graphs = [graph for paths in values for graph in paths]
    return Additions(blocks, gains, frozenset(_linear_norms(graphs)), missing)


def _linear_norms(graphs: "Iterable[_Values]") -> set[nn.Module]:
    """Return the norms that no activation follows before the next layer or addition."""
    linear, activated = set[nn.Module](), set[nn.Module]()
    for values in graphs:
        for index, value in enumerate(values.all):
            if value.op == "norm" and value.module is not None:
                (activated if _is_activated(values, index) else linear).add(value.module)
    return linear - activated


def _is_activated(values: "_Values", index: int) -> bool:
    pending = [index]
    while pending:
        for user in values.users(pending.pop()):
            if values.all[user].op == "activation":
                return True
            if values.all[user].op not in ("layer", "norm", "add"):
                pending.append(user)
    return False


@dataclass(frozen=True)
class _Value:
    """The result of a module or function: operation and indices of its inputs."""

    op: Op
    inputs: tuple[int, ...] = ()
    module: nn.Module | None = None


class _Values:
    """All values of one run through the code, in order.

    Sets of them are integers, one bit each.
    """

    def __init__(self) -> None:
        self.all: list[_Value] = []
        self.ancestors: list[int] = []  # the value itself included
        self.consumers: list[set[int]] = []
        self.used = 0  # ancestors of the output

    def append(self, op: Op, inputs: Iterable[int], module: nn.Module | None = None) -> int:
        inputs = tuple(dict.fromkeys(inputs))
        index = len(self.all)
        ancestors = 1 << index
        for i in inputs:
            ancestors |= self.ancestors[i]
            self.consumers[i].add(index)
        self.all.append(_Value(op, inputs, module))
        self.ancestors.append(ancestors)
        self.consumers.append(set())
        return index

    def end(self, outputs: Iterable[int]) -> None:
        """Append the output of the model, which uses the given values."""
        self.used = self.ancestors[self.append("other", outputs)]

    def users(self, index: int) -> list[int]:
        """Return the consumers of a value that the output depends on."""
        return [i for i in self.consumers[index] if self.used >> i & 1]

    def depends(self, index: int, on: int) -> bool:
        return bool(self.ancestors[index] >> on & 1)

    def only_feeds(self, index: int, total: int) -> bool:
        """Return whether every path from a value to the output leads through a sum."""
        pending, seen = [index], {total}
        while pending:
            for user in self.users(pending.pop()):
                if not self.depends(total, user):
                    return False
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
        return True


def _from_fx(graph: fx.Graph, root: nn.Module) -> _Values:
    """Read the values of a torch.fx graph."""
    values = _Values()
    index: dict[fx.Node, int] = {}
    for node in graph.nodes:
        inputs = [index[i] for i in node.all_input_nodes if i in index]
        if node.op == "output":
            values.end(inputs)
        elif node.op == "placeholder":
            index[node] = values.append("other", ())
        elif node.op == "call_module" and inputs:
            module = root.get_submodule(str(node.target))
            index[node] = inputs[0]
            if not isinstance(module, _IDENTITIES):
                index[node] = values.append(_module_op(module), inputs, module)
        elif node.op in ("call_function", "call_method") and inputs:
            name = str(getattr(node.target, "__name__", node.target))
            if name in _NOT_MAPS or (name == "getattr" and node.args[1] in _ATTRIBUTES):
                continue
            if name in _SHAPED_LIKE:
                inputs = inputs[:1]
            index[node] = values.append(_function_op(name, node.args, inputs), inputs)
    return values


def _from_example(model: nn.Module, example: Any) -> _Values:
    """Run an example and record every module and function that it calls."""
    copied = copy_model(model, share_parameters=True)
    original = copied.original()
    values = _Values()
    index = WeakTensorKeyDictionary()
    inputs: dict[nn.Module, list[int]] = {}

    def known(data: Any) -> list[int]:
        return [index[a] for a in tree_leaves(data) if isinstance(a, Tensor) and a in index]

    def record(op: Op, sources: list[int], output: Any, module: nn.Module | None = None) -> None:
        if sources:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    index[tensor] = values.append(op, sources, module)

    # A module's inputs are read before it runs, because it may change them in place.
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[module] = known((args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        sources = inputs.pop(module)
        if isinstance(module, _IDENTITIES) and sources and isinstance(output, Tensor):
            index[output] = sources[0]
        # Of other modules the functions are recorded, if they are not scripted or autograd's.
        elif is_leaf(module) or not known(output):
            record(_module_op(module), sources, output, original[module])

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            sources = known(args[0] if name in _SHAPED_LIKE else (args, kwargs))
            output = func(*args, **(kwargs or {}))
            if name not in _NOT_MAPS:
                record(_function_op(name, args, sources), sources, output)
            return output

    def start(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor not in index:
                index[tensor] = values.append("other", ())

    def finish(module: nn.Module, args: Any, output: Any) -> None:
        outputs = known(dict(output) if isinstance(output, dict) else output)
        # If the output is an object that hides its tensors, everything may be used.
        values.end(outputs or range(len(values.all)))

    hooks = [copied.model.register_forward_pre_hook(start, with_kwargs=True, prepend=True)]
    for module in copied.model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    hooks.append(copied.model.register_forward_hook(finish))
    with Recorder():
        run_example(copied, example, hooks)
    return values


def _module_op(module: nn.Module) -> Op:
    if isinstance(module, (_ConvNd, nn.Linear)):
        return "layer"
    if isinstance(module, NORMS):
        return "norm"
    if isinstance(module, nn.Upsample):
        return "resize"
    if next(module.parameters(), None) is not None and not isinstance(module, nn.PReLU):
        return "layer"
    return "activation" if type(module).__module__ == nn.ReLU.__module__ else "other"


def _function_op(name: str, args: Any, inputs: list[int]) -> Op:
    if name in ("getitem", "__getitem__"):  # an integer picks one of several tensors
        return "part" if isinstance(args[1], int) else "other"
    op = _FUNCTIONS.get(name, "other")
    # With a number or a parameter as the other operand, the map only changes its scale or offset.
    return "other" if op in ("add", "multiply") and len(set(inputs)) < 2 else op


@dataclass(frozen=True)
class _Sum:
    """A sum of maps: the values that end the operands to scale, each a layer call."""

    branch: bool
    operands: int
    ends: tuple[tuple[int, nn.Module], ...]


def _sums(values: _Values) -> Iterator[_Sum]:
    """Yield the sums of a graph. A chain of additions is one sum."""
    for index, value in enumerate(values.all):
        if value.op != "add" or not values.used >> index & 1:
            continue
        users = values.users(index)
        if len(users) == 1 and values.all[users[0]].op == "add":
            continue  # part of a longer sum
        operands = list(_operands(values, index))
        branches = _branches(values, operands)
        ends: list[tuple[int, nn.Module]] = []
        for operand in branches or operands:
            found = _ends(values, operand, index) or []
            others = [i for i in operands if i != operand]
            # A layer that other operands are computed from would scale these too.
            if not any(values.depends(i, call) for i in others for call, _ in found):
                ends += found
        total = len(branches) or len(operands)
        yield _Sum(bool(branches), total, tuple(dict.fromkeys(ends)))


def _operands(values: _Values, index: int) -> Iterator[int]:
    for i in values.all[index].inputs:
        if values.all[i].op == "add" and values.users(i) == [index]:
            yield from _operands(values, i)
        else:
            yield i


def _branches(values: _Values, operands: list[int]) -> list[int]:
    """Return the operands that are added to a shortcut, or [] without a shortcut."""
    common = -1
    for operand in operands:
        common &= values.ancestors[operand]
    if common == 0:
        return []
    parting = common.bit_length() - 1  # the nearest common ancestor

    def path(operand: int) -> list[int]:
        between = range(parting + 1, operand + 1)
        return [i for i in between if values.depends(operand, i) and values.depends(i, parting)]

    if any(_is_enlarged(values.all[i]) for operand in operands for i in path(operand)):
        return []
    layers = {i: _depth(values, path(i)) for i in operands}
    shortcut = min(operands, key=lambda i: layers[i])
    plain = not any(_is_nonlinear(values.all[i]) for i in path(shortcut))
    branches = [i for i in operands if layers[i] > layers[shortcut]]
    simple = plain and layers[shortcut] <= 1 and len(branches) == len(operands) - 1
    return branches if simple else []


def _depth(values: _Values, path: list[int]) -> int:
    """Return the largest number of layers in a row.

    A norm that no layer feeds counts as one.
    """
    depth: dict[int, int] = {}
    for i in path:
        value = values.all[i]
        after_layer = any(values.all[j].op == "layer" for j in value.inputs)
        counts = value.op == "layer" or (value.op == "norm" and not after_layer)
        depth[i] = counts + max((depth.get(j, 0) for j in value.inputs), default=0)
    return max(depth.values(), default=0)


def _is_nonlinear(value: _Value) -> bool:
    """Return whether a value cannot be part of a shortcut.

    Activations cannot, nor can values with some channels only.
    """
    inside = isinstance(value.module, _BatchNorm) and any(
        type(child) is not nn.Identity for child in value.module.children()
    )  # timm's BatchNormAct2d contains its activation
    return value.op in ("activation", "part") or inside


def _is_enlarged(value: _Value) -> bool:
    """Return whether a value has more positions than its input.

    It is then part of a decoder, not of a branch.
    """
    return value.op == "resize" or isinstance(value.module, _ConvTransposeNd)


def _step(values: _Values, index: int) -> int | None:
    """Return the map that a value is computed from, or None.

    It is None at a layer or between several maps.
    """
    value = values.all[index]
    if value.op in ("layer", "norm", "add", "concat"):
        return None
    if len(value.inputs) == 1:
        return value.inputs[0]
    if value.op == "multiply":  # x * gate(x), as in squeeze-and-excitation
        a, b = value.inputs
        if values.depends(b, a) or values.depends(a, b):
            return a if values.depends(b, a) else b
    return None


def _ends(values: _Values, index: int, total: int) -> list[tuple[int, nn.Module]] | None:
    """Return the layers that compute an operand; None if one cannot be scaled."""
    while (step := _step(values, index)) is not None:
        index = step
    value = values.all[index]
    if value.op in ("layer", "norm"):
        assert value.module is not None
        return [(index, value.module)] if values.only_feeds(index, total) else None
    if value.op not in ("add", "concat"):
        return None
    found = []
    for i in value.inputs:
        # A map that is computed from another operand is scaled together with it.
        if any(j != i and values.depends(i, j) for j in value.inputs):
            continue
        ends = _ends(values, i, total)
        if ends is None:
            return None
        found += ends
    return found


def _gains(sums: list[_Sum], blocks: int) -> Iterator[tuple[nn.Module, LayerGain]]:
    """Yield the gain of every call of a layer. Gains of nested sums are multiplied."""
    gains: dict[int, tuple[nn.Module, LayerGain]] = {}
    for s in sums:
        factor = (branch_gain(blocks) if s.branch else 1.0) / math.sqrt(s.operands)
        for call, module in s.ends:
            before = gains[call][1] if call in gains else LayerGain(1.0, False, s.operands)
            branch = before.branch or s.branch
            gains[call] = (module, LayerGain(before.gain * factor, branch, s.operands))
    yield from gains.values()
