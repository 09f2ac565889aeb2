from dataclasses import replace

import pytest
from refusals import refused

from raylt.errors import ConfigError
from raylt.metrics import GROUPS
from raylt.studies.analysis.measures import MEASURES, measure_of, value_of
from raylt.studies.records.record import CLIENT_CURVES, RunRecord

SUMMARY = {
    "accuracy": {"last": 0.5},
    "macro": 0.48,
    "groups": {"many": 0.92, "medium": 0.52, "few": 0.1},
    "clients": {
        "by": {
            "matched": {"mean": 0.7, "worst_decile": 0.2},
            "owned": {"mean": 0.62, "worst_decile": 0.12},
            "long_tailed": {"mean": 0.72, "worst_decile": 0.22},
            "global": {"mean": 0.42, "worst_decile": 0.32},
            "local": {"mean": 0.38, "worst_decile": 0.28},
            "miou": {"mean": 0.26, "worst_decile": 0.16},
        }
    },
    "bytes": {"up": 1, "down": 2},
    "seconds": 3.0,
    "figures": {
        "new_clients": {"owned": 0.15, "matched": 0.25, "worst_decile": 0.05},
        "zero_shot": {"accuracy": 0.33, "many": 0.34},
    },
    "others": {
        "w_i": {
            "accuracy": 0.6,
            "macro": 0.55,
            "miou": 0.3,
            "groups": {"many": 0.9, "few": None},
            "clients": {
                "matched": {"mean": 0.8, "worst_decile": 0.3},
                "owned": {"mean": 0.65},
                "long_tailed": {"mean": 0.75},
                "global": {"mean": 0.45},
                "local": {"mean": 0.35},
                "miou": {"mean": 0.25},
            },
        }
    },
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 0.5),
        ("many", 0.92),
        ("medium", 0.52),
        ("few", 0.1),
        ("macro", 0.48),
        ("owned", 0.62),
        ("long_tailed", 0.72),
        ("clients", 0.42),
        ("local", 0.38),
        ("client_miou", 0.26),
        ("bytes_up", 1),
        ("bytes_down", 2),
        ("seconds", 3.0),
        ("accuracy@w_i", 0.6),
        ("matched", 0.7),
        ("matched@w_i", 0.8),
        ("worst_decile", 0.2),
        ("worst_decile@w_i", 0.3),
        ("owned@w_i", 0.65),
        ("long_tailed@w_i", 0.75),
        ("clients@w_i", 0.45),
        ("local@w_i", 0.35),
        ("client_miou@w_i", 0.25),
        ("many@w_i", 0.9),
        ("few@w_i", None),
        ("macro@w_i", 0.55),
        ("miou@w_i", 0.3),
        ("matched@other", None),
        ("new_owned", 0.15),
        ("new_matched", 0.25),
        ("new_worst_decile", 0.05),
        ("zero_shot", 0.33),
    ],
)
def test_figure_of_one_of_several_models_is_found_by_its_name(name, value):
    measure = measure_of(name)
    assert measure.read(SUMMARY) == value
    assert (measure is MEASURES.get(name)) == ("@" not in name)
    assert "@" not in name or (measure.every_round is None and name.partition("@")[2] in measure.what)


def test_less_is_better_of_bytes_and_seconds_alone():
    assert {name for name, measure in MEASURES.items() if not measure.higher} == {"bytes_up", "bytes_down", "seconds"}


@pytest.mark.parametrize("name", ["accuracies", "bytes_up@w_i", "matched@", "@w_i"])
def test_measure_that_is_not_there_is_refused(name):
    with refused("config.unknown-name", ConfigError, key="measure", name=name):
        measure_of(name)


def finished(**curve):
    rounds = len(curve["accuracy"])
    summary = {"accuracy": {"last": curve["accuracy"][-1]}, "rounds": rounds}
    return RunRecord("", "a", 0, "a", "done", summary=summary, curve=curve)


def test_the_mean_of_the_last_rounds_is_over_ten():
    run = finished(accuracy=[2.0**-step for step in range(12)])
    assert value_of(run, "accuracy", "last10") == pytest.approx(sum(2.0**-step for step in range(2, 12)) / 10)


def test_a_round_in_which_nothing_was_right_counts_and_one_without_an_evaluation_does_not():
    run = finished(accuracy=[0.0, None, 0.4])
    assert value_of(run, "accuracy", "last10") == pytest.approx(0.2)


@pytest.mark.parametrize(("last", "best"), [(0.6, 0.6), (0.3, 0.4)])
def test_the_best_figure_may_be_that_of_the_phase_after_the_last_round(last, best):
    run = finished(accuracy=[0.1, 0.4, 0.2])
    run = replace(run, summary={**run.summary, "accuracy": {"last": last}})
    assert value_of(run, "accuracy", "best") == best


def test_of_rounds_with_the_same_validation_accuracy_the_first_counts():
    run = finished(validation=[0.5, 0.9, None, 0.9], accuracy=[0.1, 0.2, 0.3, 0.4])
    assert value_of(run, "accuracy", "validation") == 0.2


def test_a_round_without_an_evaluation_is_not_chosen_for_its_validation_accuracy():
    run = finished(validation=[0.9, 0.5, 0.6], accuracy=[None, 0.2, 0.3])
    assert value_of(run, "accuracy", "validation") == 0.3


def test_measures_with_values_by_round_have_a_curve_of_their_own():
    curves = {name: measure.curve or measure.every_round for name, measure in MEASURES.items()}
    assert {name for name, curve in curves.items() if curve} == {*GROUPS, *CLIENT_CURVES, "accuracy"}
    assert all(curve in (None, name) for name, curve in curves.items())
