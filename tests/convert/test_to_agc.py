"""to_agc on networks as people write them: what becomes what, and what stays as it was."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from deepcontrol import AGC1d, AGC2d, AGC3d, AGCConv1d, AGCConv2d, AGCConv3d, to_agc
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
    row,
    trained,
)

BATCHNORM = nn.modules.batchnorm._BatchNorm


def kinds(model: nn.Module) -> dict[str, str]:
    """Every AGC layer of a model by name, a neuron with its activation."""
    return {
        name: f"{type(m).__name__} {getattr(m, 'activation', '')}".strip()
        for name, m in model.named_modules()
        if isinstance(m, (AGC1d, AGC2d, AGC3d, AGCConv1d, AGCConv2d, AGCConv3d))
    }


@pytest.mark.parametrize("make", INPUTS)
def test_starts_from_batchnorm_exactly(make: Callable[[], nn.Module]) -> None:
    model = trained(make()).eval()
    x = torch.randn(INPUTS[make])
    expected = model(x)
    names = {name for name, _ in model.named_modules()}
    assert to_agc(model, init="bn") is model
    assert not any(isinstance(m, BATCHNORM) for m in model.modules())
    assert names <= {name for name, _ in model.named_modules()}  # no name or index has moved
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", INPUTS)
def test_trains_at_batch_one(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(1, *INPUTS[make][1:])
    model = to_agc(make(), example=x)
    for _ in range(2):  # twice: an in-place activation over what a backward keeps would show
        y = model(x)
        y.backward(torch.randn_like(y))
    missing = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not missing
    for module in model.modules():
        if isinstance(module, (AGC2d, AGCConv2d)):
            assert set(module.mean_scale.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            Residual,
            {
                "conv": "AGCConv2d relu",
                "blocks.0.conv1": "AGCConv2d none",  # its ReLU is also the one behind the sum
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
                "up_norm": "AGC2d",  # behind a transposed convolution
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
def test_what_becomes_what(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    model, report = to_agc(make(), report=True)
    assert kinds(model) == expected
    fused = sum("Conv" in kind for kind in expected.values())
    assert (report.count("fused"), report.count("replaced")) == (fused, len(expected) - fused)
    assert len(report) == len(expected)


def test_the_neuron_takes_its_relu_along() -> None:
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
    neuron = to_agc(model)[0]
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


def test_a_gamma_of_zero_is_kept() -> None:
    """It makes a residual branch start as its shortcut; without it such networks diverge."""
    model = Residual()
    nn.init.zeros_(model.blocks[0].bn2.weight)
    model, report = to_agc(model, report=True)
    assert not model.blocks[0].conv2.gain.any()
    assert model.blocks[0].conv1.gain.eq(1).all()
    assert ["gamma 0" in c.why for c in report if c.name.startswith("blocks.0")] == [False, True]


def test_one_position_starts_at_lambda_0() -> None:
    x = torch.randn(1, 3, 9, 9)
    model, report = to_agc(SqueezeExcite(), example=x, report=True)
    assert not model.squeeze[1].mean_scale.any()
    assert model.stem[0].mean_scale.eq(1).all()
    assert [("lambda 0: maps of one position" in c.why) for c in report] == [False, True]
    model(x).sum().backward()  # the layers warn in training where lambda 1 meets one position
    assert model.squeeze[1].weight.grad.any()

    unseen = to_agc(SqueezeExcite())
    assert unseen.squeeze[1].mean_scale.eq(1).all()

    features = to_agc(Signal())[6]  # behind a linear layer: known without an example
    assert not features.mean_scale.any()


def test_the_example_changes_nothing() -> None:
    model = trained(Residual()).train()
    model.blocks[0].eval()
    before = copy.deepcopy(model)
    to_agc(model, where=lambda *_: False, example={"x": torch.randn(1, 3, 32, 32)})
    for (name, a), b in zip(before.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert [m.training for m in before.modules()] == [m.training for m in model.modules()]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_branch_is_followed_both_ways() -> None:
    """What only one side of an `if` does with a convolution's output keeps it apart, too."""

    class Branch(nn.Module):
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.deep = deep

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            if x.shape[-1] > 100:
                if self.deep and x.shape[-2] > 100:
                    return self.bn(z) + z
                return self.bn(z).relu()
            return self.bn(z)

    assert kinds(to_agc(Branch(deep=False))) == {"conv": "AGCConv2d none"}
    assert kinds(to_agc(Branch(deep=True))) == {"bn": "AGC2d"}


def test_a_loop_over_the_input_is_not_followed_for_ever() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max() > 1:
                x = self.bn(self.conv(x)) / 2
            return x

    assert kinds(to_agc(Loop())) == {"bn": "AGC2d"}


def test_following_the_code_leaves_nothing_in_the_model() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = row(3, 8)
            self.cache: dict[str, object] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["last"] = y = self.layers(x)
            return y

    model = to_agc(Caching())
    assert model.cache == {}
    assert kinds(model) == {"layers.0": "AGCConv2d relu"}


def test_where_chooses() -> None:
    model, report = to_agc(UNet(), where=lambda name, _: name.startswith("down"), report=True)
    assert list(kinds(model)) == ["down1.0", "down2.0"]
    assert isinstance(model.up_norm, nn.BatchNorm2d)
    assert [c.kind for c in report] == ["fused", "fused", "skipped", "skipped"]


def test_global_average_pooling_right_behind_is_named() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Identity(), nn.AdaptiveAvgPool2d(1)
    )
    with pytest.warns(UserWarning, match="1 is followed by global average pooling") as caught:
        _, report = to_agc(copy.deepcopy(model), report=True)
    assert "hazard: global average pooling follows" in str(report)
    assert caught[0].filename == __file__  # where the user called it
    _, report = to_agc(copy.deepcopy(model), init="bn", report=True)  # lambda 0: none there
    assert "hazard" not in str(report)
    _, report = to_agc(nn.Sequential(*row(3, 8), nn.AdaptiveAvgPool2d(1)), report=True)
    assert "hazard" not in str(report)  # a ReLU lies between


def test_the_report_is_a_table() -> None:
    _, report = to_agc(UNet(), report=True)
    assert str(report).splitlines() == [
        "layer     was          became                        why",
        "down1.1   BatchNorm2d  AGCConv2d at down1.0 (relu)   with its convolution and ReLU",
        "down2.1   BatchNorm2d  AGCConv2d at down2.0 (relu)   with its convolution and ReLU",
        "up_norm   BatchNorm2d  AGC2d                         ConvTranspose2d feeds it",
        "last.0.1  BatchNorm2d  AGCConv2d at last.0.0 (relu)  with its convolution and ReLU",
        "3 fused, 1 replaced, 0 skipped",
    ]


class BatchNormAct2d(nn.BatchNorm2d):
    """A BatchNorm with layers inside, as timm has it."""

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
def test_an_activation_inside_batchnorm_is_kept(act: nn.Module, kind: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act), nn.Sigmoid(), BatchNormAct2d(8, act), nn.ReLU()
    )
    trained(model).eval()
    x = torch.randn(2, 3, 9, 9)
    expected = model(x)
    assert list(kinds(to_agc(model, init="bn")).values()) == [kind, "AGC2d"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_an_activation_inside_stands_before_the_pooling() -> None:
    norm = BatchNormAct2d(8, nn.SiLU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1))
    _, report = to_agc(model, report=True)  # a warning would be an error
    assert "hazard" not in str(report)


def test_a_batchnorm_that_does_more_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Squared(8))
    with pytest.warns(UserWarning, match=r"1 \(Squared\) is left as it is") as caught:
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
        (OwnPadding(3, 8, 3), "OwnPadding has a forward of its own"),
        (nn.LazyConv2d(8, 3), ""),
    ],
    ids=["weight norm", "own padding", "once lazy"],
)
def test_convolutions_that_do_more_are_left_alone(conv: nn.Module, why: str) -> None:
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(2, 3, 9, 9)
    model(x)
    trained(model)
    expected = model(x)
    _, report = to_agc(model, init="bn", report=True)
    assert [c.kind for c in report] == ["replaced" if why else "fused"]
    assert why in report.changes[0].why
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


class ReadsTheFilter(nn.Module):
    """Its convolution feeds the norm and nothing else, but its filter is used a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.conv.weight.sum()


def test_a_convolution_that_is_read_by_name_stays() -> None:
    assert list(kinds(to_agc(ReadsTheFilter()))) == ["bn"]


class Auxiliary(nn.Module):
    """A head that only training calls, and one that a parent calls behind a part's back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = row(3, 8), row(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return y + self.head(y) if self.training else y


def test_an_example_shows_what_was_not_followed() -> None:
    model = to_agc(Untraceable(), example=torch.randn(1, 3, 8, 8))
    assert kinds(model) == {
        "blocks.0.0": "AGCConv2d relu",
        "blocks.1.0": "AGCConv2d relu",
        "decide.1": "AGCConv2d relu",
        "bn": "AGC2d",  # the convolution could feed others, in code that was not followed
    }


class Reaching(nn.Module):
    """Cannot be followed, and calls a convolution of its part's by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.part = row(3, 8)
        self.conv = self.part[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.conv(x) if x.sum() > -1e9 else self.part(x)


def test_code_that_was_not_followed() -> None:
    assert list(kinds(to_agc(Auxiliary().eval()))) == ["stem.0", "head.0"]
    assert list(kinds(to_agc(Reaching()))) == ["part.1"]  # the convolution feeds others too


def test_hooks_are_not_lost_in_silence() -> None:
    model = row(3, 8)
    model[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on 1 \(BatchNorm2d\)") as caught:
        to_agc(model)
    assert caught[0].filename == __file__
    model = row(3, 8)
    model[0].register_forward_hook(lambda *_: None)  # somebody looks at its output
    model[2].register_forward_hook(lambda *_: None)
    to_agc(model)
    assert [type(m) for m in model] == [nn.Conv2d, AGC2d, nn.ReLU]


def test_the_model_may_be_a_batchnorm() -> None:
    assert isinstance(to_agc(nn.BatchNorm3d(4)), AGC3d)


def test_sync_batchnorm_by_itself() -> None:
    """It does not say of how many dimensions it is; the model's convolutions or an example do."""
    assert isinstance(
        to_agc(nn.Sequential(nn.Conv3d(1, 2, 1), nn.Tanh(), nn.SyncBatchNorm(2)))[2], AGC3d
    )
    alone = nn.Sequential(nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"'0' \(SyncBatchNorm\).*give an example"):
        to_agc(alone)
    assert isinstance(to_agc(alone, example=torch.randn(1, 2, 9))[0], AGC1d)
