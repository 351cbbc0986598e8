"""signal_report: its numbers, the state that it leaves, its table and its plot."""

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepcontrol import AGC2d, AGCConv2d, AGCLinear, signal_report, to_agc
from deepcontrol.convert import LayerSignal, SignalReport
from tests.convert.networks import INPUTS, Residual, SharedHead, Untraceable

F64 = torch.float64


def by_name(report: SignalReport) -> dict[str, LayerSignal]:
    return {f"{s.name} {s.call}": s for s in report}


def variance(x: Tensor) -> float:
    """The definition, not torch's function."""
    return ((x - x.mean()) ** 2).mean().item()


def test_numbers_by_hand() -> None:
    conv, linear = nn.Conv2d(2, 3, 3, dtype=F64), nn.Linear(12, 2, dtype=F64)
    model = nn.Sequential(conv, nn.ReLU(inplace=True), nn.Flatten(), linear)
    x, target = torch.randn(4, 2, 4, 4, dtype=F64), torch.randn(4, 2, dtype=F64)

    z = functional.conv2d(x, conv.weight, conv.bias)
    y = z.clamp(min=0)
    out = y.flatten(1) @ linear.weight.T + linear.bias
    # loss = sum (out - target)^2
    g_out = 2 * (out - target)
    g_y = (g_out @ linear.weight).view_as(y)
    g_z = g_y * (z > 0)

    report = signal_report(model, x, loss=lambda o: ((o - target) ** 2).sum())
    assert [(s.name, s.kind, s.layer, s.shape) for s in report] == [
        ("0", "conv", "Conv2d", (4, 3, 2, 2)),
        ("1", "activation", "ReLU", (4, 3, 2, 2)),
        ("3", "linear", "Linear", (4, 2)),
    ]
    expected = ((z, g_z), (y, g_y), (out, g_out))
    for layer, (value, gradient) in zip(report, expected, strict=True):
        assert layer.mean == pytest.approx(value.mean().item(), rel=1e-9)
        assert layer.variance == pytest.approx(variance(value), rel=1e-9)
        assert layer.gradient_variance == pytest.approx(variance(gradient), rel=1e-9)
    assert [s.open_share for s in report] == [None, (z > 0).double().mean().item(), None]


def test_agc_layers_report_their_activated_output() -> None:
    model = nn.Sequential(AGCConv2d(3, 8, 3), AGC2d(8), nn.Flatten(), AGCLinear(8 * 36, 5))
    x = torch.randn(2, 3, 8, 8)
    first, second, third = signal_report(model, x)
    y = model[0](x)
    assert (first.layer, first.kind) == ("AGCConv2d (relu)", "agc")
    assert first.variance == pytest.approx(variance(y.double()), rel=1e-5)
    assert first.open_share == pytest.approx((y > 0).float().mean().item())
    assert (second.layer, second.open_share) == ("AGC2d", None)
    assert third.layer == "AGCLinear (relu)"
    assert third.open_share is not None


def test_default_gradient_has_unit_variance_and_repeats() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.Conv2d(8, 16, 1))
    x = torch.randn(8, 3, 12, 12)
    once, twice = signal_report(model, x), signal_report(model, x)
    assert once[-1].gradient_variance == pytest.approx(1.0, rel=0.05)
    assert once == twice


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1, dtype=F64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(functional.relu(self.a(x)))
        y += x
        return functional.relu(y, inplace=True)


def test_additions_and_functional_activations_by_hand() -> None:
    """In-place operations change neither the values nor the gradients of earlier rows."""
    block, x = Block(), torch.randn(2, 4, 5, 5, dtype=F64)
    a = block.a(x).detach().requires_grad_()
    b = block.b(a.clamp(min=0))
    total = b + x
    b.retain_grad()
    total.retain_grad()
    (total.clamp(min=0) ** 2).sum().backward()

    rows = by_name(signal_report(nn.Sequential(block), x, loss=lambda y: (y**2).sum()))
    assert list(rows) == ["0.a 1", "0.relu 1", "0.b 1", "0.add 1", "0.relu 2"]
    assert rows["0.add 1"].kind == "add"
    for name, value in (("0.a 1", a), ("0.b 1", b), ("0.add 1", total)):
        assert value.grad is not None
        assert rows[name].variance == pytest.approx(variance(value), rel=1e-9), name
        assert rows[name].gradient_variance == pytest.approx(variance(value.grad)), name
    assert rows["0.relu 2"].open_share == (total > 0).double().mean().item()


def test_shared_layers_get_a_row_per_call() -> None:
    report = signal_report(SharedHead(), torch.randn(INPUTS[SharedHead]))
    calls = [s.call for s in report if s.name == "conv"]
    assert calls == [1, 2]
    shapes = [s.shape for s in report if s.name == "conv"]
    assert shapes[0] != shapes[1]


def test_untraceable_models_work() -> None:
    report = signal_report(Untraceable(), torch.randn(INPUTS[Untraceable]))
    assert all(s.gradient_variance is not None for s in report)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_changes(training: bool, fails: bool) -> None:
    model = nn.Sequential(Residual(), nn.Dropout()).train(training)
    x = torch.randn(INPUTS[Residual])
    model(x).sum().backward()
    x.requires_grad_()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = {k: (p.grad, p.grad.clone()) for k, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    rng, copied = torch.get_rng_state(), x.detach().clone()

    def loss(output: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("on purpose")
        return output.square().sum()

    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            signal_report(model, x, loss)
    else:
        signal_report(model, x, loss)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
    assert torch.equal(torch.get_rng_state(), rng)
    assert x.grad is None
    assert torch.equal(x, copied)
    assert all(m.training == training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_runs_in_the_current_mode() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), 5 + torch.randn(2, 3, 8, 8)
    assert signal_report(model.train(), x)[1].variance == pytest.approx(1.0, rel=1e-3)
    assert signal_report(model.eval(), x)[1].variance != pytest.approx(1.0, rel=1e-3)


def test_warning_about_one_position_is_left_to_training() -> None:
    model, x = AGCConv2d(3, 8, 1), torch.randn(2, 3, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        signal_report(model, x)
    with pytest.warns(UserWarning, match="one position"):
        model(x)


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    name: str = "output"


class Wrapped(nn.Module):
    """Returns its outputs in some container; takes a keyword argument."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.wrap = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), wrap

    def forward(self, image: Tensor, scale: float = 1.0) -> Any:
        image.mul_(scale)
        hidden = self.first(image)
        return self.wrap(self.second(hidden), hidden)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y, h: (y, [h], None),
        lambda y, h: {"logits": y, "hidden": {"first": h}, "count": 3},
        lambda y, h: Output(y, (h,)),
    ],
    ids=["tuple", "dict", "dataclass"],
)
@pytest.mark.parametrize("keywords", [True, False])
def test_outputs_and_examples(wrap: Callable[[Tensor, Tensor], Any], keywords: bool) -> None:
    model, x = Wrapped(wrap), torch.randn(2, 3, 8, 8)
    example = {"image": x, "scale": 2.0} if keywords else (x, 2.0)
    before = x.clone()
    first, second = signal_report(model, example)
    assert torch.equal(x, before), "the model wrote to the caller's input"
    assert second.gradient_variance == pytest.approx(1.0, rel=0.2)
    # The hidden maps are an output, too: their own gradient adds to that of the second layer.
    model.wrap = lambda y, h: y
    alone = signal_report(model, example)
    assert first.gradient_variance > alone[0].gradient_variance + 0.8
    assert first.variance == alone[0].variance


@pytest.mark.parametrize("wrap", [lambda y, h: y.detach(), lambda y, h: "none"])
def test_outputs_without_a_gradient_raise(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="without a differentiable tensor"):
        signal_report(Wrapped(wrap), torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize(
    "loss", [lambda y: y, lambda y: y.sum().item(), lambda y: y.detach().sum()]
)
def test_losses_that_are_no_number_raise(loss: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="one differentiable number"):
        signal_report(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), loss)


def test_frozen_layers_still_have_gradients() -> None:
    model = Residual().requires_grad_(False)
    with torch.no_grad():
        report = signal_report(model, torch.randn(INPUTS[Residual]))
    assert all(s.gradient_variance is not None for s in report)


def test_autocast_and_inference_mode() -> None:
    model = to_agc(Residual())
    with torch.inference_mode():
        x = torch.randn(1, *INPUTS[Residual][1:])
        exact = signal_report(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        report = signal_report(model, x)
    assert len(report) == len(exact)
    for layer, other in zip(report, exact, strict=True):
        assert layer.variance == pytest.approx(other.variance, rel=0.1, abs=1e-3)
        assert layer.gradient_variance == pytest.approx(other.gradient_variance, rel=0.2, abs=1e-4)


def test_squares_beyond_fp32_are_finite() -> None:
    layer = nn.Conv2d(3, 4, 3)
    nn.init.normal_(layer.weight, std=1e30)
    (found,) = signal_report(layer, torch.randn(1, 3, 8, 8))
    assert 1e60 < found.variance < math.inf


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_wrappers_are_taken_off() -> None:
    x = torch.randn(INPUTS[Residual])
    model = Residual()
    expected = signal_report(model, x)
    assert signal_report(torch.compile(model), x) == expected
    assert signal_report(nn.DataParallel(model), x) == expected
    model.compile()
    assert signal_report(model, x) == expected


def test_torchscript_raises() -> None:
    with pytest.raises(ValueError, match="TorchScript runs no hooks"):
        signal_report(torch.jit.ScriptModule(), torch.randn(1, 3, 8, 8))


def test_checkpointed_layers_are_reported_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    report = signal_report(Checkpointed(), torch.randn(2, 3, 8, 8))
    assert [s.name for s in report] == ["body.0", "body.1"]
    assert all(s.gradient_variance for s in report)


def test_table() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    model[3] = model[1]
    nn.init.zeros_(model[2].weight)
    nn.init.constant_(model[2].bias, -1.0)
    report = signal_report(model, torch.ones(2, 3, 4, 4), loss=lambda y: y.sum())
    header, *rows = str(report).splitlines()
    rows, below = rows[: len(report)], rows[len(report) :]
    assert header.split() == [
        *("layer", "type", "output", "mean", "variance", "open", "gradient", "flags")
    ]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "1"]
    assert rows[3].startswith("1 #2")
    for column in ("type", "output"):
        at = header.index(column)
        assert all(row[at] != " " and row[at - 1] == " " for row in rows)
    assert "-1.000" in rows[2]
    assert rows[3].endswith("vanishing, dead, constant filters")
    assert (
        below[1] == "dead: fewer than 1% of the ReLUs are open at '1'; no gradient arrives at '2'"
    )
    assert below[-1].startswith("4 layers; variance ")
    assert below[-1].endswith(" to 0; vanishing, dead, constant filters")


def test_plot(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report = signal_report(Residual(), torch.randn(INPUTS[Residual]))
    report.plot(tmp_path / "signal.png", open_share=True, label="residual")
    with image.open(tmp_path / "signal.png") as picture:
        assert picture.format == "PNG"
        assert len(set(picture.convert("L").tobytes())) > 20
    axes = figure.subplots(1, 2)
    report.plot(axes, label="once")
    report.plot(axes)
    for panel, number in zip(axes, ("variance", "gradient_variance"), strict=True):
        assert panel.get_yscale() == "log"
        line, again = panel.lines
        assert line.get_label() == "once"
        # The line goes through the sums of a residual network; each layer is a dot.
        sums = [(i, getattr(s, number)) for i, s in enumerate(report, 1) if s.kind == "add"]
        assert len(sums) > 1
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == sums
        assert list(again.get_xdata()) == [i for i, _ in sums]
        dots = [tuple(p) for c in panel.collections[:2] for p in c.get_offsets()]
        assert sorted(dots) == [(i, getattr(s, number)) for i, s in enumerate(report, 1)]
    plain = signal_report(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 8, 8))
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots(1, 2)
    plain.plot(axes)
    assert list(axes[0].lines[0].get_ydata()) == [s.variance for s in plain]
    with pytest.raises(ValueError, match="expected 3 axes"):
        report.plot(axes, open_share=True)


def test_plot_names_the_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = signal_report(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        report.plot(tmp_path / "signal.png")


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_cuda_agrees_with_the_cpu_and_restores_its_generator(autocast: bool) -> None:
    model, x = nn.Sequential(to_agc(Residual()), nn.Dropout(0.0)), torch.randn(INPUTS[Residual])
    expected = signal_report(model, x)
    state = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        report = signal_report(model.cuda(), x.cuda())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert [s.name for s in report] == [s.name for s in expected]
    rel = 0.2 if autocast else 0.02  # TF32 convolutions
    for layer, other in zip(report, expected, strict=True):
        assert layer.variance == pytest.approx(other.variance, rel=rel, abs=1e-3)
        assert layer.gradient_variance == pytest.approx(other.gradient_variance, rel=rel, abs=1e-4)
