"""The pool of client actors, each in a slot, and the replacement of lost actors."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
from ray.util import get_current_placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.capacity import Placement, nodes_of, reserve, room
from actors.client import DeviceFull
from actors.cluster import reaper
from raylt.errors import ConfigError, RayltError, count_of

QUIET_WAIT_S = 10.0  # Time to wait for room in the cluster before a note says so.
CLUSTER_CHECK_S = 2.0  # Interval at which waiting code checks whether the cluster has become smaller.
MAX_STARTS = 3  # Attempts to start the replacement of an actor.
LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, ObjectLostError)  # None is a base class of another.


@dataclass
class ActorSlot:
    """A slot of the pool, which holds one client actor.

    Attributes:
        name: Name of the actor in Ray.
        home: Ids of the clients whose calls the actor takes first.
        bundle: Number of its bundle in the placement group.
        home_node: Number of the node that is home to the slot's clients. After the loss of a node the actor may run
            on another node.
        actor: Ray's handle of the actor.
        process: Node and pid of the actor, once it has started.
        device: Description of the device that the actor computes on.
        stacks: Whether small clients train in stacks in the actor (`local.stacked`).
        starts: Number of actors that have been started in the slot.
        packs: Numbers of the packs of clients' data that the actor keeps.
        current: Name of the actor that runs in the slot now; a replacement has another name.
        late: Reference of a call that is still running although its result is no longer needed.
    """

    name: str
    home: list[int]
    bundle: int
    home_node: int = 0
    actor: Any = None
    process: tuple[str, int] | None = None
    device: dict[str, str | None] = field(default_factory=dict)
    stacks: bool = False
    starts: int = 0
    current: str = ""
    packs: set[int] = field(default_factory=set)
    late: Any = None

    def __post_init__(self) -> None:
        self.own = frozenset(self.home)


class ActorPool:
    """The slots of all client actors. The pool shrinks if a device or the cluster has too little room.

    Args:
        run: Name of the run, the prefix of the actors' names.
        groups: Ids of clients. The clients of each group are distributed evenly.
        placement: Number, resources and node labels of the actors.
        start: Function that starts the actor of a slot under a name, with Ray's scheduling strategy.
        note: Function that is called with one line when slots are removed.
        start_timeout_s: Seconds that the actors may take to start.

    Attributes:
        group: Ray's placement group of the actors; None inside a trial of a search, which has its own.
        home_nodes: Number of each client's home node (`ActorSlot.home_node`), by id.
    """

    def __init__(
        self,
        run: str,
        groups: Sequence[Sequence[int]],
        placement: Placement,
        start: Callable[[ActorSlot, str, Any], Any],
        note: Callable[[str], None],
        start_timeout_s: float,
    ):
        self._slots: list[ActorSlot] = []
        self._placement = placement
        self._start = start
        self._note = note
        self._start_timeout_s = start_timeout_s
        # all actors get resources, or none of them; a trial of a search has its resources already
        actors = min(placement.actors, sum(map(len, groups)))
        self.group = None if get_current_placement_group() else reserve(placement, actors)
        try:
            self._slots = deal_clients(run, groups, self._bundles_by_node(actors))
            self.home_nodes = _home_nodes(self._slots)
            for slot in self._slots:
                self._spawn(slot)
            self._await(self._slots, starts=1)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[ActorSlot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> ActorSlot:
        return self._slots[index]

    def replace(self, slots: Sequence[ActorSlot]) -> None:
        """Start new actors in the slots of lost and stuck actors, and wait until they are ready.

        A slot that the pool has removed is skipped. After the loss of a node, there may be no room for a new actor.
        """
        in_pool = [slot for slot in slots if any(slot is other for other in self._slots)]
        for slot in in_pool:
            ray.kill(slot.actor)
            self._spawn(slot)
        self._await(in_pool, starts=MAX_STARTS)

    def halve(self) -> list[ActorSlot]:
        """Remove every second slot if there is more than one; return the removed slots.

        A process frees its device memory only when it ends, after `ray.kill` has returned. The remaining actors on its
        node wait for this before their next call.
        """
        given_up = self._slots[1::2]
        for slot in given_up:
            ray.kill(slot.actor)
        self._slots = self._slots[::2]
        processes = [slot.process for slot in given_up if slot.process]
        for slot in self._slots:
            slot.actor.wait_until_gone.remote(processes)
        return given_up

    def close(self) -> None:
        """Kill the actors and release their resources."""
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        if self.group is not None:
            remove_placement_group(self.group)

    def _bundles_by_node(self, actors: int) -> list[list[int]]:
        """Wait for the placement group, and return the numbers of its bundles on each node.

        The resources of a trial of a search count as one node.
        """
        if self.group is None:
            return [list(range(actors))]
        quiet_s = min(QUIET_WAIT_S, self._start_timeout_s)
        if not self.group.wait(quiet_s):
            self._note(
                f"the cluster has no room yet for {count_of(actors, 'client actor')} of {self._size()}; waiting for at "
                f"most {self._start_timeout_s:g} s"
            )
            if not self.group.wait(self._start_timeout_s - quiet_s):
                raise self._no_room_in_time(actors)
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        by_node: dict[str, list[int]] = {}
        for bundle in range(actors):
            by_node.setdefault(nodes[bundle], []).append(bundle)
        return list(by_node.values())

    def _spawn(self, slot: ActorSlot) -> None:
        name = slot.name if slot.starts == 0 else f"{slot.name}~{slot.starts}"
        slot.current = name
        slot.starts += 1
        slot.packs = set()
        slot.late = None
        strategy = None if self.group is None else PlacementGroupSchedulingStrategy(self.group, slot.bundle)
        slot.actor = self._start(slot, name, strategy)

    def _await(self, slots: Sequence[ActorSlot], starts: int) -> None:
        """Wait until the actor of each slot has started, or the slot has been removed.

        Args:
            slots: The slots.
            starts: Attempts to start an actor that dies while it starts.
        """
        end = time.monotonic() + self._start_timeout_s
        starts_left = {id(slot): starts for slot in slots}
        waiting = {slot.actor.ready.remote(): slot for slot in slots}
        while waiting:
            full: dict[int, DeviceFull] = {}
            timeout = min(CLUSTER_CHECK_S, max(0.0, end - time.monotonic()))
            for ref in ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)[0]:
                slot = waiting.pop(ref)
                try:
                    node, pid, slot.device, slot.stacks = ray.get(ref)
                    slot.process = node, pid
                except DeviceFull as error:
                    full[id(slot)] = _without_traceback(error)
                except ConfigError as error:  # another attempt would use the same settings
                    raise _without_traceback(error) from error
                except LOST as error:
                    starts_left[id(slot)] -= 1
                    if starts_left[id(slot)] == 0:
                        raise _not_started(slot, error) from error
                    self._spawn(slot)  # its node may be shutting down
                    waiting[slot.actor.ready.remote()] = slot
            if full:
                waiting |= self._make_room(full, waiting)
            if waiting and time.monotonic() >= end:
                raise self._no_room_in_time(len(self))
            self._give_up(waiting)

    def _make_room(self, full: dict[int, DeviceFull], waiting: dict[Any, ActorSlot]) -> dict[Any, ActorSlot]:
        """Remove half of the slots, because a device has no room for some of the starting actors.

        Actors that had no room and keep their slots try again after the others have ended.

        Args:
            full: Errors of the actors that had no room, by identity of their slots.
            waiting: Slots whose actors are starting, by reference. Removed slots are deleted from it.

        Returns:
            The slots that try again, by reference.

        Raises:
            ConfigError: There is only one slot.
        """
        before = len(self)
        error = next(iter(full.values()))
        if before == 1:
            raise ConfigError(
                f"resources: the device has no room for a single client actor ({error.details['cause']}). Free the "
                "device, use a smaller model or local.batch, or set resources.device=cpu.",
                code="device.full",
                cause=error.details["cause"],
            ) from error
        given_up = {id(slot) for slot in self.halve()}
        for ref in [ref for ref, slot in waiting.items() if id(slot) in given_up]:
            del waiting[ref]
        self._note(
            f"device out of memory as client actors start ({error.details['cause']}); continuing with {len(self)} of "
            f"{before}"
        )
        return {slot.actor.ready.remote(again=True): slot for slot in self._slots if id(slot) in full}

    def _give_up(self, waiting: dict[Any, ActorSlot]) -> None:
        """Remove slots that no longer fit into the cluster. The other actors take over their clients."""
        if not waiting or len(waiting) == len(self):
            return
        fits = room(self._placement, nodes_of(ray.nodes()))
        for ref in list(waiting)[: max(0, len(self) - max(1, fits))]:
            slot = waiting.pop(ref)
            ray.kill(slot.actor)
            self._slots.remove(slot)
            self._note(
                f"the cluster has become smaller: no room for {slot.name}, continuing with {len(self)} client actors"
            )

    def _size(self) -> str:
        return f"{count_of(self._placement.cpus, 'CPU')} and {count_of(self._placement.gpus, 'GPU')}"

    def _no_room_in_time(self, actors: int) -> ConfigError:
        return ConfigError(
            f"resources: {count_of(actors, 'client actor')} of {self._size()} did not start within "
            f"{self._start_timeout_s:g} s. Wait until the cluster is free, or lower resources.actors.",
            code="cluster.busy",
            actors=actors,
            cpus=self._placement.cpus,
            gpus=self._placement.gpus,
            timeout_s=self._start_timeout_s,
        )


def _without_traceback(error: Any) -> Any:
    """Return the error that an actor raised, without Ray's exception around it, which would print a whole traceback."""
    return getattr(error, "cause", error)


def _not_started(slot: ActorSlot, error: Exception) -> RayltError:
    last_line = str(error).strip().splitlines()[-1].strip()
    folder = os.environ.get(reaper.MARK)
    logs = "Ray's logs" if folder is None else f"{folder}/ray/session_latest/logs"
    return RayltError(
        f"{slot.name}: the client actor died while it started ({last_line}). Look for the cause in {logs}.",
        code="client.not-started",
        name=slot.name,
        cause=last_line,
    )


def deal_clients(run: str, groups: Sequence[Sequence[int]], bundles: Sequence[Sequence[int]]) -> list[ActorSlot]:
    """Distribute the clients of a run evenly over actors; return one slot per actor.

    Clients with neighbouring ids go to the same node, because they share packs of data and blocks of sums. On a node
    they are dealt to its actors in turn.

    Args:
        run: Name of the run.
        groups: Ids of clients, ascending. Each actor gets its share of each group.
        bundles: Numbers of the actors' bundles, by node.
    """
    shares = np.concatenate([np.arange(len(group)) / len(group) for group in groups])
    ids = np.concatenate(groups)[np.argsort(shares, kind="stable")]  # any interval has the same share of each group
    actors = sum(map(len, bundles))
    slots: list[ActorSlot] = []
    for node, numbers in enumerate(bundles):
        first, after = (count * len(ids) // actors for count in (len(slots), len(slots) + len(numbers)))
        for position, bundle in enumerate(numbers):
            home = np.sort(ids[first + position : after : len(numbers)]).tolist()
            slots.append(ActorSlot(f"{run}/{_name_of(home)}", home, bundle, node))
    return slots


def _name_of(home: Sequence[int]) -> str:
    more = f"-and-{len(home) - 3}-more" if len(home) > 3 else ""
    clients = "client" if len(home) == 1 else "clients"
    return f"{clients}-{'-'.join(f'{id:03d}' for id in home[:3])}{more}"


def _home_nodes(slots: Iterable[ActorSlot]) -> np.ndarray:
    """Return the number of each client's home node, int32 [largest id + 1]."""
    nodes = np.zeros(1 + max(max(slot.home) for slot in slots), np.int32)
    for slot in slots:
        nodes[slot.home] = slot.home_node
    return nodes
