"""`Cohort`, the clients that a call asks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import index

from raylt.errors import ConfigError, count_of, one_line


@dataclass(frozen=True, init=False)
class Cohort:
    """The clients that a call asks, and the number of replies that the call needs.

    Attributes:
        ids: Ids of the clients, ascending.
        needed: Number of usable answers that the server waits for; by default all (fewer with federation.over_select).
        everyone: Whether these are all clients, independent of sampling. They do not count as participants of a round.
        drawn: Whether `Method.sample` drew the clients by the rule of federation.sampling, which the privacy of clients
            relies on.

    Raises:
        ConfigError: The ids are not whole numbers, a client is named twice, or `needed` is not between 1 and the number
            of clients.
    """

    ids: tuple[int, ...]
    needed: int
    everyone: bool = False
    drawn: bool = False

    def __init__(self, ids: Iterable[int], needed: int | None = None, *, everyone: bool = False, drawn: bool = False):
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
        object.__setattr__(self, "drawn", drawn)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)
