"""The Triton kernels against the reference: in the interpreter on a CPU, compiled on a GPU."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepcontrol import AGC2d, AGCConv2d
from deepcontrol.ops import dispatch, reference
from deepcontrol.ops.activation import ACTIVATIONS, mask_packing, unpack_relu_mask

pytest.importorskip("triton")

from deepcontrol.ops.triton import agc as kernels
from deepcontrol.ops.triton import gain as gain_kernels
from deepcontrol.ops.triton import tiling as tiling_module
from deepcontrol.ops.triton.tiling import Tiling

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN, so that unwritten elements show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def maps(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> Tensor:
    z = (torch.randn(shape, device=device) + 0.5).to(dtype)
    return z if layout == "contiguous" else z.movedim(1, -1).contiguous().movedim(-1, 1)


def errors(
    z: Tensor, activation: str, gain: bool, tiling: Tiling | None = None
) -> dict[str, float]:
    """Return relative errors of the kernels' output and gradients against the formula in fp64."""
    gamma, beta, lam = (torch.randn(z.shape[1], device=z.device) for _ in range(3))
    one = torch.ones_like(gamma)
    given = gamma if gain else None
    exact_u = reference.agc(z.double(), *(a.double() for a in (gamma if gain else one, beta, lam)))
    g = torch.randn_like(z) * (exact_u.abs() > 1e-5)  # at 0, rounding decides the sign
    y, mean, *_ = kernels.forward(z, beta, lam, activation, gamma=given, tiling=tiling)
    needs = "input" if gain else ACTIVATIONS[activation].needs
    kept = {"nothing": None, "output": y, "input": z}[needs]
    dz, dgamma, dbeta, dlam = kernels.backward(
        g, kept, mean, given, beta, lam, activation, tiling=tiling
    )
    assert y.stride() == z.stride() == dz.stride()
    again, _, mask, _ = kernels.forward(
        z, beta, lam, activation, None, True, gamma=given, tiling=tiling
    )
    assert torch.equal(again, y)
    has_mask = ACTIVATIONS[activation].needs == "output" and mask_packing(z) != "none"
    assert (mask is not None) == has_mask
    if mask is not None and not gain:
        assert torch.equal(unpack_relu_mask(mask, y) > 0, y > 0)
        by_mask = kernels.backward(g, mask, mean, None, beta, lam, activation, tiling=tiling)
        assert torch.equal(by_mask[0], dz)
        assert torch.equal(by_mask[2], dbeta)

    leaves = [a.double().requires_grad_() for a in (z, gamma, beta, lam)]
    u = reference.agc(leaves[0], leaves[1] if gain else one.double(), leaves[2], leaves[3])
    exact = ACTIVATIONS[activation].apply(u)
    expected = torch.autograd.grad(exact, leaves, g.double(), allow_unused=True)
    found = {"y": (y, exact), "dz": (dz, expected[0]), "dbeta": (dbeta, expected[2])}
    found |= {"dlam": (dlam, expected[3])} | ({"dgamma": (dgamma, expected[1])} if gain else {})
    # Relative to the largest term: for lambda near 1 gradients are differences of large numbers.
    scale = {"y": exact, "dz": g.double()}
    return {
        name: ((a.double() - b).norm() / scale.get(name, b).norm().clamp(min=1e-3)).item()
        for name, (a, b) in found.items()
    }


def tiled(block_c: int, block_p: int, part_steps: int, tile_steps: int) -> Tiling:
    return Tiling(block_c, block_p, part_steps, tile_steps, single_pass=False, warps=1)


SMALL = [  # shape, layout, dtype, activation, gain, tiling
    ((2, 5, 7, 3), "contiguous", torch.float32, "relu", False, None),
    ((2, 5, 7, 3), "channels_last", torch.bfloat16, "relu", False, None),
    ((1, 3, 1, 1), "channels_last", torch.float32, "none", False, None),
    ((3, 2, 11), "contiguous", torch.float16, "leaky_relu", False, None),
    ((1, 2, 3, 2, 5), "channels_last", torch.float32, "silu", False, None),
    ((2, 3, 4, 5), "contiguous", torch.float32, "gelu", False, None),
    ((2, 3, 4, 5), "channels_last", torch.bfloat16, "none", True, None),
    ((2, 3, 4, 5), "contiguous", torch.float32, "none", True, None),
    ((1, 3, 4, 5), "channels_last", torch.float32, "none", True, None),
    ((2, 16, 7, 3), "channels_last", torch.bfloat16, "relu", False, None),
    ((1, 3, 4, 6), "contiguous", torch.float32, "leaky_relu", False, None),
    ((2, 24, 7, 9), "channels_last", torch.float32, "leaky_relu", False, tiled(16, 8, 3, 2)),
    ((2, 16, 8, 8), "channels_last", torch.float32, "relu", False, tiled(8, 8, 3, 2)),
    ((2, 5, 8, 9), "contiguous", torch.float32, "relu", False, tiled(2, 16, 2, 1)),
    # Several parts and tiles, of several steps, with and without a remainder.
    ((2, 4, 8, 8), "channels_last", torch.float32, "relu", False, tiled(2, 8, 3, 2)),
    ((2, 5, 7, 9), "channels_last", torch.bfloat16, "relu", False, tiled(4, 8, 2, 3)),
    ((2, 5, 7, 9), "contiguous", torch.float32, "gelu", True, tiled(2, 16, 1, 1)),
    ((1, 5, 7, 9), "channels_last", torch.float32, "relu", True, tiled(4, 8, 2, 3)),
]


@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "activation", "gain", "tiling"), SMALL, ids=str
)
def test_small_maps(
    shape: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    activation: str,
    gain: bool,
    tiling: Tiling | None,
    device: str,
) -> None:
    z = maps(shape, layout, dtype, device)
    for name, error in errors(z, activation, gain, tiling).items():
        assert error < 4 * TOLERANCE[dtype], (name, error)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_large_maps(dtype: torch.dtype, layout: str, gain: bool, activation: str) -> None:
    shapes = [(2, 64, 256, 512), (1, 19, 181, 127), (8, 512, 8, 16), (3, 40, 17, 23, 29)]
    for shape in shapes:
        for name, error in errors(maps(shape, layout, dtype, "cuda"), activation, gain).items():
            assert error < 4 * TOLERANCE[dtype], (name, shape, error)


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (1, 3, 5, 7)], ids=str)
def test_in_place_gives_the_same_bits(shape: tuple[int, ...], device: str) -> None:
    z = maps(shape, "channels_last", torch.float32, device)
    beta, lam = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    tiling = tiled(2, 8, 3, 1)
    y, mean, *_ = kernels.forward(z, beta, lam, "relu", tiling=tiling)
    over = z.clone()
    same, same_mean, *_ = kernels.forward(over, beta, lam, "relu", out=over, tiling=tiling)
    assert same is over
    assert torch.equal(same, y)
    assert torch.equal(same_mean, mean)


@pytest.mark.gpu
def test_every_run_gives_the_same_bits() -> None:
    z = maps((8, 64, 128, 256), "channels_last", torch.bfloat16, "cuda")
    beta, lam = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    y, mean, *_ = kernels.forward(z, beta, lam, "relu")
    g = torch.randn_like(y)
    first = (y, mean, *kernels.backward(g, y, mean, None, beta, lam, "relu"))
    for _ in range(20):
        y, mean, *_ = kernels.forward(z, beta, lam, "relu")
        again = (y, mean, *kernels.backward(g, y, mean, None, beta, lam, "relu"))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, first, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, mean, *_ = kernels.forward(z, beta, lam, "relu")
        again = (y, mean, *kernels.backward(g, y, mean, None, beta, lam, "relu"))
    graph.replay()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_than_int32_can_count(layout: str) -> None:
    z = torch.empty(1, 40, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    if layout == "channels_last":
        z = z.to(memory_format=torch.channels_last)
    z.normal_()
    assert z.numel() > 2**31
    beta, lam = torch.randn(40, device="cuda"), torch.randn(40, device="cuda")
    y, mean, *_ = kernels.forward(z, beta, lam, "none")
    for c in (0, 39):
        exact = z[0, c].double()
        assert abs(mean[0, c].item() - exact.mean().item()) < 1e-4
        expected = exact[-1, -4:] - lam[c].double() * exact.mean() + beta[c].double()
        torch.testing.assert_close(y[0, c, -1, -4:].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gain(layout: str, dtype: torch.dtype, device: str) -> None:
    weight = maps((5, 3, 3, 2), layout, torch.float32, device)
    gain = torch.randn(5, device=device)
    assert gain_kernels.supports(weight)
    scaled = gain_kernels.scale(weight, gain, dtype)
    # Triton's interpreter cuts off where a device rounds.
    rounding = 2**-7 if device == "cpu" and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(
        scaled, reference.scaled_filters(weight, gain, dtype), rtol=rounding, atol=0
    )
    assert scaled.stride() == weight.stride()
    dscaled = torch.randn(weight.shape, device=device).to(dtype)
    dweight, dgain = gain_kernels.scale_backward(weight, gain, dscaled)
    assert torch.equal(dweight, reference.scaled_filters(dscaled, gain, torch.float32))
    exact = (weight.double() * dscaled.double()).sum((1, 2, 3))
    torch.testing.assert_close(dgain.double(), exact, rtol=1e-5, atol=1e-5)
    assert not gain_kernels.supports(weight.transpose(0, 1))


def test_strided_parameters(device: str) -> None:
    z = maps((2, 4, 3, 5), "channels_last", torch.float32, device)
    table = torch.randn(4, 3, device=device)
    gamma, beta = table[:, 0], table[:1, 1].expand(4)
    lam = table[:, 2]
    y, mean, *_ = kernels.forward(z, beta, lam, "none", gamma=gamma)
    torch.testing.assert_close(y, reference.agc(z, gamma, beta, lam))
    g = torch.randn_like(z)
    found = kernels.backward(g, z, mean, gamma, beta, lam, "none")
    leaves = [a.clone().requires_grad_() for a in (z, gamma, beta, lam)]
    expected = torch.autograd.grad(reference.agc(*leaves), leaves, g)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    weight = torch.randn(4, 2, 3, 3, device=device)
    scaled = gain_kernels.scale(weight, gamma, torch.float32)
    assert torch.equal(scaled, reference.scaled_filters(weight, gamma, torch.float32))


def test_in_place_on_a_slice_writes_only_the_slice(device: str) -> None:
    whole = torch.randn(2, 6, 3, 4, device=device)
    before = whole.clone()
    part = whole[:, :4]
    beta, lam = torch.randn(4, device=device), torch.randn(4, device=device)
    expected, *_ = kernels.forward(part.clone(), beta, lam, "relu")
    y, *_ = kernels.forward(part, beta, lam, "relu", out=part)
    assert torch.equal(y, expected)
    assert torch.equal(part, expected)
    assert torch.equal(whole[:, 4:], before[:, 4:])


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on the CPU, in Triton's interpreter."""
    for name in ("agc", "gain_conv"):  # each shares its name with a function
        module = importlib.import_module(f"deepcontrol.ops.{name}")
        monkeypatch.setattr(module, "uses_kernels", lambda z, traced=False: True)


def trained(neuron: AGCConv2d, layer: AGC2d, x: Tensor) -> list[Tensor]:
    leaves = [x, *neuron.parameters(), *layer.parameters()]
    y = layer(neuron(x))
    g = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).sin()
    return [y, *torch.autograd.grad(y, leaves, g)]


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("width", [5, 6], ids=["output", "mask"])  # 24 positions allow a mask
@pytest.mark.parametrize("weight_norm", [False, True])
def test_layers_on_kernels(
    activation: str, width: int, weight_norm: bool, request: pytest.FixtureRequest
) -> None:
    options = {"activation": activation, "weight_norm": weight_norm}
    neuron, layer = AGCConv2d(2, 3, 3, padding=1, **options), AGC2d(3)  # type: ignore[arg-type]
    x = torch.randn(2, 2, 4, width, requires_grad=True)
    expected = trained(neuron, layer, x)
    request.getfixturevalue("on_kernels")
    for a, b in zip(trained(neuron, layer, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_second_derivatives_take_the_plain_path(
    activation: str, weight_norm: bool, request: pytest.FixtureRequest
) -> None:
    neuron = AGCConv2d(1, 2, 2, activation=activation, weight_norm=weight_norm)  # type: ignore[arg-type]
    x = torch.randn(1, 1, 3, 5, requires_grad=True)

    def curvature() -> Tensor:
        (first,) = torch.autograd.grad(neuron(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = curvature()
    request.getfixturevalue("on_kernels")
    torch.testing.assert_close(curvature(), expected, rtol=1e-4, atol=1e-5)


class _FakeCuda:
    """A meta tensor that claims to be on a CUDA device."""

    is_cuda = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> object:
        return getattr(self._tensor, name)


class TestDispatch:
    def test_gives_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "not on cpu" in str(dispatch.fallback_reason(torch.ones(1, 1, 1)))
        monkeypatch.setenv("DEEPCONTROL_KERNELS", "off")
        assert dispatch.device_fallback_reason(None) == "DEEPCONTROL_KERNELS=off"
        monkeypatch.setenv("DEEPCONTROL_KERNELS", "of")
        with pytest.raises(ValueError, match="on or off, not 'of'"):
            dispatch.device_fallback_reason(None)

    def test_32_bit_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dispatch, "device_fallback_reason", lambda device: None)

        def why(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
            z = torch.empty_strided(shape, strides, device="meta")
            return dispatch.fallback_reason(_FakeCuda(z))  # type: ignore[arg-type]

        assert why((2, 3, 4, 4), (48, 16, 4, 1)) is None
        assert "32 bits" in str(why((1 << 16, 1 << 15), (1 << 15, 1)))
        assert "32 bits" in str(why((1 << 10, 1 << 9, 8, 8), (1 << 9, 1, 1 << 22, 1 << 19)))
        assert "32 bits" in str(why((1 << 20, 2, 8, 8), (64, 1 << 26, 8, 1)))

    @pytest.mark.gpu
    def test_supported_and_unsupported_tensors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        z = torch.randn(2, 3, 4, 6, device="cuda")
        assert dispatch.fallback_reason(z) is None
        assert "float64" in str(dispatch.fallback_reason(z.double()))
        assert dispatch.fallback_reason(z[..., ::2]) is None
        assert "evenly" in str(dispatch.fallback_reason(z[..., :5]))
        assert "evenly" in str(dispatch.fallback_reason(z[:, :, :1].expand(2, 3, 4, 6)))
        assert "nothing" in str(dispatch.fallback_reason(z[:0]))
        monkeypatch.setenv("DEEPCONTROL_KERNELS", "off")
        assert dispatch.fallback_reason(z) == "DEEPCONTROL_KERNELS=off"


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("n", [1, 8, 64])
@pytest.mark.parametrize("positions", [1, 7, 512, 2048, 100_003, 1 << 24])
@pytest.mark.parametrize("held", [0, 1, 2])
def test_tilings_are_within_their_bounds(
    channels_last: bool, n: int, positions: int, held: int
) -> None:
    tiling = tiling_module.choose_tiling(n, 64, positions, channels_last, 132, held)
    blocks = -(-positions // tiling.block_p)
    most = tiling_module.MAX_HELD if tiling.single_pass else 2 * tiling_module.BLOCK
    assert tiling.block_p * tiling.block_c <= most
    assert -(-blocks // tiling.part_steps) <= tiling_module.MAX_PARTS
    assert not tiling.single_pass or (held > 0 and tiling.block_p >= positions)
