"""The command `raylt plot`."""

import json
from pathlib import Path

import pytest
from commands import SMALL, refused

from raylt.errors import ConfigError


def test_clients_are_printed_and_drawn(raylt, finished):
    folder, _ = finished
    code, out, err = raylt("plot", "clients", folder)
    assert (code, err) == (0, "")
    assert "over the classes it owns" in out
    assert "worst decile" in out
    assert out.rstrip().endswith("clients.png")
    (folder / "clients.png").unlink()  # other tests use the folder, too
    code, out, _ = raylt("plot", "clients", folder, "--metric", "matched", "--picture", "here.png", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert Path("here.png").stat().st_size > 1000
    assert (found["metric"], len(found["runs"]["one"]), len(found["samples"])) == ("matched", 3, 3)
    refused(raylt("plot", "clients", folder, "--picture", "here.abc"), "--picture", "abc", ".png")


def test_clients_of_runs_over_another_split_are_refused(raylt, finished):
    folder, _ = finished
    code, *_ = raylt("run", *SMALL, "data.seed=5", "method=fedavg", "--fleet", "local", "--out", ".", "--name", "two")
    assert code == 0
    refused(raylt("plot", "clients", folder, "two"), "two: has another split than")


@pytest.mark.slow
def test_a_split_is_drawn_from_settings_or_from_a_run(raylt, finished):
    folder, _ = finished
    assert raylt("plot", "data", "data.clients=30", "data.alpha=0.1") == (0, "data.png\n", "")
    assert raylt("plot", "data", folder)[:2] == (0, f"{folder}/data.png\n")
    assert raylt("plot", "data", "data.source=shapes", "data.partition=classes", "--picture", "maps.png").code == 0
    assert all(Path(name).stat().st_size > 10_000 for name in ("data.png", "maps.png", folder / "data.png"))
    (folder / "data.png").unlink()
    refused(raylt("plot", "data", folder, "seed=3"), "[config.conflict]: seed=3: ")
    refused(raylt("plot", "data", "data.clients=0"), "[config.out-of-range]: data.clients: ")
    refused(raylt("plot", "data", "absent.yaml"), "absent.yaml", "No such file")
    refused(raylt("plot", "data", "--picture", "absent/it.png"), "--picture", "absent/it.png", "no such folder")


@pytest.mark.parametrize("arguments", [["features"], ["clusters"], ["predictions"], ["clients"], ["data"]])
def test_what_is_no_run_folder_is_refused(raylt, tmp_path, arguments):
    refused(raylt("plot", *arguments, tmp_path), "not a run folder")


def test_pictures_of_other_methods_are_refused(raylt, finished):
    folder, _ = finished
    refused(raylt("plot", "features", folder), "fedprox", "sfd")
    refused(raylt("plot", "clusters", folder), "fedprox", "mupfl")
    refused(raylt("plot", "predictions", folder), "no label maps", "raylt plot clients")


def test_without_a_picture_its_help_is_shown(raylt):
    code, out, err = raylt("plot")
    assert code == 2
    assert all(name in out for name in ("features", "clusters", "predictions", "clients", "data"))
    assert "error" not in err


def test_the_commands_of_before_are_gone(raylt):
    for command in ("features", "clusters", "show", "clients"):
        refused(raylt(command, "runs/one"), f"'{command}'")


def test_arms_of_recorded_studies_are_drawn(raylt):
    digits = Path(__file__).parents[2] / "studies" / "results" / "digits.json"
    assert raylt("plot", "arms", digits, "--measure", "few", "--picture", "arms.png") == (0, "arms.png\n", "")
    assert Path("arms.png").stat().st_size > 10_000
    refused(raylt("plot", "arms", digits, "--measure", "new_owned", "--picture", "arms.png"), "new_owned")


def test_the_picture_of_a_study_has_every_option(raylt, monkeypatch):
    digits = Path(__file__).parents[2] / "studies" / "results" / "digits.json"
    given = []
    monkeypatch.setattr("raylt.plots.arms.draw_arms", lambda made, _: given.extend((c.at, c.reference) for c in made))
    monkeypatch.setattr("raylt.plots.curves.draw_curves", lambda study, *options: given.append(options))
    assert raylt("plot", "arms", digits, "--at", "best", "--reference", "sfd", "--picture", "a.png").code == 0
    options = ["--measure", "few", "--over", "bytes", "--spread", "sd", "--level", "0.8", "--mix-versions"]
    assert raylt("plot", "curves", digits, *options, "--picture", "c.png").code == 0
    assert given == [("best", "sfd"), (["few"], "bytes", "sd", Path("c.png"), 0.8, True)]


@pytest.mark.parametrize("picture", ["confusion", "classes"])
def test_the_picture_of_an_evaluation_is_of_the_step_and_client_that_are_asked_for(raylt, monkeypatch, picture):
    given = []

    def confusion_of(run, *which):
        given.append(which)
        raise ConfigError("plot: ends here. Repeat it.", code="config.conflict")

    monkeypatch.setattr("raylt.runs.run.Run.open", lambda folder: None)
    monkeypatch.setattr("raylt.plots.classes.confusion_of", confusion_of)
    assert raylt("plot", picture, ".", "--client", "a", "--step", 2).code == 2
    assert given == [("a", 2)]
