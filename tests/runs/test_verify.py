"""`raylt verify` finds whole files, damaged files, and damage that can be repaired."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from small_runs import make_run

import raylt
from raylt import Run, registry
from raylt.cli.main import app
from raylt.errors import CheckpointError, FolderHeld
from raylt.methods.fedprox import FedProx
from raylt.runs.folder.writer import Journal
from raylt.runs.verify import repair, verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "one", "method=fedprox", "federation.rounds=3", "output.keep=3")


@pytest.fixture
def run(made, tmp_path):
    return Run.open(shutil.copytree(made.folder, tmp_path / "run"))


@pytest.fixture
def stopped(run):
    (run.folder / "summary.json").unlink()
    return run


def broken(folder):
    return {finding.what: finding.mendable for finding in verify(folder) if not finding.whole}


def unchecked(folder):
    return [finding.what for finding in verify(folder) if not finding.checked]


def flip(file, place=-20):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def ends_as(made, run):
    assert run.resume(fleet="local", quiet=True).summary["model_sha256"] == made.summary["model_sha256"]


def test_a_whole_run_is_whole_and_nothing_is_written(run):
    before = {file: file.stat().st_mtime_ns for file in run.folder.rglob("*")}
    findings = verify(run.folder)
    assert [finding.what for finding in findings] == [
        "identity.json",
        "config.yaml",
        "split.json",
        "outline.json",
        "data",
        "metrics.jsonl",
        "checkpoints/000001",
        "checkpoints/000002",
        "checkpoints/000003",
        "confusions",
        "provenance.jsonl",
        "summary.json",
        "model.safetensors",
        "events.out.tfevents.*",
    ]
    assert findings[-1].detail == "unsealed: no hash binds it"
    assert all(finding.whole for finding in findings)
    assert {file: file.stat().st_mtime_ns for file in run.folder.rglob("*")} == before
    assert repair(run.folder) == []


def test_a_file_without_a_hash_has_one_state_and_all_files_of_tensorboard_one_line(run, capsys):
    for name in ("picture.png", "events.out.tfevents.1", "events.out.tfevents.2"):
        (run.folder / name).write_text("")
    app(["verify", str(run.folder)], standalone_mode=False)
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [[name, state, text.strip()] for name, state, text in lines] == [
        [name, "unsealed", "no hash binds it"] for name in ("events.out.tfevents.*", "picture.png")
    ]


def test_a_torn_last_line_is_cut(made, stopped):
    file = stopped.folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-30])
    assert broken(stopped.folder) == {"metrics.jsonl": "cut it there"}
    assert repair(stopped.folder) == ["cut metrics.jsonl after line 2"]
    assert broken(stopped.folder) == {}
    ends_as(made, stopped)


def test_what_killed_writers_left_is_removed(made, stopped):
    (stopped.folder / ".summary.json.0123.writing").write_text("{")
    left = stopped.folder / "checkpoints/.000004.0123.writing"
    left.mkdir()
    (left / "server.safetensors").write_text("")
    assert set(broken(stopped.folder)) == {".summary.json.0123.writing", "checkpoints/.000004.0123.writing"}
    assert len(repair(stopped.folder)) == 2
    assert broken(stopped.folder) == {}


@pytest.mark.parametrize("file", ["server.safetensors", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_removed_where_an_older_one_is_whole(made, stopped, file):
    flip(stopped.folder / "checkpoints/000003" / file)
    assert broken(stopped.folder) == {"checkpoints/000003": "remove it"}
    assert repair(stopped.folder) == ["removed checkpoint 000003"]
    assert broken(stopped.folder) == {}
    ends_as(made, stopped)


def test_all_damaged_checkpoints_are_left(stopped):
    for step in (1, 2, 3):
        flip(stopped.folder / f"checkpoints/{step:06d}/server.safetensors")
    assert set(broken(stopped.folder).values()) == {None}
    assert repair(stopped.folder) == []
    assert len(list((stopped.folder / "checkpoints").iterdir())) == 3


def test_a_damaged_line_and_all_after_it_are_cut_if_a_checkpoint_precedes_it(made, stopped):
    file = stopped.folder / "metrics.jsonl"
    one, two, three = file.read_text().splitlines(keepends=True)
    file.write_text(one + two.replace('"phase"', '"phrase"') + three)
    assert broken(stopped.folder)["metrics.jsonl"] == "cut it after line 1 and continue from there"
    assert repair(stopped.folder) == ["removed checkpoint 000003", "cut metrics.jsonl after line 1"]
    assert broken(stopped.folder) == {}
    ends_as(made, stopped)


def test_a_damaged_line_of_a_finished_run_cannot_be_mended(run):
    file = run.folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"phase"', '"phrase"', 1))
    before = file.read_bytes()
    assert set(broken(run.folder).values()) == {None}
    assert repair(run.folder) == []
    assert file.read_bytes() == before


def test_checkpoints_that_are_gone_are_missed(stopped):
    shutil.rmtree(stopped.folder / "checkpoints")
    assert broken(stopped.folder) == {"checkpoints": None}


def test_a_last_checkpoint_that_is_gone_is_missed_in_a_finished_run(run):
    shutil.rmtree(run.folder / "checkpoints/000003")
    assert unchecked(run.folder) == ["checkpoints/000003"]
    shutil.rmtree(run.folder / "checkpoints")
    assert unchecked(run.folder) == ["checkpoints/000003"]
    assert broken(run.folder) == {}


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_model_is_rewritten_from_the_last_checkpoint(run, damage):
    file = run.folder / "model.safetensors"
    before = file.read_bytes()
    damage(file)
    assert broken(run.folder) == {"model.safetensors": "rewrite it from the last checkpoint"}
    with pytest.raises(CheckpointError, match="--repair"):
        run.resume(fleet="local", quiet=True)
    assert repair(run.folder) == ["rewrote model.safetensors from the last checkpoint"]
    assert file.read_bytes() == before
    assert broken(run.folder) == {}
    assert run.resume(fleet="local", quiet=True).state == "done"


def test_a_damaged_model_stays_if_the_last_checkpoint_does_not_give_it(run, monkeypatch):
    file = run.folder / "model.safetensors"
    flip(file)
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(FedProx, "global_model", lambda self, server: torch.nn.Linear(2, 2))
        assert "another model" in repair(run.folder)[0]
    shutil.rmtree(run.folder / "checkpoints/000003")
    assert broken(run.folder)["model.safetensors"] is None
    assert "cannot be rewritten" in repair(run.folder)[0]
    assert file.read_bytes() == before


def test_a_run_that_a_process_is_at_is_not_mended(stopped):
    with Journal(stopped.folder), pytest.raises(FolderHeld):
        repair(stopped.folder)


def stripes(seed):
    """Return a source of two classes, of random pixels."""
    x = np.random.default_rng(seed).integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    y = np.arange(60) % 2
    return raylt.Source("stripes", x, y, x[:20], y[:20], ("left", "right"), (0.5,), (0.25,))


@pytest.mark.slow
def test_data_that_are_not_at_hand_are_not_checked_and_no_damage(no_guests, tmp_path):
    raylt.register(lambda _: stripes(0), "mine", kind="source")
    file, data = tmp_path / "data.npz", stripes(1)
    np.savez(file, **{name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test", "class_names")})
    folders = [
        make_run(
            tmp_path, source[:4], "method=fedavg", f"data.source={source}", "data.imbalance=1", "model=small"
        ).folder
        for source in ("mine", f"npz:{file}")
    ]
    assert all(finding.whole and finding.checked for folder in folders for finding in verify(folder))
    registry._plugins.pop(("source", "mine"))
    registry.TABLES["source"].pop("mine")
    file.rename(tmp_path / "moved.npz")
    for folder in folders:
        assert [finding.what for finding in verify(folder) if not finding.checked] == ["data"]
        assert broken(folder) == {}
        assert not app(["verify", str(folder)], standalone_mode=False)
        with refused("signature.not-made"):
            app(["verify", str(folder), "--sign", "key"], standalone_mode=False)
    raylt.register(lambda _: stripes(2), "mine", kind="source")
    assert set(broken(folders[0])) == {"data"}


# the command


def called(capsys, *arguments):
    code = app(["verify", *map(str, arguments)], standalone_mode=False) or 0
    return code, *capsys.readouterr()


def test_the_command_says_it_in_80_columns_and_by_its_exit_code(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = called(capsys, run.folder)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert (out.count(" intact"), out.count(" unsealed")) == (13, 1)
    flip(run.folder / "checkpoints/000003/server.safetensors")
    code, out, _ = called(capsys, run.folder, "--format", "json")
    assert code == 2
    (wrong,) = [finding for finding in json.loads(out) if not finding["whole"]]
    assert (wrong["what"], wrong["mendable"]) == ("checkpoints/000003", "remove it")
    code, out, err = called(capsys, run.folder, "--repair")
    assert (code, err) == (0, "removed checkpoint 000003\n")
    assert "DAMAGED" not in out


def test_the_command_refuses_what_is_no_run(tmp_path):
    with pytest.raises(CheckpointError):
        app(["verify", str(tmp_path)], standalone_mode=False)
    (tmp_path / ".notes.writing").write_text("mine")
    with pytest.raises(CheckpointError):
        app(["verify", str(tmp_path), "--repair"], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == [".notes.writing"]
    for name in ("results.json", "run"):
        with refused("file.not-found", CheckpointError, path=str(tmp_path / name)):
            app(["verify", str(tmp_path / name)], standalone_mode=False)
