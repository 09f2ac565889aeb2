"""Dispatches the calls of a job to client actors as the actors become free.

A `Job` knows which call to make next and what its results mean. The dispatcher knows the actors. It replaces an actor
that died, gives up half the actors when a device is full, and keeps actors busy with late calls out of the way. Both
jobs, client functions and the items of `Fleet.map`, are in `actors.calls`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.exceptions import RayTaskError

from actors.actor_pool import LOST, ActorPool, ActorSlot
from raylt.core.fleet.wire import Fault

# an idle actor's choice of clients: its own, those of its node, those of other nodes
Reach = Literal["own", "node", "others"]
REACHES: tuple[Reach, ...] = ("own", "node", "others")  # in the order of its choice


@dataclass
class Call:
    """A call that is running on an actor.

    Attributes:
        ids: the clients, or items, that the call is for.
        private_refs: references to the new private state of each client; empty for items.
        reply_refs: references to replies that stay in the object store; empty if the call returns its replies.
        start: when the call was submitted, from `time.monotonic`.
        patience: seconds after which the call is reported as stuck; None for never.
        actors: number of actors when the call was submitted.
        reported: whether the call has been reported as stuck.
    """

    ids: list[int]
    slot: ActorSlot
    actors: int
    private_refs: list[Any] = field(default_factory=list)
    reply_refs: list[Any] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    patience: float | None = None
    reported: bool = False

    @property
    def stuck_at(self) -> float | None:
        """Return the time at which the call counts as stuck.

        It is None if the call has no time limit, or has already been reported.
        """
        return None if self.patience is None or self.reported else self.start + self.patience


@dataclass(frozen=True)
class Outcome:
    """The result of a call for one client or one item.

    Attributes:
        value: the reply or result, or a `Fault`.
        private_ref: reference to the client's new private state.
    """

    id: int
    value: Any
    private_ref: Any = None


class Job(ABC):
    """Base class of jobs: a set of calls that a `Dispatcher` submits.

    Attributes:
        deadline: time, from `time.monotonic`, after which the job is given up; None for no limit.
    """

    deadline: float | None = None

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Return whether some calls have not been submitted yet."""

    @property
    @abstractmethod
    def satisfied(self) -> bool:
        """Return whether the job needs no further result."""

    @abstractmethod
    def submit(self, slot: ActorSlot, reach: Reach) -> tuple[Any, Call] | None:
        """Submit the next call that an idle actor can run.

        Args:
            reach: the clients that the call may be for. An actor takes over another actor's clients only if none of
                its own wait.

        Returns:
            Ray's reference to the results, and the call; None if no call suits the actor.
        """

    @abstractmethod
    def outcomes(self, call: Call, results: Any) -> Sequence[Outcome]:
        """Split the results of a call by client or item."""

    @abstractmethod
    def accept(self, outcome: Outcome, seconds: float) -> None:
        """Record the outcome of a client or item whose function raised no error."""

    @abstractmethod
    def fail(self, id: int, fault: Fault) -> None:
        """Record that the function of a client or item raised an error."""

    @abstractmethod
    def requeue(self, ids: Sequence[int]) -> None:
        """Submit the calls of the given clients or items again, without counting another attempt."""

    @abstractmethod
    def lose(self, call: Call, error: Exception) -> None:
        """Record that the actor of a call died, or that an object was lost."""

    @abstractmethod
    def reject(self, call: Call, cause: BaseException) -> None:
        """Record that Ray could not transfer a call or its results."""

    @abstractmethod
    def describe(self, id: int) -> str:
        """Return a description of a client or item, as in `client 3, round 2, train`."""

    def expire(self, calls: Sequence[Call]) -> None:  # noqa: B027  (a job without a deadline has nothing to do)
        """Give up all running and pending calls, because the deadline has passed."""

    def report_stuck(self, call: Call, seconds: float) -> None:  # noqa: B027  (likewise without patience)
        """Report a call that has run longer than expected."""


class Dispatcher:
    """Submits the calls of one job to client actors and collects the results.

    Args:
        note: called with one line for each remedy that the user should know of.

    Attributes:
        over: whether the job has ended.
    """

    def __init__(self, pool: ActorPool, job: Job, note: Callable[[str], None]):
        self.pool = pool
        self.job = job
        self.note = note
        self.running: dict[Any, Call] = {}
        self.over = False

    def advance(self, wait_s: float | None = None) -> None:
        """Submit all calls that can start, wait for one call to end, and record its results.

        Args:
            wait_s: seconds to wait at most; None for as long as it takes.
        """
        self._submit()
        late = [slot.late for slot in self.pool if slot.late is not None]
        ready: list[Any] = []
        if self.running or late:
            ready, _ = ray.wait([*self.running, *late], num_returns=1, timeout=self._timeout(wait_s))
        for ref in ready:
            if ref in self.running:
                self._record(ref, self.running.pop(ref))
            else:
                self._release(ref)
        deadline = self.job.deadline
        if self.job.satisfied or not (self.running or self.job.pending):
            self._end()
        elif not ready and deadline is not None and time.monotonic() >= deadline:
            self._expire()
        elif not ready:
            self._report_stuck()

    def _submit(self) -> None:
        busy = {id(call.slot) for call in self.running.values()}
        idle = [slot for slot in self.pool if id(slot) not in busy and slot.late is None]
        for reach in REACHES:
            idle = [slot for slot in idle if not self._submit_to(slot, reach)]

    def _submit_to(self, slot: ActorSlot, reach: Reach) -> bool:
        submitted = self.job.submit(slot, reach)
        if submitted is None:
            return False
        ref, call = submitted
        self.running[ref] = call
        return True

    def _timeout(self, wait_s: float | None) -> float | None:
        """Return the seconds until the deadline or until a call counts as stuck, at most `wait_s`."""
        times = [self.job.deadline, *(call.stuck_at for call in self.running.values())]
        known_times = [moment for moment in times if moment is not None]
        seconds = [max(0.0, moment - time.monotonic()) for moment in known_times]
        return min([*seconds, *([] if wait_s is None else [wait_s])], default=None)

    def _record(self, ref: Any, call: Call) -> None:
        try:
            outcomes = self.job.outcomes(call, ray.get(ref))
        except LOST as error:
            self.job.lose(call, error)
            if not isinstance(error, RayTaskError):  # the actor lives, and an object that it needed is lost
                self._replace(call.slot)
            return
        except RayTaskError as error:  # the call could not be sent, or its results could not
            self.job.reject(call, error.cause)
            return
        seconds = (time.monotonic() - call.start) / len(call.ids)
        for outcome in outcomes:
            fault = outcome.value if isinstance(outcome.value, Fault) else None
            if fault is None:
                self.job.accept(outcome, seconds)
            elif fault.code == "device.full" and call.actors > 1:  # fewer actors may mend it
                self._make_room(call, outcome.id)
            else:
                self.job.fail(outcome.id, fault)

    def _replace(self, slot: ActorSlot) -> None:
        """Replace a dead actor. The time that this takes does not count towards the deadline."""
        start = time.monotonic()
        self.pool.replace([slot])
        if self.job.deadline is not None:
            self.job.deadline += time.monotonic() - start

    def _make_room(self, call: Call, id: int) -> None:
        """Remove half of the actors because a device was full, and submit the same calls again.

        When other calls have made room since this call was submitted, the call is only submitted again.
        """
        if call.actors == len(self.pool):
            before = len(self.pool)
            given_up = self.pool.halve()
            for ref, other in list(self.running.items()):
                if any(other.slot is slot for slot in given_up):
                    del self.running[ref]
                    self.job.requeue(other.ids)
            self.note(
                f"{self.job.describe(id)}: device out of memory; continuing with {len(self.pool)} of {before} "
                "client actors"
            )
        self.job.requeue([id])

    def _report_stuck(self) -> None:
        now = time.monotonic()
        for call in self.running.values():
            if call.stuck_at is not None and now >= call.stuck_at:
                call.reported = True
                self.job.report_stuck(call, now - call.start)

    def _release(self, ref: Any) -> None:
        """Free the actor of a late call that has ended; replace the actor if it died."""
        slot = next(slot for slot in self.pool if slot.late == ref)
        slot.late = None
        try:
            ray.get(ref)
        except LOST:
            self._replace(slot)
        except RayTaskError:
            pass

    def _end(self) -> None:
        """End the job. An actor that is still busy gets no new call before its current call ends."""
        for ref, call in self.running.items():
            call.slot.late = ref
        self.over = True

    def _expire(self) -> None:
        """End the job at its deadline, and replace actors that are still busy, because they may be stuck."""
        self.job.expire(list(self.running.values()))
        self.over = True
        late = [slot for slot in self.pool if slot.late is not None]
        self.pool.replace([call.slot for call in self.running.values()] + late)
