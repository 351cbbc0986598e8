"""The model card of an exported network: a Markdown file for its users."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..folders.runfolder import Run, read_run
from ..terminal import format_size, printable
from ..train.config import Train
from ..train.progress import FEW_IMAGES

CARD = "model-card.md"
WEAK_IOU = 0.5

_INSTALL = {
    "onnx": "pip install numpy pillow onnxruntime",
    "exported": "pip install numpy pillow torch",
    "executorch": "pip install numpy pillow torch executorch",
}
_LOAD = {
    "onnx": (
        "import onnxruntime",
        'session = onnxruntime.InferenceSession("{file}")',
        'logits = session.run(["classes"], {{"images": x}})[0]',
    ),
    "exported": (
        "import torch",
        'network = torch.export.load("{file}").module()',
        "outputs = network(torch.from_numpy(x))",
        "logits = (outputs[0] if isinstance(outputs, tuple) else outputs).detach().numpy()",
    ),
    "executorch": (
        "import torch\nfrom executorch.runtime import Runtime",
        'method = Runtime.get().load_program("{file}").load_method("forward")',
        "logits = method.execute([torch.from_numpy(x)])[0].numpy()",
    ),
}


def model_card(folder: Path, config: Train, description: dict[str, Any], epoch: int | None) -> str:
    """Return the card of an exported file.

    Args:
        folder: Run folder, for its records.
        config: Configuration of the run.
        description: The description of the exported file.
        epoch: Epoch of the exported checkpoint, if it is known.
    """
    run = read_run(folder)
    row = next((r for r in reversed(run.metrics) if r["epoch"] == epoch), {})
    parts = [
        f"# {_word(config.model)} for {len(description['classes'])} classes",
        _purpose(config, description),
        *_classes(run, config, description, row),
        *_metrics(run, config, epoch, row),
        *_preprocessing(description),
        *_usage(config, description),
        *_training(run, config),
        *_limits(run, config, description, row),
    ]
    return "\n\n".join(parts) + "\n"


def _word(text: object) -> str:
    """Return a text of a run folder for one cell of a Markdown table."""
    return printable(str(text)).replace("|", "/").replace("<", "&lt;").replace("\n", " ")


def _purpose(config: Train, description: dict[str, Any]) -> str:
    what = "assigns one class to an image"
    if config.task == "segmentation":
        what = "labels every " + (
            "voxel of a volume" if _is_volume(config) else "pixel of an image"
        )
    folded = " Its AGC layers are folded into convolutions." if description["folded"] else ""
    int8 = " Its convolutions are quantized to int8." if description["int8"] else ""
    return (
        f"`{description['file']}` {what}. It is a {_word(config.model)} with norm "
        f"`{config.norm}`, trained with deepcontrol.{folded}{int8} `{description['file']}.json` "
        "has the same facts for programs."
    )


def _classes(
    run: Run, config: Train, description: dict[str, Any], row: dict[str, Any]
) -> list[str]:
    is_segmentation = config.task == "segmentation"
    values = row.get(run.class_metric)
    if not isinstance(values, list) or len(values) != len(description["classes"]):
        values = [None] * len(description["classes"])
    colors = [f"#{bytes(color).hex()}" for color in description["colors"]]
    metric = "validation IoU, %" if is_segmentation else "wrong validation images, %"
    table = [["output", "class", *["color in pictures"] * is_segmentation, metric]]
    for i, name in enumerate(description["classes"]):
        color = [f"`{colors[i]}`"] * is_segmentation
        table.append([str(i), _word(name), *color, _percent(values[i])])
    return ["## Classes", _table(table)]


def _metrics(run: Run, config: Train, epoch: int | None, row: dict[str, Any]) -> list[str]:
    images = run.derived.get("val_images", "unknown")
    samples = "crops" if _is_volume(config) else "images"
    things = "images"
    if config.task == "segmentation":
        things = "voxels" if _is_volume(config) else "pixels"
    table = [["metric", "value"], [f"wrong {things}, %", _percent(row.get("val_error"))]]
    if config.task == "segmentation":
        table.append(["mean IoU, %", _percent(row.get("val_mean_iou"))])
    about = (
        f"On the {images} validation {samples} of the training data, after epoch {epoch} of "
        f"{config.epochs}. The checkpoint may have been chosen by this error, so the error on new "
        "images is higher."
    )
    return ["## Metrics", about, _table(table)]


def _preprocessing(description: dict[str, Any]) -> list[str]:
    of_input = description["input"]
    shape = " x ".join(str(side) for side in of_input["shape"])
    lines = [f"- input `{of_input['name']}`: {of_input['dtype']}, {shape}, {of_input['channels']}"]
    if of_input["resizing"]:
        lines.append(f"- resized {of_input['resizing']}")
    if of_input["sides_are_multiples_of"] > 1:
        lines.append(f"- sides are multiples of {of_input['sides_are_multiples_of']} pixels")
    if of_input.get("window"):
        height, width = of_input["window"]
        lines.append(f"- trained on crops: cut larger images into windows of {height}x{width}")
    if "mean" in of_input:
        mean, std = of_input["mean"][0], of_input["std"][0]
        lines.append(f"- each value: (pixel - {mean:g}) / {std:g}, for pixels of 0 to 255")
    else:
        lines.append(f"- each value: {of_input['normalization']}")
        for channel, values in of_input["intensities"].items():
            constants = ", ".join(f"{name} {value:g}" for name, value in values.items())
            lines.append(f"- intensities of channel {channel}: {constants}")
    return ["## Preprocessing", "\n".join(lines)]


def _usage(config: Train, description: dict[str, Any]) -> list[str]:
    target = description["target"]
    imports, *run = (line.format(file=description["file"]) for line in _LOAD[target])
    of_input = description["input"]
    channels = of_input["shape"][1]
    if _is_volume(config):
        return ["## Use", _volume_usage(config)]
    if channels not in (1, 3):
        return [
            "## Use",
            f"The image has {channels} channels, in the order of the training images.",
        ]
    mode = "L" if channels == 1 else "RGB"
    load, *forward = (run[0], *run[1:])
    code = [
        imports,
        "import numpy as np",
        "from PIL import Image",
        "",
        load,
        f'image = Image.open("photo.jpg").convert("{mode}")',
        *_resize_code(config, of_input),
        f"pixels = pixels.reshape(*pixels.shape[:2], {channels})",
        f"x = (pixels - {of_input['mean'][0]:g}) / {of_input['std'][0]:g}",
        "x = np.ascontiguousarray(x.transpose(2, 0, 1)[None], dtype=np.float32)",
        *forward,
    ]
    if config.task == "segmentation":
        code.append("labels = logits.argmax(1)[0][:height, :width]  # a class for each pixel")
    else:
        code.append("label = int(logits.argmax(1)[0])  # the class of the image")
    fence = "```"
    return ["## Use", f"`{_INSTALL[target]}`", f"{fence}python\n" + "\n".join(code) + f"\n{fence}"]


def _is_volume(config: Train) -> bool:
    return len(config.sample_size) == 3


def _volume_usage(config: Train) -> str:
    size = format_size(config.sample_size)
    return (
        f"Cut a volume into windows of {size} that overlap by half, pad smaller volumes with 0 "
        "after the normalization, and average the softmax of the logits with Gaussian weights (a "
        "deviation of an eighth of each side). `deepcontrol predict` does this."
    )


def _resize_code(config: Train, of_input: dict[str, Any]) -> Sequence[str]:
    """Return the lines that turn `image` into `pixels` of a valid size."""
    height, width = config.image_size
    if config.task == "classification":
        return (
            f"scale = max({width} / image.width, {height} / image.height)",
            f"width = max({width}, round(image.width * scale))",
            f"height = max({height}, round(image.height * scale))",
            "image = image.resize((width, height), Image.Resampling.BILINEAR)",
            f"left, top = (width - {width}) // 2, (height - {height}) // 2",
            f"pixels = np.asarray(image.crop((left, top, left + {width}, top + {height})))",
        )
    if of_input["resizing"]:
        return (
            f"scale = min({width} / image.width, {height} / image.height)",
            f"width = min({width}, round(image.width * scale))",
            f"height = min({height}, round(image.height * scale))",
            "pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))",
            f"pad = ((0, {height} - height), (0, {width} - width)) + ((0, 0),) * (pixels.ndim - 2)",
            'pixels = np.pad(pixels, pad, "edge")',
        )
    step = of_input["sides_are_multiples_of"]
    lines = ["pixels = np.asarray(image)", "height, width = pixels.shape[:2]"]
    if step > 1:
        lines += [
            f"pad = ((0, -height % {step}), (0, -width % {step})) + ((0, 0),) * (pixels.ndim - 2)",
            'pixels = np.pad(pixels, pad, "edge")',
        ]
    return lines


def _training(run: Run, config: Train) -> list[str]:
    derived = run.derived
    folder = "" if config.data_root is None else f" ({config.data_root.name})"
    samples = "crops" if _is_volume(config) else "images"
    counts = " and ".join(
        f"{derived.get(f'{split}_images', '?')} {name} {samples}"
        for split, name in (("train", "training"), ("val", "validation"))
    )
    steps = f"{config.epochs} epochs, batch size {config.batch_size}, seed {config.seed}"
    optimizer = f"{config.optimizer}, learning rate {config.learning_rate:g}, {config.schedule}"
    rows = {
        "data": _word(f"{config.data}{folder}: {counts}"),
        "image size": format_size(config.sample_size),
        "parameters": _word(derived.get("parameters", "?")),
        "training": steps,
        "optimizer": optimizer,
        "loss": config.loss,
    }
    versions = run.about.get("versions")
    if isinstance(versions, dict) and versions:
        rows["versions"] = _word(", ".join(f"{k} {v}" for k, v in versions.items()))
    if run.about.get("commit"):
        rows["commit"] = _word(run.about["commit"])
    return ["## Training", _table([["", ""], *map(list, rows.items())])]


def _limits(run: Run, config: Train, description: dict[str, Any], row: dict[str, Any]) -> list[str]:
    lines = ["- Measured on images like the training images only. Try it on yours before use."]
    images = run.derived.get("val_images")
    if isinstance(images, int) and images < FEW_IMAGES:
        samples = "crops" if _is_volume(config) else "images"
        lines.append(f"- Only {images} validation {samples}: the metrics are uncertain.")
    values = row.get("val_class_iou")
    if isinstance(values, list) and len(values) == len(description["classes"]):
        weak = [
            _word(name)
            for name, value in zip(description["classes"], values, strict=True)
            if isinstance(value, float) and value < WEAK_IOU
        ]
        if weak:
            lines.append(f"- IoU below {WEAK_IOU:.0%}: {', '.join(weak)}.")
    depends_on_crop = config.norm.startswith("agc") and not description["fixed_means"]
    if depends_on_crop and not description["input"]["resizing"]:
        lines.append(
            "- AGC subtracts the mean over the image, so the outputs depend on the crop. Use "
            "images or windows of the training size."
        )
    return ["## Limits", "\n".join(lines)]


def _percent(value: object) -> str:
    return f"{100 * value:.2f}" if isinstance(value, float) and value == value else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
