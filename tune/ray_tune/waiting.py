"""`WaitingNotice`: says that the trials of a search wait for room in the cluster."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import tune as ray_tune
from ray.tune.experiment import Trial
from ray.util import placement_group_table

from actors.actor_pool import QUIET_WAIT_S


class WaitingNotice(ray_tune.Callback):
    """Callback that says once when no trial can run because other jobs fill the cluster. Tune would wait in silence.

    Args:
        note: Function that shows a line. Tune pickles it.
    """

    def __init__(self, note: Callable[[str], None]):
        self._note = note
        self._idle_since: float | None = None
        self._noted = False

    def on_step_end(self, iteration: int, trials: Sequence[Any], **info: Any) -> None:
        if any(trial.status == Trial.RUNNING for trial in trials):
            self._idle_since = None
            self._noted = False
            return
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        if self._noted or now - self._idle_since < QUIET_WAIT_S:
            return
        self._idle_since = now  # trials that start have their room
        if _waits_for_room():
            self._noted = True
            self._note("the cluster has no room yet for a trial; waiting until other jobs end")


def _waits_for_room() -> bool:
    """Return whether a placement group of this job is pending."""
    job = ray.get_runtime_context().get_job_id()
    groups = placement_group_table().values()
    # the id of a group ends with the id of the job that made it
    return any(group["state"] == "PENDING" and group["placement_group_id"].endswith(job) for group in groups)
