"""For the site: the study in results/ lies beside the pages, where their links find it.

The pages link to ../results/, so that they work wherever the repository is read.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (
    "results/camvid/index.html",
    "results/camvid/figures/figure1.png",
    "results/camvid/figures/figure2.png",
)


def on_files(files: Files, *, config: Any) -> None:
    for name in SHOWN:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("](../results/", "](results/")
