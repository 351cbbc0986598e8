"""2x2 pooling with one-byte indices equals torch's pooling bit for bit on every path."""

import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import max_pool2d, max_unpool2d

import deepcontrol.ops.triton
from deepcontrol.nn import saved_bytes
from deepcontrol.ops import dispatch, max_pool2x2, max_unpool2x2, reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SHAPES = [
    (1, 1, 2, 2), (2, 3, 2, 3), (2, 8, 4, 6), (1, 5, 7, 13), (3, 2, 3, 2), (1, 16, 5, 4),
    (2, 24, 3, 7), (1, 130, 4, 2), (1, 3, 2, 301), (2, 64, 9, 10), (0, 3, 4, 4),
]  # fmt: skip
CASES = list(itertools.product(SHAPES, FORMATS))


def laid_out(a: Tensor, layout: str) -> Tensor:
    """Return a in that layout, with its strides also for maps of one position."""
    empty = torch.empty(a.shape, dtype=a.dtype, device=a.device, memory_format=FORMATS[layout])
    return empty.copy_(a)


def maps(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> Tensor:
    """Return small integers, so that most windows have ties, and every special value."""
    x = torch.randint(-2, 3, shape, device=device).to(dtype)
    lot = torch.rand(shape, device=device)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        x[(lot >= 0.1 * i) & (lot < 0.1 * (i + 1))] = value
    return laid_out(x, layout)


def random_like(shape: torch.Size, x: Tensor, layout: str) -> Tensor:
    return laid_out(torch.randn(shape, device=x.device).to(x.dtype), layout)


def torch_positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run torch's own pooling in the contiguous layout.

    On a GPU torch 2.11 reads a misaligned address in channels_last (1, 1, 2, 2) of fp64, and no
    later test in the process runs.
    """
    return max_pool2d(laid_out(x, "contiguous"), 2, return_indices=True)


def torch_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Run torch's pooling and convert its positions to 2 * dy + dx."""
    pooled, position = torch_positions(x)
    width = x.shape[3]
    return pooled, (2 * (position // width % 2) + position % width % 2).to(torch.uint8)


def assert_bits(ours: Tensor, expected: Tensor) -> None:
    """Assert equal bits, the sign of zero included; any NaN equals any NaN."""
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape
    if ours.is_floating_point():
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.signbit() & ~ours.isnan(), expected.signbit() & ~expected.isnan())
        ours, expected = ours.nan_to_num(0, 9e4, -9e4), expected.nan_to_num(0, 9e4, -9e4)
    assert torch.equal(ours, expected)


def assert_layout(a: Tensor, layout: str) -> None:
    assert a.numel() == 0 or a.is_contiguous(memory_format=FORMATS[layout]), (a.shape, a.stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=str)
def test_pool_equals_torch(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str
) -> None:
    x = maps(shape, layout, dtype, device).requires_grad_()
    peer = x.detach().requires_grad_()
    pooled, index = max_pool2x2(x)
    expected, expected_index = torch_pool(peer)
    assert_bits(pooled, expected)
    assert_bits(index, expected_index)
    for upstream in FORMATS:
        g = random_like(pooled.shape, x, upstream)
        (dx,) = torch.autograd.grad(pooled, x, g, retain_graph=True)
        (expected_dx,) = torch.autograd.grad(expected, peer, g, retain_graph=True)
        assert_bits(dx, expected_dx)
        for a in (pooled, index, dx):
            assert_layout(a, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), CASES, ids=str)
def test_unpool_equals_torch(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str
) -> None:
    x = maps(shape, layout, dtype, device)
    _, index = max_pool2x2(x)
    _, position = torch_positions(x)
    for values_layout in FORMATS:
        values = maps(tuple(index.shape), values_layout, dtype, device).requires_grad_()
        peer = values.detach().requires_grad_()
        unpooled = max_unpool2x2(values, index, x.shape[2:])
        expected = max_unpool2d(peer, position, 2, output_size=x.shape[2:])
        assert_bits(unpooled, expected)
        g = random_like(x.shape, x, layout)
        (dvalues,) = torch.autograd.grad(unpooled, values, g)
        (expected_dvalues,) = torch.autograd.grad(expected, peer, g)
        assert_bits(dvalues, expected_dvalues)
        for a in (unpooled, dvalues):
            assert_layout(a, values_layout)


@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 2, 2), (1, 3, 3, 2)], ids=str)
def test_one_window_keeps_channels_last_there_and_back(shape: tuple[int, ...], device: str) -> None:
    x = maps(shape, "channels_last", torch.float32, device)
    pooled, index = max_pool2x2(x)
    assert_layout(max_unpool2x2(pooled, index, shape[2:]), "channels_last")


def odd_maps(device: str) -> dict[str, Tensor]:
    return {
        "cropped": torch.randn(2, 8, 9, 9, device=device)[:, :, 1:8, 2:8],
        "cropped channels_last": maps((2, 8, 9, 9), "channels_last", torch.float32, device)[
            :, :, 1:8, 2:8
        ],
        "every other": torch.randn(2, 6, 8, 20, device=device)[:, ::2, :, ::3],
        "transposed": torch.randn(3, 2, 7, 6, device=device).transpose(2, 3).transpose(0, 1),
        "expanded over samples": torch.randn(1, 3, 4, 5, device=device).expand(2, 3, 4, 5),
        "expanded over positions": torch.randn(2, 3, 1, 1, device=device).expand(2, 3, 4, 5),
    }


@pytest.mark.parametrize("case", odd_maps("cpu"))
def test_any_strides(case: str, device: str) -> None:
    x = odd_maps(device)[case].requires_grad_()
    pooled, index = max_pool2x2(x)
    expected, expected_index = torch_pool(x)
    assert_bits(pooled, expected)
    assert_bits(index, expected_index)
    g = torch.randn(2, x.shape[1], 1, 1, device=device).expand_as(pooled)
    assert_bits(
        torch.autograd.grad(pooled, x, g)[0],
        torch.autograd.grad(expected, x, g)[0],
    )


def distinct(shape: tuple[int, ...], layout: str) -> Tensor:
    """Return values far enough apart that finite differences do not change the maxima."""
    count = torch.Size(shape).numel()
    x = torch.randperm(count).reshape(shape).double() / count
    return laid_out(x, layout)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (1, 2, 3, 4)], ids=str)
def test_derivatives_of_both_orders(shape: tuple[int, ...], layout: str) -> None:
    x = distinct(shape, layout).requires_grad_()
    index = max_pool2x2(x)[1]
    values = torch.randn(index.shape, dtype=torch.float64, requires_grad=True)

    def pooled(x: Tensor) -> Tensor:
        return max_pool2x2(x)[0]

    def unpooled(values: Tensor) -> Tensor:
        return max_unpool2x2(values, index, shape[2:])

    def both(x: Tensor) -> Tensor:
        return max_unpool2x2(max_pool2x2(x)[0].square(), max_pool2x2(x)[1], shape[2:])

    for f, a in ((pooled, x), (unpooled, values), (both, x)):
        assert gradcheck(f, (a,))
        assert gradgradcheck(f, (a,))


class PoolAndBack(nn.Module):
    """Pool and unpool as SegNet does; linear in between, so that nothing else is saved."""

    def forward(self, x: Tensor) -> Tensor:
        pooled, index = max_pool2x2(x)
        return max_unpool2x2(3 * pooled, index, x.shape[2:])


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_the_index_is_saved(layout: str, dtype: torch.dtype, device: str) -> None:
    x = maps((2, 8, 7, 6), layout, dtype, device).requires_grad_()
    assert saved_bytes(PoolAndBack(), x) == 2 * 8 * 3 * 3


def test_requires_grad() -> None:
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    pooled, index = max_pool2x2(x)
    assert pooled.requires_grad
    assert not index.requires_grad
    assert not max_unpool2x2(pooled.detach(), index, (4, 4)).requires_grad


def gradients(f: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = f(x)
    return [y.detach(), *torch.autograd.grad(y, x, g)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("layout", "dynamic"), [("channels_last", False), ("contiguous", True)])
def test_compile_without_a_graph_break(layout: str, dynamic: bool, device: str) -> None:
    torch.compiler.reset()
    model = PoolAndBack()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for shape in ((2, 8, 7, 6), (1, 8, 4, 10))[: 2 if dynamic else 1]:
        x = maps(shape, layout, torch.float32, device)
        g = torch.randn_like(x)
        for a, b in zip(gradients(compiled, x, g), gradients(model, x, g), strict=True):
            assert_bits(a, b)
            assert_layout(a, layout)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_sees_plain_ops() -> None:
    x = torch.randn(2, 3, 7, 6)
    sizes = {2: torch.export.Dim("h", min=4), 3: torch.export.Dim("w", min=4)}
    exported = torch.export.export(PoolAndBack(), (x,), dynamic_shapes=(sizes,))
    assert "deepcontrol" not in exported.graph_module.code
    for shape in ((2, 3, 7, 6), (2, 3, 8, 9)):
        x = torch.randn(shape)
        assert_bits(exported.module()(x), PoolAndBack()(x))


def test_vmap_grad_and_batched_gradients() -> None:
    model = PoolAndBack()
    x = torch.randn(3, 1, 2, 5, 4)
    g = torch.randn(2, 5, 4)

    def loss(x: Tensor) -> Tensor:
        return (model(x) * g).sum()

    together = torch.func.vmap(torch.func.grad(loss))(x)
    for sample, dx in zip(x, together, strict=True):
        assert_bits(dx, gradients(model, sample, g.unsqueeze(0))[1])
    sample = x[0].requires_grad_()
    upstream = torch.randn(6, 1, 2, 5, 4)
    (batched,) = torch.autograd.grad(model(sample), sample, upstream, is_grads_batched=True)
    for a, dx in zip(upstream, batched, strict=True):
        assert_bits(dx, gradients(model, sample, a)[1])


def test_meta_has_the_real_strides() -> None:
    for layout in FORMATS:
        x = maps((2, 8, 6, 8), layout, torch.float32, "cpu")
        real, empty = max_pool2x2(x), max_pool2x2(x.to("meta"))
        assert [a.stride() for a in real] == [a.stride() for a in empty]
        assert max_unpool2x2(*empty, (7, 8)).stride() == max_unpool2x2(*real, (7, 8)).stride()


def test_without_triton_there_are_no_ops_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("agc", "agc_pool", "blocks", "gain", "launch", "pool"):
        monkeypatch.delitem(sys.modules, f"deepcontrol.ops.triton.{name}", raising=False)
        monkeypatch.delattr(deepcontrol.ops.triton, name, raising=False)
    assert not dispatch.register_ops()


B = torch.zeros(1, 2, 3, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda: max_pool2x2(torch.ones(2, 3, 4)), r"3 dimensions: \(2, 3, 4\)"),
        (lambda: max_pool2x2(torch.ones(2, 3, 1, 4)), "at least 2x2, got 1x4"),
        (lambda: max_pool2x2(torch.ones(2, 3, 4, 0)), "at least 2x2, got 4x0"),
        (lambda: max_pool2x2(torch.ones(2, 3, 4, 4).int()), "int32"),
        (lambda: max_unpool2x2(torch.ones(1, 2, 3, 4), B.long(), (6, 8)), "uint8.*int64"),
        (lambda: max_unpool2x2(torch.ones(1, 2, 3, 4).int(), B, (6, 8)), "int32"),
        (lambda: max_unpool2x2(torch.ones(2, 3, 4), B, (6, 8)), "3 dimensions"),
        (
            lambda: max_unpool2x2(torch.ones(1, 2, 3, 5), B, (6, 10)),
            r"\(1, 2, 3, 5\) on cpu.*\(1, 2, 3, 4\)",
        ),
        (lambda: max_unpool2x2(torch.ones(1, 2, 3, 4, device="meta"), B, (6, 8)), "meta.*cpu"),
        (
            lambda: max_unpool2x2(torch.ones(1, 2, 3, 4), B, (5, 8)),
            r"3x4 come from a size of \(6 or 7, 8 or 9\), got \(5, 8\)",
        ),
        (lambda: max_unpool2x2(torch.ones(1, 2, 3, 4), B, (6, 10)), r"got \(6, 10\)"),
        (lambda: max_unpool2x2(torch.ones(1, 2, 3, 4), B, (1, 2, 6, 8)), r"got \(1, 2, 6, 8\)"),
    ],
)
def test_wrong_inputs_are_named(call: Callable[[], object], numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        call()


# The tests below need Triton: registered ops, and kernels in the interpreter or on a device.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((2, 8, 5, 6), torch.bfloat16, "channels_last"),
        ((1, 3, 4, 3), torch.float32, "contiguous"),
        ((0, 2, 4, 4), torch.float32, "channels_last"),
    ],
    ids=str,
)
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype, layout: str, device: str) -> None:
    pytest.importorskip("triton")
    dispatch.register_ops()
    x = laid_out(torch.randn(shape, device=device).to(dtype), layout)
    pooled, index = torch.ops.deepcontrol.max_pool2x2(x)
    last = layout == "channels_last"
    for grad in (False, True):
        x, pooled = x.detach().requires_grad_(grad), pooled.detach().requires_grad_(grad)
        ops = torch.ops.deepcontrol
        torch.library.opcheck(ops.max_pool2x2, (x,))
        torch.library.opcheck(ops.pick2x2, (x, index, last))
        torch.library.opcheck(ops.place2x2, (pooled, index, *shape[2:], last))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory of torch.empty with NaN or 255, so that unwritten elements show."""
    empty = torch.empty

    def nan(*args: object, **kwargs: object) -> Tensor:
        a = empty(*args, **kwargs)  # type: ignore[call-overload]
        return a.fill_(torch.nan if a.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", nan)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "layout"), [c for c in CASES if c[0][0]], ids=str)
def test_kernels_equal_the_reference(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str
) -> None:
    pytest.importorskip("triton")
    from deepcontrol.ops.triton import pool as kernels

    x = maps(shape, layout, dtype, device)
    for result in FORMATS:  # the input may have another layout than the result
        last = result == "channels_last"
        pooled, index = kernels.pool(x, last)
        expected, expected_index = reference.max_pool2x2(x)
        assert_bits(pooled, expected)
        assert_bits(index, expected_index)
        values = maps(tuple(index.shape), layout, dtype, device)
        placed = kernels.place(values, index, shape[2:], last)
        assert_bits(placed, reference.place2x2(values, index, shape[2:]))
        picked = kernels.pick(x, index, last)
        assert_bits(picked, reference.pick2x2(x, index))
        for a in (pooled, index, placed, picked):
            assert_layout(a, result)


@pytest.mark.parametrize("case", odd_maps("cpu"))
def test_kernels_read_any_strides(case: str, device: str) -> None:
    pytest.importorskip("triton")
    from deepcontrol.ops.triton import pool as kernels

    x = odd_maps(device)[case]
    for last in (False, True):
        pooled, index = kernels.pool(x, last)
        expected, expected_index = reference.max_pool2x2(x)
        assert_bits(pooled, expected)
        assert_bits(index, expected_index)
        assert_bits(kernels.pick(x, index, last), expected)
