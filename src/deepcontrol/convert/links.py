"""Which module takes whose output: what must be known before two modules can become one.

torch.fx follows the calls through a model's own Python, as it is in training and in evaluation, and
with optional arguments left out or given. Where that asks something of its input (its shape, say,
to pad it), both answers are followed. Where it asks too much, each part is followed by itself, and
in an nn.Sequential the order says it. But code that was not followed may also call what is inside
of a part, so such links are doubted, until an example shows that the part was called as a whole.
Whatever is not followed counts as UNSEEN: doubt always keeps two modules apart.
"""

import copy
import inspect
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..nn import AGC1d, AGC2d, AGC3d, AGCLinear
from .example import called_only_within
from .tree import parents

_LEAVES = (_ConvNd, _BatchNorm, AGC1d, AGC2d, AGC3d, AGCLinear)
_AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_BRANCHES = 4  # on one path; each doubles what there is to follow
_FUNCTIONAL_AVERAGES = tuple(getattr(nn.functional, f"adaptive_avg_pool{d}d") for d in (1, 2, 3))


class Other(Enum):
    """A neighbor that is not a module."""

    UNSEEN = "a function, an input or output, or code that was not followed"
    GLOBAL_MEAN = "the mean of each map"


Neighbor = nn.Module | Other


@dataclass
class Links:
    """For each module, over all its calls: whose output it takes, and who takes its output."""

    before: dict[nn.Module, set[Neighbor]] = field(default_factory=lambda: defaultdict(set))
    after: dict[nn.Module, set[Neighbor]] = field(default_factory=lambda: defaultdict(set))
    followed_in: dict[nn.Module, nn.Module] = field(default_factory=dict)  # whose code said so
    doubted: set[nn.Module] = field(default_factory=set)

    def connect(self, giver: Neighbor, taker: Neighbor) -> None:
        if isinstance(giver, nn.Module):
            self.after[giver].add(taker)
        if isinstance(taker, nn.Module):
            self.before[taker].add(giver)

    def only_before(self, module: nn.Module) -> nn.Module | None:
        return _only(self.before[module])

    def only_after(self, module: nn.Module) -> nn.Module | None:
        return _only(self.after[module])

    def meets_global_mean(self, module: nn.Module) -> bool:
        """Whether the mean of the module's maps is taken right after it."""
        return any(_averages(taker) for taker in self.after[module])


def find_links(model: nn.Module, wanted: Iterable[nn.Module], example: Any = None) -> Links:
    """The links of a model, followed as far as the wanted modules need it."""
    links = Links()
    _explore(model, set(wanted), links, parents(model))
    in_parts = {module: part for module, part in links.followed_in.items() if part is not model}
    links.doubted = set(in_parts)
    if in_parts and example is not None:
        links.doubted -= called_only_within(model, in_parts, example)
    return links


def _explore(
    root: nn.Module,
    wanted: set[nn.Module],
    links: Links,
    held_by: dict[nn.Module, list[nn.Module]],
) -> None:
    """Follow the calls within root; what stays unfollowed, within each of its children."""
    found = _traced(root)
    if not found.before and is_plain_sequential(root):
        found = _in_order(root)
    inside = set(root.modules())
    called = set(found.before) - set(links.before)
    for module in called:
        links.followed_in[module] = root
        for giver in found.before[module]:
            links.connect(giver, module)
        for taker in found.after[module]:
            links.connect(module, taker)
        if not inside.issuperset(held_by[module]):  # somebody outside can call it as well
            links.connect(Other.UNSEEN, module)
            links.connect(module, Other.UNSEEN)
    for child in root.children():
        if not isinstance(child, _LEAVES) and wanted & set(child.modules()) - set(links.before):
            _explore(child, wanted, links, held_by)


class _Tracer(fx.Tracer):
    """Follows one path through the code: its first branches as told, all further ones as true."""

    def __init__(self, told: tuple[bool, ...]) -> None:
        super().__init__()
        self.told = told
        self.taken: list[bool] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """A slice of a Sequential is a new one, of no name: what it calls is what counts."""
        if is_plain_sequential(m) and all(m is not own for own in self.root.modules()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The answer to what the code asks of its input, which has no values."""
        if len(self.taken) == _BRANCHES:
            return super().to_bool(obj)  # which raises
        self.taken.append(self.told[len(self.taken)] if len(self.taken) < len(self.told) else True)
        return self.taken[-1]


def _graphs(root: nn.Module) -> Iterator[fx.Graph]:
    """root's graph, one for each path through its code; an error if one cannot be followed."""
    copied = _stand_in(root)
    absent = _absent_if_not_given(root)
    for training in (True, False) if copied is not root else (root.training,):
        if copied is not root:
            copied.train(training)
        for given in ({}, absent) if absent else ({},):
            paths: list[tuple[bool, ...]] = [()]
            while paths:
                told = paths.pop()
                tracer = _Tracer(told)
                yield tracer.trace(copied, given)
                paths += [(*tracer.taken[:i], False) for i in range(len(told), len(tracer.taken))]


def _absent_if_not_given(root: nn.Module) -> dict[str, Any]:
    """The arguments of root's forward that are None by default: to fx they never would be."""
    parameters = inspect.signature(type(root).forward).parameters
    return {name: None for name, parameter in parameters.items() if parameter.default is None}


def _stand_in(root: nn.Module) -> nn.Module:
    """A copy to follow, with the same tensors: what its code stores is no value, but fx's Proxy.

    A cache of the model itself (LeViT's of its attention biases) would keep that for good.
    """
    shared = {id(a): a for a in (*root.parameters(), *root.buffers())}
    try:
        return copy.deepcopy(root, shared)
    except Exception:  # whatever a module holds that cannot be copied
        return root


def _traced(root: nn.Module) -> Links:
    """The links that torch.fx sees, over all paths; none if it cannot follow root's code."""
    links = Links()
    if "forward" in vars(root):  # which fx passes over for its class's
        return links
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's own, about proxies that it cannot judge
            graphs = list(_graphs(root))
    except Exception:  # whatever a model's code raises when its input has no values
        return links
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if node.op == "get_attr":  # a parameter read by its name: its owner is not just called
            owner = root.get_submodule(node.target.rpartition(".")[0])
            links.connect(owner, Other.UNSEEN)
            links.connect(Other.UNSEEN, owner)
        elif not _is_identity(node, root):
            for source in node.all_input_nodes:
                while _is_identity(source, root):
                    source = source.all_input_nodes[0]
                links.connect(_neighbor(source, root), _neighbor(node, root))
    return links


def _neighbor(node: fx.Node, root: nn.Module) -> Neighbor:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))
    return Other.GLOBAL_MEAN if _is_global_mean(node) else Other.UNSEEN


def _is_identity(node: fx.Node, root: nn.Module) -> bool:
    return node.op == "call_module" and type(_neighbor(node, root)) is nn.Identity


def _is_global_mean(node: fx.Node) -> bool:
    if node.target in _FUNCTIONAL_AVERAGES:
        return _is_one(node.kwargs.get("output_size", node.args[-1]))
    if node.target not in ("mean", torch.mean):
        return False
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else ())
    return isinstance(dims, (tuple, list)) and set(dims) in ({2, 3}, {-1, -2}, {2, 3, 4})


def _averages(taker: Neighbor) -> bool:
    return taker is Other.GLOBAL_MEAN or (
        isinstance(taker, _AVERAGES) and _is_one(taker.output_size)
    )


def _is_one(size: Any) -> bool:
    return set(size) == {1} if isinstance(size, (tuple, list)) else size == 1


def is_plain_sequential(module: nn.Module) -> bool:
    own = type(module).forward is not nn.Sequential.forward or "forward" in vars(module)
    return isinstance(module, nn.Sequential) and not own


def _in_order(root: nn.Module) -> Links:
    """The links of an nn.Sequential, which calls its children one after the other."""
    links = Links()
    # By name, since children() leaves out the second of two places that share a module.
    layers = [layer for layer in root._modules.values() if type(layer) is not nn.Identity]
    chain: list[Any] = [Other.UNSEEN, *layers, Other.UNSEEN]
    for giver, taker in itertools.pairwise(chain):
        links.connect(giver, taker)
    return links


def _only(neighbors: set[Neighbor]) -> nn.Module | None:
    """The module that is the one neighbor in all calls, or None."""
    if len(neighbors) != 1:
        return None
    (neighbor,) = neighbors
    return neighbor if isinstance(neighbor, nn.Module) else None
