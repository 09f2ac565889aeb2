"""Rankings: wins by hand, strengths against a maximised likelihood, and failed runs."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made import record as whole_record
from refusals import refused
from scipy import optimize, stats

from raylt.cli.main import app
from raylt.errors import ConfigError
from raylt.studies.analysis.ranking import PRIOR, fit, half_widths, rank, with_costs
from raylt.studies.definition import Definition
from raylt.studies.records.record import RecordState, RunRecord
from raylt.studies.report.comparison_tables import UNSEALED
from raylt.studies.report.leaderboard import (
    LETTER_WIDTH,
    PERSONAL,
    RIGHT,
    WIDTH,
    leaderboard_page,
    ranking_svg,
    ranking_table,
)
from raylt.studies.study import Study


def record(
    arm: str, seed: int, value: float | None, state: RecordState = "done", cell: str = "", up: int = 0
) -> RunRecord:
    summary = None if value is None else {"accuracy": {"last": value}, "bytes": {"up": up}}
    return RunRecord(cell, arm, seed, f"{arm}-{seed}", state, summary=summary)


def ended(arm: str, seed: int, error: str | None) -> RunRecord:
    """Return the record of a run that failed with an error code."""
    return replace(record(arm, seed, None, "failed"), config={"seed": seed}, error=error, problem="why")


def most_likely(wins: np.ndarray) -> np.ndarray:
    """Return strengths that maximise the likelihood; each arm also has PRIOR wins and losses against strength 0."""

    def loss(s: np.ndarray) -> float:
        value = 0.0
        for i in range(len(s)):
            value += PRIOR * (np.log1p(np.exp(-s[i])) + np.log1p(np.exp(s[i])))
            for j in range(len(s)):
                value += wins[i, j] * np.log1p(np.exp(s[j] - s[i]))
        return value

    s = optimize.minimize(loss, np.zeros(len(wins)), method="BFGS", options={"gtol": 1e-9}).x
    return s - s.mean()


def test_strengths_maximise_the_likelihood():
    wins = np.array([[0, 5, 2.5, 0], [1, 0, 4, 0], [0.5, 2, 0, 3], [0, 0, 1, 0]], dtype=float)
    assert fit(wins) == pytest.approx(most_likely(wins), abs=1e-4)


def test_arms_that_always_win_are_fitted_to_the_end():
    """Nine blocks with the same order of twelve arms: here fits creep, because only the prior bounds the strengths."""
    wins = np.triu(np.full((12, 12), 9.0), 1)
    assert fit(wins) == pytest.approx(most_likely(wins), abs=1e-3)


def test_two_arms_by_hand():
    """Three wins and one loss; by symmetry about the mean, the prior's opponent has strength 0."""
    (a, b) = fit(np.array([[0.0, 3.0], [1.0, 0.0]]))
    # s = a = -b: 3.5 = 4 p(2s) + p(s), where p is the logistic function
    p = [1 / (1 + np.exp(-x)) for x in (2 * a, a)]
    assert 4 * p[0] + p[1] == pytest.approx(3.5, abs=1e-4)
    assert a == pytest.approx(-b)


def test_of_two_arms_the_chance_of_one_is_to_be_better_than_the_other():
    runs = [record(arm, seed, value) for arm, value in (("a", 0.8), ("b", 0.6)) for seed in range(3)]
    first, second = rank({"ground": runs}).arms
    gap = first.strength.estimate - second.strength.estimate
    assert gap > 1
    assert (first.chance, second.chance) == pytest.approx((1 / (1 + np.exp(-gap)), 1 / (1 + np.exp(gap))))


RUNS = [
    record(arm, seed, value + 0.01 * seed) for arm, value in (("a", 0.8), ("b", 0.6), ("c", 0.7)) for seed in (0, 1)
]


@pytest.mark.parametrize("ulp", [-1e-15, 0, 1e-15])
def test_arms_with_the_same_wins_are_ordered_by_name_on_every_processor(ulp, monkeypatch):
    monkeypatch.setattr("raylt.studies.analysis.ranking.fit", lambda wins: np.array([0.5 + ulp, 0.5 - ulp, -1.0]))
    assert [each.arm for each in rank({"ground": RUNS}).arms] == ["a", "b", "c"]


def test_order_and_counts():
    ranking = rank({"ground": RUNS})
    assert [arm.arm for arm in ranking.arms] == ["a", "c", "b"]
    assert [(arm.finished, arm.planned, arm.diverged) for arm in ranking.arms] == [(2, 2, 0)] * 3
    assert (ranking.blocks, ranking.cells, ranking.studies) == (2, 1, ["ground"])
    assert ranking.arms[0].chance > 0.7 > 0.5 > ranking.arms[2].chance
    two = rank({"ground": [*RUNS, *(replace(run, cell="other") for run in RUNS)]})
    assert (two.blocks, two.cells, two.studies) == (4, 2, ["ground"])


def test_fewer_bytes_are_better():
    runs = [record("a", 0, 0.5, up=10), record("b", 0, 0.5, up=20)]
    assert [arm.arm for arm in rank({"ground": runs}, "bytes_up").arms] == ["a", "b"]
    tied = rank({"ground": runs}).arms
    assert [arm.strength.estimate for arm in tied] == pytest.approx([0, 0], abs=1e-9)


def test_rounds_that_a_measure_does_not_have_are_refused():
    with refused("config.conflict", ConfigError, key="at", measure="matched"):
        rank({"g": RUNS}, "matched", at="best")


def test_the_notes_name_models_versions_and_unsealed_runs():
    def run(arm: str, seed: int, figure: str, code: str, sealed: bool) -> RunRecord:
        whole = whole_record(arm, seed, 0.5, made={"codes": [code]}, sealed=sealed)
        return replace(whole, summary=whole.summary | {"shown": {"figure": figure}})

    runs = [run("a", seed, "accuracy", "c" * 64, sealed=seed > 0) for seed in range(2)]
    runs += [run("b", seed, "matched", "d" * 64, sealed=True) for seed in range(2)]
    notes = ranking_table(rank({"g": runs})).notes
    assert [line.partition(";")[0] for line in notes["evaluated models"]] == [
        "g, of b: clients' own models (accuracy and class groups: all their answers together)"
    ]
    assert notes["versions of the code"] == ["g: 2 versions"]
    assert notes[UNSEALED] == ["g: 1 run"]
    assert not any(ranking_table(rank({"g": RUNS})).notes.values())


def test_versions_of_the_code_and_of_a_plugin_are_counted_apart():
    def versions(*made: tuple[str, str]) -> list[str]:
        runs = [
            whole_record(arm, seed, 0.5, made={"codes": [code * 64], "plugins": {"model own": plugin * 64}})
            for seed, (code, plugin) in enumerate(made)
            for arm in "ab"
        ]
        return rank({"g": runs}).versions

    assert versions(("c", "d"), ("c", "d")) == []
    assert versions(("c", "d"), ("c", "e")) == ["g: 2 versions of model own"]


def test_a_tie_is_half_a_win():
    runs = [record("a", 0, 0.5), record("b", 0, 0.4), record("a", 1, 0.5), record("b", 1, 0.5)]
    expected = fit(np.array([[0, 1.5], [0.5, 0]]))
    assert [arm.strength.estimate for arm in rank({"ground": runs}).arms] == pytest.approx(expected)


@pytest.mark.parametrize(
    "left_out", [record("d", 1, None, "stopped"), ended("d", 1, None), ended("d", 1, "client.failed")]
)
def test_a_diverged_run_is_worse_than_all_and_another_failed_or_stopped_one_is_missing(left_out):
    diverged = rank({"g": [*RUNS, record("d", 0, 0.9), ended("d", 1, "training.diverged")]})
    missing = rank({"g": [*RUNS, record("d", 0, 0.9), left_out]})
    (lost,) = [arm for arm in diverged.arms if arm.arm == "d"]
    (of_one_seed,) = [arm for arm in missing.arms if arm.arm == "d"]
    assert (lost.finished, lost.planned, lost.diverged) == (1, 2, 1)
    assert (of_one_seed.finished, of_one_seed.planned, of_one_seed.diverged) == (1, 2, 0)
    assert lost.strength.estimate < of_one_seed.strength.estimate
    assert diverged.left_out == []
    assert [line.partition(": ")[0] for line in missing.left_out] == ["g, d-1"]


@pytest.mark.parametrize(("measure", "last"), [("accuracy", 0.0), ("bytes_up", 0.5)])
def test_a_diverged_run_is_worse_than_all_whatever_the_measure(measure, last):
    """Also than a run that classifies nothing correctly, and where less is better."""
    runs = [record("a", seed, last, up=10) for seed in range(3)]
    runs += [ended("b", seed, "training.diverged") for seed in range(3)]
    first, second = rank({"g": runs}, measure).arms
    assert (first.arm, second.arm) == ("a", "b")
    assert first.strength.estimate > 0.5


def test_runs_without_the_measure_or_without_another_arm_are_named_and_their_studies_are_not():
    local = [replace(record("local", seed, 0.5), summary={"bytes": {"up": 1}}) for seed in (0, 1)]
    alone = [record("sfd", seed, 0.5, cell="K 5") for seed in (0, 1)]
    ranking = rank({"g": [*RUNS, *local, record("a", 7, 0.8)], "h": alone})
    assert ranking.studies == ["g"]
    assert [arm.arm for arm in ranking.arms] == ["a", "c", "b"]
    assert ranking.left_out == [
        "g, local-0 (and 1 more of this arm): no accuracy",
        "g, a-7: no other arm has this figure with the same seed",
        "h, sfd-0 (and 1 more of this arm): no other arm has this figure with the same seed",
    ]


def test_arms_that_never_met_are_compared_through_others():
    first = [record("a", 0, 0.9), record("b", 0, 0.5)]
    second = [record("b", 0, 0.9), record("c", 0, 0.5)]
    ranking = rank({"one": first, "two": second})
    assert [arm.arm for arm in ranking.arms] == ["a", "b", "c"]
    assert ranking.cells == ranking.blocks == 2


def test_arms_that_nothing_connects_are_refused():
    studies = {
        "one": [record("a", 0, 0.9), record("b", 0, 0.5)],
        "two": [record("c", 0, 0.9), record("d", 0, 0.5)],
        "three": [record("d", 0, 0.9), record("e", 0, 0.5)],
    }
    with refused("study.not-connected", ConfigError, groups=["a, b", "c, d, e"]):
        rank(studies)
    connecting = {"four": [record("a", 0, 0.9), record("e", 0, 0.5)]}
    assert len(rank({**studies, **connecting}).arms) == 5


def test_intervals_are_symmetric_and_widen_with_disagreement():
    agree = [record(arm, seed, value) for seed in range(6) for arm, value in (("a", 0.8), ("b", 0.6))]
    differ = [
        record(arm, seed, value) for seed in range(6) for arm, value in (("a", 0.5), ("b", 0.6 - 0.2 * (seed % 2)))
    ]
    (steady, _), (shaky, _) = rank({"g": agree}).arms, rank({"g": differ}).arms
    for arm in (steady, shaky):
        assert arm.strength.low + arm.strength.high == pytest.approx(2 * arm.strength.estimate)
    # by hand, blocks of one comparison each: the curvature of s_a - s_b is 6 p (1 - p) and the prior's, t has 5 degrees
    p, own = (1 / (1 + np.exp(-x)) for x in (2 * steady.strength.estimate, steady.strength.estimate))
    across = 6 * p * (1 - p) * 2 + 2 * PRIOR * own * (1 - own)
    assert steady.strength.half == pytest.approx(2.5706 * (1 / (2 * across)) ** 0.5, rel=1e-3)
    assert shaky.strength.half > 0.5


def test_a_cell_with_one_seed_adds_no_spread_to_the_intervals_of_others():
    # three comparisons in each block of two arms; in the cell of three blocks a wins 3, 0 and 3 of them, around 2
    blocks = [np.array([[0.0, won], [3.0 - won, 0.0]]) for won in (3.0, 0.0, 3.0)]
    wins = [np.stack(blocks), np.stack(blocks[:1])]
    strengths = fit(np.concatenate(wins).sum(0))
    a = strengths[0]
    p, own = (1 / (1 + np.exp(-x)) for x in (2 * a, a))
    across = 12 * p * (1 - p) * 2 + 2 * PRIOR * own * (1 - own)
    spread = (1 + 4 + 1) * 3 / 2
    half = stats.t.ppf(0.975, 2) * spread**0.5 / across
    assert half_widths(wins, strengths, 0.95) == pytest.approx([half, half])


def test_intervals_have_the_level_that_is_asked_for():
    arms = (("a", 0.8), ("b", 0.6), ("c", 0.7))
    runs = [record(arm, seed, value, cell=cell) for cell in "xy" for seed in range(3) for arm, value in arms]
    half, most = ([arm.strength.half for arm in rank({"g": runs}, level=level).arms] for level in (0.5, 0.95))
    quantiles = stats.t.ppf([0.75, 0.975], 4)  # two blocks beyond the first in each of two cells
    assert np.divide(half, most) == pytest.approx(quantiles[0] / quantiles[1])


def test_blocks_that_contradict_each_other_as_a_whole_widen_the_intervals():
    """Six arms in one order in half of the blocks, and in the reverse order in the others: one fact for 15 pairs."""
    order = np.triu(np.ones((6, 6)), 1)
    turned = [np.stack([order, order.T, order, order.T])]
    rng = np.random.default_rng(0)
    mixed = np.triu(rng.permuted(np.repeat([[1.0, 1, 0, 0]], 36, axis=0), axis=1).T.reshape(4, 6, 6), 1)
    mixed = [mixed + np.triu(1 - mixed, 1).swapaxes(1, 2)]
    assert np.array_equal(sum(turned[0]), sum(mixed[0]))  # the same wins of each pair
    strengths = fit(sum(turned[0]))
    of_turned, of_mixed = (half_widths(wins, strengths, 0.95) for wins in (turned, mixed))
    assert of_turned[0] > 1.5 * of_mixed[0]
    assert np.isnan(half_widths([turned[0][:1], turned[0][:1]], strengths, 0.95)).all()  # a block a cell has no spread


def test_the_degrees_of_freedom_of_an_arm_are_those_of_its_own_blocks():
    runs = [record(arm, seed, value) for seed in range(6) for arm, value in (("a", 0.8), ("b", 0.6))]
    runs += [record("c", seed, 0.7) for seed in (0, 1, 2)] + [record("d", 0, 0.5)]

    def halves(level: float) -> dict[str, float]:
        return {arm.arm: arm.strength.half for arm in rank({"g": runs}, level=level).arms}

    narrow, wide = halves(0.5), halves(0.95)
    assert narrow.pop("d") == wide.pop("d") == np.inf  # no interval: one block has no spread
    of_six, of_three = (stats.t.ppf(0.975, freedom) / stats.t.ppf(0.75, freedom) for freedom in (5, 2))
    assert {arm: half / narrow[arm] for arm, half in wide.items()} == pytest.approx(
        {"a": of_six, "b": of_six, "c": of_three}
    )


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.7, 1.5, 4.0])
@pytest.mark.parametrize("few", [2, 3])
def test_intervals_of_an_arm_with_few_blocks_cover_what_many_seeds_give(few, spread):
    """Twelve arms in six cells of six seeds; arm 5 has runs of a few seeds of the first cell only."""
    rng = np.random.default_rng(1)

    def cells() -> list[np.ndarray]:
        values = np.arange(12) + spread * rng.standard_normal((6, 6, 12))
        values[1:, :, 5] = values[0, few:, 5] = np.nan
        return list((values[..., :, None] > values[..., None, :]).astype(float))

    truth = fit(sum(np.concatenate(cells()).sum(0) for _ in range(1000)) / 1000)
    covered = []
    for _ in range(200):
        wins = cells()
        strengths = fit(np.concatenate(wins).sum(0))
        covered.append(np.abs(strengths - truth) <= half_widths(wins, strengths, 0.95))
    assert np.mean(covered, axis=0)[5] >= 0.94
    assert np.mean(covered) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.7, 1.5, 4.0])
@pytest.mark.parametrize("seeds", [3, 6])
def test_intervals_cover_what_many_seeds_give(seeds, spread):
    """Twelve arms whose values differ by 1 from one to the next, and over seeds by a normal of a given spread."""
    rng = np.random.default_rng(1)

    def blocks(n: int) -> np.ndarray:
        values = np.arange(12) + spread * rng.standard_normal((n, 12))
        return (values[:, :, None] > values[:, None, :]).astype(float)

    truth = fit(blocks(4000).sum(0) * seeds / 4000)  # with the prior's weight of these seeds
    covered = []
    for _ in range(100):
        wins = [blocks(seeds)]
        strengths = fit(wins[0].sum(0))
        covered.append(np.abs(strengths - truth) <= half_widths(wins, strengths, 0.95))
    assert np.mean(covered) >= 0.94


def test_nothing_to_compare_is_refused():
    with refused("study.no-figure", ConfigError, key="measure"):
        rank({"g": [record("a", 0, 0.5)]})


def test_table_page_and_picture_name_every_arm():
    ranking = rank({"g": [*RUNS, ended("d & e", 1, "training.diverged"), ended("gone", 0, None)]})
    page, picture = leaderboard_page(ranking, "x.svg", "raylt rank g"), ranking_svg(ranking)
    for arm in ("a", "b", "c"):
        assert f">{arm}</text>" in picture
        assert f"| {arm} |" in page
    assert "d &amp; e" in picture
    assert "prefers-color-scheme: dark" in picture
    ticks = [int(tick) for tick in re.findall(r'text-anchor="middle">([+-]?\d+)<', picture)]
    assert 0 in ticks
    assert all(tick % 3 == 0 for tick in ticks)
    assert "0 of 2" in page
    rows = {row[0]: row[1:4] for row in ranking_table(ranking).rows}
    for arm in ranking.arms:
        assert rows[arm.arm][1:] == [f"{round(100 * arm.chance)} %", f"{arm.finished} of {arm.planned}"]
        assert float(rows[arm.arm][0].split(" ")[0]) == pytest.approx(arm.strength.estimate, abs=0.005)
    assert "- g, gone-0: failed: why" in page
    assert "![Strengths of the arms with intervals](x.svg)" in page
    assert any("d & e: 1 of 2 runs" in line for lines in ranking_table(ranking).notes.values() for line in lines)


def test_the_picture_says_if_some_arms_are_ranked_by_clients_own_models():
    ranking = rank({"g": RUNS})
    assert PERSONAL not in ranking_svg(ranking)
    assert PERSONAL in ranking_svg(replace(ranking, models=["g, of a: clients' own models"])).partition("</title>")[0]


def test_equal_arms_without_intervals_can_be_drawn():
    picture = ranking_svg(rank({"g": [record("a", 0, 0.5), record("b", 0, 0.5)]}))
    left, right = re.findall(r'circle cx="([0-9.]+)"', picture)
    assert left == right


def test_intervals_lie_within_the_axis():
    picture = ranking_svg(rank({"g": RUNS}))
    left = int(re.search(r'<text x="(\d+)" y="\d+" text-anchor="end"', picture)[1]) + 10
    ends = [float(x) for pair in re.findall(r'<line x1="(-?[0-9.]+)" x2="(-?[0-9.]+)"', picture) for x in pair]
    assert len(ends) == 6
    assert left <= min(ends) < max(ends) <= left + WIDTH - RIGHT


def test_title_names_and_axis_fit_the_picture():
    long = "an arm whose name is long enough for a line"
    runs = [replace(run, arm=long) if run.arm == "a" else run for run in RUNS]
    studies = {f"a_study_with_a_long_name_{number}": runs for number in range(6)}
    picture = ranking_svg(rank(studies))
    width = int(re.search(r'viewBox="0 0 (\d+)', picture)[1])
    lines = [line for x, line in re.findall(r'<text x="(\d+)" y="\d+">([^<]+)<', picture) if x == "8"]
    assert len(lines) > 1
    assert all(8 + LETTER_WIDTH * len(line) <= width for line in lines)
    assert "12 blocks of one seed in 6 cells" in " ".join(lines)
    names = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="end">([^<]+)<', picture)
    assert [name for _, name in names] == [long, "c", "b"]
    assert all(int(right) - LETTER_WIDTH * len(name) > 0 for right, name in names)
    assert ">strength: log-odds of being better than an arm of mean strength<" in picture


def test_costs_are_passes_as_a_multiple_of_fedavgs():
    def run(arm: str, value: float, **fields) -> RunRecord:
        federation = {"rounds": 4, "participation": 0.5}
        config = {"method": {"name": arm, **fields}, "local": {"epochs": 2}, "federation": federation}
        return replace(record(arm, 0, value), config=config)

    runs = {"g": [run("fedavg", 0.5), run("ditto", 0.6), run("fedrep", 0.7, head_epochs=10), run("moon", 0.4)]}
    runs["g"].append(run("elsewhere", 0.3))
    costs = {arm.arm: arm.cost for arm in with_costs(rank(runs), runs).arms}
    # FedRep trains ten epochs of the head, at a third each, and two of the encoder, and ten of the head once more after
    # the two rounds that ask a client; MOON adds two forward passes of a third each
    thirds = {"fedrep": pytest.approx(3.5), "moon": pytest.approx(5 / 3)}
    assert costs == {"fedavg": 1, "ditto": 2, "elsewhere": None, **thirds}
    table = ranking_table(with_costs(rank(runs), runs))
    assert table.head[-1] == "passes"
    assert [row[-1] for row in table.rows] == ["3.5", "2.0", "1.0", "1.7", "-"]
    more = {"h": [run("fedavg", 0.5), run("fedrep", 0.7, head_epochs=1)]}  # an arm has the costs of its first run
    assert with_costs(rank(runs | more), runs | more).arms[0].cost == pytest.approx(3.5)


def test_the_time_of_an_arm_is_the_median_multiple_of_fedavgs_at_the_same_seed():
    def run(arm: str, seed: int, seconds: float) -> RunRecord:
        one = record(arm, seed, 0.5)
        return replace(one, curve={**one.curve, "seconds": [1.0, seconds]})

    runs = [run("fedavg", 0, 10), run("fedavg", 1, 20), run("fedavg", 2, 40)]
    runs += [run("sfd", 0, 20), run("sfd", 1, 100), run("sfd", 2, 120), run("sfd", 3, 1)]
    runs += [run("alone", 3, 5), run("fedavg", 4, 10), replace(run("sfd", 4, 1), state="failed", problem="why")]
    ranking = rank({"g": runs, "h": [run("sfd", 0, 7)]})
    assert {arm.arm: arm.time for arm in ranking.arms} == {"fedavg": 1, "sfd": 3, "alone": None}
    table = ranking_table(ranking)
    assert {row[0]: row[table.head.index("time")] for row in table.rows} == {
        "fedavg": "1.0",
        "sfd": "3.0",
        "alone": "-",
    }


@pytest.mark.slow
def test_the_leaderboard_of_the_documentation_is_that_of_the_records(tmp_path, monkeypatch):
    root = Path(__file__).parents[3]
    page = (root / "docs/leaderboard.md").read_text()
    command = shlex.split(page.split("```")[1].replace("\\\n", " "))
    assert command[:2] == ["raylt", "rank"]
    arguments = [*command[1:-1], str(tmp_path / "leaderboard.md")]
    monkeypatch.chdir(root)
    app(arguments, standalone_mode=False)
    written = (tmp_path / "leaderboard.md").read_text()
    assert written.split("```")[0] == page.split("```")[0]
    assert (tmp_path / "leaderboard.svg").read_text() == (root / "docs/leaderboard.svg").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path(__file__).parents[3] / "docs").is_dir(), reason="the copy that mutants are tested in has no docs"
)
def test_the_picture_of_ground_two_is_that_of_its_record(tmp_path, monkeypatch):
    root = Path(__file__).parents[3]
    words = re.search(r"`(raylt rank [^`]+)`", (root / "docs/results/ground_two.md").read_text())[1].split()
    monkeypatch.chdir(root)
    app([*words[1:-1], str(tmp_path / words[-1])], standalone_mode=False)
    written = (tmp_path / words[-1]).with_suffix(".svg").read_text()
    assert written == (root / "docs/ground_two_ranking.svg").read_text()


def test_command_writes_the_page_and_its_picture(tmp_path, capsys, monkeypatch):
    definition = Definition(name="ground", arms={arm: {} for arm in "abc"}, seeds=[0, 1])
    runs = [whole_record(run.arm, run.seed, run.summary["accuracy"]["last"]) for run in RUNS]
    monkeypatch.setattr("raylt.cli.studies.compare.open_any", lambda paths: Study(definition, None, runs))
    app(["rank", "ground.json", "--to", str(tmp_path / "board.md")], standalone_mode=False)
    assert "better than another arm" in capsys.readouterr().out
    assert "(board.svg)" in (tmp_path / "board.md").read_text()
    assert (tmp_path / "board.svg").read_text().startswith("<svg")
    app(["rank", "ground.json", "--format", "json"], standalone_mode=False)
    assert [arm["arm"] for arm in json.loads(capsys.readouterr().out)["arms"]] == ["a", "c", "b"]
    with refused("config.conflict", ConfigError, key="--to"):
        app(["rank", "ground.json", "--to", str(tmp_path / "board.svg")], standalone_mode=False)
