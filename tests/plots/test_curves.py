"""`raylt plot curves` draws the means of the records, with the size and marks that a paper needs."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from made import record
from refusals import refused
from scipy import stats
from small_runs import make_tiny_run

from raylt.errors import ConfigError
from raylt.plots.curves import caption, draw_curves
from raylt.plots.style import COLOURS
from raylt.studies.definition import define
from raylt.studies.records.record import RunRecord
from raylt.studies.report.html import render
from raylt.studies.study import Study, of_runs

DIGITS = Path(__file__).parents[2] / "studies" / "results" / "digits.json"


@pytest.fixture(scope="module")
def study():
    """Return the cell IF 10: three arms with six seeds; two arms have a last phase."""
    opened = Study.open(DIGITS)
    opened.records = [record for record in opened.records if record.cell == "IF 10"]
    return opened


@pytest.fixture(scope="module")
def figure(study):
    return draw_curves(study)


def of(study: Study, arm: str, step: int, key: str = "accuracy") -> list[float]:
    return [100 * record.curve[key][step - 1] for record in study.records if record.arm == arm]


def line(ax, label):
    return next(each for each in ax.lines if each.get_label() == label)


def test_groups_are_panels_and_lines_are_means_over_seeds(study, figure):
    assert [ax.get_title() for ax in figure.axes] == ["accuracy", "many-shot", "medium-shot", "few-shot"]
    few = line(figure.axes[3], "fedavg")
    assert list(few.get_xdata()) == list(range(1, 31))
    assert few.get_ydata()[-1] == pytest.approx(fmean(of(study, "fedavg", 30, "few")))


def test_bands_are_intervals_or_standard_deviations(study, figure):
    values = of(study, "fedavg", 30)
    half = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    for drawn, expected in ((figure, half), (draw_curves(study, ["accuracy"], spread="sd"), stdev(values))):
        band = np.asarray(drawn.axes[0].collections[0].get_paths()[0].vertices)
        ends = band[band[:, 0] == 30, 1]
        assert (max(ends), min(ends)) == pytest.approx((fmean(values) + expected, fmean(values) - expected))


def test_a_last_phase_is_a_marker_behind_a_dotted_line(study, figure):
    ax = figure.axes[0]
    assert len(line(ax, "sfd").get_xdata()) == 30
    dotted = [each for each in ax.lines if each.get_linestyle() == ":"]
    assert sorted(each.get_ydata()[1] for each in dotted) == pytest.approx(
        sorted(fmean(of(study, arm, 31)) for arm in ("sfd", "sfd without aligner"))
    )


def of_early_end(run: RunRecord, rounds: int) -> RunRecord:
    """Return a run that federation.patience ended after some rounds, before its last phase."""
    kept = [*range(rounds), run.rounds]
    curve = {key: [values[index] for index in kept] for key, values in run.curve.items() if len(values) == run.steps}
    curve["step"] = list(range(1, rounds + 2))
    return replace(run, curve=curve, steps=rounds + 1, summary=run.summary | {"rounds": rounds})


def test_a_last_phase_is_not_averaged_with_rounds_where_runs_end_early(study):
    runs = [run for run in study.records if run.arm == "sfd"][:2]
    definition = study.definition.model_copy(update={"reference": "sfd"})
    early = Study(definition, None, [of_early_end(runs[0], 5), of_early_end(runs[1], 8)], study.holdings)
    ax = draw_curves(early, ["accuracy"]).axes[0]
    assert list(line(ax, "sfd").get_xdata()) == [1, 2, 3, 4, 5]
    (dotted,) = [each for each in ax.lines if each.get_linestyle() == ":"]
    assert list(dotted.get_xdata()) == [5, 7.5]
    assert dotted.get_ydata()[1] == pytest.approx(fmean(100 * run.curve["accuracy"][-1] for run in runs))
    assert "sfd, after the last phase: " in render(early)


def test_the_axis_counts_bytes_or_seconds(study):
    sent = np.asarray(line(draw_curves(study, ["accuracy"], "bytes").axes[0], "sfd").get_xdata())
    sfd = [record.curve for record in study.records if record.arm == "sfd"]
    assert sent[-1] == pytest.approx(fmean((curve["up"][29] + curve["down"][29]) / 2**20 for curve in sfd))
    seconds = np.asarray(line(draw_curves(study, ["accuracy"], "seconds").axes[0], "sfd").get_xdata())
    assert seconds[-1] == pytest.approx(fmean(curve["seconds"][29] for curve in sfd))


def test_text_is_legible_at_the_width_of_a_column_and_lines_differ_without_colour(figure):
    assert figure.get_figwidth() == pytest.approx(3.35)
    texts = [*figure.legends[0].get_texts(), *(text for ax in figure.axes for text in ax.get_xticklabels())]
    assert min(text.get_fontsize() for text in texts) >= 7
    lines = [each for each in figure.axes[0].lines if not each.get_label().startswith("_")]
    assert len({each.get_marker() for each in lines}) == len({str(each.get_linestyle()) for each in lines}) == 3


def test_neighbouring_colours_differ_in_grey():
    grey = [
        sum(weight * int(colour[at : at + 2], 16) for weight, at in ((0.299, 1), (0.587, 3), (0.114, 5)))
        for colour in COLOURS[:3]
    ]
    assert min(abs(one - other) for one, other in combinations(grey, 2)) > 40


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_picture_has_the_format_of_its_name_and_the_same_bytes_again(study, tmp_path, name, start):
    draw_curves(study, ["accuracy"], path=str(tmp_path / name))
    first = (tmp_path / name).read_bytes()
    assert first.startswith(start)
    assert b"/Type3" not in first
    draw_curves(study, ["accuracy"], path=tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_the_caption_says_what_lines_and_bands_are(study):
    text = caption(study)
    assert "6 seeds" in text
    assert "95 % t interval" in text
    assert "last phase" in text
    one = Study(study.definition, None, [record for record in study.records if record.seed == 0])
    assert "Bands" not in caption(one)


def test_cells_with_other_groups_are_told_apart():
    """Two cells, of which the first has no few-shot class."""
    few_of = {"IF 5": 0, "IF 20": 90}
    records = [record(arm, 0, 0.5, cell=cell) for cell in few_of for arm in ("fedavg", "la")]
    for run in records:
        few = few_of[run.cell]
        run.curve["few"] = run.curve["few"] if few else [None] * 10
        groups = {"many": 150, "medium": 150 - few, "few": few}
        run.summary["tests"] = {"images": 300, "groups": groups, "thresholds": [20, 100], "own": None, "one_class": []}
    study = Study(define({"name": "x", "arms": {"fedavg": "fedavg", "la": "la"}}), None, records)
    assert "Test images: IF 5: 300 (150 many, 150 medium); IF 20: 300 (150 many, 60 medium, 90 few)." in caption(study)
    one = Study(study.definition, None, records[:2])
    assert "Test images: 300 (150 many, 150 medium)." in caption(one)
    panel = next(ax for ax in draw_curves(study).axes if ax.get_title() == "few-shot, IF 5")
    assert [text.get_text() for text in panel.texts] == ["no few-shot class"]
    assert list(panel.get_yticks()) == []


def test_ticks_of_few_rounds_are_whole_numbers():
    run = record("fedavg", 0, 0.5)
    three = replace(run, steps=3, curve={key: values[:3] for key, values in run.curve.items()})
    figure = draw_curves(Study(define({"name": "x", "arms": {"fedavg": "fedavg"}}), None, [three]), ["accuracy"])
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks())


def test_what_has_no_curve_is_refused(study):
    with refused("config.conflict", ConfigError, key="measure", value="bytes_up"):
        draw_curves(study, ["bytes_up"])
    with refused("study.no-figure", ConfigError):  # records of earlier versions lack the curves of clients
        draw_curves(study, ["owned"])
    judged_once = [
        replace(record, curve=record.curve | {"accuracy": [None] * (record.steps - 1) + record.curve["accuracy"][-1:]})
        for record in study.records
    ]
    with refused("study.no-figure", ConfigError):
        draw_curves(Study(study.definition, None, judged_once), ["accuracy"])


@pytest.mark.slow
def test_clients_own_models_have_curves(tmp_path):
    settings = ("federation.rounds=3", "evaluation.personal=1")
    run = make_tiny_run(tmp_path, "ditto", *settings, name="own")
    plain = make_tiny_run(tmp_path, "fedavg", *settings, name="plain")
    figure = draw_curves(of_runs([run.folder, plain.folder]), ["matched", "worst_decile"])
    assert [ax.get_title() for ax in figure.axes] == ["own class mix", "worst tenth, class mix"]
    for ax, figure_of in zip(figure.axes, ("mean", "worst_decile"), strict=True):
        for made, arm in ((run, "ditto"), (plain, "fedavg")):
            drawn = line(ax, arm).get_ydata()
            assert list(drawn) == [100 * report["clients"]["matched"][figure_of] for report in made.reports]
    assert draw_curves(of_runs([run.folder])).axes[0].get_title() == "own test images"  # the default figure


def test_a_single_seed_has_no_band(study):
    one = Study(study.definition, None, [record for record in study.records if record.seed == 0])
    assert not draw_curves(one, ["accuracy"]).axes[0].collections


def test_the_caption_counts_the_runs_that_are_not_drawn(study):
    *rest, last = study.records
    lost = replace(last, state="failed", error="training.diverged", summary=None)
    text = caption(Study(study.definition, None, [*rest, lost, replace(lost, seed=99, error=None)]))
    assert f"Not drawn: {last.arm}: 1 diverged run, {last.arm}: 1 failed run." in text
    assert "Not drawn" not in caption(study)


def test_a_single_evaluated_round_has_its_interval_as_a_bar(study):
    once = [
        replace(
            run, curve=run.curve | {"accuracy": [*[None] * 29, run.curve["accuracy"][29], *[None] * (run.steps - 30)]}
        )
        if run.arm == "sfd"
        else run
        for run in study.records
    ]
    ax = draw_curves(Study(study.definition, None, once), ["accuracy"]).axes[0]
    values = of(study, "sfd", 30)
    half = stats.t.ppf(0.975, 5) * stdev(values) / 6**0.5
    bars = [each.get_segments()[0] for each in ax.collections if hasattr(each, "get_segments")]
    (bar,) = [bar for bar in bars if bar[0][0] == 30]
    assert bar[:, 1] == pytest.approx([fmean(values) - half, fmean(values) + half])


@pytest.mark.parametrize("value", [0.0, 0.002])
def test_a_panel_of_values_near_0_has_no_ticks_below_it(value):
    run = record("fedavg", 0, 0.5)
    zeros = replace(run, curve=run.curve | {"accuracy": [value] * 10})
    ax = draw_curves(Study(define({"name": "x", "arms": {"fedavg": "fedavg"}}), None, [zeros]), ["accuracy"]).axes[0]
    assert [tick for tick in ax.get_yticks() if ax.get_ylim()[0] <= tick < 0] == []
