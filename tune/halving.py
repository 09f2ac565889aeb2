"""Successive halving without waiting (ASHA, Li et al., MLSys 2020), in an order that timing cannot change.

ASHA compares a trial at a rung with those that were there before it. Which those are depends, elsewhere, on which
process was faster; here a trial comes after the trials with smaller numbers, whenever it arrives. Nobody waits for
that: a trial goes on while an earlier one has not said yet whether it gets to the rung, and what it did beyond the rung
at which it is stopped then counts for nothing. So the outcome of a search is a function of its seed, and a search that
was killed and resumed comes to the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ETA = 3                 # one in this many goes on


@dataclass(frozen=True)
class Course:
    """How far a trial has come.

    Args:
        scores: by round, at rungs at least; higher is better.
        end: the score of what is deployed in the end, None before.
        failed: whether it has given up.
        over: whether nothing more will come of it, though it neither ended nor failed: it was stopped before the search
            was interrupted.
    """

    scores: Mapping[int, float]
    end: float | None = None
    failed: bool = False
    over: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: "done", "stopped" at a rung (`step`) or "failed", with the score that counts."""

    state: str
    step: int
    score: float | None


def rungs(rounds: int, grace: int | None = None) -> list[int]:
    """The rounds after which trials are compared: R/9 and R/3, none before `grace`."""
    found = {rounds // ETA ** k for k in (1, 2)} if grace is None else {
        grace * ETA ** k for k in range(32) if grace * ETA ** k <= rounds // 2}
    return sorted(step for step in found if 0 < step < rounds)


def outcomes(courses: Sequence[Course], steps: Sequence[int], rounds: int) -> list[Outcome | None]:
    """The outcome of each trial, in their order; None where it is not known yet, whatever its process does.

    Args:
        courses: of the trials of one method, in the order of their numbers.
        steps: the rungs, ascending; none for no halving.
        rounds: R, what an outcome's `step` is at the end.
    """
    recorded: dict[int, list[float]] = {step: [] for step in steps}
    closed: set[int] = set()            # rungs at which an earlier trial may still arrive
    found = []
    for course in courses:
        outcome, passed = None, None
        for step in steps:
            score = course.scores.get(step)
            if score is None and course.failed:
                outcome = Outcome("failed", step, None)
                break
            if score is None and course.over:
                outcome = passed                    # another one that was taken up again made it pass the rung
                break
            if score is None or step in closed:
                closed.update(later for later in steps if later >= step)
                break
            recorded[step].append(score)
            better = sum(other > score for other in recorded[step])
            if better >= math.ceil(len(recorded[step]) / ETA):
                outcome = Outcome("stopped", step, score)
                break
            passed = Outcome("stopped", step, score)
        else:
            if course.end is not None:
                outcome = Outcome("done", rounds, course.end)
            elif course.failed:
                outcome = Outcome("failed", rounds, None)
            elif course.over:
                outcome = passed
        found.append(outcome)
    return found
