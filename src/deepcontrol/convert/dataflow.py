"""Find which module consumes which output: the condition for fusing two modules.

torch.fx traces the model's Python code, in training and in eval mode, and with optional arguments
omitted, given, and given one at a time. If the code branches on its input (on its shape, to pad
it), both branches are traced. If that fails and there is an example, the model runs on it while it
is traced, so that the code can ask for the number of dimensions and of parts (`len(x.shape)`,
`sum(x.split(n))`). If torch.fx cannot trace a model as a whole, each of its children is traced
separately, and an nn.Sequential that cannot be traced calls its children in order.

The model itself is neither traced nor run: a copy is. Tracing has limits (a Proxy is no Tensor,
and code can notice), so the result is verified on an example: see verify.py.

Code that could not be traced may also call a module inside of a traced part. Such modules are
unconfirmed until an example input shows that they are called only from within their part. All
untraced code counts as UNKNOWN, and UNKNOWN always prevents a fusion.
"""

import contextlib
import functools
import inspect
import itertools
import operator
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from ..nn import AGC1d, AGC2d, AGC3d, AGCLinear
from .dry_run import copy_model, example_arguments, preserved_random_state, run_example

_LEAVES = (_ConvNd, _BatchNorm, AGC1d, AGC2d, AGC3d, AGCLinear)
_AVERAGE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_FUNCTIONAL_POOLS = tuple(getattr(nn.functional, f"adaptive_avg_pool{d}d") for d in (1, 2, 3))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_BRANCHES = 4  # per path; each one doubles the number of paths
_UNTRACED: dict[str, Any] = {name: getattr(nn.Module, name) for name in ("__call__", "__getattr__")}


class Other(Enum):
    """A producer or consumer that is not a module."""

    UNKNOWN = "a function, an input or output, or untraced code"
    GLOBAL_POOL = "the mean of each map"


Endpoint = nn.Module | Other


@dataclass
class Dataflow:
    """Producers and consumers of each module, over all of its calls.

    traced_in maps a module to the part of the model that was traced to find its neighbors.
    unconfirmed are the modules that untraced code may call as well. graphs maps each traced part
    to the graphs of all paths through its code; parts inside of a traced part are left out. read
    are the modules whose buffers other code reads (functional.batch_norm with their statistics).
    """

    producers: dict[nn.Module, set[Endpoint]] = field(default_factory=lambda: defaultdict(set))
    consumers: dict[nn.Module, set[Endpoint]] = field(default_factory=lambda: defaultdict(set))
    traced_in: dict[nn.Module, nn.Module] = field(default_factory=dict)
    unconfirmed: set[nn.Module] = field(default_factory=set)
    graphs: dict[nn.Module, list[fx.Graph]] = field(default_factory=dict)
    read: set[nn.Module] = field(default_factory=set)

    def connect(self, producer: Endpoint, consumer: Endpoint) -> None:
        if isinstance(producer, nn.Module):
            self.consumers[producer].add(consumer)
        if isinstance(consumer, nn.Module):
            self.producers[consumer].add(producer)

    def sole_producer(self, module: nn.Module) -> nn.Module | None:
        """Return the module that produces every input of `module`, or None."""
        return _sole(self.producers[module])

    def sole_consumer(self, module: nn.Module) -> nn.Module | None:
        """Return the module that consumes every output of `module`, or None."""
        return _sole(self.consumers[module])

    def feeds_global_pool(self, module: nn.Module) -> bool:
        """Return whether global average pooling directly follows the module."""
        return any(_is_global_pool(consumer) for consumer in self.consumers[module])


def trace_dataflow(model: nn.Module, targets: Iterable[nn.Module], example: Any = None) -> Dataflow:
    """Trace the producers and consumers of the target modules, as far as possible.

    Args:
        model: The model to trace. It is not changed.
        targets: The modules to find the neighbors of.
        example: An input of the model, a tuple of inputs or a dict of keyword arguments. If given,
            the model runs to trace more code, and to confirm the modules of separately traced
            parts.
    """
    flow = Dataflow()
    _trace_parts(model, set(targets), flow, _parents(model), example)
    in_parts = {module: part for module, part in flow.traced_in.items() if part is not model}
    flow.unconfirmed = set(in_parts)
    if in_parts and example is not None:
        flow.unconfirmed -= _called_only_inside(model, in_parts, example)
    return flow


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module is an nn.Sequential that does not override forward."""
    overridden = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return isinstance(module, nn.Sequential) and not overridden


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is one step of the dataflow, as those of torch.nn are."""
    own = isinstance(module, _LEAVES)
    return own or fx.Tracer().is_leaf_module(module, "")


def _trace_parts(
    root: nn.Module,
    targets: set[nn.Module],
    flow: Dataflow,
    parents: dict[nn.Module, list[nn.Module]],
    example: Any = None,
) -> None:
    """Trace root; then trace each child of root that contains targets not found yet."""
    found = _trace_fx(root, lambda: _path_graphs(root))
    if not found.producers and example is not None:
        found = _trace_fx(root, lambda: _example_graphs(root, example))
    if not found.producers and is_plain_sequential(root):
        found = _sequential_dataflow(root)
    if all(root not in set(part.modules()) for part in flow.graphs):
        flow.graphs |= found.graphs
    flow.read |= found.read
    inside = set(root.modules())
    called = set(found.producers) - set(flow.producers)
    for module in called:
        flow.traced_in[module] = root
        for producer in found.producers[module]:
            flow.connect(producer, module)
        for consumer in found.consumers[module]:
            flow.connect(module, consumer)
        if not inside.issuperset(parents[module]):  # a parent outside of root can call it as well
            flow.connect(Other.UNKNOWN, module)
            flow.connect(module, Other.UNKNOWN)
    for child in root.children():
        if not isinstance(child, _LEAVES) and targets & set(child.modules()) - set(flow.producers):
            _trace_parts(child, targets, flow, parents)


def _parents(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Map each module to its parents; a shared module has several."""
    found = defaultdict(list)
    for parent in model.modules():
        for child in parent._modules.values():
            if child is not None:
                found[child].append(parent)
    return found


class _PathTracer(fx.Tracer):
    """Trace one path through the code.

    The first branches on an input are taken as given in `branches`, further ones as true.
    """

    def __init__(self, branches: tuple[bool, ...]) -> None:
        super().__init__()
        self.branches = branches
        self.taken: list[bool] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        # A slice of an nn.Sequential is a new module without a name: trace through it.
        if is_plain_sequential(m) and all(m is not own for own in self.root.modules()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if len(self.taken) == _MAX_BRANCHES:
            return super().to_bool(obj)  # raises TraceError
        i = len(self.taken)
        self.taken.append(self.branches[i] if i < len(self.branches) else True)
        return self.taken[-1]


class _ExampleTracer(_PathTracer):
    """Run each node on an example: code may ask for lengths, and iterate."""

    def __init__(self, branches: tuple[bool, ...], inputs: Mapping[str, Any]) -> None:
        super().__init__(branches)
        self.inputs = tree_map_only(Tensor, Tensor.clone, dict(inputs))
        self.values: dict[fx.Node, Any] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ExampleProxy(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        proxy = super().create_proxy(*args, **kwargs)
        with torch.no_grad(), _untraced():
            self.values[proxy.node] = self._run(proxy.node)
        return proxy

    def value(self, node: fx.Node) -> Any:
        return self.values[node] if node in self.values else self._run(node)

    def _run(self, node: fx.Node) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            return self.inputs.get(target)  # omitted arguments, which are None, have other names
        if node.op == "get_attr":
            return operator.attrgetter(target)(self.root)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)


class _ExampleProxy(fx.Proxy):
    """A Proxy with the length of its value on the example."""

    def __len__(self) -> int:
        tracer: Any = self.tracer
        return len(tracer.value(self.node))

    def __iter__(self) -> Iterator[fx.Proxy]:
        items: Any = self
        return (items[i] for i in range(len(items)))

    def __getattr__(self, name: str) -> "_ExampleAttribute":
        return _ExampleAttribute(self, name)


class _ExampleAttribute(_ExampleProxy, fx.proxy.Attribute):
    """An attribute of a Proxy, such as its shape."""

    def __init__(self, root: fx.Proxy, name: str) -> None:
        fx.proxy.Attribute.__init__(self, root, name)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Undo the changes that a tracer makes to nn.Module while it traces."""
    traced = {name: getattr(nn.Module, name) for name in _UNTRACED}
    try:
        for name, method in _UNTRACED.items():
            setattr(nn.Module, name, method)
        yield
    finally:
        for name, method in traced.items():
            setattr(nn.Module, name, method)


def _trace_fx(root: nn.Module, trace: Callable[[], Iterable[fx.Graph]]) -> Dataflow:
    """Return the dataflow over all code paths; empty if one cannot be traced."""
    flow = Dataflow()
    if "forward" in vars(root):  # torch.fx would trace the forward of the class instead
        return flow
    try:
        with warnings.catch_warnings(), preserved_random_state():
            warnings.simplefilter("ignore")  # models warn about values that a Proxy does not have
            graphs = list(trace())
    except Exception:  # a model's code can raise anything when its input has no values
        return flow
    flow.graphs[root] = graphs
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if node.op == "get_attr":  # a parameter read by name: its module is not only called
            path, _, attribute = node.target.rpartition(".")
            owner = root.get_submodule(path)
            if attribute in owner._buffers:
                flow.read.add(owner)
            flow.connect(owner, Other.UNKNOWN)
            flow.connect(Other.UNKNOWN, owner)
        elif not _is_identity(node, root):
            for source in node.all_input_nodes:
                while _is_identity(source, root):
                    source = source.all_input_nodes[0]
                flow.connect(_endpoint(source, root), _endpoint(node, root))
    return flow


def _path_graphs(root: nn.Module) -> Iterator[fx.Graph]:
    """Yield the graph of every path through the code; raise if one cannot be traced."""
    omitted = _optional_arguments(root)
    everything: list[dict[str, Any]] = [{}, omitted] if omitted else [{}]
    alone = [{k: v for k, v in omitted.items() if k != name} for name in omitted]
    for training in (True, False):
        # A new copy for each mode: code that caches a value stores a Proxy while it is traced.
        copied = copy_model(root, share_parameters=True).model.train(training)
        with torch.set_grad_enabled(training):
            for concrete_args in everything:
                yield from _branch_graphs(copied, concrete_args)
            for concrete_args in alone if len(alone) > 1 else []:
                # Code may check that its arguments belong together.
                with contextlib.suppress(ValueError):
                    yield from list(_branch_graphs(copied, concrete_args))


def _example_graphs(root: nn.Module, example: Any) -> Iterator[fx.Graph]:
    """Yield the graph of every path with the arguments of an example."""
    args, kwargs = example_arguments(root, example)
    for training in (True, False):
        copied = copy_model(root, share_parameters=True).model.train(training)
        for module in copied.modules():
            if isinstance(module, _BatchNorm):
                module.eval()  # in training mode it refuses a single value per channel
        inputs = inspect.signature(copied.forward).bind(*args, **kwargs)
        given = set(inputs.arguments)
        inputs.apply_defaults()
        omitted = {k: v for k, v in _optional_arguments(root).items() if k not in given}
        with torch.set_grad_enabled(training):
            make = functools.partial(_ExampleTracer, inputs=inputs.arguments)
            yield from _branch_graphs(copied, omitted, make)


def _branch_graphs(
    root: nn.Module,
    concrete_args: dict[str, Any],
    make: Callable[[tuple[bool, ...]], _PathTracer] = _PathTracer,
) -> Iterator[fx.Graph]:
    """Yield a graph for each way to branch on the input."""
    paths: list[tuple[bool, ...]] = [()]
    while paths:
        path = paths.pop()
        tracer = make(path)
        yield tracer.trace(root, concrete_args)
        paths += [(*tracer.taken[:i], False) for i in range(len(path), len(tracer.taken))]


def _optional_arguments(root: nn.Module) -> dict[str, Any]:
    """Return the arguments of root's forward that default to None.

    torch.fx passes a Proxy for every argument, so the code that runs without them needs a
    separate trace.
    """
    parameters = inspect.signature(type(root).forward).parameters
    return {name: None for name, parameter in parameters.items() if parameter.default is None}


def _sequential_dataflow(root: nn.Module) -> Dataflow:
    """Return the dataflow of an nn.Sequential, which calls its children in order."""
    flow = Dataflow()
    # By name: children() lists a module that is registered twice only once.
    layers = [
        layer
        for layer in root._modules.values()
        if type(layer) is not nn.Identity or has_hooks(layer)
    ]
    chain: list[Any] = [Other.UNKNOWN, *layers, Other.UNKNOWN]
    for producer, consumer in itertools.pairwise(chain):
        flow.connect(producer, consumer)
    return flow


def _endpoint(node: fx.Node, root: nn.Module) -> Endpoint:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    return Other.GLOBAL_POOL if _is_global_mean(node) else Other.UNKNOWN


def _is_identity(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node is an nn.Identity without hooks."""
    if node.op != "call_module":
        return False
    module = root.get_submodule(str(node.target))
    return type(module) is nn.Identity and not has_hooks(module)


def _is_global_mean(node: fx.Node) -> bool:
    """Return whether a node that is not a module takes the mean of each map."""
    if node.target in _FUNCTIONAL_POOLS:
        given = node.kwargs
        return _is_one(given["output_size"] if "output_size" in given else node.args[-1])
    if node.target not in ("mean", torch.mean):
        return False
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    return isinstance(dims, (tuple, list)) and set(dims) in ({2, 3}, {-1, -2}, {2, 3, 4})


def _is_global_pool(consumer: Endpoint) -> bool:
    return consumer is Other.GLOBAL_POOL or (
        isinstance(consumer, _AVERAGE_POOLS) and _is_one(consumer.output_size)
    )


def _is_one(size: Any) -> bool:
    return set(size) == {1} if isinstance(size, (tuple, list)) else size == 1


def _sole(endpoints: set[Endpoint]) -> nn.Module | None:
    if len(endpoints) != 1:
        return None
    (endpoint,) = endpoints
    return endpoint if isinstance(endpoint, nn.Module) else None


def _called_only_inside(
    model: nn.Module, parts: Mapping[nn.Module, nn.Module], example: Any
) -> set[nn.Module]:
    """Return the modules that the example calls, and only while their part runs."""
    copied = copy_model(model, share_parameters=True)
    original = copied.original()
    running: Counter[nn.Module] = Counter()
    inside, outside = set[nn.Module](), set[nn.Module]()

    def enter(part: nn.Module, *_: Any) -> None:
        running[original[part]] += 1

    def leave(part: nn.Module, *_: Any) -> None:
        running[original[part]] -= 1

    def record(module: nn.Module, *_: Any) -> None:
        module = original[module]
        (inside if running[parts[module]] else outside).add(module)

    hooks = [copied.modules[module].register_forward_pre_hook(record) for module in parts]
    for part in set(parts.values()):
        hooks.append(copied.modules[part].register_forward_pre_hook(enter, prepend=True))
        hooks.append(copied.modules[part].register_forward_hook(leave, always_call=True))
    run_example(copied, example, hooks)
    return inside - outside
