"""Asynchronous successive halving (ASHA, Li et al., MLSys 2020) with decisions that do not depend on timing.

ASHA compares a trial at a rung with the trials that reached the rung before it. In other implementations these trials
depend on which process was faster. Here they are the trials with smaller numbers, whenever they reach the rung. No
process waits for them: a trial continues while it is unknown whether an earlier trial will reach the rung. If it is
then stopped at the rung, its later steps do not count. So these decisions follow from the trials' values alone, even if
the search was killed and resumed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ETA = 3  # One of ETA trials continues at a rung.


@dataclass(frozen=True)
class TrialProgress:
    """The scores of a trial so far.

    Args:
        scores: Scores by round, at least for the rungs; higher is better.
        end: Score of the deployed model; None before the end.
        failed: Whether the trial has failed and is not retried.
        over: Whether the trial gets no more scores although it neither ended nor failed, because it was stopped before
            the search was interrupted.
    """

    scores: Mapping[int, float]
    end: float | None = None
    failed: bool = False
    over: bool = False


@dataclass(frozen=True)
class Outcome:
    """The final state and score of a trial.

    Args:
        state: "done", "stopped" at a rung, or "failed".
        step: The step that the trial reached: a rung, or the number of rounds.
        score: The score that counts; None for a failed trial.
    """

    state: str
    step: int
    score: float | None


def rungs(rounds: int, grace: int | None = None) -> list[int]:
    """Return the round numbers (rungs) after which trials are compared.

    Args:
        rounds: Number of rounds R. By default the rungs are R/9 and R/3.
        grace: The first rung. Each further rung is `ETA` times the previous one, up to R/2.
    """
    if grace is None:
        steps = {rounds // ETA**k for k in (1, 2)}
    else:
        steps = {grace * ETA**k for k in range(32) if grace * ETA**k <= rounds // 2}
    return sorted(step for step in steps if 0 < step < rounds)


def outcomes(trials: Sequence[TrialProgress], steps: Sequence[int], rounds: int) -> list[Outcome | None]:
    """Return the outcome of each trial, in order; None for a trial that is still undecided.

    Args:
        trials: Progress of the trials of one method, in the order of their numbers.
        steps: The rungs, ascending; empty for no halving.
        rounds: Number of rounds R, the `step` of an outcome at the end.
    """
    recorded: dict[int, list[float]] = {step: [] for step in steps}
    open_rungs: set[int] = set()  # rungs that an earlier trial may still reach
    return [_outcome(trial, steps, rounds, recorded, open_rungs) for trial in trials]


def _outcome(
    trial: TrialProgress, steps: Sequence[int], rounds: int, recorded: dict[int, list[float]], open_rungs: set[int]
) -> Outcome | None:
    """Return the outcome of one trial, and add its scores to `recorded` for the comparison with later trials."""
    passed: Outcome | None = None  # outcome at the last rung that the trial has passed
    for step in steps:
        score = trial.scores.get(step)
        if score is None and trial.failed:
            return Outcome("failed", step, None)
        if score is None and trial.over:
            return passed  # an earlier trial was run again, and this one now passes the rung at which it was stopped
        if score is None or step in open_rungs:
            open_rungs.update(later for later in steps if later >= step)
            return None
        recorded[step].append(score)
        better = sum(other > score for other in recorded[step])
        passed = Outcome("stopped", step, score)
        if better >= math.ceil(len(recorded[step]) / ETA):
            return passed
    if trial.end is not None:
        return Outcome("done", rounds, trial.end)
    if trial.failed:
        return Outcome("failed", rounds, None)
    return passed if trial.over else None
