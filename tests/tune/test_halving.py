import random

import pytest

from tune.halving import Course, Outcome, outcomes, rungs


def course(*scores, end=None, failed=False, over=False):
    return Course(dict(zip((1, 3), scores, strict=False)), end, failed, over)


def test_rungs_are_at_a_ninth_and_a_third_of_the_rounds():
    assert rungs(30) == [3, 10]
    assert rungs(6) == [2]
    assert rungs(2) == []
    assert rungs(30, grace=4) == [4, 12]


def test_one_in_three_goes_on():
    # recorded at rung 1: .5 -> best of 1; .4 -> second of 2; .6 -> best of 3; .55 -> second of 4, and 2 of 4 go on
    found = outcomes([course(.5), course(.4), course(.6), course(.55)], [1, 3], 9)
    assert [o and o.state for o in found] == [None, "stopped", None, None]
    assert found[1] == Outcome("stopped", 1, .4)


def test_equals_go_on_together():
    assert outcomes([course(.5), course(.5)], [1], 9) == [None, None]


def test_a_trial_is_not_judged_before_earlier_ones_have_been():
    assert outcomes([course(), course(.1, end=.1)], [1], 9) == [None, None]
    assert outcomes([course(.5), course(.1, end=.1)], [1], 9) == [None, Outcome("stopped", 1, .1)]
    assert outcomes([course(.05), course(.1, end=.1)], [1], 9) == [None, Outcome("done", 9, .1)]


def test_a_failed_trial_holds_nobody_up():
    assert outcomes([course(failed=True), course(.1, end=.2)], [1], 9) == [
        Outcome("failed", 1, None), Outcome("done", 9, .2)]
    assert outcomes([course(.5, failed=True), course(.1, end=.2)], [1], 9)[1] == Outcome("stopped", 1, .1)


@pytest.mark.parametrize("seed", range(30))
def test_outcomes_do_not_depend_on_the_order_in_which_results_come(seed):
    """Results arrive in a random order; whatever is concluded on the way stays, and the end is the same."""
    rng = random.Random(seed)
    steps, ends = (1, 3), [rng.random() for _ in range(9)]
    scores = [[rng.random() for _ in steps] for _ in ends]
    final = outcomes([course(*s, end=e) for s, e in zip(scores, ends, strict=True)], steps, 9)
    assert None not in final
    known = [0] * len(ends)
    before = [None] * len(ends)
    while any(k < 3 for k in known):
        i = rng.choice([i for i, k in enumerate(known) if k < 3])
        known[i] += 1
        now = outcomes([course(*s[:k], end=e if k == 3 else None) for s, e, k in zip(scores, ends, known, strict=True)],
                       steps, 9)
        assert all(a is None or a == b for a, b in zip(before, now, strict=True))
        assert all(a is None or a == b for a, b in zip(now, final, strict=True))
        before = now
    assert before == final


def test_a_trial_that_was_stopped_before_an_interruption_counts_where_it_came_to():
    """The first failed, and was run again when the search was resumed: its score moves the others' places."""
    before = [course(failed=True), course(.5, .6, end=.5), course(.6, .7, end=.6), course(.55, over=True),
              course(.7, .8, end=.7)]
    assert [each.state for each in outcomes(before, [1, 3], 9)] == ["failed", "done", "done", "stopped", "done"]
    after = outcomes([course(.05, .1, end=.1), *before[1:]], [1, 3], 9)
    # the second of three was stopped at the first rung; as the second of four it would have gone on
    assert after[3] == Outcome("stopped", 1, .55)
    assert after[4] == Outcome("done", 9, .7)
