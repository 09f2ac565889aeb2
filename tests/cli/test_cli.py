"""The command line as a user meets it. Most commands run in this process; real ones where the exit code or the
terminal matters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from raylt.cli import main as cli
from raylt.config import settings
from raylt.core.checkpoint import hash_tensors
from raylt.errors import RayltError

SMALL = ["method=fedavg", "data.clients=3", "local.epochs=1", "data.imbalance=50", "federation.rounds=2"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def raylt(monkeypatch, capsys, tmp_path):
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["raylt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())
    yield call
    torch.set_num_threads(threads)          # a run sets them to 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Outcome]:
    """A run of two rounds, from a process of its own: its folder and what it printed."""
    out = tmp_path_factory.mktemp("runs")
    done = subprocess.run([sys.executable, "-m", "raylt", "run", *SMALL, "method=fedprox", "method.mu=1e-2",
                           "--fleet", "local", "--format", "json", "--out", str(out), "--name", "one"],
                          capture_output=True, text=True, cwd=out)
    return out / "one", Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def npz(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), "y_train": np.arange(40) % 2,
              "x_test": rng.integers(0, 256, (6, 8, 8), dtype=np.uint8), "y_test": np.arange(6) % 2,
              "class_names": np.array(["a", "b"])}

    def write(*without: str) -> Path:
        path = tmp_path / "arrays.npz"
        np.savez(path, **{key: value for key, value in arrays.items() if key not in without})
        return path
    return write


def damage(folder: Path) -> None:
    tensors = folder / "server.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])


def copied(folder: Path, place: Path) -> Path:
    subprocess.run(["cp", "-r", folder, place], check=True)
    return place


def refused(outcome: Outcome, *named: str) -> None:
    """Exit code 2, one line on stderr that names what is wrong, nothing on stdout."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert all(part in outcome.err for part in named), outcome.err


# refused input

SCENES = "data.source=shapes", "data.partition=iid", "data.imbalance=1"


@pytest.mark.parametrize(("arguments", "named"), [
    (["federation.round=2"], ["federation.round", "did you mean federation.rounds?"]),
    (["method=fedprix"], ["'fedprix'", "did you mean fedprox?"]),
    (["method=fedavg", "method.mu=1"], ["method.mu"]),
    (["data.source=npz:missing.npz"], ["missing.npz", "no such file"]),
    (["data.source=digit"], ["'digit'", "did you mean digits?"]),
    (["data.source=cifar10"], ["cifar10", "data.download=true"]),
    (["data.imbalance=0.5"], ["data.imbalance = 0.5", "greater than or equal to 1"]),
    (["data.alpha=0"], ["data.alpha = 0", "greater than 0"]),
    (["method=sfd", *SCENES, "model=lraspp"], ["method = sfd: is for classification", "raylt methods"]),
    (["method=bpfed", *SCENES, "model=lraspp"], ["method = bpfed: is for classification"]),
    (["method=fedavg", *SCENES], ["model = small: does not do segmentation", "there are: lraspp"]),
    (["method=fedavg", "model=lraspp"], ["model = lraspp: does not do classification", "resnet8"]),
    (["method=fedavg", "model=lraspp", "data.source=shapes"], ["data.partition = dirichlet", "data.partition=classes"]),
    (["data.clients=5000"], ["data.clients = 5000", "training samples", "lower"]),
    (["data.partition=creff", "data.clients=5"], ["data.clients = 5", "at least 10"]),
    (["absent.yaml"], ["absent.yaml", "exists"]),
    (["seed"], ["seed", "exists"]),
    (["seed=0", "rounds"], ["'rounds'", "key=value"]),
    (["--name", "a/b"], ["--name a/b", "--out"]),
    (["--name", ".."], ["--name ..", "--out"])])
def test_run_refuses(raylt, tmp_path, arguments, named):
    refused(raylt("run", *arguments, "--fleet", "local"), *named)
    assert list(tmp_path.iterdir()) == []               # no run folder is left behind


@pytest.mark.parametrize(("without", "named"), [
    (["y_train"], ["has no y_train;"]), (["x_test", "class_names"], ["has no x_test, class_names;"])])
def test_npz_without_some_arrays_is_refused(raylt, npz, without, named):
    refused(raylt("run", f"data.source=npz:{npz(*without)}", "--fleet", "local"), "arrays.npz", *named)


def test_existing_run_folder_is_refused_and_left_alone(raylt, finished):
    folder, _ = finished
    before = sorted(folder.rglob("*"))
    refused(raylt("run", "--fleet", "local", "--out", folder.parent, "--name", "one"), "exists already",
            f"raylt resume {folder}")
    assert sorted(folder.rglob("*")) == before


def test_resume_with_other_settings_shows_each_difference(raylt, finished):
    folder, _ = finished
    refused(raylt("resume", folder, "local.lr=0.1", "seed=3", "method.mu=2", "--fleet", "local"),
            "local.lr: 0.05 -> 0.1", "seed: 0 -> 3", "method.mu: 0.01 -> 2", "resources.*")


def test_resume_of_what_is_no_run_is_refused(raylt, tmp_path):
    refused(raylt("resume", tmp_path, "--fleet", "local"), "not a run folder")
    refused(raylt("resume", tmp_path / "absent", "--fleet", "local"), "absent: not a run folder")


def test_resume_is_refused_when_all_checkpoints_are_damaged(raylt, finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    for step in ("000001", "000002"):
        damage(folder / "checkpoints" / step)
    refused(raylt("resume", folder, "--fleet", "local"), "000002 is damaged", "000001 is damaged", "start a new run")


def test_option_or_command_that_does_not_exist_is_refused(raylt):
    refused(raylt("run", "--format", "xml"), "--format", "'xml'", "'table', 'json'")
    refused(raylt("run", "--fleet", "slurm"), "--fleet", "'slurm'")
    refused(raylt("run", "--bogus"), "--bogus")
    refused(raylt("train"), "'train'")
    refused(raylt("resume"), "RUN")


def test_split_that_cannot_be_written_or_read_is_refused(raylt, tmp_path):
    refused(raylt("data", "--export", tmp_path / "absent" / "split.json"), "--export", "absent")
    refused(raylt("data", "--import", tmp_path / "absent.json"), "absent.json", "exists")
    (tmp_path / "other.json").write_text("{}")
    refused(raylt("data", "--import", tmp_path / "other.json"), "other.json", "not a split")


@pytest.mark.slow
def test_address_where_no_cluster_answers_is_refused(tmp_path):
    done = subprocess.run([sys.executable, "-m", "raylt", "run", "--address", "127.0.0.1:1", "--name", "one"],
                          capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: --address 127.0.0.1:1: nothing answers there (Connection refused)")
    assert "Traceback" not in done.stderr


def test_error_of_a_real_process_is_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "raylt", "run", "data.alpha=0"], capture_output=True, text=True,
                          cwd=tmp_path)
    refused(Outcome(done.returncode, done.stdout, done.stderr), "data.alpha = 0")


def test_debug_shows_the_traceback_anywhere_on_the_line(tmp_path):
    done = subprocess.run([sys.executable, "-m", "raylt", "--debug", "run", "data.alpha=0"], capture_output=True,
                          text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1] == "raylt.errors.ConfigError: data.alpha = 0: input should be greater than 0"


# what else can end a run

def test_failure_that_raylt_foresees_ends_with_its_own_exit_code(raylt, monkeypatch):
    def fail(*_):
        raise RayltError("the [bold]server[/bold] is gone")
    monkeypatch.setattr("raylt.runs.runner.start", fail)
    assert raylt("run") == Outcome(1, "", "error: the [bold]server[/bold] is gone\n")


def test_failure_that_nobody_foresaw_is_one_line_with_its_place(raylt, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("division\nby zero")
    monkeypatch.setattr("raylt.runs.runner.start", fail)
    code, out, err = raylt("run")
    assert (code, out) == (1, "")
    assert err.startswith("error: ZeroDivisionError: division by zero (test_cli.py:")
    assert err.endswith("--debug shows the traceback\n")
    assert err.count("\n") == 1


def test_interrupted_run_says_how_to_go_on(raylt, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr("raylt.runs.runner.start", interrupt)
    assert raylt("run") == Outcome(130, "", "stopped; to go on: raylt resume RUN, or raylt tune --resume SEARCH\n")


def test_without_a_command_help_is_shown_and_no_error(raylt):
    code, out, err = raylt()
    assert code == 2
    assert all(command in out for command in ("run", "resume", "methods", "settings", "data", "doctor"))
    assert "error" not in err


def test_help_ends_with_exit_code_0(raylt):
    assert raylt("--help").code == 0
    code, out, err = raylt("run", "--help")
    assert (code, err) == (0, "")
    assert "--fleet" in out


# a run

def test_json_of_a_run_has_the_figures_of_summary_json(finished):
    folder, (code, out, _) = finished
    assert code == 0
    printed = json.loads(out)
    assert {"method", "split_sha256", "rounds", "accuracy", "groups", "clients", "bytes", "seconds",
            "model_sha256"} <= set(printed)
    assert set(printed["accuracy"]) == {"last", "last10", "best"}
    assert list(printed["groups"]) == ["many", "medium", "few"]
    assert {"mean", "worst_decile"} <= set(printed["clients"])
    assert set(printed["bytes"]) == {"up", "down"}
    assert printed.pop("folder") == str(folder)
    assert printed == json.loads((folder / "summary.json").read_text())
    assert (printed["method"], printed["rounds"]) == ("fedprox", 2)


def test_run_folder_is_complete(finished):
    folder, (_, out, _) = finished
    names = {"events" if entry.name.startswith("events.") else entry.name for entry in folder.iterdir()}
    assert names == {"config.yaml", "split.json", "metrics.jsonl", "checkpoints", "events", "summary.json",
                     "model.safetensors", ".lock"}
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["000001", "000002"]
    assert all(file.stat().st_size > 0 for file in folder.glob("events.*"))
    assert hash_tensors(load_file(folder / "model.safetensors")) == json.loads(out)["model_sha256"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["method"] == {"name": "fedprox", "mu": 0.01}
    assert config["data"]["clients"] == 3


def test_bytes_of_a_run_are_those_of_its_clients_and_rounds(finished):
    folder, (_, out, _) = finished
    # down: 2 rounds x 3 clients x the model; up: the same and 8 bytes of loss each
    model = sum(t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values())
    assert json.loads(out)["bytes"] == {"down": 2 * 3 * model, "up": 2 * 3 * (model + 8)}


def test_without_a_terminal_a_run_prints_a_line_per_round_and_no_bar(finished):
    folder, (_, _, err) = finished
    lines = err.splitlines()
    assert lines[0] == f"fedprox on digits, run folder {folder}"
    assert [line.split("  ")[0] for line in lines[1:]] == ["round 1/2", "round 2/2"]
    assert "accuracy" in lines[1]
    assert "\x1b" not in err
    assert "\r" not in err


def test_table_of_a_run_shows_the_figures_of_its_summary(raylt):
    code, out, _ = raylt("run", *SMALL, "federation.rounds=1", "--fleet", "local", "--name", "two")
    summary = json.loads(Path("runs/two/summary.json").read_text())
    assert code == 0
    assert f"{100 * summary['accuracy']['last']:.2f} %" in out
    assert summary["model_sha256"][:16] in out
    assert "runs/two" in out


def test_run_from_a_file_equals_the_run_from_overrides(raylt, finished):
    folder, (_, out, _) = finished
    code, again, _ = raylt("run", folder / "config.yaml", "--fleet", "local", "--format", "json", "--name", "again")
    assert code == 0
    assert json.loads(again)["model_sha256"] == json.loads(out)["model_sha256"]


def test_resume_after_damage_says_so_and_ends_with_the_same_model(raylt, finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    damage(folder / "checkpoints/000002")
    code, out, err = raylt("resume", folder, "--fleet", "local", "--format", "json", "output.keep=3")
    assert code == 0
    assert "checkpoint 000002 is damaged" in err.splitlines()[0]
    assert "continuing after step 1" in err
    assert json.loads(out)["model_sha256"] == json.loads(finished[1].out)["model_sha256"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_resume_of_a_finished_run_shows_its_summary_again(raylt, finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    code, out, _ = raylt("resume", folder, "--fleet", "local", "--format", "json")
    assert code == 0
    assert json.loads(out) == json.loads(finished[1].out) | {"folder": str(folder)}


def test_folder_of_a_run_without_a_name_is_one_folder_below_out(raylt, npz):
    code, out, err = raylt("run", f"data.source=npz:{npz()}", "data.clients=2", "federation.rounds=1", "local.epochs=1",
                           "method=fedavg",
                           "--fleet", "local", "--format", "json")
    assert code == 0, err
    assert Path(json.loads(out)["folder"]).parent == Path("runs")


# the other commands

def test_classes_and_clients_of_a_split_sum_up(raylt):
    code, out, _ = raylt("data", "data.clients=7", "--format", "json")
    split = json.loads(out)
    assert code == 0
    assert np.array(split["clients"]).shape == (7, 10)
    assert np.array(split["clients"]).sum(0).tolist() == split["classes"]
    assert len(split["names"]) == len(split["groups"]) == 10
    assert set(split["groups"]) == {"many", "medium", "few"}


def test_table_of_a_split_shows_the_sums_of_its_groups(raylt):
    split = json.loads(raylt("data", "--format", "json").out)
    out = raylt("data").out
    sizes = [n for n, group in zip(split["classes"], split["groups"], strict=True) if group == "few"]
    assert f"few: {len(sizes)} classes, {sum(sizes)} samples" in out
    assert split["sha256"] in out


def test_imported_split_is_the_exported_one_whatever_the_seed(raylt, tmp_path):
    file = tmp_path / "split.json"
    exported = json.loads(raylt("data", "data.seed=5", "--export", file, "--format", "json").out)
    imported = json.loads(raylt("data", "--import", file, "--format", "json").out)
    drawn = json.loads(raylt("data", "--format", "json").out)
    assert imported == exported
    assert drawn["sha256"] != exported["sha256"]


def test_split_of_a_run_can_be_imported(raylt, finished):
    folder, (_, out, _) = finished
    imported = json.loads(raylt("data", *SMALL, "--import", folder / "split.json", "--format", "json").out)
    assert imported["sha256"] == json.loads(out)["split_sha256"]


def test_methods_are_listed_with_default_range_and_source(raylt):
    code, out, _ = raylt("methods", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert listing["fedprox"]["fields"]["mu"] == {
        "default": 0.01, "range": "[0.0001, 1] log", "source": "weight of the proximal term, Eq. 2"}
    assert listing["fedavg"]["paper"] == "McMahan et al., AISTATS 2017"
    table = raylt("methods").out
    assert all(name in table for name in listing)


def test_settings_are_listed_with_default_and_meaning(raylt):
    code, out, _ = raylt("settings", "--format", "json")
    listing = json.loads(out)
    assert code == 0
    assert list(listing) == [key for key, _ in settings()]
    assert listing["data.alpha"]["default"] == 0.5
    assert "Dirichlet" in listing["data.alpha"]["what"]
    table = raylt("settings").out
    assert all(key in table for key in listing)


def test_clients_prints_and_draws_every_client(raylt, finished):
    folder, _ = finished
    code, out, err = raylt("clients", folder)
    assert (code, err) == (0, "")
    assert "over the classes it owns" in out
    assert "worst decile" in out
    assert out.rstrip().endswith("clients.png")
    code, out, _ = raylt("clients", folder, "--metric", "matched", "--picture", "here.png", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert Path("here.png").stat().st_size > 1000
    assert (found["metric"], len(found["runs"]["one"]), len(found["samples"])) == ("matched", 3, 3)
    refused(raylt("clients", folder, "--picture", "here.abc"), "--picture here.abc", "give a .png")


def test_clients_refuses_runs_over_another_split_in_one_line(raylt, finished):
    folder, _ = finished
    code, *_ = raylt("run", *SMALL, "data.seed=5", "method=fedavg", "--fleet", "local", "--out", ".", "--name", "two")
    assert code == 0
    code, out, err = raylt("clients", folder, "two")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "two: its clients hold other samples" in err
