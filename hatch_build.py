"""Build hook: the README without its picture, as the package's description.

The picture is a file of the repository. Its relative path would lead nowhere on a package index.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeWithoutPicture(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n+", "", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
