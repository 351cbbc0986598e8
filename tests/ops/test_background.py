"""Background estimators: values, gradients, ties, and the window kernels against the reference."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from deepcontrol.ops import background as ops
from deepcontrol.ops import reference
from deepcontrol.ops.activation import mask_packing, unpack_relu_mask
from deepcontrol.ops.background import Quantile, TrimmedMean, WindowMean, subtract_background

ESTIMATORS = [
    WindowMean(3),
    WindowMean(4),
    Quantile(0.5),
    Quantile(0.3),
    Quantile(1.0),
    TrimmedMean(0.2),
    TrimmedMean(0.0),
]
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def window_mean_by_hand(z: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Average over explicit slices, one position at a time."""
    out = torch.empty_like(z)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in z.shape[2:])).reshape(-1, len(sizes)):
        window = tuple(
            slice(max(int(p) - (size - 1) // 2, 0), int(p) + size // 2 + 1)
            for p, size in zip(at, sizes, strict=True)
        )
        mean = z[(slice(None), slice(None), *window)].flatten(2).mean(2)
        out[(slice(None), slice(None), *(int(p) for p in at))] = mean
    return out


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 3, 7), (3,)),
        ((1, 2, 6), (4,)),
        ((2, 3, 5, 8), (3, 5)),
        ((1, 2, 5, 4), (2, 99)),  # covers the whole width
        ((1, 1, 3, 4, 5), (2, 1, 3)),
        ((2, 2, 1, 1), (3, 3)),
    ],
    ids=str,
)
def test_window_mean_covers_the_clipped_window(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    z = torch.randn(shape, dtype=torch.float64)
    expected = window_mean_by_hand(z, sizes)
    spans = WindowMean(sizes).spans(len(sizes))
    torch.testing.assert_close(reference.window_mean(z, spans), expected)
    torch.testing.assert_close(WindowMean(sizes)(z), expected)


def test_odd_windows_are_torchs_average_pooling() -> None:
    z = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    pooled = nn.functional.avg_pool2d(z, (3, 5), 1, (1, 2), count_include_pad=False)
    torch.testing.assert_close(WindowMean((3, 5))(z), pooled)


def test_running_sums_do_not_cancel() -> None:
    """A window far from a large value must not see its rounding error."""
    z = torch.randn(1, 1, 512)
    z[..., 0] = 1e8
    exact = reference.window_mean(z.double(), ((3, 3),))
    error = (WindowMean(7)(z) - exact)[..., 8:].abs().max()
    assert error < 1e-6


def test_median_and_quantiles_match_torch() -> None:
    for positions in (8, 9):
        z = torch.randn(2, 3, positions, dtype=torch.float64)
        for q in (0.0, 0.3, 0.5, 1.0):
            expected = torch.quantile(z, q, dim=2, keepdim=True)
            torch.testing.assert_close(Quantile(q)(z), expected)


@pytest.mark.parametrize("estimator", [Quantile(0.5), Quantile(0.3), TrimmedMean(0.1)])
def test_an_empty_batch_has_no_values(estimator: Callable[[Tensor], Tensor]) -> None:
    assert estimator(torch.empty(0, 3, 4, 4)).shape == (0, 3, 1, 1)


def test_quantile_of_a_map_that_torch_quantile_refuses() -> None:
    z = torch.arange(2**24 + 3, dtype=torch.float32).flip(0).reshape(1, 1, -1)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(z, 0.5)
    assert Quantile(0.5)(z).item() == 2**23 + 1


def test_trimmed_mean_leaves_out_both_ends() -> None:
    z = torch.randn(2, 3, 11, dtype=torch.float64)
    expected = z.sort(2).values[..., 2:-2].mean(2, keepdim=True)  # floor(0.2 * 11) = 2
    torch.testing.assert_close(TrimmedMean(0.2)(z), expected)
    torch.testing.assert_close(TrimmedMean(0.0)(z), z.mean(2, keepdim=True))
    ties = torch.tensor([[[1.0, 1.0, 1.0, 2.0, 5.0, 5.0]]])
    assert TrimmedMean(0.2)(ties).item() == (1 + 1 + 2 + 5) / 4
    assert TrimmedMean(0.4)(torch.full((1, 1, 7), 3.0)).item() == 3.0


def test_equal_elements_share_the_gradient() -> None:
    z = torch.tensor([[[2.0, 1.0, 2.0, 3.0, 2.0]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(Quantile(0.5)(z).sum(), z)
    torch.testing.assert_close(gradient, torch.tensor([[[1.0, 0.0, 1.0, 0.0, 1.0]]]) / 3)
    # One of the two threes at the upper threshold stays: each gets half of its share.
    z = torch.tensor([[[1.0, 2.0, 3.0, 3.0]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(TrimmedMean(0.25)(z).sum(), z)
    torch.testing.assert_close(gradient, torch.tensor([[[0.0, 1.0, 0.5, 0.5]]]) / 2)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 5), (2, 2, 3, 4), (1, 2, 2, 3, 3)], ids=str)
def test_gradients(estimator: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    gamma, beta, lam = torch.randn(3, shape[1], dtype=torch.float64).requires_grad_()

    def neuron(z: Tensor, gamma: Tensor, beta: Tensor, lam: Tensor) -> Tensor:
        return subtract_background(z, estimator, gamma, beta, lam, "silu")

    assert gradcheck(neuron, (z, gamma, beta, lam))
    if len(shape) == 3:
        assert gradgradcheck(neuron, (z, gamma, beta, lam))


def test_half_types_sum_in_fp32() -> None:
    z = torch.ones(1, 1, 600, dtype=torch.bfloat16)
    for estimator in (WindowMean(599), TrimmedMean(0.1), Quantile(0.5)):
        b = estimator(z)
        assert b.dtype == torch.float32
        assert (b == 1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowMean(0), "1 or more"),
        (lambda: WindowMean((3, 2.5)), "1 or more"),  # type: ignore[arg-type]
        (lambda: WindowMean((3, 3))(torch.zeros(1, 1, 4)), "2 sizes"),
        (lambda: WindowMean(3)(torch.zeros(1, 4)), "spatial dimensions"),
        (lambda: Quantile(1.5), "between 0 and 1"),
        (lambda: TrimmedMean(0.5), r"below 0\.5"),
        (lambda: ops.check_background("mode"), "unknown background 'mode'"),  # type: ignore[arg-type]
        (lambda: ops.check_background(WindowMean), "unknown background"),
        (
            lambda: subtract_background(torch.zeros(1, 2, 4), lambda z: z.new_zeros(3)),
            "broadcasts",
        ),
    ],
)
def test_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def _poison() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN, so that unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


KERNEL_CASES = [  # shape, window, layout, dtype, activation, gain, segments
    ((2, 5, 7, 3), (3, 3), "contiguous", torch.float32, "relu", False, None),
    ((2, 16, 9, 5), (4, 5), "channels_last", torch.bfloat16, "relu", False, None),
    ((1, 8, 5, 70), (2, 31), "channels_last", torch.float32, "leaky_relu", False, 3),
    ((1, 3, 40, 6), (5, 7), "contiguous", torch.float32, "none", True, 2),
    ((2, 3, 4, 5), (99, 2), "channels_last", torch.float32, "none", True, None),
    ((3, 2, 11), (4,), "contiguous", torch.float16, "relu", False, None),
    ((2, 8, 11), (3,), "channels_last", torch.float32, "relu", False, None),
    ((1, 8, 2, 3, 4), (2, 3, 9), "channels_last", torch.float32, "relu", True, None),
    ((1, 2, 3, 4, 5), (3, 1, 2), "contiguous", torch.float32, "relu", False, None),
    ((2, 4, 60, 1), (5, 1), "contiguous", torch.float32, "relu", True, 2),
    ((2, 4, 60), (5,), "contiguous", torch.float32, "relu", True, 3),
    ((2, 4, 1, 60), (1, 5), "contiguous", torch.float32, "relu", True, 2),
]

FAST = [KERNEL_CASES[i] for i in (0, 4, 6, 9)]


def kernel_errors(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    activation: str,
    gain: bool,
    segments: int | None,
    device: str,
) -> dict[str, float]:
    """Return relative errors of the kernels' output and gradients against the formula in fp64."""
    pytest.importorskip("triton")
    from deepcontrol.ops.triton import window as kernels

    z = (torch.randn(shape, device=device) + 0.5).to(dtype)
    if layout == "channels_last":
        z = z.movedim(1, -1).contiguous().movedim(-1, 1)
    spans = WindowMean(sizes).spans(len(sizes))
    gamma, beta, lam = torch.randn(3, shape[1], device=device)
    parameters = (gamma if gain else None, beta, lam)
    y, mask = kernels.forward(z, *parameters, spans, activation, True, segments)
    assert y.stride() == z.stride()
    has_mask = activation != "none" and mask_packing(z) == "channels"
    assert (mask is not None) == has_mask
    saved = None if activation == "none" else y if mask is None else mask
    if mask is not None:
        assert torch.equal(unpack_relu_mask(mask, y) > 0, y > 0)

    leaves = [None if a is None else a.double().requires_grad_() for a in (z, *parameters)]
    b = reference.window_mean(leaves[0], spans)  # type: ignore[arg-type]
    exact = reference.subtract_background(leaves[0], b, *leaves[1:], activation)  # type: ignore[arg-type]
    u = reference.subtract_background(leaves[0], b, *leaves[1:], "none")  # type: ignore[arg-type]
    # Where rounding decides the sign of u, no gradient is compared.
    g = torch.randn_like(z) * (u.detach().abs() > 0.03)
    wanted = torch.autograd.grad(exact, [a for a in leaves if a is not None], g.double())
    found = kernels.backward(g, z, *parameters, saved, spans, activation, segments)
    assert found[0] is not None
    assert found[0].stride() == z.stride()
    frozen = kernels.backward(g, None, None, beta, None, saved, spans, activation, segments)
    # Another instance of the kernel, whose reductions a compiler may order in another way.
    torch.testing.assert_close(frozen[2], found[2], rtol=1e-5, atol=1e-4 * shape[0])
    assert frozen[1] is frozen[3] is None
    plain = ops.window_backward(g, z, *parameters, saved, spans, activation)
    means = kernels.window_mean(z, spans, False, segments)
    adjoint = kernels.window_mean(z, spans, True, segments)
    pairs = {"y": (y, exact), "b": (means, b)}
    pairs["adjoint"] = (adjoint, ops.window_mean(z.double(), spans, True))
    given = [a for a in found if a is not None]
    pairs |= {f"gradient {i}": pair for i, pair in enumerate(zip(given, wanted, strict=True))}
    by_torch = [a for a in plain if a is not None]
    pairs |= {f"plain {i}": pair for i, pair in enumerate(zip(by_torch, wanted, strict=True))}
    return {
        name: float((a.double() - e).detach().norm() / e.detach().norm().clamp(min=1e-3))
        for name, (a, e) in pairs.items()
    }


@pytest.mark.usefixtures("_poison")
@pytest.mark.filterwarnings("ignore:avg_pool3d_backward_cuda does not have a deterministic")
@pytest.mark.parametrize(
    "case",
    [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in KERNEL_CASES],
    ids=str,
)
def test_kernels_match_the_reference(case: tuple, device: str) -> None:
    for name, error in kernel_errors(*case, device).items():
        assert error < TOLERANCE[case[3]], (name, error)


@pytest.mark.gpu
@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("size", [(7, 7), (63, 63), (4, 32)], ids=str)
def test_kernels_on_large_maps(dtype: torch.dtype, layout: str, size: tuple[int, ...]) -> None:
    for shape in [(1, 64, 256, 512), (2, 19, 181, 127), (4, 512, 8, 16)]:
        for gain, activation in ((False, "relu"), (True, "none")):
            case = (shape, size, layout, dtype, activation, gain, None, "cuda")
            for name, error in kernel_errors(*case).items():
                assert error < 2 * TOLERANCE[dtype], (name, shape, error)
