"""to_agc: which layers become which, their parameters, and the report."""

import copy
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from deepcontrol import AGC1d, AGC2d, AGC3d, AGCConv2d, fold, to_agc
from deepcontrol.nn import saved_bytes
from tests.convert.networks import (
    INPUTS,
    Padded,
    Residual,
    SharedHead,
    Signal,
    SqueezeExcite,
    UNet,
    Untraceable,
    Volume,
    agc_layers,
    row,
    trained,
)

BATCHNORM = nn.modules.batchnorm._BatchNorm


@pytest.mark.parametrize("make", INPUTS)
def test_init_bn_preserves_the_outputs(make: Callable[[], nn.Module]) -> None:
    model = trained(make()).eval()
    x = torch.randn(INPUTS[make])
    expected = model(x)
    names = {name for name, _ in model.named_modules()}
    assert to_agc(model, init="bn") is model
    assert not any(isinstance(m, BATCHNORM) for m in model.modules())
    assert names <= {name for name, _ in model.named_modules()}  # names and indices are unchanged
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", INPUTS)
def test_trains_at_batch_one(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(1, *INPUTS[make][1:])
    model = to_agc(make(), example=x)
    for _ in range(2):  # twice: an in-place activation on a saved tensor would raise
        y = model(x)
        y.backward(torch.randn_like(y))
    missing = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not missing
    for module in model.modules():
        if isinstance(module, (AGC2d, AGCConv2d)):
            assert set(module.mean_scale.tolist()) <= {0.0, 0.5, 1.0}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            Residual,
            {
                "conv": "AGCConv2d relu",
                "blocks.0.conv1": "AGCConv2d none",  # the block calls its ReLU again after the sum
                "blocks.0.conv2": "AGCConv2d none",
                "blocks.1.conv1": "AGCConv2d none",
                "blocks.1.conv2": "AGCConv2d none",
                "blocks.1.downsample.0": "AGCConv2d none",
            },
        ),
        (
            UNet,
            {
                "down1.0": "AGCConv2d relu",
                "down2.0": "AGCConv2d relu",
                "up": "AGCConvTranspose2d none",  # a function follows, not a module
                "last.0.0": "AGCConv2d relu",
            },
        ),
        (
            SharedHead,
            {
                "stem.0": "AGCConv2d relu",
                "head.0": "AGCConv2d relu",  # called twice, but always in the same order
                "norms.0": "AGC2d",  # one convolution feeds both
                "norms.1": "AGC2d",
            },
        ),
        (Untraceable, dict.fromkeys(("blocks.0.1", "blocks.1.1", "decide.2", "bn"), "AGC2d")),
        (Padded, {"conv": "AGCConv2d relu"}),
        (Volume, {"0": "AGCConv3d leaky_relu", "3": "AGCConv3d none"}),
        (Signal, {"0": "AGCConv1d silu", "6": "AGC1d"}),
    ],
)
def test_fused_and_replaced_layers(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    model, report = to_agc(make(), report=True)
    assert agc_layers(model) == expected
    fused = sum("Conv" in kind for kind in expected.values())
    assert (report.count("fused"), report.count("replaced")) == (fused, len(expected) - fused)
    assert len(report) == len(expected)


def test_the_relu_is_fused_and_memory_is_saved() -> None:
    model = to_agc(row(3, 8))
    assert [type(m) for m in model] == [AGCConv2d, nn.Identity, nn.Identity]
    before, x = row(3, 8), torch.randn(1, 3, 16, 16)
    assert saved_bytes(model, x) < 0.6 * saved_bytes(before, x)


def test_shared_modules_stay_shared() -> None:
    model = to_agc(SharedHead())
    assert model.again is model.head
    parameters = [id(p) for p in model.parameters()]
    assert len(parameters) == len(set(parameters))

    twice = nn.BatchNorm2d(3)
    model = to_agc(nn.Sequential(twice, nn.Tanh(), twice))
    assert model[0] is model[2]
    assert isinstance(model[0], AGC2d)


def test_filters_stay_the_same_parameters_in_the_same_order() -> None:
    model = Residual()
    filters = [p for p in model.parameters() if p.dim() > 1]
    to_agc(model, example=torch.randn(1, 3, 32, 32))
    assert [id(p) for p in model.parameters() if p.dim() > 1] == [id(p) for p in filters]
    names = [name for name, _ in model.named_parameters()][:5]
    assert names == [
        "conv.weight",
        "conv.bias",
        "conv.gain",
        "conv.mean_scale",
        "blocks.0.conv1.weight",
    ]


def test_keeps_dtype_device_training_and_requires_grad() -> None:
    model = row(3, 8).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    neuron = to_agc(model, init="paper")[0]
    assert {p.dtype for p in neuron.parameters()} == {torch.bfloat16}
    assert not neuron.training
    assert model.training
    assert [n for n, p in neuron.named_parameters() if not p.requires_grad] == ["weight"]

    on_meta = to_agc(nn.Sequential(nn.BatchNorm2d(4, device="meta")), init="bn")
    assert all(p.is_meta for p in on_meta.parameters())


def test_norms_in_fp32_among_half_filters() -> None:
    model = trained(row(3, 8)).eval()
    expected = model(x := torch.randn(1, 3, 9, 9))
    model[0].to(torch.bfloat16)
    to_agc(model, init="bn")
    assert model[0].gain.dtype == torch.float32
    torch.testing.assert_close(model(x.bfloat16()).float(), expected, rtol=0.05, atol=0.05)


def test_zero_gamma_is_kept() -> None:
    """A residual branch then starts as its shortcut; without it such networks diverge."""
    model = Residual()
    nn.init.zeros_(model.blocks[0].bn2.weight)
    model, report = to_agc(model, init="paper", report=True)
    assert not model.blocks[0].conv2.gain.any()
    assert model.blocks[0].conv1.gain.eq(1).all()
    assert ["gamma 0" in c.why for c in report if c.name.startswith("blocks.0")] == [False, True]


def test_single_position_maps_start_at_lambda_0() -> None:
    x = torch.randn(1, 3, 9, 9)
    model, report = to_agc(SqueezeExcite(), example=x, report=True)
    assert not model.squeeze[1].mean_scale.any()
    assert model.stem[0].mean_scale.eq(0.5).all()
    assert [("lambda 0: maps of one position" in c.why) for c in report] == [False, True]
    model(x).sum().backward()  # AGC layers would warn about lambda 1 on 1x1 maps
    assert model.squeeze[1].weight.grad.any()

    without_example = to_agc(SqueezeExcite())
    assert without_example.squeeze[1].mean_scale.eq(0.5).all()

    features = to_agc(Signal())[6]  # after a linear layer: known without an example
    assert not features.mean_scale.any()


def test_running_the_example_does_not_change_the_model() -> None:
    model = trained(Residual()).train()
    model.blocks[0].eval()
    before = copy.deepcopy(model)
    to_agc(model, lambda *_: False, init="paper", example={"x": torch.randn(1, 3, 32, 32)})
    for (name, a), b in zip(before.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert [m.training for m in before.modules()] == [m.training for m in model.modules()]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_where_selects_batchnorms() -> None:
    model, report = to_agc(UNet(), where=lambda name, _: name.startswith("down"), report=True)
    assert list(agc_layers(model)) == ["down1.0", "down2.0"]
    assert isinstance(model.up_norm, nn.BatchNorm2d)
    assert [c.kind for c in report] == ["fused", "fused", "skipped", "skipped"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("0.1", ["0.1"]),
        ("*.1", ["0.1", "1.1", "2.1"]),
        (["0.*", lambda name, _: name == "2.1"], ["0.1", "2.1"]),
        (("0.1", "1.1"), ["0.1", "1.1"]),
        ("[12].*", ["1.1", "2.1"]),
    ],
    ids=["name", "glob", "list", "tuple", "characters"],
)
def test_where_takes_names_and_globs(where: object, expected: list[str]) -> None:
    model = nn.Sequential(row(3, 8), row(8, 8), row(8, 8))
    _, report = to_agc(model, where=where, report=True)
    assert [change.name for change in report if change.kind != "skipped"] == expected


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "block.bn2",
            r"where='block\.bn2' matches no BatchNorm.*Similar names: .*'blocks\.0\.bn2'",
        ),
        (["bn", "blocks.0"], r"inside of 'blocks\.0', use 'blocks\.0\.\*'"),
        ("zzz", r"Some names: 'bn', 'blocks\.0\.bn1'"),
    ],
    ids=["similar", "container", "nothing similar"],
)
def test_names_that_match_nothing_raise(where: object, message: str) -> None:
    model = Residual()
    layers = list(model.modules())
    with pytest.raises(ValueError, match=message):
        to_agc(model, where=where)
    assert list(model.modules()) == layers


def test_global_average_pooling_behind_the_norm_warns() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Identity(), nn.AdaptiveAvgPool2d(1)
    )
    with pytest.warns(UserWarning, match="1 is followed by global average pooling") as caught:
        _, report = to_agc(copy.deepcopy(model), lam=1.0, report=True)
    assert "hazard: global average pooling follows" in str(report)
    assert caught[0].filename == __file__  # the warning points at the caller
    _, report = to_agc(copy.deepcopy(model), init="bn", report=True)  # lambda is 0
    assert "hazard" not in str(report)
    row_and_pool = nn.Sequential(*row(3, 8), nn.AdaptiveAvgPool2d(1))
    _, report = to_agc(row_and_pool, lam=1.0, report=True)
    assert "hazard" not in str(report)  # a ReLU is in between


def test_report_prints_as_a_table() -> None:
    _, report = to_agc(UNet(), report=True)
    why, transposed = "fused with its convolution and ReLU", "fused with its transposed convolution"
    assert str(report).splitlines() == [
        "layer     was          became                           why",
        f"down1.1   BatchNorm2d  AGCConv2d at down1.0 (relu)      {why}",
        f"down2.1   BatchNorm2d  AGCConv2d at down2.0 (relu)      {why}",
        f"up_norm   BatchNorm2d  AGCConvTranspose2d at up (none)  {transposed}",
        f"last.0.1  BatchNorm2d  AGCConv2d at last.0.0 (relu)     {why}",
        "4 fused, 0 replaced, 0 skipped",
        "not verified: no example, so branches that torch.fx does not see; pass example=",
        "12 new parameters: create the optimizer after the conversion",
    ]


def test_new_parameters() -> None:
    model = row(3, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, report = to_agc(model, report=True)
    assert report.new_parameters == ("0.bias", "0.gain", "0.mean_scale")
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if id(p) not in known]
    assert missing == list(report.new_parameters)


class BatchNormAct2d(nn.BatchNorm2d):
    """A BatchNorm with an activation inside, as in timm."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Squared(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize(
    ("act", "kind"),
    [(nn.ReLU(), "AGCConv2d relu"), (nn.Hardswish(), "AGCConv2d none")],
    ids=["relu", "hardswish"],
)
def test_activation_inside_a_batchnorm_subclass_is_kept(act: nn.Module, kind: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act), nn.Sigmoid(), BatchNormAct2d(8, act), nn.ReLU()
    )
    trained(model).eval()
    x = torch.randn(2, 3, 9, 9)
    expected = model(x)
    assert list(agc_layers(to_agc(model, init="bn")).values()) == [kind, "AGC2d"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_activation_inside_a_batchnorm_subclass_precedes_the_pooling() -> None:
    norm = BatchNormAct2d(8, nn.SiLU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1))
    _, report = to_agc(model, report=True)  # pytest turns warnings into errors
    assert "hazard" not in str(report)


def test_batchnorm_subclass_with_another_forward_is_skipped() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Squared(8).requires_grad_(False))
    with pytest.warns(UserWarning, match=r"1 \(Squared\) is skipped") as caught:
        _, report = to_agc(model, report=True)
    assert caught[0].filename == __file__
    assert isinstance(model[1], Squared)
    assert report.count("skipped") == 1


class OwnPadding(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1), value=1.0))


@pytest.mark.parametrize(
    ("conv", "why"),
    [
        (parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), "parametrized"),
        (OwnPadding(3, 8, 3), "OwnPadding overrides forward"),
        (nn.LazyConv2d(8, 3), ""),
    ],
    ids=["weight norm", "own padding", "once lazy"],
)
def test_convolutions_that_compute_more_are_not_fused(conv: nn.Module, why: str) -> None:
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 9, 9)
    model(x)
    trained(model)
    expected = model(x)
    _, report = to_agc(model, init="bn", report=True)
    assert [c.kind for c in report] == ["replaced" if why else "fused"]
    assert why in report.changes[0].why
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_hooks_move_to_the_new_layer_and_observed_layers_stay() -> None:
    model, seen = row(3, 8), []
    handle = model[1].register_forward_hook(lambda m, args, out: seen.append(type(m)))
    to_agc(model)
    assert [type(m) for m in model] == [nn.Conv2d, AGC2d, nn.ReLU]
    model(torch.randn(1, 3, 9, 9))
    handle.remove()
    model(torch.randn(1, 3, 9, 9))
    assert seen == [AGC2d]
    model = row(3, 8)
    model[0].register_forward_hook(lambda *_: None)  # its output is observed
    model[2].register_forward_hook(lambda *_: None)
    to_agc(model)
    assert [type(m) for m in model] == [nn.Conv2d, AGC2d, nn.ReLU]


def test_the_model_itself_is_a_batchnorm() -> None:
    assert isinstance(to_agc(nn.BatchNorm3d(4)), AGC3d)


def test_sync_batchnorm_dimensions() -> None:
    """They come from the model's convolutions or from an example."""
    assert isinstance(
        to_agc(nn.Sequential(nn.Conv3d(1, 2, 1), nn.Tanh(), nn.SyncBatchNorm(2)))[2], AGC3d
    )
    single = nn.Sequential(nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"'0' \(SyncBatchNorm\).*pass example="):
        to_agc(single)
    assert isinstance(to_agc(single, example=torch.randn(1, 2, 9))[0], AGC1d)


def test_report_has_the_bytes_that_layers_save() -> None:
    x = torch.randn(2, 3, 16, 16)
    means = 2 * 8 * 4  # of 8 channels in fp32
    _, report = to_agc(UNet(), example=x, report=True)
    assert {c.name: c.saved_bytes for c in report if "1.1" in c.name or c.name == "up_norm"} == {
        "down1.1": means,
        "up_norm": means,
    }
    model, report = to_agc(SharedHead(), example=x, report=True)
    saved = {change.name: change.saved_bytes for change in report}
    assert saved["stem.1"] == means
    assert saved["norms.0"] == 2 * 8 * 16 * 16 * 4 + means  # its input
    assert report.saved_bytes == saved_bytes(model, x)
    assert "16.1 KiB" in str(report).splitlines()[3]
    assert ", 20.1 KiB of it by unfused AGC layers" in str(report)


def test_bytes_are_missing_if_the_example_does_not_run_in_training_mode() -> None:
    class Targets(nn.Sequential):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            if self.training and targets is None:
                raise ValueError("targets")
            return super().forward(x)

    _, report = to_agc(Targets(*row(3, 8)), example=torch.randn(1, 3, 9, 9), report=True)
    assert report.saved_bytes is None
    assert report.changes[0].saved_bytes is None
    assert "saves" not in str(report)


class Decoder(nn.Module):
    """Transposed convolutions with BatchNorm: grouped, with an activation, with an output size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = row(3, 8, stride=2)
        self.up1 = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 4, 2, 1, groups=2), nn.BatchNorm2d(6), nn.ReLU()
        )
        self.up2 = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(4), nn.SiLU()
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up1(self.down(x))
        size = [2 * x.shape[2], 2 * x.shape[3]]
        return self.head(self.act2(self.norm2(self.up2(x, output_size=size))))


@pytest.mark.parametrize("with_example", [True, False])
def test_transposed_convolutions_are_fused(with_example: bool) -> None:
    x = torch.randn(2, 3, 10, 10, dtype=torch.float64)
    model = trained(Decoder()).double().eval()
    expected, filters = model(x), model.up2.weight
    before = saved_bytes(copy.deepcopy(model).train(), x)
    example = x if with_example else None
    model, report = to_agc(model, init="bn", example=example, report=True)
    assert agc_layers(model) == {
        "down.0": "AGCConv2d relu",
        "up1.0": "AGCConvTranspose2d relu",
        "up2": "AGCConvTranspose2d silu",
    }
    assert report.count("fused") == 3
    assert (report.unverified is None) == with_example
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)
    assert model.up2.weight is filters
    assert saved_bytes(model, x) < 0.8 * before
    torch.testing.assert_close(fold(model)(x), expected, rtol=1e-9, atol=1e-9)

    scratch = to_agc(Decoder(), example=x.float())
    assert scratch.up1[0].weight_standardization
    scratch(x.float()).square().mean().backward()
    assert all(p.grad is not None for p in scratch.parameters())


def consumer_ratios(model: nn.Module) -> dict[str, float]:
    neurons = {name: m for name, m in model.named_modules() if isinstance(m, AGCConv2d)}
    return {name: m.consumer_ratio for name, m in neurons.items() if m.consumer_ratio}


def test_neurons_before_a_3x3_neuron_store_map_sums() -> None:
    """As in VGG and in the blocks of a U-Net; a pooling or other geometry comes in between."""
    vgg = nn.Sequential(*row(3, 8), *row(8, 16), nn.MaxPool2d(2), *row(16, 16), *row(16, 4))
    assert consumer_ratios(to_agc(vgg)) == {"0": 2.0, "7": 0.25}
    strided = nn.Sequential(*row(3, 8), *row(8, 8, stride=2), *row(8, 8, groups=2), *row(8, 8))
    assert consumer_ratios(to_agc(strided)) == {"6": 1.0}
    assert consumer_ratios(to_agc(UNet())) == {}  # down1 also feeds the skip connection
    silu = nn.Sequential(*row(3, 8)[:2], nn.SiLU(), *row(8, 8))
    assert consumer_ratios(to_agc(silu)) == {}  # the backward needs its map: it runs unfused
    residual = to_agc(Residual(), example=torch.randn(1, 3, 32, 32))
    assert consumer_ratios(residual) == {}  # the blocks call their ReLU in place, between the two


def test_map_sums_in_a_model_that_is_converted_twice() -> None:
    model = nn.Sequential(*row(3, 8), *row(8, 16), *row(16, 8))
    to_agc(model, where=["1", "7"])
    assert consumer_ratios(model) == {}
    to_agc(model, init="paper")
    assert consumer_ratios(model) == {"0": 2.0, "3": 0.5}
    assert consumer_ratios(copy.deepcopy(model)) == {"0": 2.0, "3": 0.5}
    assert len(list(fold(model).parameters())) == 9


@pytest.mark.gpu
def test_map_sums_do_not_change_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    gain_conv = importlib.import_module("deepcontrol.ops.gain_conv")  # the module, not the op
    monkeypatch.setattr(gain_conv, "MIN_ELEMENTS", 1)
    found = []

    def stored_map_sums(x: Tensor) -> Tensor | None:
        found.append(gain_conv.stored_map_sums(x))
        return found[-1]

    monkeypatch.setattr("deepcontrol.nn.conv.stored_map_sums", stored_map_sums)
    model = to_agc(nn.Sequential(*row(3, 64), *row(64, 64), *row(64, 64))).cuda().bfloat16()
    x = torch.randn(2, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
    y = model(x)
    assert [sums is not None for sums in found] == [False, True, True]
    monkeypatch.undo()
    for m in model:
        m.consumer_ratio = 0.0
    torch.testing.assert_close(model(x), y, rtol=2e-2, atol=2e-2)
