"""Measure one model of another library: convert it, train a step, fold it."""

import copy
import importlib.metadata
import time
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deepcontrol import fold, he_init_, to_agc
from deepcontrol.convert import Report
from deepcontrol.nn import saved_bytes

from .models import Entry

Row = dict[str, object]


def measure(entry: Entry) -> Row:
    """Return the row of a model. Errors of the conversion and of the step are raised."""
    torch.manual_seed(0)
    model = entry.build().train()
    images = smooth_images(4, entry.sample)
    row: Row = {
        **identity(entry),
        "norms": sum(isinstance(m, _BatchNorm) for m in model.modules()),
        "bn_trains_at_1": _trains(model, images[:1]),
    }
    # At batch 2, because BatchNorm refuses maps of one position at batch 1.
    before = saved_bytes(model, images[:2])
    agc, report = converted(model, images[:1])
    after = saved_bytes(agc, images[:2])
    finite = step_is_finite(agc, images[:1])
    like_trained, start = from_batchnorm(model, images)
    for scale in mean_scales(like_trained):
        nn.init.normal_(scale, 0.8, 0.2)
    he_start = folding(agc.eval(), images[:1])
    return {
        **row,
        **{kind: report.count(kind) for kind in ("fused", "replaced", "skipped")},
        "backed_out": sum("backed out" in change.why for change in report),
        "verified": report.unverified is None,
        "unverified": report.unverified or "",
        "one_position": sum("lambda 0" in change.why for change in report),
        "constant": len(report.constant),
        "finite_at_1": finite,
        "mib_before": f"{before / 2**20:.2f}",
        "mib_after": f"{after / 2**20:.2f}",
        **start,
        **{name: f"{value:.1e}" for name, value in folding(like_trained, images[:1]).items()},
        **{f"he_{name}": f"{value:.1e}" for name, value in he_start.items()},
    }


def identity(entry: Entry) -> Row:
    """Return the columns that identify a row."""
    return {
        "library": entry.library,
        "version": importlib.metadata.version(entry.library),
        "model": entry.name,
        "input": "x".join(map(str, entry.sample)),
    }


def smooth_images(samples: int, sample: tuple[int, ...]) -> Tensor:
    """Draw smooth random images with a little noise, of shape (samples, *sample).

    White noise would look the same to the deeper layers in all samples, so the statistics over
    them would have almost no variance.
    """
    channels, *size = sample
    blobs = torch.randn(samples, channels, *(4,) * len(size))
    mode = {2: "bilinear", 3: "trilinear"}[len(size)]
    smooth = nn.functional.interpolate(blobs, size=size, mode=mode)
    return smooth + 0.2 * torch.randn(samples, *sample)


def converted(model: nn.Module, image: Tensor) -> tuple[nn.Module, Report]:
    """Convert a copy of the model with He initialization, ready for training."""
    with warnings.catch_warnings():
        # The report counts norms that are followed by global average pooling.
        warnings.filterwarnings("ignore", message=".*followed by global average pooling")
        return to_agc(he_init_(copy.deepcopy(model)), init="paper", example=image, report=True)


def step_is_finite(model: nn.Module, image: Tensor) -> bool:
    """Check that a training step is finite and that gradients reach the AGC layers."""
    outputs = [y for y in tensors(model(image)) if y.requires_grad]
    torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    reached = any(scale.grad is not None for scale in mean_scales(model))
    return reached and all(bool(a.isfinite().all()) for a in (*outputs, *gradients))


def from_batchnorm(model: nn.Module, images: Tensor) -> tuple[nn.Module, dict[str, str]]:
    """Convert a copy with BatchNorm's statistics; measure difference and time.

    The models are in eval mode. Untrained networks with BatchNorm amplify rounding, so the
    difference between BatchNorm's own fp32 and fp64 is returned too. Times are CPU seconds of this
    process.
    """
    model = copy.deepcopy(model)
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            norm.momentum = 1.0  # the statistics of one batch
            if norm.affine:
                nn.init.normal_(norm.weight, 1.0, 0.2)
                nn.init.normal_(norm.bias, 0.0, 0.2)
    with torch.no_grad():
        model.train()(images)
        model.eval()
        expected = tensors(model(images))
        exact = tensors(copy.deepcopy(model).double()(images.double()))
        forward = time.process_time()
        model(images[:1])
        forward = time.process_time() - forward
        agc = copy.deepcopy(model)
        conversion = time.process_time()
        agc = to_agc(agc, init="bn", example=images[:1])
        conversion = time.process_time() - conversion
        in_double = to_agc(model.double(), init="bn", example=images[:1].double())
        differences = {
            "bn_start": difference(tensors(agc(images)), expected),
            "bn_start_fp64": difference(tensors(in_double(images.double())), exact),
            "bn_rounding": difference(expected, exact),
        }
    times = {"forward_s": f"{forward:.3f}", "conversion_s": f"{conversion:.2f}"}
    return agc, {name: f"{value:.1e}" for name, value in differences.items()} | times


def folding(model: nn.Module, image: Tensor) -> dict[str, float]:
    """Measure the differences of fold(model) to the model, and of fp32 to fp64."""
    with torch.no_grad():
        expected = tensors(model(image))
        folded = tensors(fold(model)(image))
        model, image = model.double(), image.double()
        exact = tensors(model(image))
        return {
            "fold": difference(folded, expected),
            "fold_fp64": difference(tensors(fold(model)(image)), exact),
            "fp32_rounding": difference(expected, exact),
        }


def mean_scales(model: nn.Module) -> list[nn.Parameter]:
    """Return the lambdas of a model."""
    return [p for name, p in model.named_parameters() if name.endswith("mean_scale")]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its output."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
    )


def tensors(output: Any) -> list[Tensor]:
    """Collect the floating-point tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    return (
        [t for part in output for t in tensors(part)] if isinstance(output, (list, tuple)) else []
    )


def _trains(model: nn.Module, image: Tensor) -> bool:
    try:
        model(image)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        return False
    return True
