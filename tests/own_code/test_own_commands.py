"""Commands in messages load the plugin files that they need."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from raylt.errors import at_the_shell, quoted
from raylt.own_code.commands import own_command, plugin_options, resume_call
from raylt.own_code.module_sources import PLUGIN


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Let this process have loaded the file `own code.py` in the current folder, and return its path."""
    file = tmp_path / "own code.py"
    module = ModuleType(f"{PLUGIN}own_code_1")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return file


def test_a_command_loads_the_plugin_files_of_this_process(plugin):
    assert own_command("debug", Path("a run"), "--round", 3) == "raylt debug --plugin 'own code.py' 'a run' --round 3"
    with at_the_shell():
        assert resume_call(Path("r")) == "raylt resume --plugin 'own code.py' r"
    assert resume_call(Path("r")) == "raylt.resume('r')"
    assert own_command("resume", "r", plugins=["other.py"]) == "raylt resume --plugin other.py r"


def test_a_folder_that_begins_with_a_dash_is_not_an_option():
    assert own_command("resume", Path("-runs/a b"), "--fleet", "local") == "raylt resume './-runs/a b' --fleet local"
    assert (quoted("-r"), quoted("r"), quoted("/-r")) == ("./-r", "r", "/-r")


def test_a_file_outside_the_current_folder_has_its_whole_path(plugin, tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert plugin_options() == ["--plugin", str(plugin)]
    os.rmdir(tmp_path / "below")
    assert plugin_options() == ["--plugin", str(plugin)]
