"""`raylt` is the whole public interface, and code for users imports nothing below it."""

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from test_docs import blocks

import raylt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = sorted(file for folder in ("examples", "tests/guests") for file in (ROOT / folder).rglob("*.py"))
DEEP = re.compile(r"^\s*(?:from|import) raylt\..*$", re.M)


def plugins_in(file: Path) -> Iterator[str]:
    """Yield the texts in a test file that are plugins, that is, define a method or register something."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"^(?:from|import) raylt", node.value, re.M)
            and re.search(r"Method\)|\bregister\(", node.value)
        ):
            yield node.value


def faults(source: str) -> list[str]:
    """Return each use of raylt in a source that the public interface does not offer."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names if alias.name.startswith("raylt.")]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "raylt":
            found += [
                f"from {node.module} import {alias.name}"
                for alias in node.names
                if node.module != "raylt" or alias.name not in raylt.__all__
            ]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raylt":
            found += [f"raylt.{node.attr}"] if node.attr not in raylt.__all__ else []
    return found


def imported_by_type_checkers() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the submodules, and the names by module, that raylt/__init__.py imports under TYPE_CHECKING."""
    body = ast.parse(Path(str(raylt.__file__)).read_text()).body
    block = next(node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    submodules, names = {}, {}
    for node in block.body:
        if isinstance(node, ast.Import):
            submodules |= {str(alias.asname): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names[node.module] = names.get(node.module, ()) + tuple(map(ast.unparse, node.names))
    return submodules, names


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "import raylt\nraylt.run(raylt.Method)\nfrom raylt import tree, hp\nimport torch\nfrom tune import search",
            [],
        ),
        ("import raylt.core.client as c", ["import raylt.core.client"]),
        ("def f():\n    from raylt.hyper import hp", ["from raylt.hyper import hp"]),
        ("from raylt import registry, mean", ["from raylt import registry"]),
        ("import raylt\nraylt.runs.trackers.trackers([])", ["raylt.runs"]),
    ],
)
def test_a_use_of_what_is_not_public_is_found(source, found):
    assert faults(source) == found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_public_interface_alone(page):
    text = page.read_text()
    assert faults(blocks(page)) == []
    assert DEEP.findall(text) == []
    assert set(re.findall(r"\braylt\.(\w+)\(", text)) <= set(raylt.__all__)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_examples_and_guests_use_the_public_interface_alone(file):
    assert faults(file.read_text()) == []


@pytest.mark.slow
def test_plugins_inside_tests_use_the_public_interface_alone():
    sources = {
        file.name: list(plugins_in(file))
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if file != Path(__file__) and file.parent.name != "own_code"
    }
    assert {"test_prometheus.py", "test_registry.py"} <= {name for name, found in sources.items() if found}
    assert {
        name: wrong for name, found in sources.items() if (wrong := [f for text in found for f in faults(text)])
    } == {}


def test_every_public_name_is_what_its_module_has():
    """All modules are imported first, because a submodule of the same name would replace the name."""
    for name, (module, attribute) in raylt._EXPORTS.items():
        assert getattr(import_module(module), attribute) is not None
        assert getattr(raylt, name) is getattr(import_module(module), attribute), name
    for name, module in raylt._SUBMODULES.items():
        assert getattr(raylt, name) is import_module(module)
    assert raylt.load_config("recipe:demo").method["name"] == "sfd"
    assert re.match(r"\d+\.\d+", raylt.__version__)


def test_no_public_name_is_that_of_a_sub_module():
    below = {module.name for module in pkgutil.iter_modules(raylt.__path__)}
    assert "core" in below
    assert below & set(raylt.__all__) <= set(raylt._SUBMODULES)


def test_tables_and_type_checkers_imports_agree():
    submodules, places = imported_by_type_checkers()
    assert submodules == raylt._SUBMODULES
    assert {module: set(names) for module, names in places.items()} == {
        module: set(names) for module, names in raylt._MODULES.items()
    }


def test_all_has_each_name_once_and_no_other_is_offered():
    assert len(set(raylt.__all__)) == len(raylt.__all__)
    assert set(raylt.__all__) == {"__version__", *raylt._SUBMODULES, *raylt._EXPORTS} == set(dir(raylt))
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        raylt.runn  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "absent"),
    [
        ("import raylt", {"torch", "ray", "pydantic", "numpy", "pandas"}),
        ("import raylt; raylt.RayltError; raylt.seed_for", {"torch", "ray", "pydantic"}),
        ("import raylt; raylt.hp; raylt.Config; raylt.load_config", {"torch", "ray", "pandas"}),
        ("from raylt import *; from raylt import tree as t; assert tree is t and callable(recordable)", {"ray"}),
    ],
)
def test_importing_it_loads_only_what_is_used(script, absent):
    script = f"import sys\n{script}\nprint(*{absent!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
