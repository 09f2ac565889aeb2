"""Figures of the papers as studies: the settings of their runs, and the rounds until an accuracy."""

import json
from dataclasses import replace

import pytest
from made import write_run
from refusals import refused
from typer.testing import CliRunner

from raylt.cli.main import app
from raylt.errors import ConfigError
from raylt.studies.analysis.time_to_accuracy import reached
from raylt.studies.definition import define
from raylt.studies.papers import figures
from raylt.studies.papers.figures import Figure, figure_of, plan_figure
from raylt.studies.records.record import read_run
from raylt.studies.report.comparison_tables import with_target
from raylt.studies.report.text_table import TextTable

TINY = Figure(
    "6",
    "a tiny figure",
    {"FedPer": {"method": "fedper"}, "FedAvg": {"method": "fedavg"}},
    {"digits, IF 10": "demo"},
    {"evaluation.every": 1, "evaluation.personal": 1, "local.epochs": 1, "data.clients": 3},
    "matched",
    targets={"digits, IF 10": 0.01},
)
TWO_CELLS = replace(
    TINY,
    arms={"FedAvg": {"method": "fedavg"}},
    recipes=dict.fromkeys(("digits, IF 10", "digits, IF 5"), "demo"),
    targets={"digits, IF 10": 0.01, "digits, IF 5": 0.02},
)


def test_the_number_of_active_clients_is_the_share_of_fedsms_clients():
    plans = plan_figure(figure_of("FedSM", "6"), "six", seeds=1, scale=0.5).runs()
    active = {plan.config.federation.participation * plan.config.data.clients for plan in plans}
    assert {round(each) for each in active} == {4, 8, 12, 16, 20}
    assert {(plan.config.data.source, plan.config.data.imbalance) for plan in plans} == {
        (source, ratio) for source in ("cifar10", "cifar100") for ratio in (10, 50, 100)
    }
    assert {plan.config.federation.rounds for plan in plans} == {100}
    assert {plan.config.method["name"] for plan in plans} == {"fedsm"}
    least = plan_figure(figure_of("FedSM", "6"), "six", seeds=1, scale=1e-4)
    assert {plan.config.federation.rounds for plan in least.runs()} == {1}
    assert (least.measure, least.at) == ("accuracy", "best")


def test_mupfls_rounds_are_counted_on_clients_models_that_are_judged_in_each_round():
    figure = figure_of("mupfl", "6")
    definition = plan_figure(figure, "six", seeds=2, scale=1)
    assert definition.measure == "matched"
    plans = definition.runs()
    assert len(plans) == 3 * 7 * 2
    assert {(plan.config.evaluation.every, plan.config.evaluation.personal) for plan in plans} == {(1, 1)}
    assert {(plan.config.data.imbalance, plan.config.data.alpha) for plan in plans} == {(10, 1.0)}
    assert {plan.cell for plan in plans} == figure.targets.keys()
    assert sorted(figure.targets.values()) == [0.35, 0.7, 0.9]
    assert figure_of("MuPFL", "8") is figure  # so that both read one study


def test_cells_and_arms_of_a_figure_can_be_chosen():
    figure = figure_of("mupfl", "6")
    definition = plan_figure(figure, "six", 1, 1.0, {"dataset": "cifar10", "alpha": "1"}, ["fedavg", "MuPFL"])
    assert list(definition.arms) == ["FedAvg", "MuPFL"]
    assert list(definition.all_cells) == ["cifar10, IF 10, alpha 1.0"]
    for where, arms, key in (({"IF": "3"}, None, "--cells"), ({"K": "3"}, None, "--cells"), ({}, ["MuPL"], "--arms")):
        with refused("config.unknown-name", ConfigError, key=key):
            plan_figure(figure, "six", 1, 1.0, where, arms)
    with refused("config.unknown-name", ConfigError, key="table", name="sfd fig6"):
        figure_of("sfd", "6")


def test_rounds_until_a_value_of_clients_own_models_are_counted_on_their_curve(tmp_path):
    arms = {"fedper": "fedper"}
    plan = define({"name": "s", "arms": arms, "base": {"federation": {"rounds": 3}}, "seeds": 1}).runs()[0]
    write_run(tmp_path / "run", plan, [0.1, 0.2, 0.3])
    record = read_run(tmp_path / "run", arm="fedper")
    record.curve["matched"][:] = [0.5, None, 0.9]
    (by_matched,) = reached([record], 0.6, "matched")
    assert (by_matched.rounds, by_matched.reached) == (3, 1)
    assert reached([record], 0.25)[0].rounds == 3
    assert reached([record], 0.15)[0].rounds == 2
    assert reached([record], 0.95, "matched")[0].reached == 0
    with refused("config.conflict", ConfigError, key="target", measure="bytes_up"):
        reached([record], 0.5, "bytes_up")
    record.curve["matched"][:] = [None, None, None]  # as in a run that judged clients' models in its last round only
    (unknown,) = reached([record], 0.6, "matched")
    assert (unknown.reached, unknown.runs, unknown.without_curve) == (0, 0, 1)
    assert with_target(TextTable("", [], [], ""), [unknown], 0.6).further[0][2][0][2] == "1 without curve"
    assert with_target(TextTable("", [], [], ""), [by_matched], 0.6).further[0][2][0][2] == "1 of 1"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["table", "json"])
def test_a_figures_command_runs_it_and_prints_the_rounds_until_its_targets(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    figure = TINY if form == "table" else TWO_CELLS
    monkeypatch.setitem(figures.FIGURES, ("mupfl", "8"), figure)
    command = ["reproduce", "mupfl", "fig8", "--seeds", "1", "--scale", "0.05", "--parallel", "1", "--format", form]
    if form == "table":
        plan = CliRunner().invoke(app, [*command, "--dry-run"])
        assert plan.exit_code == 0
        assert "2 to do" in plan.stdout
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mupfl-fig6-scale0.05"]
    if form == "json":
        targets = json.loads(result.stdout)["targets"]
        assert {
            cell: [(row["cell"], row["target"], row["rounds"]) for row in rows] for cell, rows in targets.items()
        } == {
            "digits, IF 10": [("digits, IF 10", 0.01, 1)],
            "digits, IF 5": [("digits, IF 5", 0.02, 1)],
        }
    else:
        assert "until matched 1 %" in result.stdout
