"""Learning rates over the rounds: `step` and `cosine`, and those that plugins add (`local.schedule`)."""

import math
from collections.abc import Callable

from raylt.config import LocalConfig

Schedule = Callable[[LocalConfig, int, int], float]  # settings, round from 1, rounds -> learning rate


def step(local: LocalConfig, round: int, rounds: int) -> float:
    """Return `local.lr` without the share `local.lr_decay` for every `local.lr_decay_every` rounds that have passed."""
    return local.lr * (1 - local.lr_decay) ** ((round - 1) // local.lr_decay_every)


def cosine(local: LocalConfig, round: int, rounds: int) -> float:
    """Return a rate that falls from `local.lr` along a cosine, which would reach 0 after the last round."""
    # training after the last round has its rate, not zero
    return local.lr * 0.5 * (1 + math.cos(math.pi * min(round - 1, rounds - 1) / rounds))


SCHEDULES: dict[str, Schedule] = {"step": step, "cosine": cosine}


def scheduled_rate(schedule: Schedule | None, local: LocalConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round, with the warm-up that `local.warm_up` asks for.

    Args:
        schedule: by default the one of raylt's own that `local.schedule` names.
        round: from 1; 0 before the first counts as the first.
    """
    round = max(round, 1)
    rate = (schedule or SCHEDULES[local.schedule])(local, round, rounds)
    return rate if round > local.warm_up else rate * round / (local.warm_up + 1)
