"""Dispatches the calls of a job to client actors as the actors become free.

A `Job` chooses the next call and interprets its results. The dispatcher manages the actors: it replaces actors that
died, removes half of the actors when a device is full, and gives no call to an actor that is busy with a late one. The
two kinds of jobs, for client functions and for the items of `Fleet.map`, are in `actors.calls`.
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

# The clients that an idle actor considers: its own, the clients of its node, or the clients of other nodes.
Reach = Literal["own", "node", "others"]
REACHES: tuple[Reach, ...] = ("own", "node", "others")  # In order of preference.


@dataclass
class ActorCall:
    """A call that is running on an actor.

    Attributes:
        ids: Clients or items of the call.
        slot: Slot of the actor.
        actors: Number of actors when the call was submitted.
        private_refs: References to the new private state of each client; empty for items.
        reply_refs: References to replies that stay in the object store; empty if the call returns its replies.
        start: Time at which the call was submitted, from `time.monotonic`.
        patience: Seconds after which the call is reported as stuck; None for never.
        reported: Whether the call has been reported as stuck.
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
class ItemOutcome:
    """The result of a call for one client or one item.

    Attributes:
        id: The client or item.
        value: The reply or result, or a `Fault`.
        private_ref: Reference to the client's new private state.
    """

    id: int
    value: Any
    private_ref: Any = None


class Job(ABC):
    """Base class of jobs: a set of calls that a `Dispatcher` submits.

    Attributes:
        deadline: Time, from `time.monotonic`, after which the job is given up; None for no limit.
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
    def submit(self, slot: ActorSlot, reach: Reach) -> tuple[Any, ActorCall] | None:
        """Submit the next call that an idle actor can run.

        Args:
            slot: Slot of the actor.
            reach: Clients that the call may be for. An actor takes over clients of another actor only if none of its
                own are waiting.

        Returns:
            Ray's reference to the results, and the call; None if no call suits the actor.
        """

    @abstractmethod
    def outcomes(self, call: ActorCall, results: Any) -> Sequence[ItemOutcome]:
        """Split the results of a call by client or item."""

    @abstractmethod
    def accept(self, outcome: ItemOutcome, seconds: float) -> None:
        """Record the outcome of a client or item whose function raised no error."""

    @abstractmethod
    def fail(self, id: int, fault: Fault) -> None:
        """Record that the function of a client or item raised an error."""

    @abstractmethod
    def requeue(self, ids: Sequence[int]) -> None:
        """Submit the calls of the given clients or items again, without counting another attempt."""

    @abstractmethod
    def lose(self, call: ActorCall, error: Exception) -> None:
        """Record that the actor of a call died, or that an object was lost."""

    @abstractmethod
    def reject(self, call: ActorCall, cause: BaseException) -> None:
        """Record that Ray could not transfer a call or its results."""

    @abstractmethod
    def describe(self, id: int) -> str:
        """Return a description of a client or item, as in `client 3, round 2, train`."""

    def expire(self, calls: Sequence[ActorCall]) -> None:  # noqa: B027  (optional: a job may have no deadline)
        """Give up all running and pending calls, because the deadline has passed."""

    def report_stuck(self, call: ActorCall, seconds: float) -> None:  # noqa: B027  (optional: calls may have no patience)
        """Report a call that has run longer than expected."""


class Dispatcher:
    """Submits the calls of one job to client actors and collects the results.

    Args:
        pool: The pool of client actors.
        job: The job.
        note: Function that is called with one line for each event that the user should know of.

    Attributes:
        over: Whether the job has ended.
    """

    def __init__(self, pool: ActorPool, job: Job, note: Callable[[str], None]):
        self.pool = pool
        self.job = job
        self.note = note
        self.running: dict[Any, ActorCall] = {}
        self.over = False

    def advance(self, wait_s: float | None = None) -> None:
        """Submit all calls that can start, wait for one call to end, and record its results.

        Args:
            wait_s: Maximum number of seconds to wait; None for no limit.
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

    def _record(self, ref: Any, call: ActorCall) -> None:
        try:
            outcomes = self.job.outcomes(call, ray.get(ref))
        except LOST as error:
            self.job.lose(call, error)
            if not isinstance(error, RayTaskError):  # with RayTaskError the actor lives, but an object was lost
                self._replace(call.slot)
            return
        except RayTaskError as error:  # the call or its results could not be sent
            self.job.reject(call, error.cause)
            return
        seconds = (time.monotonic() - call.start) / len(call.ids)
        for outcome in outcomes:
            fault = outcome.value if isinstance(outcome.value, Fault) else None
            if fault is None:
                self.job.accept(outcome, seconds)
            elif fault.code == "device.full" and call.actors > 1:  # fewer actors may fit
                self._make_room(call, outcome.id)
            else:
                self.job.fail(outcome.id, fault)

    def _replace(self, slot: ActorSlot) -> None:
        """Replace a dead actor. The time for this does not count towards the deadline."""
        start = time.monotonic()
        self.pool.replace([slot])
        if self.job.deadline is not None:
            self.job.deadline += time.monotonic() - start

    def _make_room(self, call: ActorCall, id: int) -> None:
        """Remove half of the actors because a device was full, and submit the same calls again.

        If actors were removed after this call was submitted, only submit the call again.
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
