"""Rounding errors of the ops and their gradients, compared with a one-line formula.

Errors are measured against reference.py in fp64. The peer is Eq. 1 written in one line and run in
the dtype of the maps. In each case an op may be no worse than its peer (1.5 times for bf16 and
fp16), or within one rounding of the summed terms, below which the order of two errors is chance.
Summed over all cases, the op may exceed its peer by at most 10%.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepcontrol.ops import agc, center_bias_act, reference
from deepcontrol.ops.activation import ACTIVATIONS
from deepcontrol.ops.agc import agc_forward

CASES = 400


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    param_dtype: torch.dtype
    offset: float  # of the mean from 0, in standard deviations
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 6)), *size)
    layouts = ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(
        shape=shape,
        layout=draw(st.sampled_from(layouts)),
        dtype=dtype,
        param_dtype=draw(st.sampled_from([torch.float32, dtype])),
        offset=draw(st.sampled_from([0.0, 1.0, 10.0])),
        seed=draw(st.integers(0, 2**31)),
    )


def laid_out(z: Tensor, layout: str) -> Tensor:
    """Return z in another layout; for "expanded", repeat its first sample."""
    if layout == "channels_last":
        return z.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return z.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        wide = z.new_full((*z.shape[:-1], 2 * z.shape[-1]), torch.nan)
        wide[..., ::2] = z
        return wide[..., ::2]
    if layout == "expanded":
        return z[:1].expand_as(z)
    return z.contiguous()


def run(f: Callable[..., Tensor], inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    """Return the output of f and the gradients of its inputs in fp64."""
    leaves = [a.detach().requires_grad_() for a in inputs]
    y = f(*leaves)
    grads = torch.autograd.grad(y, leaves, g.to(y.dtype))
    return [a.detach().double() for a in (y, *grads)]


def over_map(a: Tensor, z: Tensor) -> Tensor:
    return a.reshape(a.shape + (1,) * (z.dim() - 2))


def typed_agc(z: Tensor, gamma: Tensor, beta: Tensor, lam: Tensor) -> Tensor:
    """Eq. 1 in one line."""
    m = z.mean(tuple(range(2, z.dim())), keepdim=True)
    return over_map(gamma, z) * (z - over_map(lam, z) * m) + over_map(beta, z)


def summed_terms(inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    """Return the sums behind output and gradients with absolute terms, the scale of roundings."""
    z, gamma, beta, lam = (a.double().abs() for a in inputs)
    g = g.double().abs()
    dims = tuple(range(2, z.dim()))
    m, gbar = (over_map(a.mean(dims), z) for a in (z, g))
    gamma_, lam_ = over_map(gamma, z), over_map(lam, z)
    centered = z + lam_ * m
    across = (0, *dims)
    return [
        gamma_ * centered + over_map(beta, z),
        gamma_ * (g + lam_ * gbar),
        (g * centered).sum(across),
        g.sum(across),
        gamma * (m * g).sum(across),
    ]


def compare(
    names: list[str],
    case: Case,
    ours: list[Tensor],
    typed: list[Tensor],
    exact: list[Tensor],
    terms: list[Tensor],
    totals: dict[str, list[tuple[float, float]]],
) -> None:
    half = case.dtype != torch.float32
    unit = torch.finfo(case.dtype).eps
    for name, a, b, e, t in zip(names, ours, typed, exact, terms, strict=True):
        assert a.isfinite().all(), (name, case)
        scale = t.norm().item() or 1.0
        error, peer = ((v - e).norm().item() / scale for v in (a, b))
        assert error <= max((1.5 if half else 1.0) * peer, unit), (name, case, error, peer)
        totals[f"{name} {case.dtype}"].append((error, peer))


@pytest.fixture(scope="module")
def totals() -> dict[str, list[tuple[float, float]]]:
    return defaultdict(list)


def in_all_no_worse(totals: dict[str, list[tuple[float, float]]]) -> None:
    cases = sum(len(errors) for name, errors in totals.items() if name.startswith("y "))
    assert cases >= 300
    for name, errors in totals.items():
        ours, peers = (sum(e) for e in zip(*errors, strict=True))
        assert ours <= 1.1 * peers, (name, ours, peers)
    totals.clear()


once = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def inputs_of(case: Case, device: str) -> tuple[list[Tensor], Tensor]:
    rng = torch.Generator().manual_seed(case.seed)
    z = (torch.randn(case.shape, generator=rng) + case.offset).to(case.dtype)
    params = [torch.randn(case.shape[1], generator=rng).to(case.param_dtype) for _ in range(3)]
    g = torch.randn(case.shape, generator=rng).to(case.dtype)
    return [laid_out(z.to(device), case.layout), *(p.to(device) for p in params)], g.to(device)


def test_agc(device: str, totals: dict[str, list[tuple[float, float]]]) -> None:
    @once
    @given(cases())
    def check(case: Case) -> None:
        inputs, g = inputs_of(case, device)
        exact = run(reference.agc, [a.double() for a in inputs], g)
        typed = run(typed_agc, [a.to(case.dtype) for a in inputs], g)
        names = ["y", "dz", "dweight", "dbias", "dmean_scale"]
        compare(names, case, run(agc, inputs, g), typed, exact, summed_terms(inputs, g), totals)

    check()
    in_all_no_worse(totals)


def test_center_bias_act(device: str, totals: dict[str, list[tuple[float, float]]]) -> None:
    @once
    @given(cases(), st.sampled_from(list(ACTIVATIONS)))
    def check(case: Case, activation: str) -> None:
        act = ACTIVATIONS[activation].apply
        inputs, g = inputs_of(case, device)
        one = torch.ones_like(inputs[1])
        terms = summed_terms([inputs[0], one, *inputs[2:]], g)
        if ACTIVATIONS[activation].needs == "input":
            # The roundings of u reach the gradients through act'', which is at most 0.8.
            terms[1:] = summed_terms([inputs[0], one, *inputs[2:]], g * (1 + terms[0]))[1:]
        if activation == "relu":
            # Where rounding decides the sign of u, both gradients are right.
            u = reference.center_bias_act(*(a.double() for a in (inputs[0], *inputs[2:])), "none")
            g = g.where(u.abs() > 4 * torch.finfo(case.dtype).eps * terms[0], 0)
        inputs = [inputs[0], *inputs[2:]]
        exact = run(
            lambda *a: reference.center_bias_act(*a, activation), [a.double() for a in inputs], g
        )
        typed = run(
            lambda v, beta, lam: act(typed_agc(v, one.to(v.dtype), beta, lam)),
            [a.to(case.dtype) for a in inputs],
            g,
        )
        ours = run(lambda *a: center_bias_act(*a, activation), inputs, g)
        names = ["y", "dv", "dbias", "dmean_scale"]
        del terms[2]
        compare(names, case, ours, typed, exact, terms, totals)

    check()
    in_all_no_worse(totals)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_accumulate_in_fp32(dtype: torch.dtype, device: str) -> None:
    """A bf16 sum of ones stops at 256 and an fp16 sum overflows; the mean covers all positions."""
    z = torch.full((1, 1, 512, 512), 1.5, dtype=dtype, device=device)
    z[..., 0, 0] = 0.5
    one, zero = torch.ones(1, device=device), torch.zeros(1, device=device)
    assert agc(z, one, zero, one).abs().max() == 1.0
    assert center_bias_act(z, zero, one, "none").abs().max() == 1.0
    _, mean = agc_forward(z, one, zero, one)
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(1.5 - 1 / 512**2, abs=1e-7)
