"""torch.compile(model, dynamic=True): full graph, one compilation for three batch sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepcontrol import to_agc
from deepcontrol.workbench.models import NnUNet3d, ResNet18, ResNet50, SegNet, UNet3d
from tests.compiling import assert_compiles_once

Make = Callable[[], nn.Module]


def converted_torchvision() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return to_agc(models.resnet50())


def converted_timm() -> nn.Module:
    timm = pytest.importorskip("timm")
    return to_agc(timm.create_model("resnet26d"))


NETWORKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "segnet": (lambda: SegNet(5), (3, 64, 64)),
    "resnet50": (lambda: ResNet50(10), (3, 64, 64)),
    "unet3d": (lambda: UNet3d(1, 3), (1, 32, 32, 32)),
    "nnunet": (lambda: NnUNet3d(1, 3), (1, 64, 64, 64)),
    "torchvision": (converted_torchvision, (3, 64, 64)),
    "timm": (converted_timm, (3, 64, 64)),
}
SMALL: dict[str, tuple[Make, tuple[int, ...]]] = {
    "segnet": (lambda: SegNet(5, 0.05), (3, 32, 32)),
    "resnet18": (lambda: ResNet18(5, width=0.1), (3, 64, 64)),
    "unet3d": (lambda: UNet3d(1, 3, 0.05), (1, 32, 32, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_small_network_compiles_once(name: str) -> None:
    torch.manual_seed(0)
    make, shape = SMALL[name]
    assert_compiles_once(make(), shape, "eager")  # dynamo alone: graph breaks and guards


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")
def test_network_compiles_once_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    layout = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
    model = make().cuda().to(memory_format=layout)
    assert_compiles_once(model, shape, "inductor", torch.bfloat16, tolerance=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ordinary_loop_with_a_compiled_model(name: str, mode: str) -> None:
    """torch.compile(model) as users call it, with a scheduler."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().cuda()
    compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    x = torch.randn(2, *shape, device="cuda")
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(x).float().square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.compiler.reset()
