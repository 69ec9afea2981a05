"""Imports only go down, and what must not happen on import does not."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "orbitkv"

# Each layer may import from itself and from those above it in this list. A name stands for the
# module and all below it, unless a longer one is listed; "orbitkv.stages" itself is the registry.
LAYERS = (
    ("orbitkv.errors",),
    ("orbitkv.config", "orbitkv.probe"),
    ("orbitkv.objects",),
    ("orbitkv.segment", "orbitkv.graph"),
    ("orbitkv.codecs",),
    ("orbitkv.cache",),
    ("orbitkv.stages.ticket",),
    ("orbitkv.stages.batch", "orbitkv.stages.direct"),
    ("orbitkv.stages.base",),
    ("orbitkv.stages.*",),
    ("orbitkv.stages",),
    ("orbitkv.pipeline",),
    ("orbitkv.runtime",),
    ("orbitkv",),
    ("orbitkv.engines",),
    ("orbitkv.commands",),
    (
        "orbitkv.doctor",
        "orbitkv.demo",
        "orbitkv.okv",
        "orbitkv.qualify",
        "orbitkv.simulation",
        "orbitkv.top",
        "orbitkv.trace_svg",
        "orbitkv.trace_views",
        "orbitkv.tracing",
    ),
    ("orbitkv.cli", "orbitkv.__main__"),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# orbitkv/pipelines is a link to definitions and to modules of a user's own, which are above all.
SOURCES = {
    module_name(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "pipelines"
}


def layer_of(module: str) -> int:
    """The layer whose name is the longest that the module is or lies in."""
    found = {}
    for index, names in enumerate(LAYERS):
        for name in names:
            if name.endswith(".*"):
                matches = module.startswith(name[:-1])
            elif name in ("orbitkv", "orbitkv.stages"):
                matches = module == name
            else:
                matches = module == name or module.startswith(f"{name}.")
            if matches:
                found[len(name)] = index
    assert found, f"{module} is in no layer of {Path(__file__).name}"
    return found[max(found)]


def imported(module: str) -> Iterator[tuple[int, str]]:
    """Line and module of every import from OrbitKV, wherever in the file it stands."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in SOURCES else str(node.module)


def own_imports(module: str) -> Iterator[tuple[int, str]]:
    for line, name in imported(module):
        if name == "orbitkv" or name.startswith("orbitkv."):
            yield line, name


@pytest.mark.parametrize("module", SOURCES)
def test_imports_only_go_down(module: str) -> None:
    upward = [
        f"{SOURCES[module].relative_to(ROOT)}:{line} imports {name}"
        for line, name in own_imports(module)
        if layer_of(name) > layer_of(module)
    ]
    assert upward == []


def test_modules_do_not_import_one_another_in_a_circle() -> None:
    needs = {module: {name for _, name in own_imports(module)} for module in SOURCES}
    order = tuple(graphlib.TopologicalSorter(needs).static_order())
    assert order.index("orbitkv.errors") < order.index("orbitkv.runtime.manager")


def test_every_layer_is_listed_once() -> None:
    names = [name for layer in LAYERS for name in layer]
    assert len(names) == len(set(names))


def uses(module: str, *attributes: str) -> list[str]:
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    return [
        f"{SOURCES[module].relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in attributes)
        or (isinstance(node, ast.alias) and node.name in attributes)
    ]


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - {"orbitkv.cli"}))
def test_only_the_command_reads_the_environment(module: str) -> None:
    assert uses(module, "environ", "environb", "getenv", "getenvb", "putenv") == []


@pytest.mark.parametrize(
    "module", sorted(SOURCES.keys() - {"orbitkv.runtime.lanes", "orbitkv.runtime.cuda"})
)
def test_stages_enqueue_and_only_lanes_wait(module: str) -> None:
    assert uses(module, "synchronize") == []


@pytest.mark.parametrize("module", SOURCES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text(encoding="utf-8")))


def fresh(code: str) -> str:
    """Standard output of a new interpreter that has warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_importing_orbitkv_imports_no_engine_and_no_gpu_library() -> None:
    heavy = {"torch", "transformers", "vllm", "sglang", "cupy", "kvikio", "numba", "mooncake"}
    code = f"import sys, orbitkv; print(sorted({heavy!r} & set(sys.modules)))"
    assert fresh(code) == "[]\n"


def test_importing_orbitkv_starts_no_thread_and_says_nothing() -> None:
    code = "import threading, orbitkv; print(threading.active_count())"
    assert fresh(code) == "1\n"


def test_reading_a_definition_imports_no_engine_and_no_gpu_library() -> None:
    code = (
        "import sys; from orbitkv.pipeline import load_pipeline\n"
        "load_pipeline('save'), load_pipeline('restore')\n"
        "print(sorted({'torch', 'cupy', 'kvikio'} & set(sys.modules)))"
    )
    assert fresh(code) == "[]\n"
