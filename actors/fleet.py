"""`RayFleet`: the fleet whose clients live in Ray actors.

What a client is, apart from its actor, is known here: a reference to its data and one to the private state that its
last call left. So any actor can run any client's call: a lost actor is replaced and the same call is run again, and
where an actor holds several clients an idle one takes over a waiting client. Calls are deterministic in (private
state, message, seed), so none of this can change a result.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from actors.client import ClientActor, label_of
from raylt.client import ClientFunction, Message, Reply
from raylt.config import Config
from raylt.data.task import Task
from raylt.errors import ClientError, ClientLost, ConfigError, RayltError, one_line
from raylt.fleet import Answer, Fleet, ItemFunction
from raylt.method import Method
from raylt.tree import Tree, from_arrays, to_arrays

START_TIMEOUT_S = 180
LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError)   # none of them is another's parent


@dataclass(frozen=True)
class Placement:
    """How many client actors there are and what each takes."""

    actors: int
    cpus: float
    gpus: float


@dataclass
class Slot:
    """A place for one actor."""

    name: str
    home: list[int]                                     # its clients
    actor: Any = None
    lives: int = 0
    held: set[int] = field(default_factory=set)         # clients whose data the actor has
    late: Any = None                                    # a call that nobody waits for any more


@dataclass
class Call:
    """One client's call under way."""

    id: int
    slot: Slot
    private: Any


class RayFleet(Fleet):
    """Client actors, and the dispatch of calls to them as they become free, largest client first.

    Args:
        shards: references to the clients' data, by id.
        test: reference to the test set.
        run: name of the run; actors are named `<run>/client-003`.

    Raises:
        ConfigError: there is no room for the actors.
        RayltError: an actor died while it started.
    """

    def __init__(self, config: Config, method: Method, task: Task, shards: list[Any], test: Any, placement: Placement,
                 run: str):
        super().__init__(config, task)
        self._method, self._task, self._test, self._shards = method, task, test, shards
        self._placement = placement
        self._slots = []
        actors = min(placement.actors, len(self.ids))
        for i in range(actors):
            home = self.ids[i::actors]
            name = f"client-{home[0]:03d}" if len(home) == 1 else f"clients-{home[0]:03d}-to-{home[-1]:03d}"
            self._slots.append(Slot(f"{run}/{name}", home))
        for slot in self._slots:
            self._spawn(slot)
        self._await(self._slots)

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, from_arrays(ray.get(self._private[id]))

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = ray.put(to_arrays(private))

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        name, results = getattr(fn, "__name__", "map"), {}
        waiting, losses = list(range(len(items))), dict.fromkeys(range(len(items)), 0)
        running: dict[Any, tuple[int, Slot]] = {}
        while waiting or running:
            busy = {id(slot) for _, slot in running.values()}
            for slot in self._slots:            # one that is still at a late call takes its item after it
                if waiting and id(slot) not in busy:
                    place = waiting.pop(0)
                    running[slot.actor.compute.remote(fn, to_arrays(items[place]))] = place, slot
            ready, _ = ray.wait(list(running), num_returns=1)
            place, slot = running.pop(ready[0])
            try:
                result: Any = ray.get(ready[0])
            except LOST as error:
                self._replace([slot])
                losses[place] += 1
                if losses[place] > self.config.federation.retries:
                    raise RayltError(f"{name}, item {place}: its process died {losses[place]} times "
                                     f"({type(error).__name__})") from error
                waiting.insert(0, place)
                continue
            except RayTaskError as error:       # it could not be sent there, or its result not back
                result = one_line(error.cause)
            if isinstance(result, str):
                raise RayltError(f"{name}, item {place}: {result}")
            results[place] = from_arrays(result)
        return [results[place] for place in range(len(items))]

    def _spawn(self, slot: Slot) -> None:
        name = slot.name if slot.lives == 0 else f"{slot.name}~{slot.lives}"
        slot.lives, slot.held, slot.late = slot.lives + 1, set(), None
        options = ClientActor.options(name=name, num_cpus=self._placement.cpus, num_gpus=self._placement.gpus)
        slot.actor = options.remote(
            label_of(slot.home, self._task.client_counts), self.config, self._method, self._task.facts, self._test)

    def _replace(self, slots: list[Slot]) -> None:
        """New actors for lost and stuck ones. Waits for them: a deadline is for work, not for a process to start."""
        for slot in slots:
            ray.kill(slot.actor)
            self._spawn(slot)
        self._await(slots)

    def _await(self, slots: list[Slot]) -> None:
        try:
            ray.get([slot.actor.ready.remote() for slot in slots], timeout=START_TIMEOUT_S)
        except GetTimeoutError:
            raise ConfigError(f"resources: {len(self._slots)} client actors of {self._placement.cpus:g} CPUs and "
                              f"{self._placement.gpus:g} GPUs did not start within {START_TIMEOUT_S} s; wait until "
                              "the cluster is free, or lower resources.actors") from None
        except LOST as error:
            last = str(error).strip().splitlines()[-1].strip()
            raise RayltError(f"a client actor died while it started: {last}") from error

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[Reply], bool]) -> Iterator[Answer]:
        dispatch = _Dispatch(self, fn, ids, ray.put(to_arrays(message)), enough, usable)
        for id in ids:
            while id not in dispatch.answers and not dispatch.over:
                dispatch.advance()
            answer = dispatch.answers.pop(id, None)
            if answer is not None:
                yield answer


class _Dispatch:
    """One call on several clients: who waits, who runs, who has answered."""

    def __init__(self, fleet: RayFleet, fn: ClientFunction, ids: list[int], message: Any, enough: int,
                 usable: Callable[[Reply], bool]):
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
        late = [slot.late for slot in self.fleet._slots if slot.late is not None]
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        ready, _ = ray.wait([*self.running, *late], num_returns=1, timeout=left)
        for ref in ready:
            if ref in self.running:
                self._record(ref, self.running.pop(ref))
            else:
                self._release(ref)
        if self.answered >= self.enough or (not self.running and not self.waiting):
            self._end()
        elif not ready:
            self._expire()

    def _start(self) -> None:
        busy = {id(call.slot) for call in self.running.values()}
        free = [slot for slot in self.fleet._slots if id(slot) not in busy and slot.late is None]
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
        shard = None if id in slot.held else self.fleet._shards[id]
        slot.held.add(id)
        reply, private = slot.actor.run.options(num_returns=2).remote(
            self.fn, self.message, self.fleet.round, id, shard, self.fleet._private.get(id))
        self.running[reply] = Call(id, slot, private)

    def _record(self, ref: Any, call: Call) -> None:
        id = call.id
        try:
            reply: Any = ray.get(ref)
        except LOST as error:
            start = time.monotonic()
            self.fleet._replace([call.slot])
            if self.deadline is not None:
                self.deadline += time.monotonic() - start
            self._fail(id, ClientLost(id, self.fleet.round, self.name, f"its process died ({type(error).__name__})"))
            return
        except RayTaskError as error:               # it could not be sent there, or its reply not back
            self._fail(id, ClientError(id, self.fleet.round, self.name, one_line(error.cause)))
            return
        if isinstance(reply, str):
            self._fail(id, ClientError(id, self.fleet.round, self.name, reply))
        else:
            reply = Reply(reply.weight, from_arrays(reply.tree))
            self.answered += self.usable(reply)
            self.answers[id] = Answer(id, reply, call.private)

    def _fail(self, id: int, error: ClientError) -> None:
        if self.attempts[id] < self.fleet.config.federation.retries:
            self.attempts[id] += 1
            self.fleet.ledger.retried.append(id)
            self.waiting.insert(0, id)
        else:
            self.answers[id] = Answer(id, None, None, error)

    def _release(self, ref: Any) -> None:
        """A late call of an earlier round is through, or its actor died."""
        slot = next(slot for slot in self.fleet._slots if slot.late == ref)
        slot.late = None
        try:
            ray.get(ref)
        except LOST:
            self.fleet._replace([slot])
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
        self.fleet._replace([call.slot for call in self.running.values()]
                            + [slot for slot in self.fleet._slots if slot.late is not None])
