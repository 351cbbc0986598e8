"""SegNet and ClassNet match their descriptions in the paper."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deepcontrol import AGCConv2d, identity_init_
from deepcontrol.workbench.models import NORMS, ClassNet, SegNet, is_agc

NETWORKS = {"segnet": SegNet, "classnet": ClassNet}


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def logits(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output.classes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("network", "classes", "count", "million_parameters", "gflops"),
    [(SegNet, 19, 26, 29.454, 162.773), (ClassNet, 14, 81, 2.742, 13.829)],
)
def test_counts(
    network: type, classes: int, count: int, million_parameters: float, gflops: float
) -> None:
    """FLOPs count multiply-adds twice, for one image of 256x512."""
    with torch.device("meta"):
        model, x = network(classes), torch.empty(1, 3, 256, 512)
    assert len(convolutions(model)) == count
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    assert parameters == pytest.approx(million_parameters, abs=5e-4)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() / 1e9 == pytest.approx(gflops, abs=5e-4)


def test_segnet_widths() -> None:
    widths = [64, 64, 128, 128, *[256] * 3, *[512] * 6]
    mirror = [*[512] * 5, *[256] * 3, 128, 128, 64, 64, 19]
    with torch.device("meta"):
        layers = convolutions(SegNet(19))
    assert [layer.out_channels for layer in layers] == widths + mirror
    assert [layer.in_channels for layer in layers] == [3, *(widths + mirror)[:-1]]
    assert {layer.kernel_size for layer in layers} == {(3, 3)}
    assert all(isinstance(layer, AGCConv2d) for layer in layers[:-1])
    assert not isinstance(layers[-1], AGCConv2d)


def test_classnet_parts() -> None:
    with torch.device("meta"):
        model = ClassNet(14)
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == 7
    assert max(layer.out_channels for layer in convolutions(model)) == 256
    decoder = [
        layer.out_channels for name, layer in model.decoder.named_modules() if "merge" in name
        and isinstance(layer, nn.Conv2d)
    ]  # fmt: skip
    assert set(decoder) == {14, 10}
    first_layers = [block.layers[0][0] for block in model.encoder if hasattr(block, "layers")]
    assert [layer.in_channels for layer in first_layers] == [3, 35, 67, 99, 131, 195, 259, 259]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_classnet_has_paths_of_8_to_53_layers() -> None:
    """Count convolutions on every path from the image to the class logits."""
    model = ClassNet(14, width=0.125).eval()
    graph = torch.export.export(model, (torch.randn(1, 3, 256, 256),)).graph
    depths: dict[torch.fx.Node, tuple[int, int]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name == "x":
                depths[node] = (0, 0)
            continue
        before = [depths[n] for n in node.all_input_nodes if n in depths]
        if node.op == "output":
            classes = node.args[0][0]
            break
        if before:
            step = int("conv" in str(node.target))
            shortest, longest = min(b[0] for b in before), max(b[1] for b in before)
            depths[node] = (shortest + step, longest + step)
    assert depths[classes] == (8, 53)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_and_backward_with_every_norm(name: str, norm: str) -> None:
    model = NETWORKS[name](5, width=0.125, norm=norm)
    x = torch.randn(2, 3, 256, 256)
    output = model(x)
    assert logits(output).shape == (2, 5, 256, 256)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    torch.autograd.backward(outputs, [torch.randn_like(o) for o in outputs])
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    assert any(m.startswith("AGC") for m in map(repr, model.modules())) == is_agc(norm)


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (67, 128)], ids=str)
def test_segnet_accepts_odd_sizes(size: tuple[int, int]) -> None:
    model = SegNet(5, width=0.125).eval()
    assert model(torch.randn(1, 3, *size)).shape == (1, 5, *size)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_segnet_exports_as_plain_ops() -> None:
    model = SegNet(5, width=0.125).eval()
    x = torch.randn(1, 3, 33, 47)
    exported = torch.export.export(model, (x,))
    assert "deepcontrol" not in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("size", [(1, 1), (129, 255), (200, 300), (256, 128)], ids=str)
def test_classnet_pads_and_crops_exactly(size: tuple[int, int]) -> None:
    model = ClassNet(5, width=0.125).eval()
    x = torch.randn(1, 3, *size)
    height, breadth = (-(-s // 128) * 128 for s in size)
    padded = nn.functional.pad(x, (0, breadth - size[1], 0, height - size[0]), mode="replicate")
    expected = model(padded)
    for output, whole in zip(model(x), expected, strict=True):
        assert output.shape[2:] == size
        assert whole.shape[2:] == (height, breadth)
        assert torch.equal(output, whole[..., : size[0], : size[1]])


def test_width_and_identity_init() -> None:
    assert [c.out_channels for c in convolutions(SegNet(19, width=0.25))][:5] == [
        16,
        16,
        32,
        32,
        64,
    ]
    model = identity_init_(SegNet(19, width=0.25))
    found = [
        i for i, layer in enumerate(convolutions(model))
        if layer.in_channels == layer.out_channels
        and torch.equal(layer.weight, nn.init.dirac_(torch.empty_like(layer.weight)))
    ]  # fmt: skip
    # All layers with equal widths, except the first after each pooling or unpooling.
    assert found == [1, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 20]


@pytest.mark.parametrize("network", NETWORKS.values())
def test_invalid_inputs_raise(network: type) -> None:
    with pytest.raises(ValueError, match=r"'batch'.*agc, agc\+wn, agc\+ws, bn, gn, in, ln, frn"):
        network(5, norm="batch")
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        network(5, width=0)
    model = network(5, width=0.125)
    with pytest.raises(ValueError, match=r"\(N, 3, H, W\).*\(1, 4, 64, 64\)"):
        model(torch.randn(1, 4, 64, 64))
    with pytest.raises(ValueError, match=r"at least 32x32, got \(1, 3, 31, 64\)"):
        SegNet(5, width=0.125)(torch.randn(1, 3, 31, 64))
