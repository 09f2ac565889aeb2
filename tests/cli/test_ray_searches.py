"""The command `raylt tune --scheduler pbt|hyperband|median`."""

import json
from types import SimpleNamespace

import pytest

from raylt.cli.options import Format
from raylt.cli.searches.ray_tune import _show

SETTINGS = ["method=fedprox", "data.clients=4", "data.imbalance=5", "federation.rounds=4", "local.epochs=1"]
RANGE = "local.lr=loguniform(0.01,0.3)"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--scheduler", "hyperband", "--fleet", "local"], "config.conflict"),
        (["--scheduler", "hyperband", "--budget", "900"], "config.conflict"),
        (["--scheduler", "median", "--methods", "fedprox,fedavg"], "config.conflict"),
        (["--scheduler", "pbt", "seed=choice(0,1)"], "search.fixed-setting"),
        (["--scheduler", "pbt", "--name", "taken"], "search.exists"),
        (["--scheduler", "pbt", "--name", "a/b"], "config.out-of-range"),
        (["--scheduler", "bohb"], "command.usage"),
        (["--scheduler", "median", "method=fednova", "local.optimiser=adam", "--fields", ""], "config.conflict"),
        (["--scheduler", "hyperband", "--grace", "2"], "config.conflict"),
        (["--scheduler", "median", "--grace", "4"], "search.no-rungs"),
        (["--scheduler", "pbt", "--grace", "50"], "search.no-rungs"),
        (["--scheduler", "pbt", "--samples", "1"], "config.out-of-range"),
        (["--scheduler", "median", "--metric", "few", "--metric", "few"], "config.conflict"),
        (["--scheduler", "median", "--metric", "few", "data.groups=[1, 5]"], "search.no-class"),
        (["--scheduler", "pbt", "--searcher", "tpe"], "config.conflict"),
    ],
)
def test_what_does_not_go_with_a_scheduler_of_ray_is_refused_before_ray_starts(raylt, tmp_path, arguments, code):
    (tmp_path / "runs/taken").mkdir(parents=True)
    ended = raylt("tune", *SETTINGS, RANGE, *arguments)
    assert ended.code == 2
    assert f"[{code}]" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["hyperband", "pbt", pytest.param("median", marks=pytest.mark.soak)])
def test_a_search_with_a_scheduler_of_ray_leaves_its_tables_and_can_be_resumed(raylt, ray_session, tmp_path, scheduler):
    metrics = ["--metric", "accuracy", "--metric", "many"]
    where = ["--name", "s", "--samples", "3", "--format", "json"]
    grace = [] if scheduler == "hyperband" else ["--grace", "2"]
    ended = raylt("tune", *SETTINGS, RANGE, "--fields", "mu", "--scheduler", scheduler, *grace, *metrics, *where)
    assert ended.code == 0, ended.err
    assert f"Ray's {scheduler}: 3 trials, folder " in ended.err
    shown = json.loads(ended.out[ended.out.index("{\n") :])
    assert [row["failed"] for row in shown["trials"]] == [None] * 3
    scores = [row["accuracy"] for row in shown["trials"]]
    assert scores == sorted(scores, reverse=True)
    folder = tmp_path / "runs/s"
    assert {"best.yaml", "trials.csv", "ray_search.json"} <= {file.name for file in folder.iterdir()}
    assert list(shown["trials"][0])[:4] == ["trial", "round", "accuracy", "many"]
    assert shown["trials"][0]["front"] is True
    assert (folder / "pareto.png").stat().st_size > 1000
    again = raylt("tune", "--resume", folder)
    assert again.code == 0, again.err
    assert f"best: {shown['trials'][0]['trial']}" in again.out
    shown_text = " ".join(again.out.split())  # the title wraps above a narrow table
    assert "3 trials, best first; percent: accuracy, many on validation samples; front: " in shown_text
    assert f"{100 * scores[0]:.2f}" in again.out
    assert ("pbt changed values" in again.out) == (folder / "pbt_global.txt").is_file()


def test_an_interrupted_search_with_a_scheduler_of_ray_is_named(raylt, monkeypatch, tmp_path):
    def interrupt(address, run):
        run()
        raise KeyboardInterrupt

    monkeypatch.setattr("raylt.cli.searches.ray_tune._in_session", interrupt)
    monkeypatch.setattr("tune.ray_tune.search.ray_search", lambda folder, plan, on_start: on_start())
    monkeypatch.setattr("tune.ray_tune.search.resume_ray_search", lambda folder: None)
    code, _, err = raylt("tune", *SETTINGS, RANGE, "--scheduler", "median", "--name", "s")
    assert code == 130
    assert err.endswith(f"stopped; continue with raylt tune --resume {tmp_path / 'runs/s'}\n")
    (tmp_path / "s").mkdir()
    (tmp_path / "s/ray_search.json").write_text("{}")
    code, _, err = raylt("tune", "--resume", tmp_path / "s")
    assert code == 130
    assert err.endswith(f"stopped; continue with raylt tune --resume {tmp_path / 's'}\n")


def test_a_search_with_a_scheduler_of_ray_cannot_be_verified_and_verify_says_so(raylt, tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/ray_search.json").write_text("{}")
    ended = raylt("verify", tmp_path / "s")
    assert ended.code == 2
    assert "[search.not-verifiable]" in ended.err
    assert "scheduler of Ray Tune" in ended.err


def test_a_narrow_terminal_cuts_no_figure_of_a_trial(capsys, tmp_path):
    row = {
        "trial": "3f2a1_00000",
        "round": 4,
        "accuracy": 0.2033,
        "local.lr": 0.03909,
        "method.mu": 0.4764,
        "local.optimiser": "adam",
        "local.momentum": 0.9,
        "local.weight_decay": 0.00012,
        "failed": None,
    }
    _show(SimpleNamespace(rows=[row], metrics=("accuracy",), folder=tmp_path, exchanged=False), Format.table)
    words = capsys.readouterr().out.split()
    assert {"3f2a1_00000", "20.33", "0.03909", "0.4764", "adam", "0.9", "0.00012", "weight_decay"} <= set(words)
