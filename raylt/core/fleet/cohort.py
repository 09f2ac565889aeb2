"""`Cohort`, the clients that a call asks, and `RoundStats`, the statistics of one round."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import Any

from raylt.core.server import Timings
from raylt.errors import ConfigError, count_of, one_line


@dataclass(frozen=True, init=False)
class Cohort:
    """The clients that a call asks, and the number of replies that the call needs.

    Attributes:
        ids: Ids of the clients, ascending.
        needed: Number of usable answers that the server waits for; by default all (fewer with federation.over_select).
        everyone: Whether these are all clients, independent of sampling. They do not count as participants of a round.

    Raises:
        ConfigError: The ids are not whole numbers, a client is named twice, or `needed` is not between 1 and the number
            of clients.
    """

    ids: tuple[int, ...]
    needed: int
    everyone: bool = False

    def __init__(self, ids: Iterable[int], needed: int | None = None, *, everyone: bool = False):
        try:
            ordered = tuple(sorted(map(index, ids)))
        except TypeError as error:
            raise ConfigError(
                f"ids: a cohort is named by whole numbers ({one_line(error)}). Give ids of fleet.ids.",
                code="method.wrong-argument",
                key="ids",
            ) from error
        twice = next((id for id, following in pairwise(ordered) if id == following), None)
        if twice is not None:
            raise ConfigError(
                f"ids: client {twice} is named twice. Name each client of a cohort once.",
                code="method.wrong-argument",
                key="ids",
                value=twice,
            )
        if needed is not None and ordered and not 1 <= needed <= len(ordered):  # Fleet.ask reports an empty cohort
            raise ConfigError(
                f"needed: a call of {count_of(len(ordered), 'client')} cannot need {needed} answers. Give 1 to "
                f"{len(ordered)}.",
                code="method.wrong-argument",
                key="needed",
                value=needed,
            )
        object.__setattr__(self, "ids", ordered)
        object.__setattr__(self, "needed", len(ordered) if needed is None else needed)
        object.__setattr__(self, "everyone", everyone)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


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
