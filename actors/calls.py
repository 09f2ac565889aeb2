"""`Call`: what is under way at an actor. `Clients`: what a dispatch of calls must know of the clients."""

from dataclasses import dataclass
from typing import Any, Protocol

from actors.shards import Shards
from actors.slots import Slot, Slots
from raylt.config import Config
from raylt.core.cohort import Ledger


@dataclass
class Call:
    """A call under way: of one client, or of a block of them."""

    ids: list[int]
    slot: Slot
    privates: list[Any]
    start: float
    patience: float         # seconds after which it is called stuck
    actors: int             # how many there were when it began
    named: bool = False


class Clients(Protocol):
    """What a dispatch must know of the clients, and whom it tells what happens: the fleet.

    Attributes:
        all_sizes: samples per client, by id.
        shards: references to the clients' data.
    """

    config: Config
    round: int
    ledger: Ledger
    all_sizes: dict[int, int]
    shards: Shards
    slots: Slots

    def private(self, id: int) -> Any:
        """A reference to a client's private state; None before its first call."""

    def keep(self, private: Any) -> Any:
        """A reference to the same state that the loss of a client's node does not touch."""

    def patience(self, name: str) -> float:
        """Seconds after which a client that is still at this call is called stuck."""
        ...

    def took(self, name: str, id: int, seconds: float) -> None:
        """Records the seconds of a call."""

    def note(self, text: str) -> None:
        """Adds a line to the run's notes."""

    def note_stuck(self, ids: list[int], name: str, seconds: float, actor: str) -> None:
        """Says who keeps everybody waiting."""


def named(ids: list[int]) -> str:
    """Who is meant by a note: `client 3`, or `clients 3, 8, 11 and 9 more`."""
    if len(ids) == 1:
        return f"client {ids[0]}"
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"clients {', '.join(map(str, ids[:3]))}{more}"
