"""Unusable files, names and code of other people end a command with one line and exit code 2."""

import importlib.util
import io
import re
import shlex
import subprocess
import sys

import pytest
from refusals import refused

import raylt
from raylt.cli.main import main
from raylt.cli.options import Output
from raylt.own_code.module_sources import own_folder
from raylt.runs.callbacks.terminal import TerminalProgress
from raylt.runs.export.model_card import model_card
from tune.report.screen import SearchProgress

EXITS = {
    "import": "import sys\nsys.exit()\n",
    "round": (
        "import sys, raylt\nclass Quiet(raylt.Method):\n    name = 'quiet'\n"
        "    def round(self, server, fleet):\n        sys.exit(0)\n"
    ),
    "import-abruptly": "import os\nos._exit(0)\n",
    "import-otherwise": "raise GeneratorExit\n",
    "import-unreadable": "class E(Exception):\n    def __str__(self):\n        raise E\nraise E\n",
    "round-abruptly": (
        "import os, raylt\nclass Quiet(raylt.Method):\n    name = 'quiet_abruptly'\n"
        "    def round(self, server, fleet):\n        os._exit(0)\n"
    ),
    "round-otherwise": (
        "import raylt\nclass Quiet(raylt.Method):\n    name = 'quiet_otherwise'\n"
        "    def round(self, server, fleet):\n        raise GeneratorExit\n"
    ),
    "train-otherwise": (
        "import raylt\nclass Quiet(raylt.Method):\n    name = 'quiet_training'\n"
        "    def train(self, client, message):\n        raise GeneratorExit\n"
    ),
    "model": "import sys, raylt\ndef net(classes, shape):\n    sys.exit()\nraylt.register(net, 'net', kind='model')\n",
}


def import_file(file):
    specification = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


SMALL = ["data.clients=3", "federation.rounds=1", "local.epochs=1", "--fleet", "local"]


@pytest.mark.parametrize("place", EXITS)
def test_code_that_exits_is_an_error_with_its_file(tmp_path, monkeypatch, capsys, place):
    file = tmp_path / "own.py"
    file.write_text(EXITS[place])
    method = re.search(r"name = '(\w+)'", EXITS[place])
    named = ["model=net", "method=fedavg"] if place == "model" else [f"method={method[1] if method else 'fedavg'}"]
    arguments = ["raylt", "run", *named, *SMALL, "--plugin", str(file), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "plugin.failed" in error
    assert "own.py" in error


LEAVING = """import sys
from raylt.errors import no_exit
def leave():
    with no_exit():
        sys.exit(130)
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_package_of_another_python_is_not_the_users_code(tmp_path, folder):
    """A virtual environment may show the packages of the system's Python, such as typer, which ends with sys.exit()."""
    package = tmp_path / "lib" / folder
    package.mkdir(parents=True)
    (package / "leaving.py").write_text(LEAVING)
    module = import_file(package / "leaving.py")
    with pytest.raises(SystemExit):
        module.leave()
    assert own_folder(module) is None


FORKING = """import os
child = os.fork()
if child == 0:
    os._exit(7)
if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7:
    raise RuntimeError("the child went on")
import raylt
class Forking(raylt.Method):
    name = "forking"
"""


@pytest.mark.slow
def test_a_process_that_a_plugin_forks_may_leave_abruptly(tmp_path):
    (tmp_path / "own.py").write_text(FORKING)
    command = [sys.executable, "-m", "raylt", "run", "method=forking", *SMALL, "--plugin", "own.py", "--out", "runs"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\udcff", "x" * 300, "ö" * 121, "a/b", ""])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path, name):
    with refused("config.out-of-range", key="name"):
        raylt.run("fedavg", out=tmp_path, name=name, fleet="local", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_no_escape_sequence_reaches_the_terminal():
    from rich.table import Table

    table = Table("name")
    table.add_row("\x1b]0;owned\x07\x1b[2J\x9b31m\u202eabc")
    console = Output()
    console.file = io.StringIO()
    console.print(table)
    console.print("x\x1b[31my")
    text = console.file.getvalue()
    assert "owned" in text
    assert not any(mark in text for mark in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("progress", [TerminalProgress, SearchProgress])
def test_no_escape_sequence_reaches_the_terminal_while_a_run_goes_on(capsys, progress):
    progress().on_message("run folder /runs/\x1b[2J\x9b31m\u202eabc")
    assert capsys.readouterr().err == "run folder /runs/?[2J?31m?abc\n"


@pytest.mark.parametrize("command", ["follow", "stop", "resume"])
def test_an_empty_path_is_refused(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["raylt", command, ""])
    with pytest.raises(SystemExit):
        main()
    assert "command.failed" not in capsys.readouterr().err


def test_a_model_card_quotes_names(tmp_path):
    name = f"$(touch {tmp_path / 'ran'})`touch {tmp_path / 'ran'}`\"; touch {tmp_path / 'ran'}; '"
    client = {"name": name, "own": {}, "figures": {}}
    description = {
        "format": 1,
        "task": "classification",
        "class_names": ["a", "b"],
        "input": {"height": 8, "width": 8, "channels": 1, "mean": [0.5], "std": [0.2], "fit": "crop"},
        "model": "small",
        "method": {"name": "fedper"},
        "batch": 32,
        "source": f"folder:`{name}`",
        "rounds": 3,
        "run": "0" * 64,
        "split_sha256": "1" * 64,
        "figures": {},
        "versions": {"raylt": "0.1.0"},
        "guests": [],
        "clients": [{"id": 0, **client}, {"id": 1, **client}],
    }
    card = model_card(description, "m $(x).safetensors")  # pyright: ignore[reportArgumentType]
    (line,) = [line for line in card.splitlines() if line.startswith("raylt predict")]
    assert shlex.split(line) == ["raylt", "predict", "m $(x).safetensors", "IMAGE", "...", "--client", name]
    subprocess.run(["sh", "-c", line.replace("raylt predict", "true", 1)], check=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    (call,) = [line for line in card.splitlines() if line.startswith("model = ")]
    calls = []
    exec(call, {"raylt": type("Raylt", (), {"load_model": lambda *given, **options: calls.append((given, options))})})
    assert calls == [(("m $(x).safetensors",), {"client": name})]
