"""The import order of the packages, read from syntax trees without importing anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    (
        "raylt.errors",
        "raylt.tree",
        "raylt.seeds",
        "raylt.hyper",
        "raylt.machine",
        "raylt.notebook",
        "raylt.metrics",
        "raylt.formatting",
        "raylt.signals",
        "raylt.store",
        "raylt.own_code",
        "raylt.typed_json",
        "raylt.disk",
        "raylt.recordability",
        "raylt.staging",
    ),
    ("raylt.config",),
    ("raylt.data", "raylt.models"),
    ("raylt.core",),
    ("raylt.ops",),
    ("raylt.methods",),
    ("raylt.registry",),
    ("raylt.contract",),
    ("raylt.runs",),
    ("raylt.plots", "raylt.studies", "raylt.privacy"),
    ("actors",),
    ("tune",),
    ("raylt.cli", "raylt", "raylt.__main__", "raylt.serving", "raylt.templates"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = (
    "raylt.config",
    "raylt.data.task",
    "raylt.data.label_maps",
    "raylt.data.splits.long_tail",
    "raylt.data.splits.partitions",
    "raylt.data.splits.split",
    "raylt.data.sources.sources",
    "raylt.data.sources.scenes",
    "raylt.data.sources.arrays",
    "raylt.data.images.cache",
    "raylt.studies.report.listing",
)


@dataclass(frozen=True)
class Import:
    """An imported module or a name in it; `lazy` means inside a function."""

    module: str
    name: str | None
    lazy: bool


def imports_in(source: str) -> Iterator[Import]:
    """Yield every import of a module, including those under TYPE_CHECKING."""
    yield from _walk(ast.parse(source), lazy=False)


def _walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, None, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module, f"line {node.lineno}: from . import"
        assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
        yield from (Import(node.module, alias.name, lazy) for alias in node.names)
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    # an import under TYPE_CHECKING loads nothing, but ties modules together all the same
    lazy = lazy or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, lazy)


@cache
def modules() -> dict[str, tuple[Import, ...]]:
    """Return the imports of each module of the project, by its dotted name."""
    found = {}
    for package in ("raylt", "actors", "tune"):
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = tuple(imports_in(file.read_text()))
    return found


def target(imported: Import) -> str | None:
    """Return the project's module that an import loads: `from raylt import tree` loads raylt.tree."""
    inner = f"{imported.module}.{imported.name}"
    return inner if inner in modules() else imported.module if imported.module in modules() else None


def layer(module: str) -> int | None:
    """Return the layer of a module, or of the nearest package above it with a layer, except `raylt` itself."""
    while module not in LAYER:
        module = module.rpartition(".")[0]
        if module in ("", "raylt"):
            return None
    return LAYER[module]


def top(imported: Import) -> str:
    return imported.module.partition(".")[0]


def edges() -> Iterator[tuple[str, str, Import]]:
    for module, imports in modules().items():
        for imported in imports:
            reached = target(imported)
            if reached is not None and reached != module:
                yield module, reached, imported


def loaded_by(module: str) -> set[str]:
    """Return the project's modules that importing this one loads, including packages."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current and current not in found:
            found.add(current)
            waiting += [current.rpartition(".")[0]]
            waiting += [reached for i in modules().get(current, ()) if not i.lazy and (reached := target(i))]
    return found


def test_collector_sees_lazy_imports_and_those_of_type_checkers():
    source = """
import a.b
from c import d as e
if TYPE_CHECKING:
    import seen
import f
class X:
    import g
    def method(self):
        if self:
            import h
"""
    assert list(imports_in(source)) == [
        Import("a.b", None, False),
        Import("c", "d", False),
        Import("seen", None, True),
        Import("f", None, False),
        Import("g", None, False),
        Import("h", None, True),
    ]


def test_collector_refuses_relative_imports():
    with pytest.raises(AssertionError, match="line 1"):
        list(imports_in("from .tree import RunningSum"))


def test_the_project_is_found():
    assert {"raylt.tree", "raylt.methods", "raylt.methods.fedavg", "actors.fleet", "tune"} <= set(modules())
    reached = {(a, b) for a, b, _ in edges()}
    assert {
        ("raylt.core.experiment", "raylt.core.checkpoint.checkpoint"),
        ("raylt.runs.runner", "actors.launch"),
    } <= reached


def test_every_module_has_a_layer():
    assert [name for name in modules() if layer(name) is None] == [], "give it a place in LAYERS"


def test_no_module_imports_from_a_later_layer():
    order = {name: number for name in modules() if (number := layer(name)) is not None}
    wrong = [
        f"{a} (layer {order[a]}) imports {b} (layer {order[b]})"
        for a, b, imported in edges()
        if order[b] > order[a] and not (a == "raylt.runs.runner" and b == "actors.launch" and imported.lazy)
    ]
    assert wrong == []


def test_imports_are_acyclic():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for a, b, _ in edges():
        graph[a].add(b)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' <- '.join(error.args[1])}")


def test_nothing_under_raylt_imports_ray():
    wrong = [
        name
        for name, imports in modules().items()
        if name.startswith("raylt") and any(top(imported) == "ray" for imported in imports)
    ]
    assert wrong == []


REACH_RAY = (
    "raylt.cli.cluster",
    "raylt.cli.jobs",
    "raylt.cli.searches.ray_tune",
    "raylt.cli.serve",
    "raylt.cli.studies.study",
    "raylt.cli.searches.tune",
    "raylt.cli.verify",
    "raylt.runs.runner",
    "raylt.serving",
)


def test_only_cli_and_run_reach_actors_and_tune_and_only_inside_functions():
    wrong = [
        f"{a} imports {b}"
        for a, b, imported in edges()
        if a.startswith("raylt") and top(imported) in ("actors", "tune") and not (a in REACH_RAY and imported.lazy)
    ]
    assert wrong == []


def test_actors_do_not_know_tune():
    assert [f"{a} imports {b}" for a, b, _ in edges() if a.startswith("actors") and b.startswith("tune")] == []


# methods of runs, studies and comparisons that draw or print with code of a later layer
OFFERED = {
    ("raylt.runs.run", "raylt.plots.objects", "draw_run"),
    ("raylt.studies.study", "raylt.plots.objects", "draw_study"),
    ("raylt.studies.analysis.comparison", "raylt.plots.objects", "draw_comparison"),
    ("raylt.studies.analysis.comparison", "raylt.studies.report.comparison_tables", "comparison_table"),
}


@pytest.mark.slow
def test_functions_of_later_layers_are_named_in_three_objects_only():
    found = set()
    for module in modules():
        file = ROOT / f"{module.replace('.', '/')}.py"
        source = file.read_text() if file.is_file() else ""
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "later":
                found.add((module, *(ast.literal_eval(argument) for argument in call.args)))
    assert found == OFFERED
    for _, module, name in OFFERED:
        assert f"def {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


def test_methods_never_import_each_other():
    inside = "raylt.methods."

    def method(module: str) -> str:
        """Return the method's file name or folder name."""
        return module.removeprefix(inside).partition(".")[0]

    wrong = [
        f"{a} imports {b}"
        for a, b, _ in edges()
        if a.startswith(inside) and f"{b}.".startswith(inside) and method(a) != method(b)
    ]
    assert wrong == []


def test_actors_import_no_method_by_name():
    wrong = [
        f"{a} imports {i.module}.{i.name}"
        for a, b, i in edges()
        if a.startswith("actors")
        and f"{b}.".startswith("raylt.methods.")
        and (b, i.name) not in {("raylt.methods", "make_method"), ("raylt.methods", "METHODS")}
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [*WITHOUT_TORCH, "raylt", "raylt.cli.main"])
def test_importing_it_imports_no_torch(module):
    wrong = [
        f"{name} imports {i.module}"
        for name in sorted(loaded_by(module))
        for i in modules().get(name, ())
        if not i.lazy and top(i) in ("torch", "torchvision", "open_clip", "safetensors")
    ]
    assert module in modules()
    assert wrong == []
