import json
from dataclasses import replace

import pytest
from made import record, summary
from refusals import refused
from rich.console import Console
from scipy import stats

from raylt.config import load
from raylt.errors import CheckpointError, ConfigError
from raylt.studies.analysis.claims import Claim, read_claim
from raylt.studies.analysis.comparison import compare, judged_on
from raylt.studies.analysis.measures import value_of
from raylt.studies.analysis.statistics import improvement, over_cells
from raylt.studies.analysis.time_to_accuracy import Reached, reached
from raylt.studies.records.record import RunRecord
from raylt.studies.report import comparison_tables
from raylt.studies.report.text_table import TextTable

CELLS = ("IF 10", "IF 50")
# by how much arm b is above arm a for each seed: about 0.1 in the first cell, about 0.01 in the second
ABOVE = {"IF 10": [0.1, 0.11, 0.09, 0.1, 0.1, 0.1], "IF 50": [0.0, 0.02, 0.0, 0.02, -0.01, 0.01]}


def records():
    return [
        record(arm, seed, 0.5 + 0.01 * seed + (ABOVE[cell][seed] if arm == "b" else 0.0), cell=cell)
        for cell in CELLS
        for seed in range(6)
        for arm in "ab"
    ]


def not_comparable(condition):
    """Expect the error for two runs that differ in a condition."""
    return refused("study.not-comparable", CheckpointError, condition=condition)


def test_rows_by_hand():
    compared = compare(records(), "a")
    b = next(row for row in compared.rows if (row.cell, row.arm) == ("IF 10", "b"))
    assert b.difference is not None
    assert b.difference.difference.estimate == pytest.approx(0.1)
    assert b.mean.estimate == pytest.approx(0.625)
    assert list(b.values) == [0, 1, 2, 3, 4, 5]
    assert b.optimism == pytest.approx(0)  # the curve rises up to its last round
    assert [overall.arm for overall in compared.overall] == ["a", "b"]


def test_the_gap_between_the_best_and_the_last_round_is_that_of_the_cell():
    gaps = dict(zip(CELLS, (0.1, 0.3), strict=True))
    runs = [
        replace(run, curve=run.curve | {"accuracy": [run.summary["accuracy"]["last"] + gaps[run.cell]] * 10})
        for run in records()
    ]
    compared = compare(runs, "a")
    optimism = {(row.cell, row.arm): row.optimism for row in compared.rows}
    assert optimism == {(cell, arm): pytest.approx(gap) for cell, gap in gaps.items() for arm in "ab"}
    table = comparison_tables.comparison_table(compared)
    assert {row[table.head.index("best - last")] for row in table.rows} == {"10.00", "30.00"}


def own_models(arm, seed, accuracy, **more):
    """Return a finished run whose clients' own models were evaluated after the last round only."""
    run = record(arm, seed, accuracy, **more)
    curve = run.curve | {"accuracy": [None] * 9 + [accuracy]}
    return replace(run, curve=curve, summary=run.summary | {"shown": {"figure": "matched", "last": accuracy}})


def of_global_model(arm, seed, accuracy, **more):
    run = record(arm, seed, accuracy, **more)
    return replace(run, summary=run.summary | {"shown": {"figure": "accuracy", "last": accuracy}})


def test_an_arm_with_one_evaluated_round_has_no_gain_from_a_choice_and_is_named():
    runs = [make(arm, seed, 0.5) for seed in (0, 1) for arm, make in (("a", record), ("own", own_models))]
    compared = compare(runs, "a")
    assert {row.arm: row.optimism for row in compared.rows} == {"a": pytest.approx(0), "own": None}
    line = "own: the last one; evaluation.personal=1 evaluates clients' own models after each round"
    assert compared.one_round == [line]
    assert f"% one evaluated round: {line}" in comparison_tables.comparison_table(compared).latex()
    for at in ("last", "last10"):
        text = comparison_tables.measures_table([compare(runs, "a", at=at)]).markdown()
        assert (line in text) == (at == "last10")
    assert compare(runs, "a", measure="matched").one_round == []
    assert compare(runs[1::2], "own").one_round == []
    short = replace(record("short", 0, 0.5, steps=1, planned_steps=1), curve={"accuracy": [0.5]})
    short = replace(short, summary=short.summary | {"rounds": 1})
    assert compare([*runs, short], "a", own={"short": {"federation.rounds": 1}}).one_round == [line]


def test_a_table_says_whose_models_were_evaluated_where_both_kinds_stand_in_it():
    kinds = (("a", of_global_model), ("own", own_models))
    runs = [make(arm, seed, 0.5, cell=cell) for cell in CELLS for seed in (0, 1) for arm, make in kinds]
    line = (
        "of own: clients' own models (accuracy and class groups: all their answers together); of the others: the "
        "global model"
    )
    compared = compare(runs, "a")
    assert compared.models == [line]
    measures = [compared, compare(runs, "a", measure="matched"), compare(runs, "a", measure="seconds")]
    tables = [comparison_tables.measures_table(order) for order in (measures, measures[::-1])]
    for table in (comparison_tables.comparison_table(compared), *tables):
        assert f"Evaluated models:\n\n- {line}\n" in table.markdown()
        assert f"% evaluated models: {line}" in table.latex()
    assert compare(runs, "a", measure="global_accuracy").models == []
    assert compare(runs[::2], "a").models == []
    assert compare([record("old", 0, 0.5, cell=CELLS[0]), *runs], "a").models == []
    partly = [*runs, of_global_model("both", 0, 0.5, cell=CELLS[0]), own_models("both", 0, 0.5, cell=CELLS[1])]
    assert compare(partly, "a").models == [line.replace("own:", f"own, both in {CELLS[1]}:", 1)]


def test_bytes_until_a_target_are_shown_in_mebibytes():
    reaching = Reached("", "a", 0.5, 1, 1, 3.0, 100 * 2**20, 10.0, 0)
    table = comparison_tables.with_target(TextTable("", [], [], ""), [reaching], 0.5)
    assert table.further[0][0].startswith("until accuracy 50 %")
    assert table.further[0][2] == [["", "a", "1 of 1", "3.0", "100.0", "10.0"]]


def test_every_interval_has_the_level_of_the_comparison():
    compared = compare(records(), "a", [Claim("b", "a", "accuracy")], level=0.8)

    def expected(values):
        return stats.t.interval(0.8, len(values) - 1, stats.tmean(values), stats.sem(values))

    for row in compared.rows:
        assert (row.mean.low, row.mean.high) == pytest.approx(expected(list(row.values.values())))
    differences = [row.difference.difference for row in compared.rows if row.difference is not None]
    differences += [each.difference.difference for each in compared.claims]
    for found, cell in zip(differences, CELLS * 2, strict=True):
        assert (found.low, found.high) == pytest.approx(expected(ABOVE[cell]))
    a, b = ([list(row.values.values()) for row in compared.rows if row.arm == arm] for arm in "ab")
    assert [each.iqm for each in compared.overall] == [over_cells(a, 0.8), over_cells(b, 0.8)]
    assert compared.overall[1].improvement == improvement(b, a, 0.8)


def test_claims_are_one_family_and_each_has_its_verdict():
    claims = [Claim("b", "a", "accuracy"), Claim("a", "b", "few")]
    verdicts = {(j.claim.better, j.cell): j.verdict for j in compare(records(), "a", claims).claims}
    assert verdicts == {
        ("b", "IF 10"): "holds",
        ("b", "IF 50"): "open",
        ("a", "IF 10"): "refuted",
        ("a", "IF 50"): "open",
    }


def test_under_six_seeds_nothing_is_claimed_whatever_the_difference():
    few = [r for r in records() if r.seed < 5]
    compared = compare(few, "a", [Claim("b", "a", "accuracy")])
    assert {j.verdict for j in compared.claims} == {"too few seeds"}
    assert all(j.p is None for j in compared.claims)


def test_arms_with_equal_bytes_have_no_difference():
    compared = compare(records(), "a", [Claim("b", "a", "bytes_up")])
    # all values are equal, so there is no spread and no p value
    assert {j.verdict for j in compared.claims} == {"no difference"}


def test_the_probability_to_be_better_is_that_of_fewer_seconds():
    slow = [record(arm, seed, 0.5, cell=cell) for cell in CELLS for seed in range(3) for arm in "ab"]
    for each in slow:
        each.summary["seconds"] = {"a": 10.0, "b": 100.0}[each.arm] + each.seed
    better = compare(slow, "a", measure="seconds").overall[1].improvement
    assert (better.estimate, better.low, better.high) == (0, 0, 0)
    assert compare(slow, "b", measure="seconds").overall[0].improvement.estimate == 1
    assert compare(records(), "a").overall[1].improvement.estimate > 0.5


@pytest.mark.parametrize(
    ("above", "seeds", "verdict"),
    [(0.0, 6, "no difference"), (0.0, 5, "too few seeds"), (0.1, 6, "no spread"), (0.1, 2, "too few seeds")],
)
def test_differences_that_are_all_the_same_have_no_p_value_and_a_verdict_that_says_so(above, seeds, verdict):
    # 0.3 + 0.01 * seed + 0.1 is not exactly 0.1 above; this rounding is no spread
    same = [
        record(arm, seed, 0.3 + 0.01 * seed + more) for seed in range(seeds) for arm, more in (("a", 0.0), ("b", above))
    ]
    (judged,) = compare(same, "a", [Claim("b", "a", "accuracy")]).claims
    assert (judged.p, judged.verdict) == (None, verdict)


@pytest.mark.parametrize("state", ["missing", "running", "stopped", "failed", "damaged"])
def test_a_run_that_is_not_whole_is_named_and_never_averaged_in(state):
    broken = [record("b", 6, 99.0, cell="IF 10", state=state, problem="why", steps=3)]
    compared = compare([*records(), *broken], "a")
    whole = compare(records(), "a").rows
    assert [replace(row, planned=0) for row in compared.rows] == [replace(row, planned=0) for row in whole]
    assert [row.planned for row in compared.rows if row.cell == "IF 10"] == [7] * sum(r.cell == "IF 10" for r in whole)
    assert comparison_tables.comparison_table(compared).rows[0][2].endswith("6 of 7")
    assert len(compared.left_out) == 1
    assert compared.left_out[0].startswith(f"IF 10/b/seed-6: {state}")
    assert compared.left_out[0] in comparison_tables.comparison_table(compared).markdown().replace("- ", "", 1)


def test_a_claim_about_an_arm_without_a_finished_run_is_named_with_the_reason():
    runs = [*records(), record("c", 0, 0.1, cell="IF 10", state="failed", problem="why", steps=3)]
    compared = compare(runs, "a", [Claim("c", "a", "accuracy"), Claim("b", "a", "accuracy")])
    assert {judged.claim.better for judged in compared.claims} == {"b"}
    # only this cell has the arm
    assert [line for line in compared.left_out if line.startswith("claim")] == [
        "claim c > a on accuracy in IF 10: c has no finished run"
    ]


def test_an_arm_is_not_better_than_one_that_finished_where_it_failed():
    """Without its failed run, arm b would be above arm a in six of seven seeds."""
    claims = [Claim("b", "a", "accuracy"), Claim("a", "b", "accuracy")]
    a_finished = record("a", 6, 0.5, cell="IF 10")
    b_failed = record("b", 6, 0.5, cell="IF 10", state="failed", problem="why")

    def judged(*more):
        compared = compare([*records(), *more], "a", claims)
        return compared, [each.verdict for each in compared.claims if each.cell == "IF 10"]

    assert judged()[1] == judged(a_finished)[1] == judged(b_failed)[1] == ["holds", "refuted"]
    compared, verdicts = judged(a_finished, b_failed)
    assert verdicts == ["runs failed", "runs failed"]
    text = comparison_tables.comparison_table(compared).markdown()
    assert "| b > a on accuracy | IF 10 | 6 of 7 |" in text
    a_failed = replace(a_finished, state="failed", problem="why", summary=None)
    b_finished = replace(b_failed, state="done", problem=None, summary=a_finished.summary)
    assert judged(a_failed, b_finished)[1] == ["holds", "refuted"]  # the failure speaks for the same arm
    both_failed, _ = judged(a_failed, b_failed)
    assert [each.planned for each in both_failed.claims if each.cell == "IF 10"] == [7, 7]


def diverged(arm: str, seed: int, **fields) -> RunRecord:
    return record(arm, seed, 0.0, state="failed", error="training.diverged", problem="lr", summary=None, **fields)


def test_a_diverged_run_counts_as_guessing_a_class():
    whole = [record(arm, seed, 0.5 + 0.01 * seed) for seed in (0, 2) for arm in "ab"]
    runs = [*whole, record("a", 1, 0.51), diverged("b", 1)]
    compared = compare(runs, "a", classes={"": 4})
    b = next(row for row in compared.rows if row.arm == "b")
    assert list(b.values.items()) == [(0, 0.5), (1, 0.25), (2, 0.52)]
    assert (b.finished, b.planned) == (2, 3)
    assert b.difference.difference.estimate == pytest.approx((0.25 - 0.51) / 3)
    assert compared.left_out == []
    assert compared.diverged == ["/b/seed-1: failed: lr"]
    text = comparison_tables.comparison_table(compared).markdown()
    assert "| b | 2 + 1 diverged | 42.33" in text
    assert "Diverged, which counts as guessing a class" in text
    # as the reference, too
    (a,) = [row for row in compare(runs, "b", classes={"": 4}).rows if row.arm == "a"]
    assert a.difference.difference.estimate == pytest.approx((0.51 - 0.25) / 3)


def test_a_run_that_was_evaluated_once_does_not_tell_when_it_reached_a_target():
    often = record("a", 0, 0.8)
    at_end = record("b", 0, 0.8)
    at_end = replace(at_end, curve=at_end.curve | {"accuracy": [None] * 9 + [0.8]})
    of_one_round = replace(at_end, arm="c", steps=1, planned_steps=1, summary=at_end.summary | {"rounds": 1})
    of_one_round = replace(of_one_round, curve={key: values[-1:] for key, values in at_end.curve.items()})
    rows = reached([often, at_end, of_one_round], 0.5)
    assert [(row.arm, row.rounds, row.runs, row.without_curve) for row in rows] == [
        ("a", 7, 1, 0),
        ("b", None, 0, 1),
        ("c", 10, 1, 0),
    ]
    (note,) = comparison_tables.with_target(TextTable("", [], [], ""), rows, 0.5).notes["without curve"]
    assert note.startswith("b: ")


def test_diverged_runs_are_named_next_to_those_that_reached_a_target():
    failed = record("c", 0, 0.2, state="failed", summary=None)
    rows = reached([failed, diverged("a", 1), diverged("b", 0), record("a", 0, 0.8)], 0.5)
    assert [(row.arm, row.runs, row.reached, row.diverged) for row in rows] == [("a", 1, 1, 1), ("b", 0, 0, 1)]
    (_, _, texts), *_ = comparison_tables.with_target(TextTable("", [], [], ""), rows, 0.5).further
    assert [row[2] for row in texts] == ["1 of 1, 1 diverged", "1 diverged"]


def few(run: RunRecord, value: float) -> RunRecord:
    """Return a finished run with another accuracy on few-shot classes."""
    return replace(run, summary=run.summary | {"groups": run.summary["groups"] | {"few": value}})


def test_a_diverged_run_counts_as_the_worst_of_its_cell_where_guessing_would_be_better():
    runs = [few(record("a", seed, 0.5), value) for seed, value in enumerate((0.02, 0.0, 0.3))]
    runs += [record("a", 0, 0.5, cell="other"), *(diverged("b", seed) for seed in range(3))]
    compared = compare([*runs, diverged("b", 0, cell="other")], "a", measure="few", classes={"": 4, "other": 4})
    values = {(row.cell, row.arm): list(row.values.values()) for row in compared.rows}
    assert values["", "b"] == [0.0] * 3
    assert values["other", "b"] == [0.25]


def test_a_mean_that_includes_a_diverged_run_is_not_marked_as_the_best():
    runs = [record(arm, seed, value) for arm, value in (("a", 0.3), ("b", 0.9), ("c", 0.4)) for seed in range(2)]
    table = comparison_tables.comparison_table(compare([*runs, diverged("b", 2)], "a", classes={"": 4}))
    assert r"\textbf{40.00}" in table.latex()
    assert r"\underline{30.00}" not in table.latex()


def test_diverged_runs_are_named_below_a_table_of_several_measures_whichever_is_the_first():
    runs = [*(record(arm, seed, 0.5) for arm in "ab" for seed in (0, 1)), diverged("b", 2)]
    of_bytes, of_accuracy = (compare(runs, "a", measure=name, classes={"": 4}) for name in ("bytes_up", "accuracy"))
    for pair in ((of_bytes, of_accuracy), (of_accuracy, of_bytes)):
        assert comparison_tables.measures_table(pair).notes[comparison_tables.DIVERGED] == ["/b/seed-2: failed: lr"]


def test_a_claim_counts_diverged_runs_as_the_table_does():
    runs = [record("a", seed, 0.5 + 0.01 * seed) for seed in range(6)]
    runs += [record("b", seed, 0.6 + 0.012 * seed) for seed in range(5)]
    claim = Claim("a", "b", "accuracy")
    (judged,) = compare([*runs, diverged("b", 5)], "a", [claim], classes={"": 4}).claims
    # five differences of about -0.1, and 0.55 - 0.25
    assert judged.difference.n == 6
    assert judged.difference.difference.estimate == pytest.approx((-5 * 0.1 - 0.02 + 0.3) / 6)
    all_diverged = compare([*runs[:6], *(diverged("b", seed) for seed in range(6))], "a", [claim], classes={"": 4})
    assert [each.verdict for each in all_diverged.claims] == ["holds"]
    assert all_diverged.left_out == []
    (of_bytes,) = compare([*runs, diverged("b", 5)], "a", [Claim("a", "b", "bytes_up")], classes={"": 4}).claims
    assert of_bytes.difference.n == 5


def test_the_seeds_of_a_row_count_finished_diverged_and_missing_runs():
    runs = [record("a", seed, 0.5) for seed in range(4)]
    compared = compare([*runs, record("b", 0, 0.5), diverged("b", 1)], "a", classes={"": 4})
    assert "| b | 1 + 1 diverged of 4 |" in comparison_tables.comparison_table(compared).markdown()


def test_a_diverged_run_is_no_failure_that_would_leave_a_claim_unjudged():
    """It has a value, although the other arm finished with its seed."""
    runs = [record("a", seed, 0.9 + 0.001 * seed) for seed in range(11)] + [diverged("a", 11)]
    runs += [record("b", seed, 0.5) for seed in range(12)]
    (judged,) = compare(runs, "b", [Claim("a", "b", "accuracy")], classes={"": 4}).claims
    assert (judged.difference.n, judged.verdict) == (12, "holds")


def test_the_seeds_of_a_row_are_those_of_its_cell():
    runs = [record(arm, seed, 0.5, cell=cell) for arm in "ab" for cell, n in (("x", 2), ("y", 4)) for seed in range(n)]
    assert [(row.cell, row.planned) for row in compare(runs, "a").rows if row.arm == "a"] == [("x", 2), ("y", 4)]


def test_diverged_runs_of_an_arm_are_one_line():
    runs = [record("a", seed, 0.5) for seed in range(3)]
    runs += [replace(diverged("b", seed), problem=f"loss {seed}") for seed in range(3)]
    compared = compare([*runs, replace(diverged("a", 3), error="server.not-finite")], "a", classes={"": 4})
    assert compared.diverged == ["/b/seed-0 (and 2 more of this arm): failed: loss 0", "/a/seed-3: failed: lr"]


def test_a_difference_names_its_number_of_pairs_where_seeds_have_no_partner():
    runs = [record("a", seed, 0.5) for seed in (0, 1)] + [record("b", seed, 0.6) for seed in (1, 2)]
    text = comparison_tables.comparison_table(compare(runs, "a")).markdown()
    assert "| +10.00 (n = 1) |" in text


def test_a_missing_reference_is_named():
    runs = [record("a", 0, 0.5, cell="x"), record("b", 0, 0.6, cell="x"), record("b", 0, 0.6, cell="y")]
    runs += [record("c", 1, 0.6, cell="x")]
    assert compare(runs, "a").left_out == [
        "x: no difference of c, since it has no seed in common with a",
        "y: no differences, since the reference arm a has no accuracy",
    ]


def test_arms_without_the_first_measure_are_the_last_rows():
    lacking = record("b", 0, 0.9)
    runs = [record("a", 0, 0.5), replace(lacking, summary=lacking.summary | {"groups": {}})]
    of_few, of_all = (compare(runs, "a", measure=measure) for measure in ("few", "accuracy"))
    table = comparison_tables.measures_table([of_few, of_all])
    assert table.rows == [["a", "1", "50.00", "50.00"], ["b", "1", "-", "90.00"]]
    assert table.places == {(1, 3): 1}


def test_arms_are_ordered_by_the_first_measure_in_its_direction():
    runs = [record(arm, seed, 0.5) for arm in "abc" for seed in (0, 1)]
    for run in runs:
        run.summary["seconds"] = {"a": 3.0, "b": 1.0, "c": 2.0}[run.arm]
        if (run.arm, run.seed) == ("b", 1):
            run.summary["groups"] = {}
    by_seconds, of_few = (compare(runs, "a", measure=measure) for measure in ("seconds", "few"))
    # the seeds are those of the measure that most runs have
    assert [row[:2] for row in comparison_tables.measures_table([by_seconds, of_few]).rows] == [
        ["b", "2"],
        ["c", "2"],
        ["a", "2"],
    ]


def test_an_arm_without_a_finished_run_is_listed_in_its_cell():
    runs = [record("a", 0, 0.5, cell=cell) for cell in CELLS]
    runs += [record("b", 0, 0.5, cell=cell, state="failed", problem="why", summary=None) for cell in CELLS]
    compared = compare(runs, "a")
    for table in (comparison_tables.comparison_table(compared), comparison_tables.measures_table([compared])):
        assert [row[:2] for row in table.rows] == [[cell, arm] for cell in CELLS for arm in "ab"]


def test_a_diverged_run_is_left_out_where_guessing_has_no_value():
    runs = [record("a", 0, 0.5), record("a", 1, 0.5), record("b", 0, 0.5), diverged("b", 1)]
    for measure, classes in (("bytes_up", {"": 4}), ("accuracy", None), ("accuracy", {"other": 4})):
        compared = compare(runs, "a", measure=measure, classes=classes)
        assert [list(row.values) for row in compared.rows if row.arm == "b"] == [[0]]
        assert compared.left_out == ["/b/seed-1: failed: lr"]
        assert compared.diverged == []
    damaged = replace(diverged("b", 1), error="server.lost")
    assert compare([*runs[:3], damaged], "a", classes={"": 4}).left_out == ["/b/seed-1: failed: lr"]


def test_an_arm_of_which_every_run_diverged_counts_as_guessing():
    runs = [*(record("a", seed, 0.5 + 0.01 * seed) for seed in range(2)), *(diverged("b", seed) for seed in range(2))]
    compared = compare(runs, "a", classes={"": 4})
    assert compared.lost == []
    assert "| b | 0 + 2 diverged | 25.00" in comparison_tables.comparison_table(compared).markdown()


def test_an_arm_of_which_every_run_failed_has_a_row():
    whole = [record("a", seed, 0.5 + 0.01 * seed) for seed in range(3)]
    failed = [record("b", seed, 0.5, state="failed", problem="why", summary=None) for seed in range(3)]
    compared = compare([*whole, *failed], "a")
    assert "| b | 0 of 3 | - |" in comparison_tables.comparison_table(compared).markdown()
    assert "| b | 0 of 3 | - |" in comparison_tables.measures_table([compared]).markdown()
    missing = [replace(each, state="missing", problem=None) for each in failed]
    assert compare([*whole, *missing], "a").lost == []


def test_runs_that_failed_alike_are_one_line_of_a_table():
    broken = [record("b", seed, 0.5, state="failed", problem="why") for seed in (6, 7, 8)]
    other = record("b", 9, 0.5, state="failed", problem="because")
    compared = compare([record("a", 0, 0.5), record("b", 0, 0.5), *broken, other], "a")
    assert len(compared.left_out) == 4
    text = comparison_tables.comparison_table(compared).markdown()
    assert "b/seed-6 and 2 more: failed: why" in text
    assert "b/seed-9: failed: because" in text
    assert "b/seed-7" not in text


def test_pairs_are_of_the_same_seeds_only():
    uneven = [r for r in records() if not (r.arm == "a" and r.seed > 2)]
    row = next(row for row in compare(uneven, "a").rows if row.arm == "b")
    assert len(row.values) == 6
    assert row.difference is not None
    assert row.difference.n == 3


def changed(**sections):
    config = record("a", 0, 0.5).config
    return {"config": config | {name: config[name] | settings for name, settings in sections.items()}}


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({"summary": {"split_sha256": "f" * 64, "groups": {}, "accuracy": {"last": 0.5}}}, "split"),
        (changed(local={"epochs": 2}), "budget"),
        (changed(local={"steps": 5}), "budget"),
        (changed(local={"batch": 64}), "budget"),
        (changed(federation={"rounds": 9}), "budget"),
        (changed(federation={"participation": 0.5}), "budget"),
        (changed(federation={"patience": 3}), "budget"),
        (changed(evaluation={"every": 5}), "evaluation"),
        (changed(evaluation={"personal": 1}), "evaluation"),
        (changed(local={"lr": 0.5}), "optimiser"),
        ({"made": {"codes": ["d" * 64]}}, "code"),
    ],
)
def test_runs_that_differ_in_a_condition_are_refused_by_name(change, condition):
    with not_comparable(condition) as caught:
        compare([record("a", 0, 0.5), record("b", 0, 0.5, **change)], "a")
    assert caught.value.details["paths"] == ["/b/seed-0", "/a/seed-0"]


def test_versions_of_a_plugin_are_listed_where_there_are_several():
    def versions(*plugins):
        runs = [
            record(arm, 0, 0.5, made={"codes": ["c" * 64], "plugins": {"model own": plugin * 64}})
            for arm, plugin in zip("ab", plugins, strict=True)
        ]
        return compare(runs, "a", mix_versions=True).versions

    assert versions("d", "d") == []
    assert versions("d", "e") == [f"model own {plugin * 12}: 1 run" for plugin in "de"]


def test_cells_are_made_by_one_version_of_the_code():
    runs = [record("a", 0, 0.5, cell=cell, made={"codes": [code * 64]}) for cell, code in zip(CELLS, "cd", strict=True)]
    with not_comparable("code"):
        compare(runs, "a")
    assert len(compare(runs, "a", mix_versions=True).rows) == 2


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("federation", "patience", 3),
        ("federation", "participation", 0.5),
        ("evaluation", "personal", 1),
        ("local", "batch", 64),
    ],
)
def test_an_arm_may_state_a_part_of_its_budget_or_of_its_evaluation(section, name, value):
    runs = [record("a", 0, 0.5), record("b", 0, 0.6, **changed(**{section: {name: value}}))]
    assert len(compare(runs, "a", own={"b": {f"{section}.{name}": value}}).rows) == 2
    with refused("study.not-comparable", CheckpointError):
        compare(runs, "a", own={"b": {"local.lr": 0.1}})


def test_a_run_that_two_versions_of_the_code_made_is_refused():
    mixed = record("b", 0, 0.5, made={"codes": ["c" * 64, "d" * 64]})
    with refused("study.other-code", path="/b/seed-0"):
        compare([record("a", 0, 0.5), mixed], "a")


def test_an_arm_with_settings_of_its_own_may_differ_in_what_they_say_and_is_named():
    central = record("b", 0, 0.9, summary=record("b", 7, 0.9).summary)  # the record has another split
    own = {"b": {"data.clients": 1}, "a": {}, "not run": {"data.clients": 2}}
    compared = compare([record("a", 0, 0.5), central], "a", own=own)
    assert compared.apart == ["b: data.clients 1"]
    assert "- b: data.clients 1" in comparison_tables.comparison_table(compared).markdown()
    assert "% arms with settings of their own: b" in comparison_tables.comparison_table(compared).latex()
    with not_comparable("split"):
        compare([record("a", 0, 0.5), central], "a", own={"b": {"local.epochs": 1}})


def test_an_arm_may_state_its_optimiser_and_then_still_has_the_budget_of_the_others():
    local = {"epochs": 1, "batch": 32, "lr": 0.5}
    one = record("a", 0, 0.5)
    faster = record("b", 0, 0.9, config=one.config | {"local": local})
    assert compare([one, faster], "a", own={"b": {"local.lr": 0.5}}).apart == ["b: local.lr 0.5"]
    longer = record("b", 0, 0.9, config=one.config | {"local": local | {"epochs": 2}})
    with not_comparable("budget"):
        compare([one, longer], "a", own={"b": {"local.lr": 0.5}})
    with not_comparable("optimiser"):
        compare([one, longer], "a", own={"b": {"local.epochs": 2}})


def test_an_arm_that_was_tuned_in_a_setting_may_differ_in_it_which_is_said_once():
    one = record("a", 0, 0.5)
    faster = record("b", 0, 0.9, config=one.config | {"local": {"epochs": 1, "batch": 32, "lr": 0.5}})
    compared = compare([one, faster], "a", searched={"b": {"local.lr", "method.tau"}}, tuned=["b: local.lr 0.5"])
    assert (compared.apart, compared.tuned) == ([], ["b: local.lr 0.5"])
    with not_comparable("optimiser"):
        compare([one, faster], "a", searched={"a": {"method.tau"}, "b": {"method.tau"}})


def test_a_record_from_before_some_settings_of_the_optimiser_trained_as_their_defaults_say():
    now = load(None, ["method=fedavg"]).model_dump(mode="json")["local"]
    # newer settings have since been added between these
    before = {name: now[name] for name in ("epochs", "batch", "lr", "precision")}
    shared = record("a", 0, 0.5).config
    older, newer = (record(arm, 0, 0.5, config=shared | {"local": local}) for arm, local in (("a", before), ("b", now)))
    assert len(compare([older, newer], "a").rows) == 2
    other = record("b", 0, 0.5, config=shared | {"local": now | {"schedule": "cosine"}})
    with not_comparable("optimiser") as caught:
        compare([older, other], "a")
    assert "(local.schedule cosine; local.schedule step)" in str(caught.value)  # only the differing setting is named


def test_last_ten_and_best_come_from_the_judged_rounds():
    one = record(
        "a",
        0,
        1.0,
        curve={"accuracy": [0.1, None, 0.9, 0.5], "seconds": [1, 2, 3, 4]},
        config={"federation": {"rounds": 3, "participation": 1.0}},
    )
    assert value_of(one, "accuracy", "last") == 1.0
    assert value_of(one, "accuracy", "last10") == pytest.approx(0.5)  # of rounds 1 to 3: 0.1, 0.9
    assert value_of(one, "accuracy", "best") == 1.0  # the finish counts too


def test_the_finish_is_not_one_of_the_last_ten_rounds():
    curve = {"accuracy": [0.5] * 12 + [0.9]}
    finished = record("a", 0, 0.9, curve=curve, summary=summary(0.9, 12, 0.9, steps=13))
    assert value_of(finished, "accuracy", "last10") == 0.5
    assert value_of(finished, "accuracy", "last") == 0.9


@pytest.mark.parametrize("at", ["best", "last10", "validation"])
def test_a_record_without_a_curve_has_only_its_last_value(at):
    assert value_of(replace(record("a", 0, 0.9), curve={}), "accuracy", at) is None
    assert value_of(replace(record("a", 0, 0.9), curve={}), "accuracy", "last") == 0.9


@pytest.mark.parametrize("at", ["last", "best", "last10", "validation"])
def test_a_figure_that_a_run_does_not_end_with_has_no_value_of_earlier_rounds(at):
    one = record("a", 0, 0.9)
    assert value_of(replace(one, summary=one.summary | {"groups": {}}), "few", at) is None


def test_a_round_is_chosen_on_validation_samples_and_the_finish_may_be_it():
    curve = {"accuracy": [0.1, 0.8, 0.9, 0.5], "few": [0.0, 0.2, 0.1, 0.4], "validation": [0.3, None, 0.6, 0.5]}
    one = record("a", 0, 0.5, curve=curve, config={"federation": {"rounds": 3, "participation": 1.0}})
    assert value_of(one, "accuracy", "validation") == 0.9  # neither the last value nor the best of all rounds
    assert value_of(one, "few", "validation") == 0.1  # from the same round
    late = record("a", 0, 0.5, curve=curve | {"validation": [0.3, None, 0.6, 0.7]}, config=one.config)
    assert value_of(late, "accuracy", "validation") == 0.5
    chosen = record("a", 0, 0.5, curve=curve | {"seconds": [1.0] * 4})
    without = compare([chosen, record("a", 1, 0.5)], "a", at="validation").left_out
    assert len(without) == 1
    assert "/a/seed-1" in without[0]
    assert "set data.validation" in without[0]


@pytest.mark.parametrize(
    ("options", "code", "details"),
    [
        ({"measure": "acc"}, "config.unknown-name", {"key": "measure", "name": "acc"}),
        ({"measure": "macro", "at": "best"}, "config.conflict", {"key": "at", "measure": "macro"}),
        ({"level": 0}, "config.out-of-range", {"key": "level", "value": 0}),
        ({"level": 1}, "config.out-of-range", {"key": "level", "value": 1}),
        ({"at": "first"}, "config.unknown-name", {"key": "at", "value": "first"}),
        ({"reference": "c"}, "config.unknown-name", {"key": "reference", "name": "c"}),
        ({"measure": "new_owned"}, "study.no-figure", {"name": "new_owned"}),
        ({"at": "validation"}, "study.no-figure", {"at": "validation"}),
        ({"measure": "matched@whole"}, "study.no-figure", {"name": "matched@whole"}),
    ],
)
def test_a_comparison_that_the_runs_cannot_give_is_refused(options, code, details):
    with refused(code, ConfigError, **details):
        compare(records(), **{"reference": "a"} | options)


def test_model_that_no_run_has_is_refused_with_those_that_they_have():
    several = record("a", 0, 0.5)
    several.summary["others"] = {name: {"clients": {"matched": {"mean": 0.7}}} for name in ("whole", "cluster")}
    assert compare([several], "a", measure="matched@whole").rows[0].values == {0: 0.7}
    with refused("study.no-figure", name="matched@wohle") as caught:
        compare([several], "a", measure="matched@wohle")
    assert "matched@whole, matched@cluster" in str(caught.value)


def test_tables_of_equal_records_are_equal_whatever_the_order_and_the_seconds():
    slower = [
        record(r.arm, r.seed, r.summary["accuracy"]["last"], cell=r.cell, curve=r.curve | {"seconds": [9.0] * 10})
        for r in records()
    ]
    first, second = (compare(each, "a", [Claim("b", "a", "few")]) for each in (records(), slower))
    assert comparison_tables.comparison_table(first).markdown() == comparison_tables.comparison_table(second).markdown()
    assert comparison_tables.comparison_table(first).latex() == comparison_tables.comparison_table(second).latex()
    assert json.dumps(first.to_json()) == json.dumps(second.to_json())


def test_markdown_and_latex_of_a_row():
    compared = compare(records(), "a")
    assert "| IF 10 | b | 6 | 62.50 ± " in comparison_tables.comparison_table(compared).markdown()
    text = comparison_tables.comparison_table(compared).latex()
    assert r" & b & 6 & \textbf{62.50} $\pm$ " in text
    assert text.count(r"\\") == 5  # the heading and four rows
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_tables.comparison_table(compared).screen())
    assert "+10.00 ±" in console.export_text()


def test_latex_marks_the_best_and_the_second_mean_of_each_column_by_its_direction():
    arms = {"a": 0.5, "b": 0.7, "c": 0.700001, "d": 0.6, "e": 0.1}  # b and c have the same text
    made = [record(arm, seed, value + seed / 100) for arm, value in arms.items() for seed in (0, 1)]
    for each in made:
        each.summary["bytes"] = {"up": 2**20 * (1 + "edcba".index(each.arm)), "down": 0}
    both = [compare(made, "a", measure=name) for name in ("accuracy", "bytes_up")]
    table = comparison_tables.measures_table(both, "sd")
    rows = {row.split(" & ")[0]: row.split(" & ")[2:] for row in table.latex().splitlines() if " & " in row}
    assert [rows[arm][0].split(" $")[0] for arm in "abcde"] == [
        "50.50",
        r"\textbf{70.50}",
        r"\textbf{70.50}",
        r"\underline{60.50}",
        "10.50",
    ]
    assert rows["e"][1].startswith(r"\textbf{1.00}")
    assert rows["d"][1].startswith(r"\underline{2.00}")
    assert rows["b"][0].endswith(r"$\pm$ 0.71")  # the standard deviation of 0.70 and 0.71


def test_the_worse_of_two_arms_is_not_underlined_as_the_second_best():
    text = comparison_tables.comparison_table(compare(records(), "a")).latex()
    assert r"\textbf" in text
    assert "underline" not in text


def test_latex_comments_say_what_a_caption_needs():
    made = records()
    for each in made:
        each.summary["tests"] = {
            "images": 300,
            "groups": {"many": 90, "medium": 120, "few": 90},
            "thresholds": [20, 60],
            "own": None,
            "one_class": [],
        }
    compared = compare(made, "a")
    comments = [
        line for line in comparison_tables.comparison_table(compared, "sd").latex().splitlines() if line[0] == "%"
    ]
    assert any("booktabs" in line for line in comments)
    assert any("standard deviation" in line and "last round" in line for line in comments)
    assert any("bold" in line for line in comments)
    assert sum("n = 300" in line and "few 90" in line for line in comments) == len(CELLS)
    assert len(compared.tests) == len(CELLS)


def test_one_image_is_a_number_of_points_in_classification_alone():
    (each, *_) = records()
    groups = {"many": 90, "medium": 120, "few": 90}
    each.summary["tests"] = {"images": 300, "groups": groups, "thresholds": [20, 60], "own": None, "one_class": []}
    assert "one image is 0.33 points" in judged_on([each], "accuracy")
    assert "points" not in judged_on([each], "few")
    each.summary["task"] = "segmentation"
    assert "points" not in judged_on([each], "accuracy")


def test_test_images_are_those_of_all_seeds_and_arms():
    """Splits differ by seed, and an arm may have other clients than the others."""
    made = [each for each in records() if each.cell == CELLS[0]]
    seeds = sorted({each.seed for each in made})
    assert len(seeds) > 1
    for each in made:
        each.summary["tests"] = {
            "images": 300,
            "groups": {"many": 90, "medium": 120, "few": 90},
            "thresholds": [20, 60],
            "own": [0, 5 + each.seed, 9],
            "one_class": ["3", "12"] if each.arm == made[0].arm else [],
        }
    own = f"2 clients have {5 + seeds[0]} to {max(9, 5 + seeds[-1])} test images each"
    assert own in judged_on(made, "accuracy")
    assert judged_on(made, "accuracy").endswith("whose figures say nothing: 3, 12")
    for each in made:
        each.summary["tests"]["one_class"] *= each.seed == seeds[0]
    numbers = ", ".join(["2", *["0"] * (len(seeds) - 1)])
    assert judged_on(made, "accuracy").endswith(f"whose figures say nothing: 0 to 2 by seed ({numbers})")


def test_clients_may_all_be_without_test_images():
    (each, *_) = records()
    groups = {"many": 90, "medium": 120, "few": 90}
    each.summary["tests"] = {"images": 300, "groups": groups, "thresholds": [20, 60], "own": [0, 0], "one_class": []}
    assert judged_on([each], "accuracy").endswith("; 0 clients have test images of their own")


def test_negative_differences_and_absent_figures_are_set_as_such_in_latex():
    text = comparison_tables.comparison_table(compare(records(), "b")).latex()
    assert "$-$10.00" in text
    assert " & -- & " in text
    assert " & - & " not in text


def test_what_people_write_is_text_to_latex():
    odd = [record("a", 0, 0.5, cell=r"[0.1|a] ~ {x}^2 \ %"), record("a", 0, 0.6, cell="*")]
    rows = comparison_tables.comparison_table(compare(odd, "a")).latex().splitlines()
    first = r"{[}0.1\textbar{}a] \textasciitilde{} \{x\}\textasciicircum{}2 \textbackslash{} \% & a & 1"
    assert any(row.startswith(first) for row in rows)
    assert any(row.startswith("{*} & a") for row in rows)


def test_frame_has_a_line_per_run():
    frame = compare(records(), "a").frame()
    assert list(frame.columns) == ["cell", "arm", "seed", "accuracy"]
    assert len(frame) == 24


def test_first_round_bytes_and_seconds_at_a_target():
    # accuracies rise by a tenth of their last value each round: 0.5 reaches 0.4 in round 8, 0.3 never does
    (first,) = reached([record("a", 0, 0.5), record("a", 1, 0.3)], 0.4)
    assert (first.reached, first.runs, first.rounds, first.bytes, first.seconds) == (1, 2, 8, 240, 16)
    # medians of the rounds 8, 9 and 5
    (third,) = reached([record("a", seed, value) for seed, value in enumerate((0.5, 0.45, 0.8))], 0.4)
    assert (third.rounds, third.bytes, third.seconds) == (8, 240, 16)


def test_of_several_measures_runs_are_named_where_a_mean_is_over_fewer_of_them():
    whole, none = [record("a", seed, 0.5) for seed in (0, 1)], [record("b", seed, 0.5) for seed in (0, 1)]
    for each in whole:
        each.summary["others"] = {"w": {"clients": {"matched": {"mean": 0.7}}}}
    named = [compare(whole + none, "a", measure=name) for name in ("accuracy", "matched@w")]
    assert named[1].left_out == ["/b/seed-0 (and 1 more of this arm): no matched@w"]
    text = comparison_tables.measures_table(named).markdown()
    assert "| b | 2 | 50.00 ± 0.00 | - |" in text
    assert "no matched" not in text
    del whole[1].summary["others"]["w"]
    partly = comparison_tables.measures_table(
        [compare(whole + none, "a", measure=each.measure) for each in named]
    ).markdown()
    assert "- /a/seed-1: no matched@w" in partly


def test_claim_names_the_model_of_either_side():
    several = [record("a", seed, 0.5) for seed in (0, 1)]
    for each in several:
        each.summary["others"] = {"own": {"accuracy": 0.7, "clients": {"matched": {"mean": 0.7 + each.seed / 100}}}}
        each.summary["clients"] = {"by": {"matched": {"mean": 0.2}}}
    one = [record("b", seed, 0.5) for seed in (0, 1)]
    for each in one:
        each.summary["clients"] = {"by": {"matched": {"mean": 0.6}}}
    claims = [read_claim(text, ["a", "b"], "matched") for text in ("a@own > b", "a > b", "b < a@own", "b@own < a")]
    compared = compare(several + one, "a", claims, "matched")
    assert [f"{each.claim}: {each.difference.difference.estimate:+.3f}" for each in compared.claims] == [
        "a@own > b on matched: +0.105",
        "a > b on matched: -0.400",
        "a@own > b on matched: +0.105",
    ]
    assert compared.left_out == ["claim a > b@own on matched: b has no matched@own"]
    (of_rounds,) = compare(several + one, "a", [read_claim("a@own > b", ["a", "b"], "accuracy")], at="best").claims
    assert of_rounds.at == "last"  # the other model has no figure of earlier rounds
    with refused("study.bad-claim", value="a@own > b on matched@own"):
        read_claim("a@own > b on matched@own", ["a", "b"], "matched")
    assert read_claim("a@own > a@whole", ["a"], "matched").measures == ("matched@own", "matched@whole")
    with refused("study.bad-claim", value="a@own > a@own"):
        read_claim("a@own > a@own", ["a"], "matched")


def test_a_claim_that_is_not_judged_in_a_cell_is_named_with_why():
    rows = [record(arm, seed, 0.5, cell=cell) for arm in "ab" for cell in CELLS for seed in (0, 1)]
    for each in rows:
        if (each.arm, each.cell) == ("b", "IF 50"):
            each.summary["groups"]["few"] = None
    compared = compare(rows, "a", [read_claim("a > b on few", ["a", "b"], "accuracy")])
    assert [each.cell for each in compared.claims] == ["IF 10"]
    assert compared.left_out == ["claim a > b on few in IF 50: b has no few"]
    apart = compare([record("a", 0, 0.5), record("b", 1, 0.6)], "a", [read_claim("a > b", ["a", "b"], "accuracy")])
    assert apart.claims == []
    assert apart.left_out == [
        "no difference of b, since it has no seed in common with a",
        "claim a > b on accuracy: its arms have no seed in common",
    ]


def test_claims_name_their_cells_where_the_measure_of_the_table_is_of_one_cell_only():
    rows = [record(arm, seed, 0.5, cell=cell) for arm in "ab" for cell in CELLS for seed in (0, 1)]
    for each in rows:
        if each.cell == "IF 50":
            each.summary["groups"]["few"] = None
    claims = [read_claim("a > b on accuracy", ["a", "b"], "few")]
    ((_, head, texts),) = comparison_tables.comparison_table(compare(rows, "a", claims, "few")).further
    assert head[1] == "cell"
    assert [row[1] for row in texts] == list(CELLS)


def test_tables_say_what_claims_are_of_and_what_their_family_is():
    claims = [read_claim(text, ["a", "b"], "accuracy") for text in ("b > a", "b > a on bytes_up")]
    text = comparison_tables.comparison_table(compare(records(), "a", claims, at="best")).markdown()
    assert "| b > a on accuracy | IF 10 | 6 |" in text
    assert "| b > a on bytes_up, last round | IF 10 | 6 |" in text
    assert "of rounds chosen on the test set" in text
    assert "one family of 2" in text
    few = comparison_tables.comparison_table(
        compare([each for each in records() if each.seed < 3], "a", claims)
    ).markdown()
    assert "one family" not in few  # too few seeds for p values


def test_a_difference_in_print_is_held_against_the_interval():
    # b is above a by 10 points on average in the first cell, and by 0.67 in the second
    claims = [read_claim("b > a", ["a", "b"], "accuracy", printed) for printed in (10.0, 20.0, None)]
    text = comparison_tables.comparison_table(compare(records(), "a", claims)).markdown()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| b > a")]
    assert [(row[1], row[4]) for row in rows] == [
        ("IF 10", "+10.00, in"),
        ("IF 50", "+10.00, out"),
        ("IF 10", "+20.00, out"),
        ("IF 50", "+20.00, out"),
        ("IF 10", ""),
        ("IF 50", ""),
    ]
    same = [record(arm, seed, 0.5 + 0.1 * (arm == "b")) for arm in "ab" for seed in range(6)]
    text = comparison_tables.comparison_table(compare(same, "a", claims[:1])).markdown()
    assert "| +10.00 |" in text  # nor is there one if all differences are equal
    single = [each for each in records() if each.seed == 0]
    assert (
        "| +10.00 |" in comparison_tables.comparison_table(compare(single, "a", claims[:1])).markdown()
    )  # without an interval there is no verdict


def test_claims_of_several_studies_stand_one_below_the_other():
    claims = [read_claim("b > a", ["a", "b"], "accuracy")]
    one_cell = [each for each in records() if each.cell == "IF 10"]
    sheet = comparison_tables.claims_table(
        {
            "wide": compare(records(), "a", claims),
            "narrow": compare(one_cell, "a", claims),
            "silent": compare([*records()[:-1], record("a", 9, 0.0, state="failed")], "a"),
        }
    )
    lines = [line for line in sheet.markdown().splitlines() if line]
    assert lines[0].startswith("**wide, last round: claims; p values adjusted by Holm in one family of 2, ")
    assert lines[1] == "| claim | cell | seeds | difference, points | p | verdict |"
    (narrow,) = [n for n, line in enumerate(lines) if line.startswith("**narrow, last round: claims; ")]
    assert "one family of 1, " in lines[narrow]
    assert lines[narrow + 1] == "| claim | seeds | difference, points | p | verdict |"
    assert lines[narrow + 3].startswith("| b > a on accuracy | 6 | +10.00 ± ")
    assert any(line.startswith("- silent: ") and "failed" in line for line in lines)
    with refused("study.no-figure", key="claims", studies=["silent"]):
        comparison_tables.claims_table({"silent": compare(records(), "a")})


def test_claims_of_a_study_have_the_notes_of_its_table():
    runs = [each for each in records() if (each.arm, each.seed) != ("b", 5)]
    runs += [record("b", 5, 0.0, cell=cell, state="failed", problem="why", summary=None) for cell in CELLS]
    runs[0] = replace(runs[0], made={"codes": ["d" * 64]}, sealed=False)
    runs.append(diverged("b", 6, cell="IF 10"))
    own = {"b": {"local.lr": 0.2}}
    compared = compare(
        runs,
        "a",
        [Claim("b", "a", "accuracy")],
        own=own,
        tuned=["b: lr 0.2"],
        mix_versions=True,
        classes=dict.fromkeys(CELLS, 4),
    )
    notes = comparison_tables.claims_table({"s": compared}).notes
    assert notes["versions of the code"] == ["s: dddddddddddd: 1 run", "s: cccccccccccc: 21 runs"]
    assert notes["arms with settings of their own"] == ["s: b: local.lr 0.2"]
    assert notes["tuned on validation samples"] == ["s: b: lr 0.2"]
    assert "s: IF 10/b/seed-5 and 1 more: failed: why" in notes["left out"]
    assert notes[comparison_tables.UNSEALED] == ["s: IF 10, a: 1 run"]
    assert notes[comparison_tables.DIVERGED] == ["s: IF 10/b/seed-6: failed: lr"]
    assert comparison_tables.notes_of(compared)[comparison_tables.UNSEALED] == ["IF 10, a: 1 run"]


def test_the_family_names_each_reason_for_a_missing_p_value():
    def heading(above):
        runs = [record(arm, seed, 0.5 + value * (arm == "b")) for arm in "ab" for seed, value in enumerate(above)]
        return comparison_tables.family(compare(runs, "a", [Claim("b", "a", "accuracy")]))

    assert heading([0.1] * 6) == "claims; no p values with fewer than six seeds or equal differences"
    assert heading([0.1, 0.2]) == "claims; no p values with fewer than six seeds"
    assert heading([0.1, 0.2] * 3).endswith("one family of 1, none with fewer than six seeds")


def test_the_table_over_cells_names_those_that_it_is_over():
    rows = [record(arm, seed, 0.5, cell=cell) for arm in "ab" for cell in ("x", "y", "z") for seed in (0, 1, 2)]
    assert compare(rows, "a").whole == ["x", "y", "z"]
    one_less = compare(rows[:-1], "a")
    assert one_less.whole == ["x", "y"]
    assert "**over cells x; y " in comparison_tables.comparison_table(one_less).markdown()
    none = compare([each for each in rows if (each.arm, each.cell) not in (("b", "x"), ("b", "y"))], "a")
    text = comparison_tables.comparison_table(none).markdown()
    assert "- over cells: no table" in text


def test_seconds_have_a_decimal_and_no_zero_is_negative():
    assert comparison_tables.formatter("seconds")(0.26) == "0.3"
    assert comparison_tables.formatter("accuracy")(-0.00001) == "0.00"
    assert comparison_tables.formatter("accuracy")(-0.0002) == "-0.02"


def test_differences_of_claims_have_units():
    of_accuracy, of_bytes = Claim("a", "b", "accuracy"), Claim("a", "b", "bytes_up")
    (alone,) = comparison_tables.comparison_table(compare(records(), "a", [of_accuracy])).further[:1]
    assert "difference, points" in alone[1]
    (both,) = comparison_tables.comparison_table(compare(records(), "a", [of_accuracy, of_bytes])).further[:1]
    assert "difference, points or MiB" in both[1]
    assert [row[3].split()[-1] for row in both[2]] == ["points"] * 2 + ["MiB"] * 2


def test_units_and_bounds_are_those_of_the_measure():
    units = {measure: comparison_tables.unit_of_difference(measure) for measure in ("few", "bytes_down", "seconds")}
    assert units == {"few": "points", "bytes_down": "MiB", "seconds": "s"}
    bounds = [comparison_tables.within(-0.1, 1.2, measure) for measure in ("few", "bytes_down", "seconds")]
    assert bounds == [(0.0, 1.0), (0.0, 1.2), (0.0, 1.2)]


def test_one_client_has_test_images_of_its_own():
    (each, *_) = records()
    groups = {"many": 90, "medium": 120, "few": 90}
    each.summary["tests"] = {"images": 300, "groups": groups, "thresholds": [20, 60], "own": [4], "one_class": []}
    assert judged_on([each], "accuracy").endswith("; 1 client has 4 test images each")
