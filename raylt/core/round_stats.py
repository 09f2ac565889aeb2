"""`RoundStats`, what is counted and timed in one round: bytes, clients with problems, and durations.

`Timings` are the durations alone, for the server's own work.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Called with the name of a call or stage, the number of finished clients, and their total.
ProgressHook = Callable[[str, int, int], None]

StageProgress = Callable[[int, int], None]  # called with the number of finished steps of a stage, and their total


class Timings(dict[str, float]):
    """Seconds that each stage of a step took, by name.

    Args:
        on_progress: Called for each stage that begins.
    """

    def __init__(self, *seconds: Mapping[str, float], on_progress: ProgressHook | None = None):
        super().__init__(*seconds)
        self._on_progress = on_progress

    @contextmanager
    def time(self, name: str) -> Iterator[StageProgress]:
        """Add the duration of the block, in seconds, to the named stage.

        Yields:
            A function that reports the number of finished steps of the stage, and their total, to the observer.
        """

        def show(done: int, total: int) -> None:
            if self._on_progress is not None:
                self._on_progress(name, done, total)

        show(0, 0)
        start = time.perf_counter()
        try:
            yield show
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the given seconds to the stages with the same names."""
        for name, more in seconds.items():
            self[name] = self.get(name, 0.0) + more


@dataclass
class Traffic:
    """Bytes in all calls of one client function: `down` in messages, `up` in replies, and the number of `replies`.

    See `raylt.core.report.TrafficRecord` for what counts.
    """

    down: int = 0
    up: int = 0
    replies: int = 0

    def add(self, more: "Traffic") -> None:
        """Add the bytes and replies of another `Traffic`."""
        self.down += more.down
        self.up += more.up
        self.replies += more.replies


@dataclass
class RoundStats:
    """Statistics of one round: traffic by client function, clients with problems, and durations.

    `timings` holds the wait for clients under the function's name, and "aggregation".
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)  # clients without an answer, for example failed or late ones
    retried: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # why each reply was not usable, by client id
    participants: set[int] = field(default_factory=set)  # clients with a usable reply, except to calls for everyone
    timings: Timings = field(default_factory=Timings)
    privacy: dict[str, Any] | None = None  # description of the noise in the uploads, and the budget

    def add_troubles(self, more: "RoundStats") -> None:
        """Add only the clients with problems from other statistics."""
        self.lost += more.lost
        self.retried += more.retried
        self.rejected |= more.rejected
