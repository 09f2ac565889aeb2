"""The user's own code is sent to another process as source if it has a file, by value otherwise, or refused by line."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from refusals import refused

from raylt import registry
from raylt.errors import ConfigError
from raylt.own_code import shipment
from raylt.own_code.commands import plugin_files
from raylt.own_code.module_sources import Source
from raylt.own_code.shipment import Shipment, ship
from raylt.own_code.top_level_names import shadowed
from raylt.registry import load_plugin, plugin_modules

ROOT = Path(__file__).parents[2]
OPEN = "import pickle, sys; [print(call()) for call in pickle.load(sys.stdin.buffer).open()]"
HEAD = "import torch, raylt\nfrom torch.nn import functional as F\n"
METHOD = (
    HEAD
    + """
class Mine(raylt.Method):
    name = "shipped"
    paper = "for tests"
    __annotations__ = {}

    def call(self):
        %s
"""
)


@pytest.fixture(autouse=True)
def own_modules(no_guests):
    """Unload the user's modules after each test."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(registry.PLUGIN) or name in ("helper", "parts", "bare"):
            del sys.modules[name]
    sys.path[:] = path


def plugin(folder, text, name="own.py"):
    file = folder / name
    file.write_text(text)
    return next(plugin.value for plugin in load_plugin(file) if plugin.kind == "method")


def opened_elsewhere(calls, folder):
    """Call functions in a process that has raylt but none of the user's files; return their results."""
    shipped = ship(calls, plugin_modules(), cloudpickle.dumps)
    done = subprocess.run(
        [sys.executable, "-P", "-c", OPEN],
        input=pickle.dumps(shipped),
        capture_output=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\n")[:-1]


def script(folder, text, *arguments, name="script.py"):
    (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, name, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        check=False,
    )


NAMES = ("own.py", "my-own method.py", "v1.2.py", "tune.py", "torch.py", "class.py")
FOLDERS = {  # files next to a plugin, the body of its method, and the result
    "called": ({"helper.py": "W = 16\n"}, "import helper; return helper.W", "16"),
    "package": (
        {"parts/__init__.py": "", "parts/inner.py": "from .deep import W\n", "parts/deep.py": "W = 17\n"},
        "from parts.inner import W; return W",
        "17",
    ),
    "namespace": ({"bare/deep.py": "W = 18\n"}, "from bare import deep; return deep.W", "18"),
    "of Python": (
        {"random.py": "raise SystemExit('the file shadows random')\n"},
        "import random; return hasattr(random, 'gauss')",
        "True",
    ),
}


@pytest.mark.slow
def test_plugins_of_any_name_travel_as_source_with_the_files_that_they_import(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    values, expected = [], []
    for number, name in enumerate(NAMES):
        folder = tmp_path / f"named{number}"
        folder.mkdir()
        text = METHOD % "return [name for name in ('classes', 'ops') if not hasattr(torch, name)]"
        values.append(plugin(folder, text.replace("shipped", f"named{number}"), name)().call)
        expected.append("[]")
    for number, (files, body, given) in enumerate(FOLDERS.values()):
        for name, text in files.items():
            (tmp_path / f"own{number}" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"own{number}" / name).write_text(text)
        values.append(plugin(tmp_path / f"own{number}", (METHOD % body).replace("shipped", f"own{number}"))().call)
        expected.append(given)
    assert opened_elsewhere(values, tmp_path / "elsewhere") == expected


@pytest.mark.slow
def test_dataclasses_closures_over_tensors_and_locks_of_a_module_travel(tmp_path):
    text = (
        "import threading, dataclasses\n"
        + METHOD % "return PAIR.left + int(TWICE(torch.ones(1)))"
        + """
LOCK = threading.Lock()

@dataclasses.dataclass
class Pair:
    left: int
    def right(self):
        with LOCK:
            return torch.classes, torch.backends.cudnn

def twice(scale):
    return lambda x: x * scale

PAIR, TWICE = Pair(3), twice(torch.full((1,), 2.0))
"""
    )
    kind = plugin(tmp_path, text)
    twice = sys.modules[kind.__module__].TWICE
    (tmp_path / "elsewhere").mkdir()
    assert opened_elsewhere([kind().call, lambda: twice(4.0).item()], tmp_path / "elsewhere") == ["5", "8.0"]


SCRIPT = (
    HEAD
    + """
import pickle, sys, threading, typing, cloudpickle
from raylt.own_code.shipment import ship

class Mine(raylt.Method):
    name = "shipped"
    __annotations__ = {}
    def call(self, model=None):
        if model is None:
            return torch.zeros(1).item()
        return (model.classes, model.ops, model.library, model.backends.cudnn.rnn, model._VF, model.backends.mkldnn,
                model.compiler.config, model.utils.deterministic)

pickle.dump(ship([Mine().call], [], cloudpickle.dumps), open("shipped", "wb"))
LOCK, LOG = threading.Lock(), open("log", "w")

def held():
    return LOCK

class Direct(Mine):
    def lock(self):
        return LOCK

class File(Mine):
    def file(self):
        return LOG.write('x')

class Helper(Mine):
    def helper(self):
        return held()

class Holds(Mine):
    lock: typing.ClassVar = threading.Lock()

for kind in (Direct, File, Helper, Holds):
    try:
        ship(kind(), [], cloudpickle.dumps)
    except raylt.RayltError as error:
        print(type(error).__name__, error)
"""
)
MESSAGES = (
    r"script.py:24: Direct.lock uses LOCK, a lock, which cannot be sent to another process \(TypeError: cannot",
    r"script.py:28: File.file uses LOG, a TextIOWrapper, which cannot",
    r"script.py:20: held uses LOCK, a lock, which cannot",
    r"script.py:34: Holds.lock is a lock, which cannot be sent",
)


@pytest.mark.slow
def test_classes_of_a_script_travel_whatever_names_they_use_or_are_refused_by_their_line(tmp_path):
    done = script(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == len(MESSAGES)
    for line, expected in zip(messages, MESSAGES, strict=True):
        assert re.match(f"ConfigError {expected}", line), line
    opened = subprocess.run(
        [sys.executable, "-P", "-c", OPEN],
        input=(tmp_path / "shipped").read_bytes(),
        capture_output=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert opened.stdout.decode().split() == ["0.0"], opened.stderr.decode()


def test_a_module_that_does_not_import_elsewhere_is_named_with_its_line(tmp_path):
    text = "x = 1\nimport no_such_module_anywhere\n"
    with refused("plugin.not-importable", ConfigError) as caught:
        Shipment((Source(registry.PLUGIN + "own_1", str(tmp_path / "own.py"), text),), b"").open()
    cause = "ModuleNotFoundError: No module named 'no_such_module_anywhere' (own.py:2"
    assert caught.value.details["cause"].startswith(cause)


def test_a_module_that_was_changed_replaces_the_one_that_arrived_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shipment._arrived, "sources", {})
    name = f"{registry.PLUGIN}sent_1"
    for value in (1, 2):
        Shipment((Source(name, str(tmp_path / "sent.py"), f"number = {value}\n"),), pickle.dumps(None)).open()
        assert sys.modules[name].number == value


def test_two_plugin_files_of_the_same_name_are_two_modules(tmp_path):
    kinds = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        kinds.append(plugin(tmp_path / name, (METHOD % "return 1").replace('"shipped"', f'"{name}"')))
    assert [pickle.loads(pickle.dumps(kind)) for kind in kinds] == kinds


def test_modules_that_workers_would_import_in_place_of_others_are_named(tmp_path):
    for file in ("yaml.py", "json/__init__.py", "tune/__init__.py", "helper.py", "notes.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    assert shadowed([tmp_path]) == {str(tmp_path.resolve()): ["json", "tune", "yaml"]}


@pytest.mark.parametrize("taken", ["tune", "yaml", "helper"])
def test_a_plugin_whose_neighbour_has_the_name_of_another_module_is_refused(tmp_path, taken):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text("RANGE = 3\n")
    plugin(tmp_path / "first", "import helper\n" + METHOD % "return helper.RANGE")
    neighbour = tmp_path / "second" / f"{taken}.py"
    neighbour.write_text("RANGE = 3\n")
    (tmp_path / "second" / "own.py").write_text(f"import {taken}\n" + METHOD % f"return {taken}.RANGE")
    with refused("plugin.name-taken", ConfigError, path=str(neighbour), name=taken):
        load_plugin(tmp_path / "second" / "own.py")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "import torch\n\ndef f():\n    return torch.nothing\n\nf()\n",
            r"AttributeError: module 'torch' has no attribute 'nothing' \(own.py:4, in f\)",
        ),
        ("x = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(own.py:2\)"),
    ],
)
def test_a_plugin_that_does_not_run_is_refused_with_its_line_and_forgotten(tmp_path, text, cause):
    (tmp_path / "own.py").write_text(text)
    with refused("plugin.failed", ConfigError, path=str(tmp_path / "own.py")) as caught:
        load_plugin(tmp_path / "own.py")
    assert re.fullmatch(cause, caught.value.details["cause"])
    assert str(tmp_path / "own.py") not in plugin_files()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["actors", "tune"])
def test_a_file_beside_a_script_does_not_take_the_place_of_a_package_of_raylt(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("print('the user\\'s file ran')\nimport threading\n")
    head = "import raylt\nfrom raylt.own_code.top_level_names import claim\n"
    done = script(tmp_path, head + f"claim()\nimport {name}\nprint({name}.__file__)\n")
    assert done.stdout.strip() == str(ROOT / name / "__init__.py"), done.stdout + done.stderr
    claiming = "try:\n    claim()\nexcept raylt.RayltError as error:\n    print(error.code, error.details['path'])\n"
    done = script(tmp_path, f"import {name}\n{head}{claiming}")
    assert done.stdout.splitlines()[1] == f"plugin.name-taken {tmp_path / name}.py"
