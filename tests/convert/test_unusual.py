"""Models and inputs that once crashed the conversion, or a tool after it."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from deepcontrol import AGC1d, AGCConv2d, calibrate, fold, to_agc
from deepcontrol.nn import saved_bytes
from tests.convert.networks import UNet, converted, row, trained


class BatchNormAct2d(nn.BatchNorm2d):
    """A BatchNorm with an activation inside, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def test_batchnorm_with_an_activation_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8))
    _, report = to_agc(model, init="paper", report=True)
    assert report.count("fused") == 1
    assert all(p.is_meta for p in model.parameters())


def test_sync_batchnorm_behind_a_linear_layer() -> None:
    model = nn.Sequential(*row(3, 4), nn.Flatten(), nn.Linear(64, 5), nn.SyncBatchNorm(5)).eval()
    expected = model(x := torch.randn(2, 3, 4, 4))
    to_agc(model, init="bn")
    assert isinstance(model[5], AGC1d)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


class Functional(nn.Module):
    """Normalizes with the statistics of its BatchNorm, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last = row(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        bn = self.bn
        y = functional.batch_norm(self.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias)
        return self.last(y)


@pytest.mark.parametrize("with_example", [True, False])
def test_batchnorms_whose_statistics_are_read_stay(with_example: bool) -> None:
    example = torch.randn(1, 3, 8, 8)
    model = Functional()
    with pytest.warns(UserWarning, match="bn .* is skipped: other code reads its running stat"):
        _, report = to_agc(model, example=example if with_example else None, report=True)
    assert [c.kind for c in report] == ["skipped", "fused"]
    model(example)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
def test_quantization_aware_layers_stay() -> None:
    from torch.ao.nn.intrinsic.qat import ConvBn2d
    from torch.ao.quantization import get_default_qat_qconfig

    qat = ConvBn2d(3, 8, 3, qconfig=get_default_qat_qconfig("fbgemm"))
    model = nn.Sequential(qat, *row(8, 8))
    with pytest.warns(UserWarning, match=r"0\.bn .* is skipped"):
        _, report = to_agc(model, report=True)
    assert [c.kind for c in report] == ["skipped", "fused"]
    model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("wrapper", ["FullyShardedDataParallel", "FSDPModule"])
def test_sharded_parts_raise(wrapper: str) -> None:
    """Classes with the names of torch.distributed's."""
    kind = type(wrapper, (nn.Sequential,), {})
    part = type("FSDPSequential", (kind,), {})(*row(3, 8))
    with pytest.raises(ValueError, match=r"'1' is wrapped in .*: convert the model before"):
        to_agc(nn.Sequential(row(3, 3), part))


def test_data_that_misses_layers_leaves_them_folded() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = AGCConv2d(3, 8, 3), AGCConv2d(3, 8, 3)

        def forward(self, x: Tensor, idle: bool = False) -> Tensor:
            return self.idle(x) if idle else self.used(x)

    model = Skips()
    with pytest.warns(UserWarning, match="the data never reached 'idle', which stay") as caught:
        constant = calibrate(model, [torch.randn(1, 3, 9, 9)])
    assert caught[0].filename == __file__
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(constant(x, idle=True), model(x, idle=True))
    assert isinstance(constant.used, nn.Sequential)


class Detector(nn.Module):
    """Takes a list of images of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = row(3, 8)

    def forward(self, images: list[Tensor], targets: list[Tensor] | None = None) -> list[Tensor]:
        return [self.layers(image.unsqueeze(0)) for image in images]


def test_list_as_one_input() -> None:
    images = [torch.randn(3, 8, 8), torch.randn(3, 6, 9)]
    model = trained(Detector()).eval()
    expected = model(images)
    _, report = to_agc(model, init="bn", example=images, report=True)
    assert report.unverified is None
    assert report.count("fused") == 1
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


class FromDict(nn.Module):
    """Takes one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = row(3, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layers(batch["image"]) * batch["scale"]


def test_dict_as_one_input() -> None:
    batch = {"image": torch.randn(1, 3, 8, 8), "scale": torch.ones(1)}
    _, report = to_agc(FromDict(), example=batch, report=True)
    assert report.unverified is None
    assert report.count("fused") == 1


def test_saved_bytes_with_keyword_arguments() -> None:
    conv, x = nn.Conv2d(3, 4, 1), torch.randn(1, 3, 8, 8)
    assert saved_bytes(conv, input=x) == saved_bytes(conv, x) == x.nbytes


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_converted_and_folded_models_can_be_traced() -> None:
    """The refusal of scripted models advises it."""
    model, x = converted(UNet)
    for network in (model, fold(model)):
        network.requires_grad_(False)
        traced = torch.jit.trace(network, x)
        torch.testing.assert_close(traced(x), network(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["wrapper", "in place", "inside"])
def test_compiled_models(how: str) -> None:
    model = trained(row(3, 8)).eval()
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    if how == "inside":
        model = nn.Sequential(model)
    torch.testing.assert_close(model(x), expected)
    converted, report = to_agc(model, init="bn", example=x, report=True)
    assert converted is model
    assert report.count("fused") == 1
    assert report.unverified is None
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


class FrozenBatchNorm2d(nn.Module):
    """The layer of torchvision."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-3
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def with_frozen() -> nn.Module:
    return trained(
        nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8), nn.ReLU(), *row(8, 4))
    ).eval()


def test_frozen_batchnorms_are_listed_or_converted() -> None:
    x = torch.randn(1, 3, 8, 8)
    _, report = to_agc(model := with_frozen(), init="bn", report=True)
    assert [(c.name, c.kind) for c in report] == [("4", "fused"), ("1", "skipped")]
    assert "frozen=True converts it" in str(report)
    assert isinstance(model[1], FrozenBatchNorm2d)

    model = with_frozen()
    expected = model(x)
    _, report = to_agc(model, init="bn", frozen=True, example=x, report=True)
    assert [c.kind for c in report] == ["fused", "fused"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert [p.requires_grad for n, p in model[0].named_parameters() if n != "weight"] == [False] * 3
    assert model[3].gain.requires_grad


def test_frozen_batchnorms_stay_after_an_error() -> None:
    model = with_frozen()
    with pytest.raises(ValueError, match=r"where='nothing' matches no BatchNorm"):
        to_agc(model, "nothing", init="bn", frozen=True)
    assert isinstance(model[1], FrozenBatchNorm2d)
    with pytest.raises(ValueError, match="`data` has no batches"):
        to_agc(model, init="bn", frozen=True, data=[])
    assert isinstance(model[1], FrozenBatchNorm2d)
    with pytest.raises(ValueError, match="frozen=True keeps the function"):
        to_agc(model, init="paper", frozen=True)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "pruned", "scripted child"])
def test_folds_models_with_computed_filters(kind: str) -> None:
    conv = nn.Conv2d(8, 8, 3)
    if kind == "weight norm":
        torch.nn.utils.weight_norm(conv)
    elif kind == "spectral norm":
        torch.nn.utils.spectral_norm(conv)
    elif kind == "pruned":
        prune.random_unstructured(conv, "weight", 0.5)
    else:
        conv = torch.jit.script(nn.Sequential(conv, nn.Sigmoid()))
    model = nn.Sequential(AGCConv2d(3, 8, 3), conv, nn.Tanh(), AGCConv2d(8, 4, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    model(x)  # the filters are now tensors of an autograd graph
    expected = model(x)
    torch.testing.assert_close(fold(model)(x), expected, rtol=1e-5, atol=1e-5)


class Rep(nn.Module):
    """A block that merges its branches for inference, as RepVGG does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.skip = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) + self.skip(x)

    def fuse(self, verbose: bool = True) -> nn.Module:
        return nn.Conv2d(8, 8, 1)

    def reparameterize(self) -> None:
        self.conv.weight.data *= self.bn.running_var


class Fusion(nn.Module):
    """Its fuse has an argument, and is part of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rep = Rep()

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(self.rep(x))

    def fuse(self, x: Tensor) -> Tensor:
        return 2 * x


def test_fusers_of_batchnorms_leave_agc_layers() -> None:
    x = torch.randn(1, 8, 6, 6)
    model, report = to_agc(nn.Sequential(Fusion(), nn.Conv2d(8, 2, 1)), example=x, report=True)
    assert report.disabled_fusers == ("0.rep.fuse", "0.rep.reparameterize")
    assert "because they fold BatchNorms: 0.rep.fuse, 0.rep.reparameterize" in str(report)
    expected = model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for same in (model, copy.deepcopy(model), loaded, fold(model)):
        rep = same[0].rep
        assert rep.fuse(verbose=False) is rep
        rep.reparameterize()
        torch.testing.assert_close(same(x), expected)
    _, report = to_agc(Rep(), where="bn", report=True)
    assert report.disabled_fusers == ("fuse", "reparameterize")
