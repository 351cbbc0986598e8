"""Build hook: the README without its picture and links to files, as the package's description.

They lead to files of the repository, which a package index does not have.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeForPackageIndex(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", text)
        text = re.sub(r"\[([^\]]*)\]\((?!https:|#)([^)]*)\)", _with_path, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _with_path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if text == path else f"{text} (`{path}`)"
