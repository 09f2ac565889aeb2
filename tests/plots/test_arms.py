from dataclasses import replace
from pathlib import Path

import pytest

from raylt.plots.arms import draw_arms
from raylt.studies.study import Study

DIGITS = Path(__file__).parents[2] / "studies" / "results" / "digits.json"


@pytest.fixture(scope="module")
def compared():
    study = Study.open(DIGITS)
    return [study.compare(measure) for measure in ("accuracy", "few")]


def test_a_chart_of_arms_shows_what_the_table_has(compared):
    figure = draw_arms(compared)
    panels = figure.axes
    assert [ax.get_title() for ax in panels] == ["IF 10: accuracy", "IF 10: few", "IF 50: accuracy", "IF 50: few"]
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names[-1] == "sfd"  # the best arm is at the top
    rows = {row.arm: row for row in compared[1].rows if row.cell == "IF 50"}
    drawn = [line.get_xdata() for line in panels[3].lines]
    for arm, row in rows.items():
        assert any(x[0] == pytest.approx(100 * row.mean.estimate) and len(x) == 1 for x in drawn), arm
        assert any(list(x) == pytest.approx([100 * v for v in row.values.values()]) for x in drawn if len(x) == 6), arm
        ends = [100 * max(0, row.mean.low), 100 * min(1, row.mean.high)]
        assert any(list(x) == pytest.approx(ends) for x in drawn if len(x) == 2), arm
    dotted = [line.get_xdata()[0] for line in panels[3].lines if line.get_linestyle() == ":"]
    assert dotted == pytest.approx([100 * rows["fedavg"].mean.estimate])


def test_an_arm_of_one_seed_has_no_interval():
    study = Study.open(DIGITS)
    study.records = [record for record in study.records if record.seed == 0]
    one = draw_arms([study.compare("bytes_up")]).axes[-1]
    assert all(len(line.get_xdata()) == 1 for line in one.lines if line.get_linestyle() != ":")
    assert one.get_xlabel().endswith("MiB")


def test_no_interval_leaves_the_values_that_a_share_can_have():
    study = Study.open(DIGITS)
    study.records = [record for record in study.records if record.seed < 2]
    panels = draw_arms([study.compare("few"), study.compare("bytes_up")]).axes
    ends = [x for ax in panels for line in ax.lines for x in line.get_xdata() if line.get_linestyle() == "-"]
    assert min(ends) >= 0
    assert max(x for line in panels[0].lines for x in line.get_xdata() if line.get_linestyle() == "-") <= 100


def test_the_picture_says_what_the_dots_of_diverged_runs_are():
    study = Study.open(DIGITS)
    *rest, last = study.records
    diverged = replace(last, state="failed", error="training.diverged", summary=None)
    one_lost = Study(study.definition, None, [*rest, diverged], study.holdings)
    assert "diverged runs count as guessing" in draw_arms([one_lost.compare()]).get_supxlabel()
    assert "diverged" not in draw_arms([study.compare()]).get_supxlabel()
