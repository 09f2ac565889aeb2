"""The report of a step: its keys, and where its fields appear."""

import json

import pytest
import torch
from pydantic import ValidationError

from raylt.core.report import FIGURES, JUDGED, POOLED, SHARED, RoundReport, best_validated, shown_figure
from raylt.runs.callbacks.tensorboard import curve_of
from raylt.runs.folder.metrics_log import MetricsLine
from raylt.runs.folder.summary import Summary
from raylt.studies.analysis.measures import MEASURES

KEYS = [
    "step",
    "phase",
    "seconds",
    "evaluation_seconds",
    "accuracy",
    "global_accuracy",
    "groups",
    "clients",
    "traffic",
    "participants",
    "lost",
    "retried",
    "rejected",
    "figures",
    "by_client",
    "stages",
    "macro",
    "miou",
    "global_macro",
    "global_miou",
    "others",
    "quality",
    "answers",
    "confusion",
    "shown",
]


def report(**fields) -> RoundReport:
    return RoundReport(
        **{"step": 1, "phase": "round", "seconds": 1.0, "evaluation_seconds": 0.5, "traffic": {}} | fields
    )


def test_record_has_the_keys_of_metrics_jsonl_in_order():
    assert list(report().record()) == KEYS


def test_record_read_back_is_the_same_report():
    written = report(rejected={3: "w is not finite"}, timings={"train": 1.5}, figures={"shares": {"fit": 1.0}})
    assert RoundReport(**json.loads(json.dumps(written.record()))) == written


@pytest.mark.parametrize(
    "fields", [{"step": 0}, {"phase": "start"}, {"accuracy": 1.5}, {"seconds": -1.0}, {"confusion": "0"}, {"more": 1}]
)
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(ValidationError):
        report(**fields)


def test_figures_of_an_evaluation_are_none_unless_judged():
    assert {name for name, value in report().record().items() if value is None} == set(JUDGED)


@pytest.mark.parametrize("name", [*POOLED, *SHARED])
def test_figure_of_a_confusion_matrix_is_in_the_summary_the_curves_and_the_measures(name):
    assert name in Summary.model_json_schema()["properties"]
    assert curve_of(name) == FIGURES[name].curve != ""
    assert MEASURES[name].what == FIGURES[name].title
    read = POOLED.get(name) or SHARED[name]
    assert read(torch.tensor([[3, 0], [0, 1]])) == 1.0


def test_json_schema_of_a_line_describes_every_field():
    properties = MetricsLine.model_json_schema()["properties"]
    assert set(properties) == {"schema", "previous", "provenance", "sha256", "date", *KEYS}
    assert all(entry["description"] for entry in properties.values())
    assert properties["seconds"]["unit"] == "seconds"


@pytest.mark.parametrize(("figures", "prefix"), [(POOLED, ""), (SHARED, "global_")], ids=["pooled", "shared"])
def test_figures_are_read_off_counts_by_their_names(figures, prefix):
    # of class 0, 8 of 10 are right; of class 1, 1 of 2
    matrix = torch.tensor([[8, 2], [1, 1]])
    expected = {"accuracy": 9 / 12, "macro": (0.8 + 0.5) / 2, "miou": (8 / 11 + 1 / 4) / 2}
    assert {name: read(matrix) for name, read in figures.items()} == pytest.approx(
        {prefix + name: value for name, value in expected.items()}
    )


def test_the_best_step_has_a_checkpoint_and_is_the_first_of_equals():
    accuracies = (0.9, 0.5, 0.7, 0.7, None)
    figures = [{} if accuracy is None else {"validation": {"accuracy": accuracy}} for accuracy in accuracies]
    lines = [report(step=step, figures=each).record() for step, each in enumerate(figures, 1)]
    assert best_validated(lines, {2, 3, 4, 5}) == {"step": 3, "accuracy": 0.7}
    assert best_validated(lines, {5}) is None


def test_the_shown_figure_is_the_mean_over_clients():
    line = report(shown="local", accuracy=0.8, clients={"local": {"mean": 0.4, "worst_decile": 0.1}}).record()
    assert shown_figure(line) == ("local", 0.4)
    assert shown_figure(line | {"shown": None}) == ("accuracy", 0.8)
