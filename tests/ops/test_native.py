"""The compiled helper: the results of the Python path, and that path where it must run."""

import copy
import gc
import importlib
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.nn import AGCConv1d, AGCConv3d, AGCConvPool2d, saved_bytes
from deepcontrol.ops import max_unpool2x2, native, reference, replay
from deepcontrol.ops.native import build
from deepcontrol.ops.replay import KernelHandle

pytest.importorskip("triton")

STEPS_TO_PREPARE = 4  # run, record, remember the module, prepare it


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the helper, or use the build in the cache."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    # The folder above is common to all workers of pytest-xdist: one builds, the others wait.
    with FileLock(tmp_path_factory.getbasetemp().parent / "native.lock"):
        build.build()
    build.load.cache_clear()


@pytest.fixture
def helper(built: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Use the helper, and on a CPU Triton's interpreter from it; yield the extension."""
    if not torch.cuda.is_available():
        for name in ("agc", "gain_conv", "pool"):
            module = importlib.import_module(f"deepcontrol.ops.{name}")
            monkeypatch.setattr(module, "uses_kernels", lambda z, traced=False: True)
    monkeypatch.setattr(replay, "RECORDED_DEVICES", ["cuda", "cpu"])
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # to compare bit for bit
    monkeypatch.delenv("DEEPCONTROL_NATIVE", raising=False)
    for name, value in (("active", True), ("run", None), ("_extension", None)):
        monkeypatch.setattr(native, name, value)
    assert native._start()
    yield native._extension
    native._extension.clear()


pytestmark = pytest.mark.slow


class Stage(nn.Module):
    """A neuron, one with pooling, the unpooling, and a norm."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.neuron = AGCConv2d(3, 8, 3, padding=1, activation=activation)  # type: ignore[arg-type]
        self.pooling = AGCConvPool2d(8, 8, 3, padding=1, weight_norm=True)
        self.norm = AGC2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.neuron(x)
        pooled, index = self.pooling(x)
        return self.norm(max_unpool2x2(pooled, index, x.shape[2:]))


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor | None]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    for p in model.parameters():
        p.grad = None
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def in_python(call: Callable[[], Any]) -> Any:
    """Call a function without the helper."""
    with native.disabled():
        return call()


def prepare(model: nn.Module, x: Tensor, g: Tensor) -> None:
    for _ in range(STEPS_TO_PREPARE):
        gradients(model, x, g)


def counted(helper: Any, call: Callable[[], Any]) -> dict[str, int]:
    """Return how often the helper and Python ran during a call."""
    before = helper.count()
    call()
    return {name: n - before[name] for name, n in helper.count().items() if name != "modules"}


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            assert a.stride() == b.stride()


def maps(*shape: int, device: str, memory_format: Any = torch.contiguous_format) -> Tensor:
    return torch.randn(shape, device=device).to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "none"])
@pytest.mark.parametrize("batch", [1, 2])
def test_same_as_python_bit_for_bit(
    helper: Any, device: str, memory_format: torch.memory_format, activation: str, batch: int
) -> None:
    model = Stage(activation).to(device).to(memory_format=memory_format)  # type: ignore[call-overload]
    shape = (batch, 3, 8, 8)
    x = maps(*shape, device=device, memory_format=memory_format).requires_grad_()
    g = maps(batch, 8, 8, 8, device=device, memory_format=memory_format)
    prepare(model, x, g)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        x = torch.randn_like(x).requires_grad_()
        expected = in_python(lambda x=x: gradients(model, x, g))
        assert_same(gradients(model, x, g), expected)
        ran = counted(helper, lambda x=x: gradients(model, x, g))
        assert ran == {"forward": 3, "backward": 3, "python_backward": 0, "python_steps": 0}


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: AGCConv1d(4, 8, 3), (2, 4, 12)),
        (lambda: AGCConv2d(4, 8, 3, stride=2, dilation=2, groups=2), (2, 4, 12, 12)),
        (lambda: AGCConv3d(4, 8, 3), (2, 4, 5, 6, 5)),
        (lambda: AGCConv2d(4, 6, 3), (2, 4, 7, 7)),
    ],
    ids=["1d", "strided", "3d", "no mask"],
)
def test_reference(
    helper: Any, device: str, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Against the formula in fp64."""
    layer: Any = make().to(device)
    with torch.no_grad():
        for p in (layer.gain, layer.bias, layer.mean_scale):
            p.normal_()
    x = maps(*shape, device=device).requires_grad_()
    g = torch.randn_like(layer(x))
    prepare(layer, x, g)
    found: list[Tensor | None] = []
    assert counted(helper, lambda: found.extend(gradients(layer, x, g)))["backward"] == 1
    exact = copy.deepcopy(layer).double()
    wide = x.detach().double().requires_grad_()
    v = reference.gain_conv(
        wide, exact.weight, exact.gain, exact.stride, exact.padding, exact.dilation, exact.groups
    )
    y = reference.center_bias_act(v, exact.bias, exact.mean_scale, exact.activation)
    y.backward(g.double())
    expected = [y.detach(), wide.grad, *(p.grad for p in exact.parameters())]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for a, b in zip(gradients(layer, x, g), expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("frozen", [["weight", "gain"], ["bias"], ["weight", "gain", "mean_scale"]])
@pytest.mark.parametrize("of_input", [True, False])
def test_frozen_parameters(helper: Any, device: str, frozen: list[str], of_input: bool) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device), maps(2, 8, 8, 8, device=device)
    x.requires_grad_(of_input)
    prepare(layer, x, g)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    for _ in range(4):  # the first two record the backward of this case
        ran = counted(helper, lambda: gradients(layer, x, g))
    assert ran == {"forward": 1, "backward": 1, "python_backward": 0, "python_steps": 0}
    assert_same(gradients(layer, x, g), in_python(lambda: gradients(layer, x, g)))


def test_evaluation_and_inference_mode(helper: Any, device: str) -> None:
    layer, x = AGCConv2d(3, 8, 3).to(device), maps(1, 3, 8, 8, device=device)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(STEPS_TO_PREPARE):
                layer(x)
            ys: list[Tensor] = []
            assert counted(helper, lambda ys=ys: ys.append(layer(x)))["forward"] == 1
            torch.testing.assert_close(ys[0], in_python(lambda: layer(x)), rtol=0, atol=0)
            assert not ys[0].requires_grad
            assert ys[0].is_inference() == (context is torch.inference_mode)


def test_autocast(helper: Any, device: str) -> None:
    layer = AGCConv2d(8, 8, 3, padding=1).to(device)
    x, g = maps(2, 8, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)

    def under_autocast() -> list[Tensor | None]:
        with torch.autocast(device, torch.bfloat16):
            return gradients(layer, x, g.bfloat16())

    for _ in range(STEPS_TO_PREPARE):
        under_autocast()
    assert counted(helper, under_autocast)["backward"] == 1
    found = under_autocast()
    assert found[0].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert_same(found, in_python(under_autocast))
    assert counted(helper, lambda: gradients(layer, x, g))["forward"] == 0  # another dtype
    assert layer(x).dtype == torch.float32


def test_changed_settings_and_parameters(helper: Any, device: str) -> None:
    """Whatever changes between calls, the result is that of a new layer."""
    x, g = maps(2, 4, 8, 8, device=device).requires_grad_(), maps(2, 4, 8, 8, device=device)

    def change_padding(layer: Any) -> None:
        layer._reversed_padding_repeated_twice[:] = [0, 0, 0, 0]  # the same list

    def swap_data(layer: Any) -> None:
        layer.weight.data = torch.randn_like(layer.weight)

    def other_layout(layer: Any) -> None:
        layer.to(memory_format=torch.channels_last)

    def parametrize(layer: Any) -> None:
        nn.utils.parametrize.register_parametrization(layer, "gain", nn.Softplus())

    changes: list[Callable[[Any], object]] = [
        lambda a: setattr(a, "stride", (2, 2)),
        lambda a: setattr(a, "activation", "leaky_relu"),
        lambda a: setattr(a, "activation", "silu"),
        lambda a: setattr(a, "weight_norm", True),
        lambda a: setattr(a, "dilation", (2, 2)),
        lambda a: setattr(a, "bias", nn.Parameter(torch.randn(4, device=device))),
        lambda a: a.__dict__.update(groups=2, weight=None) or a.__dict__.pop("weight"),
        change_padding,
        swap_data,
        other_layout,
        parametrize,
        lambda a: a.double(),
    ]
    for i, change in enumerate(changes):
        changed: Any = AGCConv2d(4, 4, 3, padding=1).to(device)
        changed._reversed_padding_repeated_twice = [1, 1, 1, 1]
        prepare(changed, x, g)
        assert counted(helper, lambda changed=changed: changed(x))["forward"] == 1
        if i == 6:  # two groups need other filters
            changed.weight = nn.Parameter(torch.randn(4, 2, 3, 3, device=device))
        change(changed)
        new = copy.deepcopy(changed)
        z = x.detach().to(changed.bias.dtype)
        expected = in_python(lambda new=new, z=z: new(z))
        torch.testing.assert_close(changed(z), expected, rtol=0, atol=0)


def test_saved_bytes_are_those_of_python(helper: Any, device: str) -> None:
    model = Stage().to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(model, x, g)
    found: list[int] = []
    assert counted(helper, lambda: found.append(saved_bytes(model, x)))["forward"] == 3
    assert found == [in_python(lambda: saved_bytes(model, x))]


@pytest.mark.parametrize(
    "make", [lambda: AGC2d(6), lambda: AGCConv2d(6, 6, 3, padding=1)], ids=["AGC2d", "AGCConv2d"]
)
def test_hooks_may_change_the_layout(
    helper: Any, device: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # cuDNN may choose another algorithm for the other layout, and TF32 rounds to 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layout = torch.channels_last
    layer: nn.Module = make().to(device).to(memory_format=layout)  # type: ignore[call-overload]
    x = maps(2, 6, 8, 8, device=device, memory_format=layout).requires_grad_()
    g = maps(2, 6, 8, 8, device=device, memory_format=layout)
    prepare(layer, x, g)
    expected = gradients(layer, x, g)
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, lambda a: a.contiguous()):
        found: list[Tensor | None] = []
        ran = counted(helper, lambda: found.extend(gradients(layer, x, g)))
    assert ran["forward"] == ran["backward"] == 1
    assert ran["python_steps"] > 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(layer, x, g), in_python(lambda: gradients(layer, x, g)))


def test_gradient_in_another_layout_and_unaligned_input(helper: Any, device: str) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)
    other = g.to(memory_format=torch.channels_last)
    assert_same(gradients(layer, x, other), in_python(lambda: gradients(layer, x, other)))
    unaligned = torch.randn(8 * 3 * 9 + 1, device=device)[1:].view(8, 3, 3, 3)
    layer.weight.data = unaligned
    found: list[Tensor | None] = []
    ran = counted(helper, lambda: found.extend(gradients(layer, x, g)))
    assert ran["forward"] == 1
    assert ran["python_steps"] > 0
    assert_same(found, in_python(lambda: gradients(layer, x, g)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AGC2d(3),
        lambda: AGCConv2d(3, 3, 3, padding=1, activation="leaky_relu"),
        lambda: AGCConv2d(3, 3, 3, padding=1, weight_norm=True),
    ],
    ids=["AGC2d", "AGCConv2d", "weight_norm"],
)
def test_second_derivatives_and_batched_gradients(
    helper: Any, device: str, make: Callable[[], nn.Module]
) -> None:
    layer = make().to(device)
    x = maps(2, 3, 8, 8, device=device).requires_grad_()
    g = maps(2, 3, 8, 8, device=device).requires_grad_()
    prepare(layer, x, g.detach())

    def second() -> list[Tensor]:
        y = layer(x)
        first = torch.autograd.grad(y, (x, *layer.parameters()), g, create_graph=True)
        total = sum((a**2).sum() for a in first)
        inputs = (x, g, *layer.parameters())
        return list(torch.autograd.grad(total, inputs, materialize_grads=True))  # type: ignore[arg-type]

    found: list[Tensor] = []
    ran = counted(helper, lambda: found.extend(second()))
    assert ran["forward"] == ran["python_backward"] == 1
    for a, b in zip(found, in_python(second), strict=True):
        torch.testing.assert_close(a, b)
    several = torch.randn(3, 2, 3, 8, 8, device=device)
    y, ones = layer(x), [layer(x) for _ in several]
    (batch,) = torch.autograd.grad(y, x, several, is_grads_batched=True)
    for one, upstream, a in zip(ones, several, batch, strict=True):
        (expected,) = torch.autograd.grad(one, x, upstream)
        torch.testing.assert_close(a, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_transforms_and_subclasses_take_python(helper: Any, device: str) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)

    class Subclass(Tensor):
        pass

    left: list[Tensor] = []

    def doubled(a: Tensor) -> Tensor:
        left.append(2 * a)
        return a.sum()

    torch.func.grad(doubled)(x)
    calls: list[Callable[[], object]] = [
        lambda: torch.func.vmap(lambda a: layer(a[None]))(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: layer(x.as_subclass(Subclass)),
        lambda: layer(left[0]),
        lambda: layer(x[0]),
        lambda: torch.jit.trace(layer, x, check_trace=False),
        lambda: torch.export.export(layer, (x,)),
    ]
    for call in calls:
        assert counted(helper, call)["forward"] == 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert counted(helper, lambda: layer(dual))["forward"] == 0
    torch.testing.assert_close(layer(left[0]), in_python(lambda: layer(2 * x)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script, inside of torch
def test_tangents_of_gradients(helper: Any, device: str) -> None:
    """Forward over reverse: the backward runs within a level that its forward did not see."""
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)
    y, tangent = layer(x), torch.randn_like(g)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(g, tangent)
        (dx,) = torch.autograd.grad(y, x, dual, retain_graph=True)
        found = torch.autograd.forward_ad.unpack_dual(dx).tangent
    (expected,) = torch.autograd.grad(y, x, tangent)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_switches(helper: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)
    with monkeypatch.context() as patch:
        patch.setenv("DEEPCONTROL_KERNELS", "off")
        assert counted(helper, lambda: layer(x))["forward"] == 0
    assert counted(helper, lambda: layer(x))["forward"] == 1
    script = "from deepcontrol.ops import native; print(native._start(), native.why_python())"
    environment = {**os.environ, "DEEPCONTROL_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "DEEPCONTROL_NATIVE=0"]


def test_backward_twice_raises(helper: Any, device: str) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)
    y = layer(x)
    y.backward(g)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(g)
    y = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_errors_of_python_pass_through(
    helper: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)

    def fail(a: Tensor) -> Tensor:
        raise KeyError("unpack")

    with torch.autograd.graph.saved_tensors_hooks(lambda a: a, fail):
        y = layer(x)
    with pytest.raises(KeyError, match="unpack"):
        y.backward(g)


def test_copies_pickles_and_dead_modules(helper: Any, device: str) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    x, g = maps(2, 3, 8, 8, device=device), maps(2, 8, 8, 8, device=device)
    prepare(layer, x, g)
    copied = copy.deepcopy(layer)
    torch.save(layer, buffer := io.BytesIO())
    buffer.seek(0)
    for other in (copied, torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), layer(x))
    for _ in range(600):  # each may have the address of one before
        short = AGCConv2d(3, 8, 1).to(device)
        helper.wants(short, x, None)
        del short
    gc.collect()
    helper.wants(copied, x, None)
    assert helper.count()["modules"] < 600
    torch.testing.assert_close(layer(x), in_python(lambda: layer(x)), rtol=0, atol=0)


@pytest.mark.gpu  # Triton's interpreter runs in one thread
def test_threads(helper: Any) -> None:
    """Several threads use one layer with several shapes."""
    device = "cuda"
    layer = AGCConv2d(3, 8, 3, padding=1).to(device)
    errors: list[BaseException] = []

    def work(size: int) -> None:
        try:
            x, g = maps(2, 3, size, size, device=device), maps(2, 8, size, size, device=device)
            for _ in range(6):
                y = layer(x.requires_grad_())
                (dx,) = torch.autograd.grad(y, x, g)
                assert dx.shape == x.shape
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (4, 5, 6, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_checkpointing_and_anomaly_mode(helper: Any, device: str) -> None:
    model = Stage().to(device)
    x, g = maps(2, 3, 8, 8, device=device).requires_grad_(), maps(2, 8, 8, 8, device=device)
    prepare(model, x, g)
    expected = gradients(model, x, g)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)  # type: ignore[attr-defined]

    assert_same(gradients(Checkpointed(), x, g), expected)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(gradients(model, x, g), expected)


def test_map_sums_are_handed_over(
    helper: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first neuron stores the sums of its maps, and the second derives its mean from them."""
    gain_conv = importlib.import_module("deepcontrol.ops.gain_conv")
    monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", 0)
    model = nn.Sequential(AGCConv2d(4, 8, 3, padding=1), AGCConv2d(8, 8, 3, padding=1))
    model[0].consumer_ratio = 1.0
    model = model.to(device)

    def step() -> list[Tensor | None]:
        with torch.autocast(device, torch.bfloat16):
            return gradients(model, x, g)

    x = maps(2, 4, 40, 40, device=device).requires_grad_()
    g = maps(2, 8, 40, 40, device=device).bfloat16()
    for _ in range(STEPS_TO_PREPARE):
        step()
    assert counted(helper, step)["forward"] == 2
    assert_same(step(), in_python(step))
    changed = model[1]
    alone = torch.randn(2, 8, 40, 40, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        assert counted(helper, lambda: changed(alone))["forward"] == 0  # without sums


@pytest.mark.gpu
def test_captured_steps(helper: Any) -> None:
    """While a CUDA graph is captured, the Python path runs: its backward has two branches."""
    from deepcontrol import TrainingStep

    torch.manual_seed(0)
    model = nn.Sequential(AGCConv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)).cuda()
    other = copy.deepcopy(model)
    x, labels = torch.randn(2, 3, 16, 16, device="cuda"), torch.zeros(2, 16, 16, device="cuda")
    labels = labels.long()
    losses = []
    for each, engine in ((model, "graph"), (other, "eager")):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        step = TrainingStep(each, nn.functional.cross_entropy, optimizer, engine=engine)  # type: ignore[arg-type]
        losses.append([float(step(x, labels)) for _ in range(8)])
    torch.testing.assert_close(*losses)


@pytest.mark.gpu
def test_backward_that_is_captured_alone(helper: Any) -> None:
    layer = AGCConv2d(3, 8, 3, padding=1).cuda()
    x, g = torch.randn(2, 3, 8, 8).cuda().requires_grad_(), torch.randn(2, 8, 8, 8).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        prepare(layer, x, g)
        y = layer(x)
        expected = torch.autograd.grad(y, x, g, retain_graph=True)[0]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            (dx,) = torch.autograd.grad(y, x, g)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(dx, expected)


@pytest.mark.gpu
def test_side_streams(helper: Any) -> None:
    layer = AGCConv2d(64, 64, 3, padding=1).cuda()
    x, g = torch.randn(4, 64, 64, 64).cuda().requires_grad_(), torch.randn(4, 64, 64, 64).cuda()
    prepare(layer, x, g)
    expected = in_python(lambda: gradients(layer, x, g))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found: list[Tensor | None] = []
        assert counted(helper, lambda: found.extend(gradients(layer, x, g)))["backward"] == 1
    torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_no_memory_is_lost(helper: Any) -> None:
    model = Stage().cuda()
    x, g = torch.randn(2, 3, 32, 32).cuda(), torch.randn(2, 8, 32, 32).cuda()
    for _ in range(10):
        gradients(model, x, g)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        gradients(model, x, g)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_packed_arguments() -> None:
    kernel = KernelHandle(1, 128, 0, ("fp32", "i64", "*u8"))
    packed = native.pack_arguments(kernel, [(-1, 1.0), (-1, 5), (2, None)])
    assert packed == [(-1, 0x3F800000), (-1, 5), (2, 0), (-1, 0), (-1, 0)]
    for kind in ("bf16", "tensordesc<fp32[1]>", "nvTmaDesc"):
        assert native.pack_arguments(KernelHandle(1, 128, 0, (kind,)), [(-1, 1.0)]) is None


def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library_path.cache_clear()
    try:
        for compiler, reason in (("false", "failed with exit code 1"), ("/no/such", "cannot run")):
            monkeypatch.setenv("CXX", compiler)
            with pytest.raises(RuntimeError, match=reason):
                build.build()
        assert not list(build.cache_folder().iterdir())
        build.load.cache_clear()
        assert build.load() is None
    finally:
        build.library_path.cache_clear()
        build.load.cache_clear()
