"""Time a single sample's neuron as one convolution call against today's kernels.

    python benchmarks/one_call.py [--rounds 40] [--out benchmarks/results/one-call-cuda.csv]

At batch 1 the mean of a convolution's output follows from sums over its input, so that
beta - lambda * mean can be the bias of the convolution and ReLU its epilogue: one call of
torch.cudnn_convolution_relu (deepcontrol/ops/triton/one_call.py). For layers of SegNet at 256x512
and two 1x1 convolutions, in bf16 and channels_last, the script times each part, the forward, the
backward of the maps, and a whole step (forward, backward of the maps and of the convolution,
gradients of the filters), replayed from CUDA graphs. A graph holds several layers in a row, each
with filters and maps of its own, so that a layer finds in the L2 cache what the one before left
there, as in a network. Times are microseconds per layer.

The backward needs the signs of y. "sign of y" reads them from y, which the next layer saves anyway;
"bits by the next" reads a bit mask, which the next layer writes while it sums its input.

Each form is checked against the formula in fp64 first: `error` is the relative error of y,
`gradient_error` the largest one of the five gradients. `keeps_nan` tells whether a NaN in the input
is one in the output. On a CPU, a stand-in takes the place of the cuDNN call, the kernels run in
Triton's interpreter, and the layers are small. Takes about 40 seconds on an H200.
"""

import argparse
import functools
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

from deepcontrol import AGCConv2d, fold
from deepcontrol.ops import reference
from deepcontrol.ops.neuron import Geometry, NeuronPlan, neuron_backward
from deepcontrol.ops.triton import agc as agc_kernels
from deepcontrol.ops.triton import one_call as kernels
from deepcontrol.workbench.bench.measure import Call, captured, milliseconds, percentiles
from deepcontrol.workbench.bench.results import source_hash, write_results
from deepcontrol.workbench.hardware import hardware

gain_conv: Any = importlib.import_module("deepcontrol.ops.gain_conv")  # ops.gain_conv is a function

DTYPE = torch.bfloat16
ALL = (True,) * 5  # x and four parameters need a gradient
WARM_UP = 3

Row = dict[str, object]


class Layer(NamedTuple):
    """The shape of a convolution; 3x3 with padding 1, or 1x1."""

    inputs: int
    outputs: int
    height: int
    width: int
    kernel: int = 3
    stride: int = 1

    def __str__(self) -> str:
        size = f"{self.inputs}->{self.outputs} {self.height}x{self.width}"
        return f"{size} {self.kernel}x{self.kernel}" + f" stride {self.stride}" * (self.stride > 1)

    def small(self) -> "Layer":
        """Return a layer of the same kind for Triton's interpreter."""
        outputs = 8 if self.inputs == self.outputs else 16
        return self._replace(inputs=min(self.inputs, 8), outputs=outputs, height=6, width=10)


LAYERS = (
    Layer(64, 64, 256, 512),
    Layer(128, 128, 128, 256),
    Layer(256, 256, 64, 128),
    Layer(512, 512, 32, 64),
    Layer(512, 512, 16, 32),
    Layer(3, 64, 256, 512),
    Layer(256, 256, 64, 128, kernel=1),
    Layer(256, 512, 64, 128, kernel=1, stride=2),
)


class Neuron(NamedTuple):
    """The parameters of a layer in fp32, as under autocast."""

    weight: Tensor
    gain: Tensor
    bias: Tensor
    mean_scale: Tensor


class Saved(NamedTuple):
    """The tensors that a neuron saves for backward, in the order of FusedNeuron."""

    x: Tensor
    weight: Tensor
    gain: Tensor
    scaled: Tensor
    saved: Tensor
    pool_index: None
    bias: Tensor
    mean_scale: Tensor
    mean: Tensor


def conv_relu(x: Tensor, filters: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
    if x.is_cuda:
        return torch.cudnn_convolution_relu(x, filters, bias, *geometry)
    v = torch.nn.functional.conv2d(x, filters, bias.to(x.dtype), *geometry)
    return v.relu_()


class Case:
    """Several layers of one shape in a row, with parameters and inputs of their own.

    Attributes:
        chained: Whether the output of a layer has the shape of its input, and is the next input.
    """

    def __init__(self, layer: Layer, count: int, device: str) -> None:
        self.layer = layer
        self.chained = layer.inputs == layer.outputs and layer.stride == 1
        one, pad = [1, 1], [layer.kernel // 2] * 2
        self.geometry = Geometry([layer.stride] * 2, pad, one, 1)
        self.neurons = [self._neuron(device) for _ in range(count)]
        self.inputs = [self._maps(layer.inputs, 1, device).relu_() for _ in range(count)]
        self.gradients = [self._maps(layer.outputs, layer.stride, device) for _ in range(count)]
        self.plan = self._plan(0.0)
        self.plan_with_sums = self._plan(1.0)
        self.takes_mask = self.chained and layer.inputs % 8 == 0

    def _neuron(self, device: str) -> Neuron:
        """Draw He filters that are exact in bf16 also after the gain: V is not rounded."""
        a = self.layer
        weight = torch.randn(a.outputs, a.inputs, a.kernel, a.kernel, device=device)
        weight *= (2 / weight[0].numel()) ** 0.5
        weight = weight.to(DTYPE).float().to(memory_format=torch.channels_last)
        gain = 2.0 ** torch.randint(-1, 2, (a.outputs,), device=device)
        bias = 0.1 * torch.randn(a.outputs, device=device)
        return Neuron(weight, gain, bias, torch.rand(a.outputs, device=device))

    def _maps(self, channels: int, stride: int, device: str) -> Tensor:
        size = (-(-self.layer.height // stride), -(-self.layer.width // stride))
        a = torch.randn(1, channels, *size, device=device).to(DTYPE)
        return a.to(memory_format=torch.channels_last)

    def _plan(self, consumer_ratio: float) -> NeuronPlan:
        x, weight = self.inputs[0], self.neurons[0].weight
        return NeuronPlan(
            self.geometry, "relu", DTYPE, x.numel(), weight, None, consumer_ratio,
            pools=False, training=True,
        )  # fmt: skip

    # One layer in each form. `run` is a layer's forward: (neuron, x, context) -> (y, ...).

    def today(self, neuron: Neuron, x: Tensor, map_sums: Tensor | None = None) -> tuple[Any, ...]:
        """Return y, the saved tensors and the map sums of y, by today's kernels."""
        plan = self.plan if map_sums is None else self.plan_with_sums
        weight, gain, bias, lam = neuron
        scaled = plan.scale(weight, gain)
        v = torch.convolution(x, scaled, None, *plan.convolution)
        y, index, mean, saved, sums = plan.forward(v, bias, lam, x, scaled, map_sums)
        assert saved is not None
        return y, Saved(x, weight, gain, scaled, saved, index, bias, lam, mean), sums

    def one_call(
        self, neuron: Neuron, x: Tensor, with_mask: bool = False
    ) -> tuple[Tensor, Saved, Tensor | None]:
        """Return y, the saved tensors, and the bits of x if asked for.

        The saved tensors have y as the ReLU mask.
        """
        weight, gain, bias, lam = neuron
        window = kernels.Window.of(x, self.geometry.stride)
        sums, mask = kernels.input_sums(x, window, self.layer.kernel > 1, with_mask)
        scaled, mean, shift = kernels.scale_with_mean(
            weight, gain, bias, lam, x, window, sums, DTYPE
        )
        assert scaled is not None
        y = conv_relu(x, scaled, shift, self.geometry)
        return y, Saved(x, weight, gain, scaled, y, None, bias, lam, mean), mask

    def backward(self, saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
        return neuron_backward(self.plan, saved, g, ALL)

    # All layers in a row.

    def each(self, run: Callable[[Neuron, Tensor], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Run a forward for all layers and keep the results, so that no memory is reused."""
        results: list[tuple[Any, ...]] = []
        x = self.inputs[0]
        for neuron, own in zip(self.neurons, self.inputs, strict=True):
            results.append(run(neuron, x if self.chained else own))
            x = results[-1][0]
        return results

    def today_in_a_row(self) -> list[tuple[Any, ...]]:
        return self.each(self.today)

    def today_with_sums_in_a_row(self) -> list[tuple[Any, ...]]:
        """Hand map sums between layers, which today's limit reserves for larger maps."""
        sums = self.first_sums

        def run(neuron: Neuron, x: Tensor) -> tuple[Any, ...]:
            nonlocal sums
            result = self.today(neuron, x, sums)
            sums = result[2]
            return result

        with all_maps_large():
            return self.each(run)

    def one_call_in_a_row(self) -> list[tuple[Any, ...]]:
        return self.each(self.one_call)

    def one_call_with_bits_in_a_row(self) -> list[tuple[Any, ...]]:
        """Let each layer save the bits that the next one writes.

        The last layer saves those that the first one writes, which are of the same size.
        """
        results = self.each(lambda neuron, x: self.one_call(neuron, x, with_mask=True))
        masks = [mask for *_, mask in results]
        masks = [*masks[1:], masks[0]]
        return [
            (y, saved._replace(saved=mask), mask)
            for (y, saved, _), mask in zip(results, masks, strict=True)
        ]

    def step(self, forward: Callable[[], list[tuple[Any, ...]]]) -> list[Any]:
        """Run all layers forward, then backward."""
        results = forward()
        gradients: list[Any] = [None]
        g: Any = self.gradients[0]
        for (_, saved, _), own in zip(reversed(results), self.gradients, strict=True):
            gradients.append(self.backward(saved, g if self.chained else own))
            g = gradients[-1][0]
        return [results, gradients]

    @functools.cached_property
    def first_sums(self) -> Tensor:
        """Map sums of the first input, in the form in which a kernel stores them."""
        zero = torch.zeros(self.layer.inputs, device=self.inputs[0].device)
        with all_maps_large():  # ReLU keeps the inputs, which are not negative
            *_, sums = agc_kernels.forward(self.inputs[0], zero, zero, "relu", None, True, 1.0)
        assert sums is not None
        return sums


@contextmanager
def all_maps_large() -> Iterator[None]:
    """Let maps of any size have their sums handed over."""
    limit, gain_conv.MIN_ELEMENTS = gain_conv.MIN_ELEMENTS, 0
    try:
        yield
    finally:
        gain_conv.MIN_ELEMENTS = limit


def check(case: Case) -> dict[str, Row]:
    """Return the columns error, gradient_error and keeps_nan of each form."""
    neuron, x, g = case.neurons[0], case.inputs[0], case.gradients[0]
    exact = [a.double() for a in (x, *neuron)]

    def formula(x: Tensor, weight: Tensor, gain: Tensor, bias: Tensor, lam: Tensor) -> Tensor:
        v = reference.gain_conv(x, weight, gain, *case.geometry)
        return reference.center_bias_act(v, bias, lam, "relu")

    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # no autotuning in fp64
        inputs = [a.requires_grad_() for a in exact]
        y = formula(*inputs)
        wanted = torch.autograd.grad(y, inputs, g.double())
    forms: dict[str, Callable[..., tuple[Any, ...]]] = {
        "today": case.today,
        "one call, sign of y": case.one_call,
    }
    if case.takes_mask:
        forms["one call, bits by the next"] = lambda neuron, x: with_bits(case, neuron, x)
    broken = x.clone()
    broken[..., 0, 0] = torch.nan
    found: dict[str, Row] = {}
    worst = 0.0  # error of today's gradients
    for name, run in forms.items():
        result, saved, _ = run(neuron, x)
        errors = [relative(a, b) for a, b in zip(case.backward(saved, g), wanted, strict=True)]
        found[name] = {
            "error": f"{relative(result, y):.1e}",
            "gradient_error": f"{max(errors):.1e}",
            "keeps_nan": bool(run(neuron, broken)[0].isnan().any()),
        }
        # In bf16 the gradients of today's neuron are far from exact if g has mean 0: most of
        # lambda * mean(g) is rounded away. One call must not add to that.
        worst = worst if name != "today" else max(errors)
        if not (relative(result, y) < 0.01 and max(errors) < 1.5 * worst + 0.05):
            raise RuntimeError(f"{case.layer}, {name}: errors {relative(result, y)}, {errors}")
    return found


def with_bits(case: Case, neuron: Neuron, x: Tensor) -> tuple[Any, ...]:
    y, saved, _ = case.one_call(neuron, x)
    mask = kernels.input_sums(y, kernels.Window.of(y, (1, 1)), True, with_mask=True)[1]
    assert mask is not None
    return y, saved._replace(saved=mask), mask


def relative(a: Any, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


def calls_of(case: Case) -> dict[str, Call]:
    """Return what is timed, by name; each call runs all layers."""
    plan, geometry = case.plan, case.geometry
    results = case.today_in_a_row()
    ones = case.one_call_in_a_row()
    all_saved = [saved for _, saved, _ in results]
    scaled = [saved.scaled for saved in all_saved]
    maps = [torch.empty_like(y) for y, *_ in results]
    shifts = [torch.zeros_like(n.bias, dtype=DTYPE) for n in case.neurons]
    inputs = [saved.x for saved in all_saved]
    window = kernels.Window.of(inputs[0], geometry.stride)
    has_borders = case.layer.kernel > 1
    sums = [kernels.input_sums(x, window, has_borders)[0] for x in inputs]
    rest = [n[2:] for n in case.neurons]

    def convolve() -> object:
        return [
            torch.convolution(x, v, None, *plan.convolution)
            for x, v in zip(inputs, scaled, strict=True)
        ]

    def convolve_relu() -> object:
        operands = zip(inputs, scaled, shifts, strict=True)
        return [conv_relu(x, filters, bias, geometry) for x, filters, bias in operands]

    def agc() -> object:
        return [
            plan.forward(v, *more, x, w, None)
            for v, more, x, w in zip(maps, rest, inputs, scaled, strict=True)
        ]

    def backward_of_maps(saved: list[Saved]) -> Call:
        def run() -> object:
            return [
                plan.backward(g, s.saved, None, s.mean, s.bias, s.mean_scale)
                for g, s in zip(case.gradients, saved, strict=True)
            ]

        return run

    calls: dict[str, Call] = {
        "part: convolution": convolve,
        "part: convolution with bias and ReLU": convolve_relu,
        "part: gain kernel": lambda: [plan.scale(*n[:2]) for n in case.neurons],
        "part: AGC kernels": agc,
        "part: input sums": lambda: [kernels.input_sums(x, window, has_borders) for x in inputs],
        "part: gain kernel with mean": lambda: [
            kernels.scale_with_mean(*n, x, window, s, DTYPE)
            for n, x, s in zip(case.neurons, inputs, sums, strict=True)
        ],
        "forward: today": case.today_in_a_row,
        "forward: one call, sign of y": case.one_call_in_a_row,
        "backward of maps: bits": backward_of_maps(all_saved),
        "backward of maps: sign of y": backward_of_maps([saved for _, saved, _ in ones]),
        "step: today": lambda: case.step(case.today_in_a_row),
        "step: one call, sign of y": lambda: case.step(case.one_call_in_a_row),
    }
    if case.takes_mask:
        calls |= {
            "part: input sums, writing bits": lambda: [
                kernels.input_sums(x, window, has_borders, True) for x in inputs
            ],
            "forward: one call, bits by the next": case.one_call_with_bits_in_a_row,
            "step: one call, bits by the next": lambda: case.step(case.one_call_with_bits_in_a_row),
        }
    if case.takes_mask and has_borders and inputs[0].is_cuda:  # plain PyTorch has no map sums
        calls["forward: today, map sums handed over"] = case.today_with_sums_in_a_row
        calls["step: today, map sums handed over"] = lambda: case.step(
            case.today_with_sums_in_a_row
        )
    return calls | folded_calls(case, inputs, sums)


def folded_calls(case: Case, inputs: list[Tensor], sums: list[Tensor]) -> dict[str, Call]:
    """Return the layers for inference: folded in plain PyTorch, and as one call."""
    layer, geometry = case.layer, case.geometry
    window = kernels.Window.of(inputs[0], geometry.stride)
    folded: list[Any] = []
    for neuron in case.neurons:
        module = AGCConv2d(
            layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.kernel // 2
        ).to(inputs[0].device, DTYPE, memory_format=torch.channels_last)  # type: ignore[call-overload]
        for name, value in neuron._asdict().items():
            getattr(module, name).copy_(value)
        folded.append(fold(module))

    def today() -> object:  # by torch's ops; on CUDA m(x) itself is one call
        return [
            m._pre_activation(x, m.padding).relu_() for m, x in zip(folded, inputs, strict=True)
        ]

    def constant_bias() -> object:  # a folded BatchNorm
        return [
            m._convolve(x, m.padding, m.bias).relu_() for m, x in zip(folded, inputs, strict=True)
        ]

    def bias_of(module: Any, x: Tensor, total: Tensor) -> Tensor:
        parameters = (module.weight, None, module.bias, module.mean_scale)
        return kernels.scale_with_mean(*parameters, x, window, total, DTYPE)[2]

    def one_call() -> object:
        results = []
        for module, x in zip(folded, inputs, strict=True):
            total = kernels.input_sums(x, window, layer.kernel > 1)[0]
            results.append(conv_relu(x, module.weight, bias_of(module, x, total), geometry))
        return results

    calls: dict[str, Call] = {
        "folded: constant bias": constant_bias,
        "folded: today": today,
        "folded: one call": one_call,
        "part: mean from V": lambda: [
            bias_of(*each) for each in zip(folded, inputs, sums, strict=True)
        ],
    }
    wanted, got = today()[0], one_call()[0]  # type: ignore[index]
    if not relative(got, wanted.double()) < 0.02:
        raise RuntimeError(f"{layer}: one call differs from fold by {relative(got, wanted):.1e}")
    return calls


@torch.no_grad()  # as in the forward and backward of an autograd.Function
def measure(layer: Layer, args: argparse.Namespace) -> list[Row]:
    """Return the rows of a layer."""
    case = Case(layer, args.count, args.device)
    errors = check(case)
    calls = {name: captured(call, args.device) for name, call in calls_of(case).items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    warm_up = WARM_UP if args.device == "cuda" else 0
    for repetition in range(warm_up + args.rounds):
        for name, call in calls.items():
            elapsed = 1e3 * milliseconds(call, args.device) / args.count
            if repetition >= warm_up:
                times[name].append(elapsed)
    rows: list[Row] = []
    print(f"\n{layer}" + ("" if case.chained else ", separate inputs"))
    for name, values in times.items():
        part, form = name.split(": ")
        found = errors.get(form, {}) if part in ("forward", "step") else {}
        rows.append(
            {
                "layer": str(layer),
                "part": part,
                "form": form,
                **percentiles("us", values),
                **(dict.fromkeys(("error", "gradient_error", "keeps_nan"), "") | found),
                "layers": args.count,
                "autotune": args.autotune,
                "rounds": args.rounds,
                "source": source_hash(),
            }
        )
        print(f"  {name:44s} {statistics.median(values):9.2f} us  {found or ''}", flush=True)
    return rows


def print_table(rows: list[Row]) -> None:
    """Print the step of each layer in each form, and the best against today's."""
    print("\nForward and backward, us per layer; in brackets against today's")
    for layer in dict.fromkeys(row["layer"] for row in rows):
        steps = {
            str(row["form"]): float(str(row["us_p50"]))
            for row in rows
            if row["layer"] == layer and row["part"] == "step"
        }
        words = [f"{form} {us:.1f} ({us / steps['today']:.2f}x)" for form, us in steps.items()]
        print(f"  {layer!s:24s} {'; '.join(words)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed replays, at least 2")
    parser.add_argument("--count", type=int, default=8, help="layers in a row")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=range(len(LAYERS)), metavar="N",
        choices=range(len(LAYERS)),
        help="; ".join(f"{i}: {layer}" for i, layer in enumerate(LAYERS)),
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=50.0, help="seconds after which no further layer starts"
    )
    parser.add_argument(
        "--autotune", action=argparse.BooleanOptionalAction, default=True,
        help="let cuDNN choose its kernels by timing them, as torch.backends.cudnn.benchmark",
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--out", type=Path, help="CSV file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2 for a spread, got {args.rounds}")
    out = args.out or Path(f"benchmarks/results/one-call-{args.device}.csv")
    torch.backends.cudnn.benchmark = args.autotune
    torch.manual_seed(0)
    print(f"One convolution call on {hardware(args.device)}: batch 1, bf16, channels_last.")
    begin, rows = time.perf_counter(), []
    for i in args.layers:
        if time.perf_counter() - begin > args.limit:
            print(f"{LAYERS[i]} skipped: {args.limit:.0f} seconds have passed")
            continue
        layer = LAYERS[i] if args.device == "cuda" else LAYERS[i].small()
        rows += measure(layer, args)
        write_results(out, rows, args.device)  # after each layer: a run may be cut short
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print_table(rows)


if __name__ == "__main__":
    main()
