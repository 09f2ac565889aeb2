"""A run folder in which a file cannot be opened, or is a folder: each command says so in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest

FILES = (
    "identity.json",
    "config.yaml",
    "split.json",
    "outline.json",
    "metrics.jsonl",
    "provenance.jsonl",
    "summary.json",
    "model.safetensors",
    ".lock",
    "checkpoints",
    "confusions",
)
QUICKLY = {"split.json", "metrics.jsonl", "checkpoints"}
COMMANDS = (
    ("ls", "."),
    ("verify", "run"),
    ("follow", "run"),
    ("compare", "run"),
    ("report", "run"),
    ("plot", "clients", "run"),
    ("export", "run"),
    ("resume", "run", "--fleet", "local"),
    ("stop", "run"),
)


@pytest.fixture
def run(finished, raylt):
    return Path(shutil.copytree(finished[0], "run"))


def exchanged(path):
    """Replace a file by a folder, or a folder by a file."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("x")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow) for name in FILES]
)
@pytest.mark.parametrize("what", ["denied", "exchanged"])
def test_every_command_ends_with_a_line(raylt, run, monkeypatch, name, what):
    if what == "exchanged":
        exchanged(run / name)
    else:
        real = os.open

        def denied(path, *arguments, **how):
            if os.path.basename(os.fsdecode(path)) == name:
                raise PermissionError(13, "Permission denied", path)
            return real(path, *arguments, **how)

        monkeypatch.setattr(os, "open", denied)
    for command in COMMANDS:
        code, out, err = raylt(*command)
        assert code in (0, 1, 2), command
        assert "command.failed" not in err, (command, err)
        assert "Traceback" not in out + err, (command, err)
        errors = [line for line in err.splitlines() if line.startswith("error")]
        assert len(errors) <= 1, (command, err)
        assert errors or out, command


@pytest.fixture
def theirs(finished, monkeypatch):
    """Copy a run to `theirs/run`, and deny this process to enter the folder `theirs`."""
    shutil.copytree(finished[0], "theirs/run")

    def denying(real):
        def denied(path, *arguments, **how):
            if not isinstance(path, int) and "theirs/" in os.fsdecode(path):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *arguments, **how)

        return denied

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, denying(getattr(os, name)))
    return Path("theirs/run")


@pytest.mark.parametrize("command", ["verify", "resume", "compare", "report", "export", "stop"])
def test_a_run_in_a_folder_that_may_not_be_entered_is_not_called_missing(raylt, theirs, command):
    code, _, err = raylt(command, theirs)
    assert code == 2
    assert err.startswith("error [file.unreadable]: theirs/run"), err


def test_files_in_a_folder_that_may_not_be_entered_are_not_called_missing(raylt, theirs):
    for words in (["predict", theirs, "x.png"], ["--plugin", "theirs/own.py", "methods"], ["page", "theirs/p.md"]):
        code, _, err = raylt(*words)
        assert (code, err[:25]) == (2, "error [file.unreadable]: "), err


def test_other_runs_are_listed_beside_a_folder_that_may_not_be_entered(raylt, run, theirs):
    code, out, _ = raylt("ls", ".", "--format", "json")
    assert code == 0
    assert {(row["name"], row["state"]) for row in json.loads(out)} == {("run", "done"), ("theirs", "unreadable")}
