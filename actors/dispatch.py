"""`Dispatch`: one call on several clients: who waits, who runs, who has answered."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from actors.slots import LOST, Slot, Slots
from raylt.config import Config
from raylt.core.client import ClientFunction
from raylt.core.cohort import Ledger
from raylt.core.fleet import Answer, Arrived
from raylt.core.wire import unpacked
from raylt.errors import ClientError, ClientLost, one_line

PATIENCE_S = 60.0           # nothing is called stuck before
FIRST_PATIENCE_S = 600.0    # where no client has done the same call yet


@dataclass
class Call:
    """One client's call under way."""

    id: int
    slot: Slot
    private: Any
    start: float
    patience: float         # seconds after which it is called stuck
    actors: int             # how many there were when it began
    named: bool = False


class Clients(Protocol):
    """What a dispatch must know of the clients, and whom it tells what happens: the fleet.

    Attributes:
        sizes: samples per client, by id.
        shards: references to the clients' data, by id.
    """

    config: Config
    round: int
    ledger: Ledger
    sizes: dict[int, int]
    shards: list[Any]
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

    def note_stuck(self, id: int, name: str, seconds: float, actor: str) -> None:
        """Says who keeps everybody waiting."""


class Dispatch:
    """A call's deadline counts from here, its retries are in the fleet's ledger.

    Args:
        message: a reference.
        enough: usable answers after which nobody else is waited for.
    """

    def __init__(self, fleet: Clients, fn: ClientFunction, ids: list[int], message: Any, enough: int,
                 usable: Callable[[int, Arrived], bool]):
        self.fleet, self.fn, self.message, self.enough, self.usable = fleet, fn, message, enough, usable
        self.name = getattr(fn, "__name__", "call")
        self.waiting = sorted(ids, key=lambda id: -fleet.sizes[id])     # the largest first, or a round ends with it
        self.running: dict[Any, Call] = {}
        self.attempts = dict.fromkeys(ids, 0)
        self.answers: dict[int, Answer] = {}
        self.answered = 0                                               # usably
        self.over = False
        limit = fleet.config.federation.deadline_s
        self.deadline = None if limit is None else time.monotonic() + limit

    def advance(self) -> None:
        """Starts what can start, waits for one call to end, and records it."""
        self._start()
        late = [slot.late for slot in self.fleet.slots if slot.late is not None]
        now = time.monotonic()
        soonest = min((call.start + call.patience for call in self.running.values() if not call.named), default=None)
        ends = [end for end in (self.deadline, soonest) if end is not None]
        left = max(0.0, min(ends) - now) if ends else None
        ready, _ = ray.wait([*self.running, *late], num_returns=1, timeout=left)
        for ref in ready:
            if ref in self.running:
                self._record(ref, self.running.pop(ref))
            else:
                self._release(ref)
        if self.answered >= self.enough or (not self.running and not self.waiting):
            self._end()
        elif not ready and self.deadline is not None and time.monotonic() >= self.deadline:
            self._expire()
        elif not ready:
            self._name_stuck()

    def _start(self) -> None:
        busy = {id(call.slot) for call in self.running.values()}
        free = [slot for slot in self.fleet.slots if id(slot) not in busy and slot.late is None]
        idle = [slot for slot in free if not self._take(slot, slot.home)]
        for slot in idle:
            self._take(slot, self.waiting)

    def _take(self, slot: Slot, clients: list[int]) -> bool:
        id = next((id for id in self.waiting if id in clients), None)
        if id is None:
            return False
        self._submit(slot, id)
        return True

    def _submit(self, slot: Slot, id: int) -> None:
        self.waiting.remove(id)
        shard = None if id in slot.held else self.fleet.shards[id]
        slot.held.add(id)
        patience = self.fleet.patience(self.name)
        reply, private = slot.actor.run.options(num_returns=2).remote(
            self.fn, self.message, self.fleet.round, id, shard, self.fleet.private(id), patience)
        self.running[reply] = Call(id, slot, private, time.monotonic(), patience, len(self.fleet.slots))

    def _record(self, ref: Any, call: Call) -> None:
        id = call.id
        try:
            reply: Any = ray.get(ref)
            private = self.fleet.keep(call.private)
        except LOST as error:
            lost = ClientLost(id, self.fleet.round, self.name, f"its process died ({type(error).__name__})")
            self.fleet.note(str(lost))
            start = time.monotonic()
            self.fleet.slots.replace([call.slot])
            if self.deadline is not None:
                self.deadline += time.monotonic() - start
            self._fail(id, lost)
            return
        except RayTaskError as error:               # it could not be sent there, or its reply not back
            self._fail(id, ClientError(id, self.fleet.round, self.name, one_line(error.cause)))
            return
        full = isinstance(reply, str) and reply.startswith("OutOfMemoryError")
        if full and call.actors > len(self.fleet.slots):       # room was made meanwhile
            self.waiting.insert(0, id)
        elif full and call.actors > 1:
            self._make_room(call)
        elif isinstance(reply, str):
            self._fail(id, ClientError(id, self.fleet.round, self.name, reply))
        else:
            reply = unpacked(reply)
            self.answered += self.usable(id, reply)
            self.answers[id] = Answer(id, reply, private)
            self.fleet.took(self.name, id, time.monotonic() - call.start)

    def _make_room(self, call: Call) -> None:
        """A device is full: half the actors at once, and the same calls again. Nobody's attempt is counted."""
        before, given_up = len(self.fleet.slots), self.fleet.slots.halve()
        self.waiting.insert(0, call.id)
        for ref, other in list(self.running.items()):
            if any(other.slot is slot for slot in given_up):
                del self.running[ref]
                self.waiting.insert(0, other.id)
        self.fleet.note(f"client {call.id}, round {self.fleet.round}, {self.name}: device out of memory; going on with "
                        f"{len(self.fleet.slots)} of {before} client actors")

    def _name_stuck(self) -> None:
        now = time.monotonic()
        for call in self.running.values():
            if not call.named and now >= call.start + call.patience:
                call.named = True
                self.fleet.note_stuck(call.id, self.name, now - call.start, call.slot.name)

    def _fail(self, id: int, error: ClientError) -> None:
        if self.attempts[id] < self.fleet.config.federation.retries:
            self.attempts[id] += 1
            self.fleet.ledger.retried.append(id)
            self.waiting.insert(0, id)
        else:
            self.answers[id] = Answer(id, None, None, error)

    def _release(self, ref: Any) -> None:
        """A late call of an earlier round is through, or its actor died."""
        slot = next(slot for slot in self.fleet.slots if slot.late == ref)
        slot.late = None
        try:
            ray.get(ref)
        except LOST:
            self.fleet.slots.replace([slot])
        except RayTaskError:
            pass

    def _end(self) -> None:
        """Enough have answered: the others go on, and their actors take no new call before they are through."""
        for ref, call in self.running.items():
            call.slot.late = ref
        self.over = True

    def _expire(self) -> None:
        """The deadline has passed: actors that are still at work may be stuck, and are replaced."""
        limit = self.fleet.config.federation.deadline_s
        for id in [*(call.id for call in self.running.values()), *self.waiting]:
            cause = f"not done after federation.deadline_s = {limit:g} s"
            self.answers[id] = Answer(id, None, None, ClientError(id, self.fleet.round, self.name, cause))
        self.over = True
        self.fleet.slots.replace([call.slot for call in self.running.values()]
                                 + [slot for slot in self.fleet.slots if slot.late is not None])
