"""docs/: the code of every page runs from top to bottom, and CONTRIBUTING.md's tree is true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if "```python" in page.read_text()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch.export's
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), names)  # noqa: S102


def test_tree_is_true() -> None:
    """The tree in CONTRIBUTING.md names every package, and only files that exist."""
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout")[1].split("Imports")[0]
    package = ROOT / "src" / "deepcontrol"
    packages = [*package.glob("*/__init__.py"), *package.glob("workbench/*/__init__.py")]
    for name in ("streets", *(path.parent.name for path in packages)):
        assert f"{name}/" in tree, f"{name}/ is missing from the tree in CONTRIBUTING.md"
    named = re.findall(r"[\w/]+\.py", tree)
    existing = {path.name for path in package.rglob("*.py")}
    missing = {name for name in named if name not in existing and not (ROOT / name).exists()}
    assert not missing, missing


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text()):
        if not link.startswith("../results/"):  # a source distribution has no pages of results
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_paths_exist(page: Path) -> None:
    """Paths of the repository that a page names in `code` exist."""
    pattern = r"`(?:python )?((?:benchmarks|dev|docs|results|src|tests)/[\w./-]+)`"
    for path in re.findall(pattern, page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


GENERATED = ("verdicts.md", "zoo.md")


@pytest.mark.parametrize(
    "page",
    [page for page in sorted(DOCS.rglob("*.md")) if page.name not in GENERATED]
    + [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")],
    ids=lambda page: page.stem,
)
def test_lines_have_at_most_120_columns(page: Path) -> None:
    """Except in tables, pictures and code."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > 120]
    assert [line for line in long if not line.startswith(("|", "![", "[!["))] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in navigation, page
