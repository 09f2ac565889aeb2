"""The commands of studies and comparisons, over run folders that are written without training."""

import json
import re
import shlex
import threading
from pathlib import Path

import pytest
import torch
from made import report, write_run
from refusals import refused

from raylt.cli.main import app
from raylt.errors import CheckpointError, ConfigError, Diverged
from raylt.methods.sfd.method import SFD
from raylt.runs.folder.reader import Files
from raylt.runs.folder.writer import Journal
from raylt.studies.definition import define
from raylt.studies.report.listing import ListedRun
from raylt.studies.study import Study

TREE = {
    "name": "s",
    "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox"}},
    "seeds": 2,
    "base": {"federation": {"rounds": 3}, "data": {"clients": 3}},
    "cells": {"data.imbalance": [10, 50]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a study of eight runs, of which six are done, one is stopped and one is missing; return its folder."""
    monkeypatch.chdir(tmp_path)
    study = Study.create(define(TREE), tmp_path / "runs")
    for place, plan in enumerate(study.definition.runs()[:-1]):
        write_run(
            study.folder / plan.folder,
            plan,
            [0.1, 0.2, 0.3 + place / 100],
            done=place < 6,
            split=10 * plan.seed + len(plan.cell),
        )
    (tmp_path / "s.yaml").write_text(json.dumps(TREE))
    return study.folder


def printed(capsys, *arguments):
    app([str(a) for a in arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_compare_prints_every_format(folder, capsys):
    assert "| IF 10 | fedavg | 2 |" in printed(capsys, "compare", folder, "--format", "markdown")
    assert r"\toprule" in printed(capsys, "compare", folder, "--format", "latex")
    content = json.loads(printed(capsys, "compare", folder, "--format", "json", "--measure", "few", "--target", "0.3"))
    assert content["measure"] == "few"
    assert content["rows"][0]["values"] == {"0": 0.3, "1": 0.32}
    assert content["target"][0]["rounds"] == 3
    assert len(content["left_out"]) == 2
    assert "left out:" in printed(capsys, "compare", folder)


@pytest.mark.slow
def test_compare_prints_the_claims_of_several_studies(tmp_path, capsys):
    studies = []
    for name, claims in (("plain", ["prox > fedavg"]), ("printed", [{"prox > fedavg": 9.99}])):
        made = Study.create(define(TREE | {"name": name, "claims": claims}), tmp_path / "runs")
        # prox is one point above fedavg with both seeds, so the interval has no width
        for plan in made.definition.runs():
            write_run(
                made.folder / plan.folder,
                plan,
                [0.1, 0.2, 0.31 if plan.arm == "prox" else 0.3],
                split=10 * plan.seed + len(plan.cell),
            )
        studies.append(made.folder)
    out = printed(capsys, "compare", *studies, "--claims", "--format", "markdown")
    assert "| prox > fedavg on accuracy | IF 10 | 2 | +1.00 ± 0.00 | - | too few seeds |" in out
    assert "| prox > fedavg on accuracy | IF 10 | 2 | +1.00 ± 0.00 | +9.99 | - | too few seeds |" in out
    content = json.loads(printed(capsys, "compare", *studies, "--claims", "--format", "json"))
    assert [each["claim"]["printed"] for each in content["claims"]["printed"]] == [9.99, 9.99]
    assert "prox > fedavg" in printed(capsys, "compare", studies[0], "--claims")
    twice, measured = [studies[0], studies[0]], [studies[0], "--measure", "few"]
    for arguments in (twice, measured, [studies[0], "--costs"]):
        with refused("config.conflict", ConfigError, key="--claims"):
            app(["compare", *map(str, arguments), "--claims"], standalone_mode=False)


@pytest.mark.parametrize("command", ["compare", "compare --measure few --measure many", "compare --claims", "rank"])
def test_the_options_of_a_comparison_reach_it(folder, capsys, monkeypatch, command):
    given = []

    def compare(study, measure, at, reference, level, mix_versions, may_lack=False):
        given.append((at, level, mix_versions))
        return compare_study(study, measure, at, reference, level, mix_versions, may_lack)

    compare_study = Study.compare
    monkeypatch.setattr(Study, "compare", compare)
    options = ["--at", "best", "--level", "0.8", "--format", "json"]
    content = json.loads(printed(capsys, *command.split()[:1], folder, *command.split()[1:], *options))
    if command == "rank":
        assert (content["at"], content["level"]) == ("best", 0.8)
    else:
        assert set(given) == {("best", 0.8, False)}


def test_a_comparison_has_the_spread_that_is_asked_for(folder, capsys):
    for measures in ([], ["--measure", "few", "--measure", "many"]):
        arguments = ["compare", folder, *measures, "--format", "markdown"]
        assert "standard deviation" not in printed(capsys, *arguments)
        assert "± standard deviation" in printed(capsys, *arguments, "--spread", "sd")


def test_two_studies_of_one_name_are_not_ranked(folder):
    with refused("config.conflict", ConfigError, key="STUDY", name="s"):
        app(["rank", str(folder), str(folder)], standalone_mode=False)


def test_runs_of_several_versions_are_ranked_only_if_asked(tmp_path, capsys):
    study = Study.create(define(TREE), tmp_path / "runs")
    for plan in study.definition.runs():
        code = "other" if plan.arm == "prox" else None
        write_run(study.folder / plan.folder, plan, [0.1], split=10 * plan.seed + len(plan.cell), code=code)
    with refused("study.not-comparable", CheckpointError, condition="code"):
        app(["rank", str(study.folder)], standalone_mode=False)
    assert "better than another arm" in printed(capsys, "rank", study.folder, "--mix-versions")


def test_the_page_of_a_ranking_has_the_command_that_writes_it(folder, capsys, tmp_path):
    page = tmp_path / "board.md"
    options = ["--measure", "few", "--at", "best", "--level", "0.9", "--mix-versions", "--to", str(page)]
    printed(capsys, "rank", folder, *options)
    written = page.read_text()
    command = shlex.split(written.split("```")[1].replace("\\\n", " "))
    assert command == ["raylt", "rank", str(folder), *options]
    page.unlink()
    printed(capsys, *command[1:])
    assert page.read_text() == written


def test_a_page_of_a_ranking_in_a_folder_that_does_not_exist_is_refused(folder):
    with refused("file.unwritable", ConfigError, key="--to", path="absent/board.md"):
        app(["rank", str(folder), "--to", "absent/board.md"], standalone_mode=False)


def test_run_folders_are_ranked_as_one_study(folder, capsys):
    runs = sorted(folder.glob("if10/*/seed-*"))
    content = json.loads(printed(capsys, "rank", *runs, "--format", "json"))
    whole = json.loads(printed(capsys, "rank", folder, "--format", "json"))
    assert len(runs) == 4
    assert [each["arm"] for each in content["arms"]] == ["fedprox", "fedavg"]
    assert whole["arms"][0]["arm"] == "prox"


def test_compare_takes_runs_by_themselves(folder, capsys):
    out = printed(
        capsys, "compare", *sorted(folder.glob("if10/*/seed-*")), "--reference", "fedprox", "--format", "markdown"
    )
    assert "differences to fedprox" in out


def test_compare_has_the_table_of_a_target_in_every_format(folder, capsys):
    for format, row in (
        ("table", "2 of 2"),
        ("markdown", "| IF 10 | fedavg | 2 of 2 | 3.0 |"),
        ("latex", "%   IF 10, fedavg, 2 of 2, 3.0"),
    ):
        out = printed(capsys, "compare", folder, "--target", "0.3", "--format", format)
        assert "until accuracy 30 %" in out
        assert row in out


def test_compare_has_the_passes_of_each_arm_and_those_until_a_target(tmp_path, capsys):
    arms = {"fedavg": "fedavg", "rep": {"method": {"name": "fedrep", "head_epochs": 3}}}
    study = Study.create(define({"name": "passes", "base": TREE["base"], "arms": arms, "seeds": 1}), tmp_path / "runs")
    for plan in study.definition.runs():
        write_run(study.folder / plan.folder, plan, [0.1, 0.2, 0.3])
    content = json.loads(printed(capsys, "compare", study.folder, "--costs", "--target", "0.2", "--format", "json"))
    passes = {each["arm"]: each["passes"] for each in content["costs"]}
    assert passes["fedavg"] == 1
    assert passes["rep"] == pytest.approx(5 / 3)  # (2 + 3 / 3 + 3 / 3 / 3) / 2 with two epochs and three rounds
    assert {each["arm"]: each["passes"] for each in content["target"]} == {arm: 2 * passes[arm] for arm in passes}
    out = printed(capsys, "compare", study.folder, "--costs", "--target", "0.2", "--format", "markdown")
    assert f"| rep | 1 of 1 | 2.0 | {2 * passes['rep']:.1f} |" in out
    assert f"| rep | {passes['rep']:.2f} |" in out
    assert "passes" not in printed(capsys, "compare", study.folder, "--target", "0.2")


def test_a_study_among_runs_is_refused_by_what_it_is(folder, tmp_path):
    run = folder / "if10" / "fedavg" / "seed-0"
    Study.open(folder).save_results()
    for paths in ((folder, run), (run, folder), (folder / "results.json", folder / "results.json")):
        with refused("config.conflict", ConfigError):
            app(["compare", *map(str, paths)], standalone_mode=False)


@pytest.mark.slow
def test_a_measure_that_no_run_has_leaves_its_column_empty(folder, capsys):
    measures = ["--measure", "local", "--measure", "accuracy"]
    rows = printed(capsys, "compare", folder, *measures, "--format", "markdown").splitlines()
    assert "| cell | arm | seeds | local, % | accuracy, % |" in rows
    row = next(row for row in rows if row.startswith("| IF 10 | fedavg "))
    assert row.split("|")[4].strip() == "-"
    assert float(row.split("|")[5].split("±")[0]) == 31  # the mean of 30 and 32
    content = json.loads(printed(capsys, "compare", folder, *measures, "--format", "json"))
    assert content["measures"]["local"]["rows"] == []
    with refused("study.no-figure", ConfigError, name="local"):
        app(["compare", str(folder), "--measure", "local"], standalone_mode=False)
    with refused("study.no-figure", ConfigError, name="local"):
        app(["compare", str(folder), "--measure", "local", "--measure", "new_owned"], standalone_mode=False)


def test_claim_on_a_group_without_classes_is_refused_in_a_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree = TREE | {"claims": ["prox > fedavg on few"], "cells": {"data.imbalance": [1, 2]}}
    (tmp_path / "s.yaml").write_text(json.dumps(tree))
    with refused("study.empty-group", ConfigError, key="study.claims", group="few", groups=[20, 60]) as caught:
        app(["study", "s.yaml", "--dry-run"], standalone_mode=False)
    assert "data.groups" in str(caught.value)
    base = TREE["base"] | {"data": {"clients": 3, "groups": [100, 1000]}}
    (tmp_path / "s.yaml").write_text(json.dumps(tree | {"base": base}))
    assert "8 runs" in printed(capsys, "study", "s.yaml", "--dry-run")


UNFIT = [
    ({"model": "cnn"}, "model.images-too-small", {"key": "model", "value": "cnn"}),
    ({"model": "torchvision:googlenet"}, "model.wrong-input", {"key": "model"}),
    ({"data": {"source": "digits", "size": 32}}, "config.conflict", {"key": "data.size"}),
    ({"data": {"clients": 1000}}, "data.too-few", {}),
]


@pytest.mark.parametrize(("settings", "code", "details"), UNFIT)
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_arm_that_cannot_start_is_refused_before_anything_runs(tmp_path, monkeypatch, settings, code, details, options):
    monkeypatch.chdir(tmp_path)
    arms = {"fits": "fedavg", "unfit": {"method": "fedavg", **settings}}
    (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"arms": arms}))
    with refused(code, **details):
        app(["study", "s.yaml", *options], standalone_mode=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tune", "key"),
    [
        ({"fields": {"prox": ["muu"]}}, "method.muu"),
        ({"ranges": {"method.muu": "uniform(0, 1)"}}, "method.muu"),
        ({"ranges": {"local.lrr": "uniform(0, 1)"}}, "local.lrr"),
        ({"ranges": {"local.lr": "banana(1)"}}, "study.tune.ranges.local.lr"),
        ({"ranges": {"local.lr": "uniform(-1, 1)"}}, "local.lr"),
    ],
)
@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_a_search_of_what_no_arm_has_is_refused_before_anything_runs(tmp_path, monkeypatch, tune, key, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"tune": {"runs": 3, **tune}}))
    with pytest.raises(ConfigError) as caught:
        app(["study", "s.yaml", *options], standalone_mode=False)
    assert caught.value.details["key"] == key
    assert not (tmp_path / "runs").exists()


def test_one_run_is_not_called_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree = {"name": "one", "arms": {"fedavg": "fedavg"}, "seeds": 1, "base": {"federation": {"rounds": 3}}}
    (tmp_path / "s.yaml").write_text(json.dumps(tree))
    assert "\n1 run, 1 to do" in printed(capsys, "study", "s.yaml", "--dry-run")
    study = Study.create(define(tree), tmp_path / "runs")
    [plan] = study.definition.runs()
    write_run(study.folder / plan.folder, plan, [0.1, 0.2, 0.3], done=True, split=0)
    page = Path(printed(capsys, "report", study.folder).strip()).read_text()
    assert "1 run: 1 done." in page
    assert "1 runs" not in page


def test_study_is_planned_where_its_data_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree = TREE | {"claims": ["prox > fedavg on few"], "cells": {"data.source": ["folder:elsewhere", "digits"]}}
    base = TREE["base"] | {"data": {"clients": 3, "imbalance": 1}}  # digits have no few-shot class; the folder may
    (tmp_path / "s.yaml").write_text(json.dumps(tree | {"base": base}))
    assert "8 runs" in printed(capsys, "study", "s.yaml", "--dry-run")
    arms = tree["arms"] | {"unfit": {"method": "fedavg", "model": "cnn"}}
    (tmp_path / "s.yaml").write_text(json.dumps(tree | {"arms": arms}))
    with refused("model.images-too-small", ConfigError):
        app(["study", "s.yaml", "--dry-run"], standalone_mode=False)


def test_study_is_planned_where_its_weights_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arms = {"fedavg": "fedavg", "own": {"method": "fedavg", "model": "torchvision:resnet18", "weights": "absent.pt"}}
    (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"arms": arms, "cells": {}, "seeds": 1}))
    assert "2 runs" in printed(capsys, "study", "s.yaml", "--dry-run")


def test_runs_that_a_study_no_longer_plans_are_named(folder, capsys, tmp_path):
    (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"arms": {"fedavg": "fedavg"}}))
    app(["study", "s.yaml", "--dry-run"], standalone_mode=False)
    notice = " ".join(capsys.readouterr().err.split())
    assert "the study no longer plans 3 runs in its folder (the first is if10/prox/seed-0)" in notice


def test_dry_run_says_what_a_last_phase_costs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fields = {"rf_dim": 60, "m_min": 80, "m_max": 120}
    arms = {"fedavg": "fedavg", "whole": {"method": {"name": "sfd", **fields}}}
    (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"arms": arms, "cells": {}, "seeds": 1}))
    lines = printed(capsys, "study", "s.yaml", "--dry-run").splitlines()
    assert lines[-1].startswith("last phase of whole: synthesis of 10 classes in 100 steps each, about ")


@pytest.mark.parametrize("command", ["study", "plan"])
def test_what_is_said_of_one_core_is_timed_on_one_core(command, tmp_path, monkeypatch, capsys):
    threads = []

    def last_phase_seconds(self, spec, model):
        threads.append(torch.get_num_threads())
        return 1.0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SFD, "last_phase_seconds", last_phase_seconds)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if command == "study":
        (tmp_path / "s.yaml").write_text(json.dumps(TREE | {"arms": {"sfd": "sfd"}, "cells": {}, "seeds": 1}))
        printed(capsys, "study", "s.yaml", "--dry-run")
    else:
        printed(capsys, "plan", "--nodes", "1x2cpu", "method=sfd", "data.source=digits", "data.clients=3")
    assert threads == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_dry_run_lists_what_is_left_and_makes_nothing(folder, capsys, tmp_path):
    out = printed(capsys, "study", "s.yaml", "--dry-run", "--parallel", "2")
    # 3 rounds of 2 s for the missing run; the stopped run has none of its 3 rounds left
    assert re.search(r"8 runs, 2 to do: .*\b6 s, 2 at once", out)
    printed(capsys, "study", "s.yaml", "--dry-run", "--out", "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_ls_lists_studies_and_inside_them_runs(folder, capsys):
    entries = json.loads(printed(capsys, "ls", "--format", "json"))
    assert [(e["name"], e["state"], e["progress"]) for e in entries] == [("s", "stopped", "6/8 runs")]
    assert len(json.loads(printed(capsys, "ls", folder, "--format", "json"))) == 7
    with refused("file.not-found", ConfigError, path="nowhere"):
        printed(capsys, "ls", "nowhere")


@pytest.mark.parametrize("file", ["split.json", "identity.json"])
def test_ls_says_the_same_of_a_damaged_run_in_its_folder_and_in_itself(folder, capsys, file):
    run = folder / "if10/fedavg/seed-0"
    (run / file).unlink()
    listed = json.loads(printed(capsys, "ls", run.parent, "--format", "json"))
    (itself,) = json.loads(printed(capsys, "ls", run, "--format", "json"))
    assert itself["state"] == "damaged"
    assert itself in [entry | {"age_s": itself["age_s"]} for entry in listed]
    (run.parent / "config.yaml").write_text("")  # of the user
    assert len(json.loads(printed(capsys, "ls", run.parent, "--format", "json"))) == 2


@pytest.mark.parametrize("figure", ["matched", "local", "accuracy"])
def test_ls_marks_the_figures_of_clients_own_models_in_80_columns(folder, capsys, monkeypatch, figure):
    entry = ListedRun("ditto-digits-1", "run", "ditto", "stopped", "100/100", 0.5468, 3000.0, 10000, figure)
    monkeypatch.setattr("raylt.studies.report.listing.listing", lambda folder: [entry])
    monkeypatch.setenv("COLUMNS", "80")
    (line,) = [line for line in printed(capsys, "ls").splitlines() if "54.68 %" in line]
    mark = {"matched": " own mix", "local": " own images", "accuracy": ""}[figure]
    assert re.search(rf"54.68 %{mark} +10000", line)


def test_report_is_written_beside_the_study(folder, capsys):
    assert printed(capsys, "report", folder).strip() == str(folder / "report.html")
    assert "IF 50" in (folder / "report.html").read_text()


def test_a_report_of_several_versions_is_written_only_if_asked(folder, capsys, monkeypatch):
    given = []
    monkeypatch.setattr("raylt.studies.report.html.write_report", lambda study, *options: given.append(options))
    for options in ([], ["--mix-versions"]):
        printed(capsys, "report", folder, "--to", "r.html", *options)
    assert given == [(Path("r.html"), False), (Path("r.html"), True)]


@pytest.mark.slow
def test_follow_shows_a_run_until_it_ends(folder, capsys):
    run = folder / "if10/fedavg/seed-0"
    (run / "summary.json").unlink()
    journal = Journal(run)

    def go_on():
        with journal:
            journal.append(report(4, 0.75, "finish"))

    threading.Timer(0.4, go_on).start()
    out = printed(capsys, "follow", run, "--every", "0.1")
    assert "round 1/3  accuracy 10.00 %" in out
    assert "finish  accuracy 75.00 %" in out
    assert f"stopped after step 4; continue with raylt resume {run}\n" in out


def test_follow_names_the_plugin_of_a_run_that_has_stopped(folder, capsys, monkeypatch):
    run = folder / "if10/fedavg/seed-0"
    (run / "summary.json").unlink()
    records = [{"kind": kind, "name": "own", "origin": "own.py", "sha256": None} for kind in ("method", "model")]
    monkeypatch.setattr(Files, "plugins", lambda _: records)
    assert f"continue with raylt resume --plugin own.py {run}\n" in printed(capsys, "follow", run)


def test_follow_names_the_damage_of_a_run_that_has_ended(folder, capsys):
    split = folder / "if10/fedavg/seed-0/split.json"
    split.unlink()
    split.mkdir()
    assert app(["follow", str(split.parent)], standalone_mode=False) == 1
    assert capsys.readouterr().out.startswith(f"damaged: {split}: ")


def test_ls_and_follow_name_the_error_that_ended_a_run(folder, capsys):
    run = folder / "if10/fedavg/seed-0"
    (run / "summary.json").unlink()
    with Journal(run) as journal:
        journal.note_failure(Diverged("all 3 updates are NaN. Lower local.lr.", code="training.diverged"))
    assert "failed (training.diverged)" in printed(capsys, "ls", run)
    assert app(["follow", str(run)], standalone_mode=False) == 1
    assert capsys.readouterr().out.endswith(
        "failed (training.diverged) after step 3: all 3 updates are NaN. Lower local.lr.\n"
    )


@pytest.mark.parametrize("command", ["follow", "stop"])
def test_a_command_on_a_run_says_that_there_is_none(capsys, command):
    with refused("run.not-found", path="nowhere"):
        printed(capsys, command, "nowhere")


def test_reproduce_plans_and_says_what_cannot_be_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = printed(
        capsys,
        "reproduce",
        "mupfl",
        "2",
        "--cells",
        "dataset=fashion_mnist,IF=100,alpha=0.5",
        "--scale",
        "0.1",
        "--arms",
        "MuPFL,FedAvg,FedRep",
        "--dry-run",
    )
    assert "to do" in out
    assert "3 cells: " in out
    with refused("config.wrong-type", ConfigError, key="--cells", value="IF"):
        printed(capsys, "reproduce", "mupfl", "--cells", "IF")


@pytest.mark.parametrize(
    "arguments",
    [
        ["fedsm", "fig6"],
        ["fedsm", "II (IoT-J) = 2 (AAAI)"],
        ["mupfl", "2", "--cells", "dataset=fashion_mnist,IF=100,alpha=0.5", "--arms", "MuPFL,FedAvg"],
    ],
)
def test_a_dry_run_of_a_reproduction_is_one_json_document_with_the_plan(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    plan = json.loads(printed(capsys, "reproduce", *arguments, "--scale", "0.1", "--dry-run", "--format", "json"))
    assert len(plan["runs"]) > 1
    assert {run["state"] for run in plan["runs"]} == {"missing"}
    assert ("cells" in plan) == (arguments[1] != "fig6")


def test_a_reproduction_has_the_rows_and_seeds_that_are_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = ["mupfl", "2", "--cells", "dataset=fashion_mnist,IF=100,alpha=0.5", "--arms", "MuPFL,FedAvg"]
    options = ["--seeds", "2", "--scale", "0.1", "--name", "part", "--dry-run", "--format", "json"]
    plan = json.loads(printed(capsys, "reproduce", *cell, *options))
    assert [run["run"].rpartition("/")[2] for run in plan["runs"]] == ["seed-0", "seed-0", "seed-1", "seed-1"]
    assert sorted(each["cell"]["method"] for each in plan["cells"]) == ["FedAvg", "MuPFL"]


@pytest.mark.parametrize(
    ("options", "papers", "mixed"),
    [([], None, False), (["--paper", "sfd"], {"SFD"}, False), (["--mix-versions"], None, True)],
)
def test_options_of_verdicts_choose_the_cells_and_the_versions(capsys, monkeypatch, folder, options, papers, mixed):
    given = []
    monkeypatch.setattr("raylt.studies.papers.verdicts.verdicts", lambda records, *which: given.append(which) or [])
    printed(capsys, "verdicts", folder, *options)
    [(cells, *versions)] = given
    assert (cells and {cell.paper for cell in cells}) == papers
    assert versions == [mixed]


def test_verdicts_writes_the_page(capsys, tmp_path, folder):
    out = printed(capsys, "verdicts", folder, "--page", tmp_path / "page.md")
    assert "640 cells" in out
    assert "640 printed cells, 0 have recorded runs" in (tmp_path / "page.md").read_text()
