"""`Dispatch`: one call on several clients: who waits, who runs, who has answered.

Many small clients travel in blocks, one call of Ray's for several: what such a call costs is more than what they
compute. A client with more than SMALL samples has a call of its own, and so has everyone where few are asked, or where
not all of them are waited for. Where so many are asked that each actor gets several blocks of raylt.core.blocks, those
blocks whose clients are all small are the calls, and come back as their sums.
"""

import itertools
import time
from collections.abc import Callable, Container
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.calls import Call, Clients, named
from actors.client import Block
from actors.faults import FULL
from actors.slots import LOST, Slot
from raylt.core.blocks import BLOCK, Summed, whole
from raylt.core.client import ClientFunction
from raylt.core.fleet import Answer, Arrived
from raylt.core.schema import Schema
from raylt.core.wire import unpacked
from raylt.errors import ClientError, ClientLost, one_line

PATIENCE_S = 60.0           # nothing is called stuck before
FIRST_PATIENCE_S = 600.0    # where no client has done the same call yet
SMALL = 32                  # samples of a client that shares a call
MOST = 64                   # clients of a call
SPREAD = 4                  # calls that an actor gets at least, so that none waits long for the last


class Dispatch:
    """A call's deadline counts from here, its retries are in the fleet's ledger.

    Args:
        message: a reference.
        enough: usable answers after which nobody else is waited for.
        sums: see `Fleet._answers`.
    """

    def __init__(self, fleet: Clients, fn: ClientFunction, ids: list[int], message: Any, enough: int,
                 usable: Callable[[int, Arrived], bool], sums: Schema | None):
        self.fleet, self.fn, self.message, self.enough, self.usable = fleet, fn, message, enough, usable
        self.name = getattr(fn, "__name__", "call")
        self.alone = set[int]()                         # who was in a block that was lost: asked again without others
        everybody = enough >= len(ids) and fleet.config.federation.deadline_s is None
        self.block = min(MOST, len(ids) // (SPREAD * len(fleet.slots))) if everybody else 1
        blocks = whole(ids) if sums is not None and self.block >= BLOCK else []
        self.sums, self.blocks = sums, [block for block in blocks if all(map(self._shares, block))]
        apart = set(ids).difference(*self.blocks)
        self.waiting = sorted(apart, key=lambda id: (-fleet.all_sizes[id], id))     # a round would end with the largest
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
        if self.answered >= self.enough or not (self.running or self.waiting or self.blocks):
            self._end()
        elif not ready and self.deadline is not None and time.monotonic() >= self.deadline:
            self._expire()
        elif not ready:
            self._name_stuck()

    def _start(self) -> None:
        busy = {id(call.slot) for call in self.running.values()}
        free = [slot for slot in self.fleet.slots if id(slot) not in busy and slot.late is None]
        idle = [slot for slot in free if not self._take(slot, slot.own)]
        for slot in idle:
            if not self._take(slot, None) and self.blocks:
                self._submit(slot, self.blocks.pop(0), self.sums)

    def _take(self, slot: Slot, clients: Container[int] | None) -> bool:
        """Has a slot run the first of those that wait, of `clients` where they are given."""
        places: list[int] = []
        for place, id in enumerate(self.waiting):
            if clients is None or id in clients:
                if places and not self._shares(id):
                    continue
                places.append(place)
                if len(places) >= self.block or not self._shares(id):
                    break
        if not places:
            return False
        ids, taken, looked = [self.waiting[place] for place in places], set(places), places[-1] + 1
        # those behind stay as they are: each call of many would take time in the square of the clients
        self.waiting[:looked] = [id for place, id in enumerate(self.waiting[:looked]) if place not in taken]
        self._submit(slot, ids)
        return True

    def _shares(self, id: int) -> bool:
        return self.fleet.all_sizes[id] <= SMALL and id not in self.alone

    def _submit(self, slot: Slot, ids: list[int], sums: Schema | None = None) -> None:
        shards, handles = self.fleet.shards, [self.fleet.private(id) for id in ids]
        new = sorted({shards.places[id] for id in ids} - slot.held)
        slot.held.update(new)
        known = [handle for handle in handles if handle is not None]
        places = itertools.count()
        block = Block(self.fleet.round, new, [(id, shards.places[id], None if handle is None else next(places))
                                              for id, handle in zip(ids, handles, strict=True)])
        patience = len(ids) * self.fleet.patience(self.name)
        replies, *privates = slot.actor.run.options(num_returns=1 + len(ids)).remote(
            self.fn, self.message, block, patience, None if sums is None else sums.of(ids),
            *(shards.packs[number] for number in new), *known)
        self.running[replies] = Call(ids, slot, privates, time.monotonic(), patience, len(self.fleet.slots))

    def _record(self, ref: Any, call: Call) -> None:
        try:
            replies: list[Any] = ray.get(ref)
            privates = [self.fleet.keep(private) for private in call.privates]
        except LOST as error:
            self._lose(call, error)
            return
        except RayTaskError as error:               # it could not be sent there, or its reply not back
            if len(call.ids) > 1:
                self._ask_alone(call.ids)
            else:
                self._fail(call.ids[0], ClientError(call.ids[0], self.fleet.round, self.name, one_line(error.cause)))
            return
        seconds = (time.monotonic() - call.start) / len(call.ids)
        for id, reply, private in zip(call.ids, replies, privates, strict=True):
            self._answer(id, reply, private, call, seconds)

    def _lose(self, call: Call, error: Exception) -> None:
        """An actor died: another in its place, and its clients are asked again. Whose fault it was in a block nobody
        knows, so that counts as nobody's attempt."""
        lost = ClientLost(call.ids[0], self.fleet.round, self.name, f"its process died ({type(error).__name__})")
        self.fleet.note(str(lost) if len(call.ids) == 1 else f"{named(call.ids)}, round {self.fleet.round}, "
                        f"{self.name}: their process died ({type(error).__name__}), each is asked again by itself")
        start = time.monotonic()
        self.fleet.slots.replace([call.slot])
        if self.deadline is not None:
            self.deadline += time.monotonic() - start
        if len(call.ids) == 1:
            self._fail(call.ids[0], lost)
        else:
            self._ask_alone(call.ids)

    def _ask_alone(self, ids: list[int]) -> None:
        self.alone.update(ids)
        self.fleet.ledger.retried += ids
        self.waiting = ids + self.waiting

    def _answer(self, id: int, reply: Any, private: Any, call: Call, seconds: float) -> None:
        full = isinstance(reply, str) and reply.startswith(FULL)
        if full and call.actors > len(self.fleet.slots):       # room was made meanwhile
            self.waiting.insert(0, id)
        elif full and call.actors > 1:
            self._make_room(id)
        elif isinstance(reply, str):
            self._fail(id, ClientError(id, self.fleet.round, self.name, reply))
        else:
            reply = reply if isinstance(reply, Summed) else unpacked(reply)
            self.answered += self.usable(id, reply)
            self.answers[id] = Answer(id, reply, private)
            self.fleet.took(self.name, id, seconds)

    def _make_room(self, id: int) -> None:
        """A device is full: half the actors at once, and the same calls again. Nobody's attempt is counted."""
        before, given_up = len(self.fleet.slots), self.fleet.slots.halve()
        self.waiting.insert(0, id)
        for ref, other in list(self.running.items()):
            if any(other.slot is slot for slot in given_up):
                del self.running[ref]
                self.waiting = other.ids + self.waiting
        self.fleet.note(f"client {id}, round {self.fleet.round}, {self.name}: device out of memory; going on with "
                        f"{len(self.fleet.slots)} of {before} client actors")

    def _name_stuck(self) -> None:
        now = time.monotonic()
        for call in self.running.values():
            if not call.named and now >= call.start + call.patience:
                call.named = True
                self.fleet.note_stuck(call.ids, self.name, now - call.start, call.slot.name)

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
        for id in [*(id for call in self.running.values() for id in call.ids), *self.waiting]:
            cause = f"not done after federation.deadline_s = {limit:g} s"
            self.answers[id] = Answer(id, None, None, ClientError(id, self.fleet.round, self.name, cause))
        self.over = True
        self.fleet.slots.replace([call.slot for call in self.running.values()]
                                 + [slot for slot in self.fleet.slots if slot.late is not None])
