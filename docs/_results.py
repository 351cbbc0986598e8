"""mkdocs hook: add the study's page and figures to the site.

Pages link to ../results/, which works wherever the repository is read. On the site these files are
at results/, so the hook rewrites the links.
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
