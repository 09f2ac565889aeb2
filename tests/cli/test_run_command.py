"""The commands `raylt run` and `raylt resume`."""

import json
from pathlib import Path

import pytest
import typer
import yaml
from commands import SMALL, Outcome, copied, damage
from safetensors.torch import load_file

from raylt.config import load
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.errors import RayltError

# other ways for a run to end


def test_failure_that_raylt_foresees_ends_with_its_own_exit_code(raylt, monkeypatch):
    def fail(*_, **__):
        raise RayltError("the [bold]server[/bold] is gone", code="server.lost")

    monkeypatch.setattr("raylt.runs.start.run", fail)
    assert raylt("run", "method=fedavg") == Outcome(1, "", "error [server.lost]: the [bold]server[/bold] is gone\n")


def test_unforeseen_exception_is_one_line_with_a_code_and_its_place(raylt, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("raylt.runs.start.run", fail)
    code, out, err = raylt("run", "method=fedavg")
    assert (code, out) == (1, "")
    assert err.startswith("error [command.failed]: ZeroDivisionError: division by zero (test_run_command.py:")
    assert err.count("\n") == 1


def test_an_exception_in_a_round_names_the_line_of_the_users_file(raylt, tmp_path, no_guests):
    text = "import raylt\nclass Mine(raylt.Method):\n    name, paper = 'typo', 'for tests'\n"
    text += "    def round(self, server, fleet):\n        got = fleet.ask(self.join, fleet.everyone, {})\n"
    (tmp_path / "own.py").write_text(text + "        server.step(got['model'])\n")
    code, _, err = raylt("--plugin", "own.py", "run", *SMALL, "method=typo", "--fleet", "local")
    assert code == 1
    assert "error [command.failed]: KeyError: 'model' (own.py:6, in round)." in err


def test_interrupted_run_says_how_to_go_on(raylt, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("raylt.runs.start.run", interrupt)
    again = "stopped before it began; repeat the same command\n"
    assert raylt("run", "method=fedavg") == Outcome(130, "", again)
    monkeypatch.setattr("raylt.studies.definition.read_definition", interrupt)
    code, out, err = raylt("study", "some.yaml")
    assert (code, out) == (130, "")
    assert err == "stopped; continue with the same command\n"
    monkeypatch.setattr("raylt.runs.run.Run.open", interrupt)
    assert raylt("debug", "study", "--round", 1, "--client", 0) == Outcome(130, "", "stopped\n")


def test_interrupted_run_or_search_is_named(raylt, monkeypatch, tmp_path):
    def interrupt_run(*_, callbacks=(), **__):
        for callback in callbacks:
            callback.on_start(tmp_path / "my run", None, [])
        raise KeyboardInterrupt

    def interrupt_search(*_, callbacks, **__):
        for callback in callbacks:
            callback.on_search_start(tmp_path / "search", ["fedprox"], 2, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr("raylt.runs.start.run", interrupt_run)
    monkeypatch.setattr("raylt.runs.continuation.branch", interrupt_run)
    monkeypatch.setattr("tune.resume", interrupt_search)
    for arguments in (["run", "method=fedavg"], ["branch", tmp_path, "method.x=1"]):
        code, _, err = raylt(*arguments)
        assert code == 130
        assert err == f"stopped; continue with raylt resume '{tmp_path / 'my run'}'\n"
    code, _, err = raylt("tune", "--resume", tmp_path / "search")
    assert code == 130
    assert err.endswith(f"stopped; continue with raylt tune --resume {tmp_path / 'search'}\n")
    monkeypatch.setattr("raylt.own_code.commands.plugin_files", lambda: [str(Path("own code.py").resolve())])
    code, _, err = raylt("run", "method=fedavg")
    assert err == f"stopped; continue with raylt resume --plugin 'own code.py' '{tmp_path / 'my run'}'\n"


@pytest.mark.parametrize(
    ("command", "function", "words", "expected"),
    [
        ("run", "start.run", ["method=fedavg", "--name", "s", "--out", "there"], (Path("there"), "s", "local", "auto")),
        ("resume", "continuation.resume", ["one", "federation.rounds=9"], (Path("one"), ["federation.rounds=9"])),
        ("branch", "continuation.branch", ["one", "seed=1", "--out", "f"], (Path("one"), ["seed=1"], Path("f"))),
    ],
)
def test_a_run_has_every_option(raylt, monkeypatch, command, function, words, expected):
    calls = []

    def begin(*given, callbacks, **more):
        calls.append((given[-len(expected) :], more, [each for each in callbacks if isinstance(each, str)]))
        end_with(3)

    monkeypatch.setattr(f"raylt.runs.{function}", begin)
    monkeypatch.setattr("raylt.runs.callbacks.trackers.trackers", lambda names: names)
    track = [] if command == "branch" else ["--track", "mlflow"]
    assert raylt(command, *words, "--fleet", "local", "--address", "auto", *track).code == 3
    where = {} if command == "run" else {"fleet": "local", "address": "auto"}
    assert calls == [(expected, where, track[1:])]


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


# a whole run


@pytest.mark.slow
def test_json_of_a_run_has_the_figures_of_summary_json(finished):
    folder, (code, out, _) = finished
    assert code == 0
    printed = json.loads(out)
    assert {
        "method",
        "split_sha256",
        "rounds",
        "accuracy",
        "groups",
        "clients",
        "bytes",
        "seconds",
        "model_sha256",
    } <= set(printed)
    assert set(printed["accuracy"]) == {"last", "last10", "last10_values", "best"}
    assert list(printed["groups"]) == ["many", "medium", "few"]
    assert {"mean", "worst_decile"} <= set(printed["clients"])
    assert set(printed["bytes"]) == {"up", "down"}
    assert printed.pop("folder") == str(folder)
    assert printed == json.loads((folder / "summary.json").read_text())
    assert (printed["method"], printed["rounds"]) == ("fedprox", 2)


def test_run_folder_is_complete(finished):
    folder, (_, out, _) = finished
    names = {"events" if entry.name.startswith("events.") else entry.name for entry in folder.iterdir()}
    assert names == {
        "identity.json",
        "config.yaml",
        "split.json",
        "outline.json",
        "metrics.jsonl",
        "checkpoints",
        "confusions",
        "events",
        "summary.json",
        "model.safetensors",
        ".lock",
        "provenance.jsonl",
    }
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["000001", "000002"]
    assert all(file.stat().st_size > 0 for file in folder.glob("events.*"))
    assert hash_tensors(load_file(folder / "model.safetensors")) == json.loads(out)["model_sha256"]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["method"] == {"name": "fedprox", "mu": 0.01}
    assert config["data"]["clients"] == 3


def test_bytes_of_a_run_are_those_of_its_clients_and_rounds(finished):
    folder, (_, out, _) = finished
    # down: 2 rounds x 3 clients x the model; up: the same, and 8 bytes each for the loss and for each of two terms'
    # shares
    model = sum(t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values())
    assert json.loads(out)["bytes"] == {"down": 2 * 3 * model, "up": 2 * 3 * (model + 3 * 8)}


def test_without_a_terminal_a_run_prints_a_line_per_round_and_no_bar(finished):
    folder, (_, _, err) = finished
    lines = err.splitlines()
    assert lines[0] == f"fedprox on digits, run folder {folder}"
    assert "training images (73%) are left out" in lines[1]
    assert [line.split("  ")[0] for line in lines[2:]] == ["round 1/2", "round 2/2"]
    assert "accuracy" in lines[2]
    assert "\x1b" not in err
    assert "\r" not in err


def test_table_of_a_run_shows_the_figures_of_its_summary(raylt):
    code, out, _ = raylt("run", *SMALL, "federation.rounds=1", "--fleet", "local", "--name", "two")
    summary = json.loads(Path("runs/two/summary.json").read_text())
    assert code == 0
    assert f"{100 * summary['accuracy']['last']:.2f} %" in out
    assert summary["model_sha256"][:16] in out


def test_a_long_path_of_a_run_folder_stays_in_one_line(raylt, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a-long-name-" * 8 + "end"
    code, out, _ = raylt("run", *SMALL, "federation.rounds=1", "--fleet", "local", "--name", name)
    assert code == 0
    assert out.splitlines()[-1] == f"run folder: runs/{name}"


def test_run_from_a_file_equals_the_run_from_overrides(raylt, finished):
    folder, (_, out, _) = finished
    code, again, _ = raylt("run", folder / "config.yaml", "--fleet", "local", "--format", "json", "--name", "again")
    assert code == 0
    assert json.loads(again)["model_sha256"] == json.loads(out)["model_sha256"]


def test_resume_after_damage_says_so_and_ends_with_the_same_model(raylt, finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    damage(folder / "checkpoints/000002")
    (folder / "summary.json").unlink()  # as if the run had been killed before its end
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
    code, out, err = raylt(
        "run",
        f"data.source=npz:{npz()}",
        "data.clients=2",
        "federation.rounds=1",
        "local.epochs=1",
        "method=fedavg",
        "--fleet",
        "local",
        "--format",
        "json",
    )
    assert code == 0, err
    assert Path(json.loads(out)["folder"]).parent == Path("runs")


def end_with(code):
    raise typer.Exit(code)


def test_without_any_settings_the_demonstration_is_run_and_said_to_be(raylt, monkeypatch):
    asked = []
    monkeypatch.setattr("raylt.runs.start.run", lambda config, *_, **__: asked.append(config) or end_with(3))
    code, out, err = raylt("run")
    assert (code, out) == (3, "")
    assert err == "no settings given; running the demonstration recipe:demo (raylt recipes lists others)\n"
    assert asked == [load("recipe:demo")]


def test_a_recipe_runs_by_its_name_with_settings_that_change_it(raylt, monkeypatch):
    asked = []
    monkeypatch.setattr("raylt.runs.start.run", lambda config, *_, **__: asked.append(config) or end_with(3))
    assert raylt("run", "recipe:mupfl/segmentation/shapes", "federation.rounds=2") == Outcome(3, "", "")
    assert (asked[0].data.source, asked[0].federation.rounds) == ("shapes", 2)


def test_help_shows_commands_that_can_be_copied(raylt):
    from raylt.cli.main import EXAMPLES

    code, out, _ = raylt("run", "--help")
    assert code == 0
    lines = [line.strip() for line in EXAMPLES.splitlines() if line.startswith("raylt")]
    assert all(" ".join(line.split()[:3]) in out for line in lines)
    for line in lines[:2]:
        load(*_divided(line.split()[2:]))


def _divided(words):
    kept = [word for word in words if "=" in word and not word.startswith("--")]
    return (words[0] if "=" not in words[0] else None), kept
