"""`federation.patience` ends the rounds when the accuracy on validation samples stops rising."""

import copy
from dataclasses import replace

import pytest
from refusals import refused
from small_runs import make_tiny_run

import raylt
from raylt.config import load, settled
from raylt.errors import ConfigError
from raylt.runs.continuation import branch, resume
from raylt.runs.export.export import unfinished
from raylt.studies.records.record import read_run
from raylt.studies.records.seal import contradiction
from raylt.studies.report.listing import listing
from raylt.studies.study import of_runs
from tune import search, space

FLAT = ("federation.rounds=9", "federation.patience=2", "data.validation=0.2", "local.lr=0.000000001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("patience")


@pytest.fixture(scope="module")
def flat(folder):
    """Do a run whose accuracy does not rise after its first round."""
    return make_tiny_run(folder, "fedavg", *FLAT, name="flat")


@pytest.fixture(scope="module")
def finished(folder):
    """Do the same run with a last phase."""
    return make_tiny_run(folder, "ccvr", *FLAT, name="finished")


def test_rounds_end_once_validation_has_not_risen(flat):
    assert (flat.state, flat.summary["rounds"], len(flat.reports)) == ("done", 3, 3)
    assert flat.reports[-1]["quality"] is not None  # judged like a last round
    assert "round 3 of 9" in flat.summary["figures"]["rounds ended"]
    assert flat.model().class_names
    assert unfinished(flat) is None  # an exported file is of the run's last model


def test_a_last_phase_follows_the_round_that_ended_the_rounds(finished):
    assert [report["phase"] for report in finished.reports] == ["round"] * 3 + ["finish"]
    assert finished.summary["rounds"] == 3
    assert "round 3 of 9" in finished.summary["figures"]["rounds ended"]


def test_rounds_before_the_end_are_those_of_a_run_without_it(folder, flat):
    config = flat.config.model_dump()
    config["federation"] |= {"patience": None, "rounds": 3}
    plain = raylt.run(raylt.Config(**config), out=folder, name="plain", fleet="local", quiet=True)
    assert plain.summary["model_sha256"] == flat.summary["model_sha256"]
    assert plain.sha256 != flat.sha256  # the setting is part of the identity
    assert settled(plain.config) != settled(flat.config)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_an_interrupted_run_ends_where_a_straight_one_does(folder, finished, step):
    class Interrupt(raylt.Callback):
        def on_step(self, report):
            if report.step == step:
                raise KeyboardInterrupt

    name = f"interrupted{step}"
    with pytest.raises(KeyboardInterrupt):
        raylt.run(finished.config, out=folder, name=name, fleet="local", quiet=True, callbacks=[Interrupt()])
    resumed = resume(folder / name, fleet="local", quiet=True)
    assert len(resumed.reports) == 4
    assert resumed.summary["model_sha256"] == finished.summary["model_sha256"]
    assert resumed.summary["figures"]["rounds ended"] == finished.summary["figures"]["rounds ended"]


@pytest.mark.slow
def test_patience_counts_from_the_best_round(folder):
    rising = make_tiny_run(
        folder, "fedavg", "federation.rounds=12", "federation.patience=3", "data.validation=0.2", name="rising"
    )
    accuracies = [report["figures"]["validation"]["accuracy"] for report in rising.reports]
    best = accuracies.index(max(accuracies)) + 1
    assert len(accuracies) == min(12, best + 3)


def test_lists_and_comparisons_count_the_rounds_that_were_taken(folder, flat, finished):
    entries = {entry.name: entry.progress for entry in listing(folder)}
    assert (entries["flat"], entries["finished"]) == ("3/9", "3/9")
    assert read_run(finished.folder).rounds == 3
    compared = of_runs([flat.folder, finished.folder]).compare("accuracy", at="last10")
    values = {row.arm: row.values[0] for row in compared.rows}
    assert values["ccvr"] == pytest.approx(values["fedavg"])  # the last phase does not count as a round
    assert of_runs([finished.folder]).plot(["accuracy"]).axes[0].get_lines()[0].get_xdata()[-1] == 3


def test_its_record_agrees_with_its_summary(finished):
    record = replace(read_run(finished.folder), arm="ccvr")
    assert contradiction(record) is None
    assert contradiction(replace(record, planned_steps=3)) == "config"
    without = copy.deepcopy(record.config)
    without["federation"]["patience"] = None
    assert contradiction(replace(record, config=without)) == "state"


def test_a_search_refuses_it(tmp_path):
    config = load(None, ["method=fedprox", "federation.patience=2", "data.validation=0.1"])
    with refused("search.not-searchable", ConfigError, key="federation.patience"):
        search(config, space(config), 2, out=tmp_path, name="s", fleet="local")


def test_such_a_run_is_neither_branched_nor_made_longer(folder, flat):
    with refused("run.not-branchable", ConfigError, key="federation.patience"):
        branch(flat, ["method=ccvr"], folder / "branched", fleet="local", quiet=True)
    with refused("run.not-extensible", ConfigError):
        resume(flat.folder, ["federation.rounds=20"], fleet="local", quiet=True)


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        (["method=fedavg", "federation.patience=2"], "data.validation"),
        (["method=fedper", "federation.patience=2", "data.validation=0.1"], "evaluation.personal"),
        (["method=fedsm", "method.teacher=none", "federation.patience=2", "data.validation=0.1"], "method"),
    ],
)
def test_what_patience_cannot_go_by_is_refused(tmp_path, settings, other):
    with refused("config.conflict", ConfigError, key="federation.patience"):
        raylt.run(load(None, settings), out=tmp_path, fleet="local", quiet=True)
    assert not list(tmp_path.iterdir())
