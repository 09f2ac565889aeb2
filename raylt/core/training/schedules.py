"""Learning rates over the rounds: `step`, `cosine`, and schedules of plugins (`local.schedule`)."""

import math
from collections.abc import Callable
from numbers import Real

import numpy as np
from torch import Tensor

from raylt.config import LocalConfig
from raylt.errors import ConfigError

Schedule = Callable[[LocalConfig, int, int], float]  # (settings, round from 1, number of rounds) -> learning rate


def step(local: LocalConfig, round: int, rounds: int) -> float:
    """Return `local.lr`, multiplied by 1 - `local.lr_decay` after every `local.lr_decay_every` rounds."""
    return local.lr * (1 - local.lr_decay) ** ((round - 1) // local.lr_decay_every)


def cosine(local: LocalConfig, round: int, rounds: int) -> float:
    """Return a rate that falls from `local.lr` along a cosine and would reach 0 after the last round."""
    return local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))


SCHEDULES: dict[str, Schedule] = {"step": step, "cosine": cosine}


def scheduled_rate(schedule: Schedule | None, local: LocalConfig, round: int, rounds: int) -> float:
    """Return the learning rate of a round, including the warm-up of `local.warm_up`.

    Args:
        schedule: The schedule; by default the built-in one that `local.schedule` names.
        local: The settings in `local`.
        round: Number of the round, from 1; 0 counts as the first round, and numbers after the last as the last round.
        rounds: Number of rounds.

    Raises:
        ConfigError: The schedule returned something else than a finite number of at least 0.
    """
    round = max(min(round, rounds), 1)
    rate = _checked((schedule or SCHEDULES[local.schedule])(local, round, rounds), local.schedule, round)
    return rate if round > local.warm_up else rate * round / (local.warm_up + 1)


def _checked(rate: object, name: str, round: int) -> float:
    """Return the learning rate that a schedule returned for a round, as a float."""
    rate = rate.item() if isinstance(rate, Tensor | np.ndarray) and rate.ndim == 0 else rate
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < math.inf:
        raise ConfigError(
            f"local.schedule: {name} returned no learning rate for round {round} ({rate!a:.80}). Return a finite "
            "number of at least 0.",
            code="plugin.failed",
            key="local.schedule",
            value=name,
            round=round,
        )
    return float(rate)
