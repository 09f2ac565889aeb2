"""The fleet that runs its clients in Ray actors.

The fleet holds references to each client's data and to the private state after its last call, so any actor can run any
client's call. A lost actor is replaced and its call repeated. If an actor has several clients, an idle actor takes over
waiting ones. Calls depend only on private state, message and seed, so none of this can change a result.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from actors.actor_pool import ActorPool, ActorSlot
from actors.by_value import pack
from actors.calls import ClientCalls, ServerItems
from actors.capacity import Placement, nodes_of
from actors.client import ClientActor, label_of, name_clients
from actors.dispatch import Dispatcher
from actors.shards import Shards
from raylt.core.client import ClientFunction, Message
from raylt.core.fleet.fleet import Answer, Arrived, Fleet, ItemFunction
from raylt.core.fleet.schema import Schema
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.runs.callbacks.progress import read_items, remove_items
from raylt.runs.folder.notes import NOTES
from raylt.store import Folder
from raylt.tree import Tree, from_arrays, to_arrays

START_TIMEOUT_S = 180
PROGRESS_S = 1.0  # Interval between two updates of the items' progress.
MIN_PATIENCE_S = 60.0  # Minimum time after which a call is reported as stuck.
STACKS_TIMEOUT_S = 3.0  # Time for a process to write its stack traces.
STACKS = "stacks"  # Folder in the run folder for the stack traces of stuck clients.


class RayFleet(Fleet):
    """Fleet that runs its clients in a pool of actors, with a `Dispatcher` for the calls of each client function.

    Args:
        setup: Configuration, method, model and augmentation.
        task: Data of the experiment.
        shards: References to the clients' data.
        test: Reference to the test set.
        placement: Number, resources and node labels of the actors.
        run: Name of the run; actors are named `<run>/client-003`.
        folder: The run folder, for notes and the stack traces of stuck clients.

    Raises:
        ConfigError: There is no room for the actors.
        RayltError: An actor died while it started.
    """

    def __init__(
        self,
        setup: Setup,
        task: Task,
        shards: Shards,
        test: Any,
        placement: Placement,
        run: str,
        folder: Path | None = None,
    ):
        super().__init__(setup.config, task)
        self.shards = shards
        self._shipped = pack(setup)
        self._task = task
        self._test = test
        self._placement = placement
        self.run_folder = folder
        self._several_nodes = len(nodes_of(ray.nodes())) > 1
        self._longest: dict[str, float] = {}  # longest call of each client function, in seconds
        self._noted = set[str]()  # lines that `note_once` has added
        self.seconds: dict[int, float] = {}  # duration of each client's calls since `begin`
        self.slots = ActorPool(
            run,
            [group for group in (self.ids, self.new_clients) if group],
            placement,
            self._start,
            self.note,
            START_TIMEOUT_S,
        )

    def begin(self, round: int) -> None:
        super().begin(round)
        self.seconds = {}

    def describe(self) -> dict[str, str | None]:
        devices = [slot.device for slot in self.slots]
        description: dict[str, str | None] = {}
        for key in devices[0]:
            values = {value for device in devices if (value := device[key]) is not None}
            description[key] = " + ".join(sorted(values)) or None
        return description

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, from_arrays(ray.get(self._private[id]))

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = ray.put(to_arrays(private))

    def close(self) -> None:
        self.slots.close()

    def note(self, text: str) -> None:
        """Add a line to the notes of the run, which the driver shows."""
        if self.run_folder is not None:
            with Folder.open(self.run_folder) as folder:
                folder.append(NOTES, text + "\n")

    def note_once(self, text: str) -> None:
        """Add a line to the notes of the run, unless an earlier call did."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def note_stuck(self, ids: list[int], name: str, seconds: float, slot: ActorSlot) -> None:
        """Add a note about a call that has run for a long time, with the file of its stack traces if there is one."""
        longest = self._longest.get(name)
        others = "no client has finished yet" if longest is None else f"other clients took at most {longest:.0f} s"
        self.note(
            f"{name_clients(ids)}, round {self.round}, {name}: running for {seconds:.0f} s, {others}; set "
            f"federation.deadline_s to continue without it; {self._stacks_of(slot)}"
        )

    def _stacks_of(self, slot: ActorSlot) -> str:
        """Return a clause that names the file with an actor's stack traces, or the reason why there is none."""
        if self.run_folder is None:
            return "without a run folder it writes no stack traces"
        file = self.run_folder / STACKS / _stacks_file(slot.current)
        end = time.monotonic() + STACKS_TIMEOUT_S
        while not (file.is_file() and file.stat().st_size):
            if time.monotonic() >= end:
                return f"it wrote no stack traces: {_process_state(slot)}"
            time.sleep(0.05)
        return f"{STACKS}/{file.name} has its stack traces"

    def patience(self, name: str, clients: int) -> float:
        """Return the seconds after which a call counts as stuck, which is far more than earlier calls took.

        Args:
            name: Name of the client function.
            clients: Number of clients of the call, which run one after the other.
        """
        return max(MIN_PATIENCE_S, 5 * clients * self._longest.get(name, 0.0))

    def record_seconds(self, name: str, id: int, seconds: float) -> None:
        """Record how long a client's call took."""
        self._longest[name] = max(seconds, self._longest.get(name, 0.0))
        self.seconds[id] = self.seconds.get(id, 0.0) + seconds

    def private(self, id: int) -> Any:
        """Return a reference to a client's private state; None before the client's first call."""
        return self._private.get(id)

    def keep(self, private: Any) -> Any:
        """Return a reference to a private state that survives the loss of the client's node."""
        return ray.put(ray.get(private)) if self._several_nodes else private

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        job = ServerItems(self.slots, fn, items, self.config.federation.retries)
        dispatcher = Dispatcher(self.slots, job, self.note)
        while not dispatcher.over:
            steps = {} if self.run_folder is None else read_items(self.run_folder, job.under_way)
            if steps:
                self.show_steps(fn, len(job.results), len(items), steps)
            else:
                self.show_items(fn, len(job.results), len(items))
            dispatcher.advance(PROGRESS_S)
        if self.run_folder is not None:
            remove_items(self.run_folder, range(len(items)))
        if job.error is not None:
            raise job.error
        return [job.results[item] for item in range(len(items))]

    def _answers(
        self,
        fn: ClientFunction,
        ids: list[int],
        message: Message,
        enough: int,
        usable: Callable[[int, Arrived], bool],
        sums: Schema | None,
    ) -> Iterator[Answer]:
        job = ClientCalls(self, fn, ids, ray.put(to_arrays(message)), enough, usable, sums)
        dispatcher = Dispatcher(self.slots, job, self.note)
        for yielded, id in enumerate(ids):
            while id not in job.answers and not dispatcher.over:
                dispatcher.advance()
                self._show_arrived(job.name, yielded + job.arrived, len(ids))
            answer = job.answers.pop(id, None)
            if answer is not None:
                yield answer

    def _start(self, slot: ActorSlot, name: str, strategy: Any) -> Any:
        """Start the actor of a slot."""
        stacks = None if self.run_folder is None else self.run_folder / STACKS / _stacks_file(name)
        options = ClientActor.options(
            name=name, num_cpus=self._placement.cpus, num_gpus=self._placement.gpus, scheduling_strategy=strategy
        )
        label = label_of(slot.home, self._task.sizes, self._task.client_counts, self._task.client_names)
        return options.remote(label, self._shipped, self._task.spec, self._test, stacks)


def _stacks_file(actor: str) -> str:
    return f"{Path(actor).name}.txt"


def _process_state(slot: ActorSlot) -> str:
    """Return a clause that describes the state of an unresponsive actor's process."""
    if slot.process is None:
        return "its process has not started"
    node, pid = slot.process
    if node != ray.get_runtime_context().get_node_id():
        return f"its process {pid} is on another node, and may be stopped or disconnected"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return f"its process {pid} has ended"
    if state in "Tt":
        return f"its process {pid} is stopped; kill -CONT {pid} continues it"
    return f"its process {pid} does not answer (state {state})"
