"""The plug-in pages of the docs: their Python code runs, and their links resolve."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "plugins").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_blocks_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks or page.stem == "index"
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", [*PAGES, DOCS / "zoo.md"], ids=lambda p: p.stem)
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_index_links_every_page() -> None:
    index = (DOCS / "plugins" / "index.md").read_text()
    for page in PAGES:
        assert page.stem == "index" or f"]({page.name})" in index
