"""`Slots`: the places for client actors, and what happens to a place whose actor is lost."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
from ray.util import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.faults import DeviceFull
from actors.placement import Placement, nodes_of, reserve, room
from raylt.errors import ConfigError, RayltError

LOOK_S = 2.0            # between looks at a cluster that may have become smaller
LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError)   # none of them is another's parent


@dataclass
class Slot:
    """A place for one actor."""

    name: str
    home: list[int]                                     # its clients
    bundle: int                                         # of the placement group
    actor: Any = None
    process: tuple[str, int] | None = None              # node and pid of the actor, once it is up
    facts: dict[str, str | None] = field(default_factory=dict)      # what it computes on
    lives: int = 0
    held: set[int] = field(default_factory=set)         # packs of clients' data that the actor has
    late: Any = None                                    # a call that nobody waits for any more

    def __post_init__(self) -> None:
        self.own = frozenset(self.home)


class Slots:
    """As many places as there is room for.

    Args:
        start: makes the actor of a slot under a name, with Ray's scheduling strategy that is its place.
        note: told, in one line, when there are fewer places than before.
        start_timeout_s: what a place in the cluster is waited for.
    """

    def __init__(self, slots: list[Slot], placement: Placement, start: Callable[[Slot, str, Any], Any],
                 note: Callable[[str], None], start_timeout_s: float):
        self._start_timeout_s = start_timeout_s
        self._slots, self._placement, self._start, self._note = slots, placement, start, note
        # all actors get their places or none does; a trial of a search has its own places already
        self.group = None if get_current_placement_group() else reserve(placement, len(slots))
        try:
            for slot in slots:
                self._spawn(slot)
            self._await(slots, lives=1)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, place: int) -> Slot:
        return self._slots[place]

    def replace(self, slots: Sequence[Slot]) -> None:
        """New actors for lost and stuck ones; waits for them. Where a node is gone, there may be none."""
        here = [slot for slot in slots if any(slot is other for other in self._slots)]     # others were given up
        for slot in here:
            ray.kill(slot.actor)
            self._spawn(slot)
        self._await(here, lives=3)

    def halve(self) -> list[Slot]:
        """Gives up every second place, when there is more than one; returns those.

        A process frees its device memory when it is gone, which is later than `ray.kill` returns: those that are left
        on its node wait for that before their next call.
        """
        given_up = self._slots[1::2]
        for slot in given_up:
            ray.kill(slot.actor)
        self._slots = self._slots[::2]
        for slot in self._slots:
            slot.actor.outlive.remote([other.process for other in given_up if other.process])
        return given_up

    def close(self) -> None:
        """Ends the actors and gives up their places."""
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        if self.group is not None:
            remove_placement_group(self.group)

    def _spawn(self, slot: Slot) -> None:
        name = slot.name if slot.lives == 0 else f"{slot.name}~{slot.lives}"
        slot.lives, slot.held, slot.late = slot.lives + 1, set(), None
        place = None if self.group is None else PlacementGroupSchedulingStrategy(self.group, slot.bundle)
        slot.actor = self._start(slot, name, place)

    def _await(self, slots: Sequence[Slot], lives: int) -> None:
        """Returns when all are up, or given up. An actor that dies while it starts is started `lives` times."""
        end = time.monotonic() + self._start_timeout_s
        left = {id(slot): lives for slot in slots}
        waiting = {slot.actor.ready.remote(): slot for slot in slots}
        while waiting:
            full: dict[int, DeviceFull] = {}
            timeout = min(LOOK_S, max(0.0, end - time.monotonic()))
            for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)[0]:
                slot = waiting.pop(ref)
                try:
                    node, pid, slot.facts = ray.get(ref)
                    slot.process = node, pid
                except DeviceFull as error:             # as Ray raises it, its text is a whole traceback
                    full[id(slot)] = getattr(error, "cause", error)
                except ConfigError as error:            # its device cannot be used, nor would another process's be
                    raise ConfigError(str(getattr(error, "cause", error))) from error
                except LOST as error:
                    left[id(slot)] -= 1
                    if left[id(slot)] == 0:
                        last = str(error).strip().splitlines()[-1].strip()
                        raise RayltError(f"a client actor died while it started: {last}") from error
                    self._spawn(slot)       # on a node that is going down, for one
                    waiting[slot.actor.ready.remote()] = slot
            if full:
                waiting |= self._make_room(full, waiting)
            if waiting and time.monotonic() >= end:
                raise ConfigError(
                    f"resources: {len(self)} client actors of {self._placement.cpus:g} CPUs and "
                    f"{self._placement.gpus:g} GPUs did not start within {self._start_timeout_s:g} s; wait until the "
                    "cluster is free, or lower resources.actors")
            self._give_up(waiting)

    def _make_room(self, full: dict[int, DeviceFull], waiting: dict[Any, Slot]) -> dict[Any, Slot]:
        """Half the actors at once where a device had no room for some that start; those of them that are left try once
        more, after the others are gone.

        Args:
            full: what they said, by their slots' identities.
            waiting: the slots that are waited for; those that are given up are taken out.
        """
        before, said = len(self), next(iter(full.values()))
        if before == 1:
            raise ConfigError(f"resources: the device has no room for a single client actor ({said}); free it, take a "
                              "smaller model or local.batch, or set resources.device=cpu") from said
        given_up = {id(slot) for slot in self.halve()}
        for ref in [ref for ref, slot in waiting.items() if id(slot) in given_up]:
            del waiting[ref]
        self._note(f"device out of memory as client actors start ({said}); going on with {len(self)} of {before}")
        return {slot.actor.ready.remote(again=True): slot for slot in self._slots if id(slot) in full}

    def _give_up(self, waiting: dict[Any, Slot]) -> None:
        """Those that wait for a place which is no more: their clients go to the actors that are left."""
        if not waiting or len(waiting) == len(self):
            return
        fits = room(self._placement, nodes_of(ray.nodes()))
        for ref in list(waiting)[:max(0, len(self) - max(1, fits))]:
            slot = waiting.pop(ref)
            ray.kill(slot.actor)
            self._slots.remove(slot)
            self._note(f"the cluster has become smaller: no room for {slot.name}, going on with {len(self)} client "
                       "actors")
