"""`Cohort`: who is asked. `Ledger`: what came of it in one round."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from raylt.core.server import Stages


@dataclass
class Traffic:
    """Bytes of one kind of call: `down` in messages, `up` in replies, over `replies` clients."""

    down: int = 0
    up: int = 0
    replies: int = 0


@dataclass
class Ledger:
    """What happened in one round: traffic by client function, the clients that made trouble, and the time it took.

    `stages` holds the wait for clients under the function's name, and "aggregation".
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)           # no usable answer, for whatever reason but a bad reply
    retried: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # reply not usable, and why
    participants: set[int] = field(default_factory=set)     # of a cohort, those who replied usably
    stages: Stages = field(default_factory=Stages)


class Cohort(list[int]):
    """The clients asked in a round; the answers of `enough` of them are waited for (federation.over_select)."""

    def __init__(self, ids: Iterable[int], enough: int):
        super().__init__(ids)
        self.enough = enough
