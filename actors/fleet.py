"""`RayFleet`: the fleet whose clients live in Ray actors.

What a client is, apart from its actor, is known here: a reference to its data and one to the private state that its
last call left. So any actor can run any client's call: a lost actor is replaced and the same call is run again, and
where an actor holds several clients an idle one takes over a waiting client. Calls are deterministic in (private
state, message, seed), so none of this can change a result.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.calls import named
from actors.client import ClientActor, label_of
from actors.dispatch import FIRST_PATIENCE_S, PATIENCE_S, Dispatch
from actors.faults import FULL
from actors.placement import Placement, nodes_of
from actors.shards import Shards
from actors.slots import LOST, Slot, Slots
from raylt.core.client import ClientFunction, Message
from raylt.core.fleet import Answer, Arrived, Fleet, ItemFunction
from raylt.core.schema import Schema
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import RayltError, one_line
from raylt.store import Folder
from raylt.tree import Tree, from_arrays, to_arrays

START_TIMEOUT_S = 180
NOTES = "notes.log"         # in the run folder: what went wrong and was mended
STACKS = "stacks"           # and what a client that is stuck was doing


class RayFleet(Fleet):
    """Client actors, and the dispatch of calls to them as they become free, largest client first.

    Args:
        shards: references to the clients' data.
        test: reference to the test set.
        run: name of the run; actors are named `<run>/client-003`.
        folder: the run folder, where notes and the stacks of stuck clients go.

    Raises:
        ConfigError: there is no room for the actors.
        RayltError: an actor died while it started.
    """

    def __init__(self, setup: Setup, task: Task, shards: Shards, test: Any, placement: Placement,
                 run: str, folder: Path | None = None):
        super().__init__(setup.config, task)
        self._setup, self._task, self._test, self.shards = setup, task, test, shards
        self._placement, self._folder = placement, folder
        self._spread = len(nodes_of(ray.nodes())) > 1
        self._longest: dict[str, float] = {}            # seconds, by client function
        self.seconds: dict[int, float] = {}             # of each client's calls since `begin`
        ids = list(self.all_sizes)
        homes = [ids[i::actors] for actors in [min(placement.actors, len(ids))] for i in range(actors)]
        slots = [Slot(f"{run}/client-{home[0]:03d}" if len(home) == 1 else
                      f"{run}/clients-{home[0]:03d}-to-{home[-1]:03d}", home, i) for i, home in enumerate(homes)]
        self.slots = Slots(slots, placement, self._start, self.note, START_TIMEOUT_S)

    def begin(self, round: int) -> None:
        super().begin(round)
        self.seconds = {}

    def describe(self) -> dict[str, str | None]:
        each = [slot.facts for slot in self.slots]
        kinds = {key: sorted({fact for facts in each if (fact := facts[key]) is not None}) for key in each[0]}
        return {key: " + ".join(values) or None for key, values in kinds.items()}

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, from_arrays(ray.get(self._private[id]))

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = ray.put(to_arrays(private))

    def close(self) -> None:
        self.slots.close()

    def note(self, text: str) -> None:
        """Adds a line to the run's notes, which the driver shows."""
        if self._folder is not None:
            with Folder.open(self._folder) as folder:
                folder.append(NOTES, text + "\n")

    def note_stuck(self, ids: list[int], name: str, seconds: float, actor: str) -> None:
        """Says who keeps everybody waiting."""
        others = f", others took at most {self._longest[name]:.0f} s" if name in self._longest else ""
        self.note(f"{named(ids)}, round {self.round}, {name}: at work for {seconds:.0f} s{others}; set "
                  f"federation.deadline_s to go on without it; {STACKS}/{Path(actor).name}.txt says where it is")

    def patience(self, name: str) -> float:
        """Seconds after which a client that is still at this call is called stuck: far more than others took."""
        return max(PATIENCE_S, 5 * self._longest[name]) if name in self._longest else FIRST_PATIENCE_S

    def took(self, name: str, id: int, seconds: float) -> None:
        """Records the seconds of a call."""
        self._longest[name] = max(seconds, self._longest.get(name, 0.0))
        self.seconds[id] = self.seconds.get(id, 0.0) + seconds

    def private(self, id: int) -> Any:
        """A reference to a client's private state; None before its first call."""
        return self._private.get(id)

    def keep(self, private: Any) -> Any:
        """A reference to the same state that the loss of a client's node does not touch."""
        return ray.put(ray.get(private)) if self._spread else private

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        name, results = getattr(fn, "__name__", "map"), {}
        waiting, losses = list(range(len(items))), dict.fromkeys(range(len(items)), 0)
        running: dict[Any, tuple[int, Slot, int]] = {}      # with how many actors there were when it began
        while waiting or running:
            busy = {id(slot) for _, slot, _ in running.values()}
            for slot in self.slots:            # one that is still at a late call takes its item after it
                if waiting and id(slot) not in busy:
                    place = waiting.pop(0)
                    running[slot.actor.compute.remote(fn, to_arrays(items[place]))] = place, slot, len(self.slots)
            ready, _ = ray.wait(list(running), num_returns=1)
            place, slot, actors = running.pop(ready[0])
            try:
                result: Any = ray.get(ready[0])
            except LOST as error:
                self.slots.replace([slot])
                losses[place] += 1
                if losses[place] > self.config.federation.retries:
                    raise RayltError(f"{name}, item {place}: its process died {losses[place]} times "
                                     f"({type(error).__name__})") from error
                waiting.insert(0, place)
                continue
            except RayTaskError as error:       # it could not be sent there, or its result not back
                result = one_line(error.cause)
            full = isinstance(result, str) and result.startswith(FULL)
            if full and actors > len(self.slots):           # room was made meanwhile
                waiting.insert(0, place)
                continue
            if full and actors > 1:
                before, given_up = len(self.slots), {id(slot) for slot in self.slots.halve()}
                lost = [ref for ref, (_, other, _) in running.items() if id(other) in given_up]
                waiting = sorted([place, *(running.pop(ref)[0] for ref in lost), *waiting])
                self.note(f"{name}, item {place}: device out of memory; going on with {len(self.slots)} of {before} "
                          "client actors")
                continue
            if isinstance(result, str):
                raise RayltError(f"{name}, item {place}: {result}")
            results[place] = from_arrays(result)
        return [results[place] for place in range(len(items))]

    def _start(self, slot: Slot, name: str, place: Any) -> Any:
        stacks = None if self._folder is None else self._folder / STACKS / f"{Path(name).name}.txt"
        options = ClientActor.options(name=name, num_cpus=self._placement.cpus, num_gpus=self._placement.gpus,
                                      scheduling_strategy=place)
        label = label_of(slot.home, self._task.sizes, self._task.client_counts, self._task.client_names)
        return options.remote(label, self._setup, self._task.facts, self._test, stacks)

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[int, Arrived], bool], sums: Schema | None) -> Iterator[Answer]:
        dispatch = Dispatch(self, fn, ids, ray.put(to_arrays(message)), enough, usable, sums)
        for id in ids:
            while id not in dispatch.answers and not dispatch.over:
                dispatch.advance()
            answer = dispatch.answers.pop(id, None)
            if answer is not None:
                yield answer
