"""AGC1d/2d/3d as drop-in replacements for BatchNorm."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from deepcontrol import AGC1d, AGC2d, AGC3d
from deepcontrol.ops import reference

PAIRS = [(AGC1d, nn.BatchNorm1d), (AGC2d, nn.BatchNorm2d), (AGC3d, nn.BatchNorm3d)]
INPUTS = {AGC1d: (2, 4, 9), AGC2d: (2, 4, 3, 5), AGC3d: (2, 4, 3, 2, 3)}


@pytest.mark.parametrize(("agc", "batchnorm"), PAIRS)
def test_signature_and_shapes_match_batchnorm(agc: type, batchnorm: type) -> None:
    theirs = inspect.signature(batchnorm).parameters
    ours = inspect.signature(agc).parameters
    for position, name in enumerate(["num_features", "eps", "momentum", "affine"]):
        assert list(ours)[position] == list(theirs)[position] == name
        assert ours[name].default == theirs[name].default
    layer = agc(4, 1e-3, None, True, False, device="cpu", dtype=torch.float64)
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias", "mean_scale"]
    assert not list(layer.named_buffers())
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    z = torch.randn(INPUTS[agc], dtype=torch.float64)
    assert layer(z).shape == batchnorm(4).double()(z).shape


@pytest.mark.parametrize("agc", INPUTS)
def test_equals_eq_1_in_training_and_eval_mode(agc: type) -> None:
    layer = agc(4)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    z = torch.randn(INPUTS[agc])
    y = layer(z)
    torch.testing.assert_close(
        y, reference.agc(z, layer.weight, layer.bias, layer.mean_scale), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(layer.eval()(z), y)
    assert torch.equal(torch.cat([layer(a) for a in z.split(1)]), y)


def test_starts_as_mean_subtraction_and_resets() -> None:
    layer = AGC2d(3)
    z = torch.randn(2, 3, 4, 4)
    start = layer(z)
    torch.testing.assert_close(start, z - z.mean((2, 3), keepdim=True))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert not torch.equal(layer(z), start)
    layer.reset_parameters()
    assert torch.equal(layer(z), start)


def test_affine_false_has_no_parameters() -> None:
    layer = AGC2d(3, affine=False)
    assert not list(layer.parameters())
    z = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(layer(z), z - z.mean((2, 3), keepdim=True))
    assert repr(layer) == "AGC2d(3, affine=False)"


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (AGC2d(3), (2, 4, 5, 5), "expected 3 channels, got 4"),
        (AGC2d(3), (3, 5, 5), "expected 4-D input, got 3-D"),
        (AGC1d(3), (2, 3, 5, 5), "expected 2-D or 3-D input, got 4-D"),
        (AGC3d(3), (2, 3, 5, 5), "expected 5-D input, got 4-D"),
    ],
)
def test_wrong_inputs_raise(layer: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(shape))
    with pytest.raises(ValueError, match="int64"):
        AGC2d(3)(torch.ones(1, 3, 2, 2, dtype=torch.int64))


def test_loading_batchnorm_drops_its_statistics_with_a_warning() -> None:
    trained = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    nn.init.normal_(trained[1].weight)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), AGC2d(4))
    nn.init.constant_(model[1].mean_scale, 0.5)
    state = trained.state_dict()
    named = r"1\.running_mean, 1\.running_var, 1\.num_batches_tracked"
    with pytest.warns(UserWarning, match=named):
        assert model.load_state_dict(state).missing_keys == []
    assert "1.running_mean" in state
    assert torch.equal(model[1].weight, trained[1].weight)
    assert torch.equal(model[1].mean_scale, torch.full((4,), 0.5))


def test_loading_batchnorm_into_a_meta_model() -> None:
    """assign=True replaces the parameters; lambda, which BatchNorm lacks, must not stay on meta."""
    with torch.device("meta"):
        model = AGC2d(4)
    with pytest.warns(UserWarning, match="running_mean"):
        model.load_state_dict(nn.BatchNorm2d(4).state_dict(), assign=True)
    assert torch.equal(model.mean_scale, torch.ones(4))

    with torch.device("meta"):
        model = AGC2d(4)
    state = nn.BatchNorm2d(4, affine=False).state_dict()
    missing = r"Missing key\(s\) in state_dict: \"weight\", \"bias\""
    with (
        pytest.warns(UserWarning, match="running_mean"),
        pytest.raises(RuntimeError, match=missing),
    ):
        model.load_state_dict(state, assign=True)


def test_bias_false_has_no_beta() -> None:
    layer = AGC2d(4, bias=False)
    assert [n for n, _ in layer.named_parameters()] == ["weight", "mean_scale"]
    assert layer(input=torch.randn(1, 4, 3, 3)).shape == (1, 4, 3, 3)


def test_loading_its_own_state_dict_is_strict_without_a_warning() -> None:
    model = AGC2d(4)
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)
    del state["mean_scale"]
    with pytest.raises(RuntimeError, match="mean_scale"):
        model.load_state_dict(state)
