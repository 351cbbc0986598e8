"""Imports point one way, the library needs torch alone, and docstrings start short."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepcontrol
from tests.torch_only import assert_library_trains, link_torch

KERNELS = "deepcontrol.ops.triton"
PLOT = "deepcontrol.convert.signal_report"
PACKAGE = Path(deepcontrol.__file__).parent
SOURCE = PACKAGE.parent
STANDARD = sys.stdlib_module_names

# The packages that each package may import from. A package may always import its own modules,
# and no chain of imports may come back to the module that it started from.
LIBRARY: dict[str, set[str]] = {
    "deepcontrol.ops": set(),
    "deepcontrol.nn": {"deepcontrol.ops"},
    "deepcontrol.convert": {"deepcontrol.ops", "deepcontrol.nn"},
    "deepcontrol.step": set(),
    "deepcontrol.graphed_model": {"deepcontrol.step"},
    "deepcontrol": {
        "deepcontrol.ops",
        "deepcontrol.nn",
        "deepcontrol.convert",
        "deepcontrol.step",
        "deepcontrol.graphed_model",
    },
}
W = "deepcontrol.workbench"
ALLOWED: dict[str, set[str]] = LIBRARY | {
    "streets": set(),
    "deepcontrol.__main__": {"deepcontrol", W, f"{W}.cli"},
    W: set(),
    f"{W}.models": {"deepcontrol.ops", "deepcontrol.nn", "deepcontrol.convert"},
    f"{W}.imagefile": set(),
    f"{W}.terminal": set(),
    f"{W}.data": {
        "streets",
        f"{W}.hardware",
        f"{W}.imagefile",
        f"{W}.folders",
    },
    f"{W}.losses": {f"{W}.data"},
    f"{W}.metrics": {f"{W}.data"},
    f"{W}.folders": set(),
    f"{W}.optim": set(),
    f"{W}.hardware": {"deepcontrol", "deepcontrol.ops", "deepcontrol.nn"},
    f"{W}.train": {
        "deepcontrol",
        "deepcontrol.nn",
        "deepcontrol.ops",
        "deepcontrol.step",
        f"{W}.data",
        f"{W}.hardware",
        f"{W}.folders",
        f"{W}.losses",
        f"{W}.metrics",
        f"{W}.models",
        f"{W}.optim",
        f"{W}.terminal",
    },
    f"{W}.data_commands": {f"{W}.data", f"{W}.folders", f"{W}.terminal"},
    f"{W}.demo": {
        "deepcontrol.nn",
        "deepcontrol.step",
        f"{W}.data",
        f"{W}.folders",
        f"{W}.losses",
        f"{W}.predict",
        f"{W}.report",
        f"{W}.train",
    },
    f"{W}.bench": {
        "deepcontrol.graphed_model",
        "deepcontrol.nn",
        "deepcontrol.ops",
        "deepcontrol.step",
        f"{W}.hardware",
        f"{W}.losses",
        f"{W}.models",
        f"{W}.folders",
    },
    f"{W}.predict": {
        "deepcontrol.nn",
        f"{W}.data",
        f"{W}.imagefile",
        f"{W}.folders",
        f"{W}.terminal",
        f"{W}.train",
    },
    f"{W}.report": {
        f"{W}.imagefile",
        f"{W}.folders",
        f"{W}.terminal",
    },
    f"{W}.export": {
        "deepcontrol",
        "deepcontrol.convert",
        f"{W}.data",
        f"{W}.metrics",
        f"{W}.models",
        f"{W}.folders",
        f"{W}.predict",
        f"{W}.terminal",
        f"{W}.train",
    },
    f"{W}.study": {
        "deepcontrol.step",
        f"{W}.bench",
        f"{W}.folders",
        f"{W}.imagefile",
        f"{W}.models",
        f"{W}.optim",
        f"{W}.report",
        f"{W}.terminal",
        f"{W}.train",
    },
    f"{W}.errors": {f"{W}.train"},
    f"{W}.cli": {
        W,
        f"{W}.demo",
        f"{W}.bench",
        f"{W}.data",
        f"{W}.data_commands",
        f"{W}.errors",
        f"{W}.hardware",
        f"{W}.export",
        f"{W}.folders",
        f"{W}.predict",
        f"{W}.report",
        f"{W}.study",
        f"{W}.terminal",
        f"{W}.train",
    },
}
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("deepcontrol", "streets")
    for path in sorted((SOURCE / top).rglob("*.py"))
}


def package_of(module: str) -> str:
    """The most specific entry of ALLOWED that a module belongs to."""
    while module not in ALLOWED:
        module = module.rpartition(".")[0]
    return module


def imports(module: str, at_import: bool = False) -> set[str]:
    """Absolute names of the modules that a module imports.

    With at_import, imports inside functions, which run later, are left out.
    """
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    found = set()
    for node in _import_statements(tree, at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                found.add(name if name in FILES else origin)
    return found


def _import_statements(tree: ast.AST, at_import: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not (at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            yield from _import_statements(node, at_import)


@pytest.mark.parametrize("module", FILES)
def test_directions(module: str) -> None:
    package = package_of(module)
    for name in imports(module):
        top = name.split(".")[0]
        if top in ("deepcontrol", "streets"):
            assert package_of(name) in ALLOWED[package] | {package}, f"{module} imports {name}"
        elif package in LIBRARY:
            # Only the kernels may need Triton, and they are imported when a tensor needs one. Only
            # the plot may need matplotlib, and it is imported when something is drawn.
            optional = {"triton"} if module.startswith(KERNELS) else set()
            optional |= {"matplotlib"} if module.startswith(PLOT) else set()
            assert top in STANDARD | {"torch"} | optional, f"{module} imports {name}"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imports(module, at_import=True) & set(FILES) for module in FILES}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as cycle:
        pytest.fail("import cycle: " + " -> ".join(cycle.args[1]))


def test_training_needs_nothing_to_draw_with() -> None:
    """A machine that only trains may be without these; the command line must start there."""
    absent = ("matplotlib", "tensorboard", "jinja2", "ray")
    script = f"""
import sys
for name in {absent}:
    sys.modules[name] = None
import deepcontrol.workbench.cli, deepcontrol.workbench.study.executors
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_library_works_with_torch_alone(tmp_path: Path) -> None:
    """Link the library beside torch and its dependencies, and train one step there."""
    link_torch(tmp_path)
    (tmp_path / "deepcontrol").symlink_to(PACKAGE)
    assert_library_trains(tmp_path)


# Modules with a reason of their own to open files: the storage, the lock, the
# cache, which reserves space in files it has just created, and tracebacks in temporary files.
OPENERS = {
    *(f"{W}.folders.{name}" for name in ("storage", "runfolder")),
    *(f"{W}.{name}" for name in ("data.cache", "errors")),
}


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith(W) and m not in OPENERS])
def test_files_are_written_and_json_is_read_in_one_place(module: str) -> None:
    """storage.py follows no links, leaves no torn file, and limits what it reads."""
    found = []
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.endswith((".write_text", ".write_bytes", ".copyfile")) or name.startswith(
            ("json.load", "shutil.copy", "np.save")
        ):
            found.append(ast.unparse(node))
        if name == "open" or name.endswith(".open"):
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if any(isinstance(v, str) and set(v) & set("wax+") and len(v) < 4 for v in constants):
                found.append(ast.unparse(node))
        if name.endswith((".savefig", ".save")) and isinstance(node.func, ast.Attribute):
            target = ast.unparse(node.args[-1 if name == "torch.save" else 0])
            is_file = target in ("file", "out", "program", "checkpoint")  # open files and records
            if not is_file:
                found.append(ast.unparse(node))
    assert not found, f"{module}: {found}"


MOST_CHARACTERS = 79  # in the first line of a docstring


@pytest.mark.parametrize("module", FILES)
def test_docstrings_begin_with_a_summary_of_one_short_line(module: str) -> None:
    found = []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        docstring = ast.get_docstring(node, clean=False) if isinstance(node, documented) else None
        if docstring is not None:
            summary, *rest = docstring.split("\n")
            if not summary.strip() or len(summary) > MOST_CHARACTERS or (rest and rest[0].strip()):
                found.append(f"{getattr(node, 'name', 'the module')}: {summary}")
    assert not found, f"expected at most {MOST_CHARACTERS} characters, then an empty line: {found}"
