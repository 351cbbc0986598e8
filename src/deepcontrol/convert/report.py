"""What a conversion did, layer by layer, as a table."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Change:
    """One BatchNorm, what it became, and why.

    kind is fused (one neuron with its convolution), replaced (a layer of its own) or skipped.
    """

    name: str
    was: str
    became: str
    kind: Literal["fused", "replaced", "skipped"]
    why: str


@dataclass(frozen=True)
class Report:
    """The changes to a model; print it for a table."""

    changes: tuple[Change, ...]

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def count(self, kind: Literal["fused", "replaced", "skipped"]) -> int:
        return Counter(change.kind for change in self.changes)[kind]

    def __str__(self) -> str:
        rows = [("layer", "was", "became", "why")]
        rows += [(c.name or "(the model)", c.was, c.became, c.why) for c in self.changes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        total = ", ".join(f"{self.count(k)} {k}" for k in ("fused", "replaced", "skipped"))
        return "\n".join([*(line.rstrip() for line in lines), total])
