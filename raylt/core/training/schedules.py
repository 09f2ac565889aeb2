"""Learning rates over the rounds: `step`, `cosine`, and those that plugins add (`local.schedule`)."""

import math
from collections.abc import Callable

from raylt.config import LocalConfig

Schedule = Callable[[LocalConfig, int, int], float]  # settings, round from 1, rounds -> learning rate


def step(local: LocalConfig, round: int, rounds: int) -> float:
    """Return `local.lr`, multiplied by 1 - `local.lr_decay` after every `local.lr_decay_every` rounds."""
    return local.lr * (1 - local.lr_decay) ** ((round - 1) // local.lr_decay_every)


def cosine(local: LocalConfig, round: int, rounds: int) -> float:
    """Return a rate that falls from `local.lr` along a cosine to 0, which it would reach after the last round."""
    return local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))


SCHEDULES: dict[str, Schedule] = {"step": step, "cosine": cosine}


def scheduled_rate(schedule: Schedule | None, local: LocalConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round, including the warm-up of `local.warm_up`.

    Args:
        schedule: by default the one of raylt's own that `local.schedule` names.
        round: from 1; 0 before the first counts as the first, and training after the last round as the last.
    """
    round = max(min(round, rounds), 1)
    rate = (schedule or SCHEDULES[local.schedule])(local, round, rounds)
    return rate if round > local.warm_up else rate * round / (local.warm_up + 1)
