"""The report of a conversion: every change to a model, as records and as a table."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """The conversion of one BatchNorm.

    Attributes:
        name: Name of the BatchNorm in the model; empty if it is the model itself.
        was: Class name before the conversion.
        became: Class name after the conversion; for fused layers with the name of the convolution
            and the activation.
        kind: "fused" (into one AGCConv with its convolution), "replaced" (by AGC1d/2d/3d) or
            "skipped" (unchanged).
        why: Reason for the kind, and notes on the initialization.
        saved_bytes: Bytes that only the AGC layer or neuron saves for the backward on the example,
            besides the input of a convolution; None without an example. An AGC layer that is not
            fused saves its input.
    """

    name: str
    was: str
    became: str
    kind: Literal["fused", "replaced", "skipped"]
    why: str
    saved_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """All changes to a model, in module order. Print it for a table.

    Attributes:
        changes: The conversion of every BatchNorm.
        new_parameters: Names of the parameters that the conversion created. An optimizer created
            before it does not have them.
        scaled_layers: Names of the convolutions and linear layers that end a residual branch, or
            another operand of a sum, without a norm after them, with the factor of their filters.
        corrected: Names of the AGC layers that were scaled because their maps were too large or too
            small on the example.
        blocks: Number of residual additions found in the model; only init="scratch" looks for them.
        missing: Why residual additions may be missing, or None.
        constant: Names of the BatchNorms that start at a lambda near 1 and are followed by a mean
            over the whole map, so that the features computed from it are the same for all inputs.
        untied: Gammas and betas that were shared by several BatchNorms and no longer are.
        unverified: What was not verified, and why; None if the example showed the same values
            before and after in evaluation and in training mode.
        difference: Only for init="bn" with an example: largest difference of the outputs before
            and after, relative to the largest output.
        disabled_fusers: Names of the methods that fold BatchNorms (fuse, reparameterize), which now
            leave their module unchanged.
        saved_bytes: Bytes that the whole model saves for the backward on the example, or None.
    """

    changes: tuple[Change, ...]
    new_parameters: tuple[str, ...] = ()
    scaled_layers: tuple[tuple[str, float], ...] = ()
    corrected: tuple[str, ...] = ()
    blocks: int = 0
    missing: str | None = None
    constant: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    unverified: str | None = None
    difference: float | None = None
    saved_bytes: int | None = None
    disabled_fusers: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def count(self, kind: Literal["fused", "replaced", "skipped"]) -> int:
        """Return the number of BatchNorms that were fused, replaced or skipped."""
        return Counter(change.kind for change in self.changes)[kind]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "was", "became", "saves", "why")]
        rows += [
            (c.name or "(the model)", c.was, c.became, _size(c.saved_bytes), c.why)
            for c in self.changes
        ]
        if self.saved_bytes is None:
            rows = [(*row[:3], *row[4:]) for row in rows]
        last = len(rows[0]) - 1
        widths = [max(len(row[i]) for row in rows) for i in range(last)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[last]])
            for row in rows
        ]
        total = ", ".join(f"{self.count(k)} {k}" for k in ("fused", "replaced", "skipped"))
        return "\n".join([*(line.rstrip() for line in lines), total, *self._summary()])

    def _summary(self) -> Iterator[str]:
        if self.blocks:
            yield f"{self.blocks} residual additions"
        if self.scaled_layers:
            layers = tuple(f"{name} by {gain:.2f}" for name, gain in self.scaled_layers)
            some = _some(layers, "scaled_layers")
            yield f"filters scaled at the end of summed branches: {some}"
        if self.corrected:
            yield f"{len(self.corrected)} layers scaled on the example (Report.corrected)"
        if self.missing:
            yield f"residual branches were not all found: {self.missing}"
        if self.constant:
            yield f"constant features until lambda changes: {_some(self.constant, 'constant')}"
        if self.untied:
            yield f"no longer tied: {_some(self.untied, 'untied')}"
        if self.unverified:
            yield f"not verified: {self.unverified}"
        else:
            yield "verified on the example in evaluation and training mode"
        if self.difference is not None:
            yield f"outputs on the example differ by {self.difference:.1e} of the largest"
        if self.saved_bytes is not None:
            replaced = sum(c.saved_bytes or 0 for c in self.changes if c.kind == "replaced")
            total = _size(self.saved_bytes)
            yield f"{total} saved for backward, {_size(replaced)} of it by unfused AGC layers"
        if self.disabled_fusers:
            methods = _some(self.disabled_fusers, "disabled_fusers")
            yield f"left without effect, because they fold BatchNorms: {methods}"
        if self.new_parameters:
            count = len(self.new_parameters)
            yield f"{count} new parameters: create the optimizer after the conversion"


def _size(count: int | None) -> str:
    """Return a number of bytes with its unit."""
    if count is None:
        return "-"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _some(names: tuple[str, ...], attribute: str) -> str:
    """Return the first names, and how many follow."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, and {len(names) - 3} more (Report.{attribute})"
