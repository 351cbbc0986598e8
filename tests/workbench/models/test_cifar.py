"""CIFAR ResNets and plain networks: structure, start and gradients."""

import pytest
import torch
from torch import Tensor, nn

from deepcontrol import AGCConv2d, he_init_
from deepcontrol.nn.init import CENTERING_GAIN
from deepcontrol.workbench.models import NORMS, CifarResNet, is_agc
from deepcontrol.workbench.models.classifiers import CifarBlock
from tests.workbench.models.test_resnet import pictures


@pytest.mark.parametrize(
    ("depth", "published", "exact"),
    [(20, 0.27, 269_722), (56, 0.85, 853_018), (110, 1.7, 1_727_962)],
)
@pytest.mark.parametrize("residual", [True, False])
def test_parameters_match_the_paper(
    depth: int, published: float, exact: int, residual: bool
) -> None:
    with torch.device("meta"):
        model = CifarResNet(depth, norm="bn", residual=residual)
    count = sum(p.numel() for p in model.parameters())
    assert count == exact
    assert count / 1e6 == pytest.approx(published, abs=0.03)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth
    assert [m.stride for m in layers[:-1]].count((2, 2)) == 2


def test_sizes_and_widths() -> None:
    with torch.device("meta"):
        model, x = CifarResNet(20, classes=7, in_channels=1, width=0.5), torch.empty(2, 1, 28, 28)
        maps = [model.stem(x)]
        for block in model.stages:
            maps.append(block(maps[-1]))
        assert [m.shape[1:] for m in maps[::3]] == [
            (8, 28, 28), (8, 28, 28), (16, 14, 14), (32, 7, 7),
        ]  # fmt: skip
        assert model(x).shape == (2, 7)


@torch.no_grad()
def test_shortcut_subsamples_and_appends_zeros() -> None:
    block = next(b for b in CifarResNet(8).stages if b.stride == 2)
    assert isinstance(block, CifarBlock)
    for parameter in block.parameters():
        parameter.zero_()  # the branch is 0
    x = torch.rand(2, 16, 8, 8)
    y = block(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 4, 4)
    assert not y[:, 16:].any()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_every_parameter_at_batch_1(norm: str, residual: bool) -> None:
    model = CifarResNet(20, 5, norm, residual)  # type: ignore[arg-type]
    nn.functional.cross_entropy(model(pictures(1, 32)), torch.tensor([3])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert any(isinstance(m, AGCConv2d) for m in model.modules()) == is_agc(norm)


@pytest.mark.parametrize("norm", NORMS)
def test_channels_last_and_autocast(norm: str) -> None:
    torch.manual_seed(0)
    model, x = CifarResNet(8, 5, norm), pictures(4, 32)  # type: ignore[arg-type]
    exact = model(x)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x), exact, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(x)
        nn.functional.cross_entropy(rough, torch.arange(4)).backward()
    assert (rough - exact).abs().max() < 0.1 * exact.abs().max()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("depth", [20, 56, 110])
def test_agc_starts_with_bounded_logits(depth: int) -> None:
    torch.manual_seed(depth)
    model, x = CifarResNet(depth), pictures(4, 32)
    logits = model(x)
    assert 0.1 < logits.std() < 10
    assert logits.std(0).mean() > 0.1 * logits.std()  # the samples differ
    if depth == 110:  # without the small gains the logits are large
        assert he_init_(model)(x).std() > 10


def test_agc_gains_at_the_start() -> None:
    blocks = 27
    model = CifarResNet(56)
    gains: dict[str, Tensor] = {
        name: m.gain for name, m in model.named_modules() if isinstance(m, AGCConv2d)
    }
    for name, gain in gains.items():
        factor = blocks**-0.5 if name.endswith("branch.1") else 1.0
        torch.testing.assert_close(gain, torch.full_like(gain, factor * CENTERING_GAIN))
    plain = CifarResNet(56, residual=False)
    for m in plain.modules():
        if isinstance(m, AGCConv2d):
            torch.testing.assert_close(m.gain, torch.full_like(m.gain, CENTERING_GAIN))
    bn = CifarResNet(20, norm="bn")
    assert all((m.weight == 1).all() for m in bn.modules() if isinstance(m, nn.BatchNorm2d))


@torch.no_grad()
@pytest.mark.parametrize("norm", [n for n in NORMS if n not in ("bn", "ws+bn")])
def test_samples_are_independent(norm: str) -> None:
    model, x = CifarResNet(8, norm=norm), pictures(3, 32)  # type: ignore[arg-type]
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-4)


def test_invalid_inputs_raise() -> None:
    for depth in (2, 18, 51):
        with pytest.raises(ValueError, match=rf"depth must be 6n \+ 2.*got {depth}"):
            CifarResNet(depth)
    with pytest.raises(ValueError, match="unknown norm 'batch'"):
        CifarResNet(20, norm="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(N, 1, H, W\), got \(2, 3, 8, 8\)"):
        CifarResNet(8, in_channels=1)(torch.randn(2, 3, 8, 8))
