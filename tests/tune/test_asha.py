import random

import pytest

from tune.asha import Outcome, TrialProgress, outcomes, rungs


def progress(*scores, end=None, failed=False, over=False):
    return TrialProgress(dict(zip((1, 3), scores, strict=False)), end, failed, over)


def test_rungs_are_at_a_ninth_and_a_third_of_the_rounds():
    assert rungs(30) == [3, 10]
    assert rungs(6) == [2]
    assert rungs(2) == []
    assert rungs(30, grace=4) == [4, 12]


def test_a_trial_past_half_of_the_rounds_is_not_stopped():
    assert rungs(10, grace=1) == [1, 3]  # 9 of 10 rounds would save one
    assert rungs(18, grace=1) == [1, 3, 9]


def test_one_trial_in_three_continues():
    # rung 1 records .5, best of 1; .4, second of 2; .6, best of 3; .55, second of 4, of which two continue
    results = outcomes([progress(0.5), progress(0.4), progress(0.6), progress(0.55)], [1, 3], 9)
    assert [o and o.state for o in results] == [None, "stopped", None, None]
    assert results[1] == Outcome("stopped", 1, 0.4)


def test_equals_go_on_together():
    assert outcomes([progress(0.5), progress(0.5)], [1], 9) == [None, None]


def test_a_trial_is_not_judged_before_earlier_ones_have_been():
    assert outcomes([progress(), progress(0.1, end=0.1)], [1], 9) == [None, None]
    assert outcomes([progress(0.5), progress(0.1, end=0.1)], [1], 9) == [None, Outcome("stopped", 1, 0.1)]
    assert outcomes([progress(0.05), progress(0.1, end=0.1)], [1], 9) == [None, Outcome("done", 9, 0.1)]


def test_a_trial_that_ends_with_a_score_of_zero_has_ended():
    assert outcomes([progress(0.0, end=0.0)], [1], 9) == [Outcome("done", 9, 0.0)]


def test_a_failed_trial_delays_no_other():
    assert outcomes([progress(failed=True), progress(0.1, end=0.2)], [1], 9) == [
        Outcome("failed", 1, None),
        Outcome("done", 9, 0.2),
    ]
    assert outcomes([progress(0.5, failed=True), progress(0.1, end=0.2)], [1], 9)[1] == Outcome("stopped", 1, 0.1)


@pytest.mark.parametrize("seed", range(30))
def test_outcomes_do_not_depend_on_the_order_in_which_results_come(seed):
    """Results arrive in a random order; outcomes never change once reached, and the end is the same."""
    rng = random.Random(seed)
    steps, ends = (1, 3), [rng.random() for _ in range(9)]
    scores = [[rng.random() for _ in steps] for _ in ends]
    final = outcomes([progress(*s, end=e) for s, e in zip(scores, ends, strict=True)], steps, 9)
    assert None not in final
    arrived = [0] * len(ends)
    before = [None] * len(ends)
    while any(k < 3 for k in arrived):
        i = rng.choice([i for i, k in enumerate(arrived) if k < 3])
        arrived[i] += 1
        now = outcomes(
            [progress(*s[:k], end=e if k == 3 else None) for s, e, k in zip(scores, ends, arrived, strict=True)],
            steps,
            9,
        )
        assert all(a is None or a == b for a, b in zip(before, now, strict=True))
        assert all(a is None or a == b for a, b in zip(now, final, strict=True))
        before = now
    assert before == final


def test_a_trial_that_was_stopped_before_an_interruption_counts_where_it_came_to():
    """The first trial failed and ran again in the resumed search, so its score changes the ranks of the others."""
    before = [
        progress(failed=True),
        progress(0.5, 0.6, end=0.5),
        progress(0.6, 0.7, end=0.6),
        progress(0.55, over=True),
        progress(0.7, 0.8, end=0.7),
    ]
    assert [each.state for each in outcomes(before, [1, 3], 9)] == ["failed", "done", "done", "stopped", "done"]
    after = outcomes([progress(0.05, 0.1, end=0.1), *before[1:]], [1, 3], 9)
    # the trial was second of three and stopped at the first rung; as second of four it would have continued
    assert after[3] == Outcome("stopped", 1, 0.55)
    assert after[4] == Outcome("done", 9, 0.7)


def test_a_trial_without_an_end_that_passes_all_rungs_counts_at_the_last_or_failed():
    # it was stopped at the last rung, and passes it after an earlier trial was run again with another score
    assert outcomes([progress(0.5, 0.6, over=True)], [1, 3], 9) == [Outcome("stopped", 3, 0.6)]
    assert outcomes([progress(0.5, 0.6, failed=True)], [1, 3], 9) == [Outcome("failed", 9, None)]
