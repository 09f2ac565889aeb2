"""The command `raylt new`: every template runs."""

import errno
import json
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from commands import refused
from ray.autoscaler._private.util import prepare_config, validate_config

from raylt.cli.new import FILES, TEMPLATES


def test_every_template_belongs_to_a_kind():
    files = {path.name for path in TEMPLATES.iterdir() if path.suffix in (".py", ".yaml")}
    assert files - {"__init__.py"} == {name for names in FILES.values() for name in names}


def test_the_method_runs(raylt, no_guests):
    assert raylt("new", "method").code == 0
    settings = "method=my_method", "federation.rounds=1", "local.epochs=1", "data.clients=2", "model=small"
    code, out, err = raylt("run", "--plugin", "my_method.py", *settings, "--fleet", "local", "--format", "json")
    assert code == 0, err
    assert json.loads(out)["method"] == "my_method"


@pytest.mark.slow
def test_the_method_passes_its_check(raylt, no_guests):
    raylt("new", "method")
    code, out, err = raylt("check", "my_method.py")
    assert code == 0, out + err


def test_the_study_is_planned(raylt):
    assert raylt("new", "study", "mine").code == 0
    code, out, err = raylt("study", "mine/my_study.yaml", "--dry-run", "--format", "json")
    assert code == 0, err
    assert len(json.loads(out)["runs"]) == 12


@pytest.mark.slow
def test_the_study_runs(raylt):
    raylt("new", "study")
    file = Path("my_study.yaml")
    tree = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**tree, "seeds": 1, "base": {**tree["base"], "federation": {"rounds": 2}}}))
    code, out, err = raylt("study", "my_study.yaml", "--parallel", "1")
    assert code == 0, err
    assert "ccvr" in out


def test_the_example_draws_what_raylt_reads(raylt):
    assert raylt("new", "example").code == 0
    subprocess.run([sys.executable, "eight_shops.py", "shops", "--most", "3"], check=True, capture_output=True)
    code, out, err = raylt("data", "data.source=folder:shops", "data.size=16", "data.bad=skip", "--format", "json")
    assert code == 0, err
    assert "Wien" in json.dumps(json.loads(out), ensure_ascii=False)


def test_the_cluster_has_all_that_ray_up_mounts(raylt, monkeypatch):
    assert raylt("new", "cluster").code == 0
    monkeypatch.chdir("cluster")
    for name in FILES["cluster"]:
        config = yaml.safe_load(Path(name).read_text())
        validate_config(prepare_config(config))
        mounted = [source for target, source in config["file_mounts"].items() if target.startswith("~/raylt")]
        assert len(mounted) == 5
        assert all(Path(source).exists() for source in mounted)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [each for each in requires("raylt") or () if "extra ==" not in each]
    assert not list(Path("raylt").rglob("__pycache__"))


@pytest.mark.parametrize("kind", FILES)
def test_nothing_is_overwritten(raylt, kind):
    assert raylt("new", kind, "folder").code == 0
    before = sorted(path.name for path in Path("folder").iterdir())
    refused(raylt("new", kind, "folder"), "[file.exists]", FILES[kind][0])
    assert sorted(path.name for path in Path("folder").iterdir()) == before


@pytest.mark.parametrize("kind", FILES)
def test_the_same_command_is_possible_again_after_a_full_disk(raylt, monkeypatch, kind):
    copy = shutil.copyfile

    def fail(source, target):
        copy(source, target)
        if Path(target).name in (FILES[kind][-1], "cells.py"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", fail)
        code, out, err = raylt("new", kind, "folder")
    assert (code, out) == (1, "")
    assert "[disk.full]: folder/" in err
    assert list(Path("folder").iterdir()) == []
    assert raylt("new", kind, "folder").code == 0


def test_a_folder_that_cannot_be_made_is_refused(raylt):
    Path("taken").write_text("")
    refused(raylt("new", "study", "taken"), "taken")
