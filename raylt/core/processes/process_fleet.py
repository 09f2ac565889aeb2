"""`ProcessFleet`: a fleet that runs clients in forked processes of this machine."""

import pickle
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import cloudpickle
import torch

from raylt.config import Config
from raylt.core.client import ClientFunction
from raylt.core.fleet.block_sums import BLOCK
from raylt.core.fleet.client_host import ClientCall, ClientHost
from raylt.core.fleet.fleet import Answer, ItemFunction, compute
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.wire import Fault, packed, unpacked
from raylt.core.processes.forked_workers import ForkedWorkers, Lost
from raylt.core.training.stacked_sgd import MIN_TASK_CLIENTS
from raylt.data.task import Task
from raylt.errors import ClientError, ClientLost, ConfigError, RayltError, user_fault
from raylt.machine import cores
from raylt.tree import Tree, from_arrays, to_arrays

LOST = "its process ended before it answered"
TASKS_PER_PROCESS = 4  # in a call with many clients; more tasks balance the load of the processes


@dataclass(frozen=True)
class _Calls:
    """A task: clients that a process calls one after another, each with its pickled private state."""

    round: int
    clients: tuple[tuple[int, bytes | None], ...]


# The pickled reply and the pickled private state of a client's call, or the reason why there are none.
CallResult = tuple[bytes, bytes] | Fault | Lost


@dataclass(frozen=True)
class _Probe:
    """A task that tests whether gradients can be computed in a forked process."""


@dataclass(frozen=True)
class _Item:
    """An item of `Fleet.map`."""

    number: int
    item: bytes


class ProcessFleet(LocalFleet):
    """A fleet that runs clients in forked processes of this machine, one per CPU core, with the bits of `LocalFleet`.

    Data and model are shared with this process (forked_workers.py). A client whose process ends is asked again.

    Args:
        config: The run's configuration.
        task: The data.
        host: A host that has called no client yet; each process calls clients with its own copy.

    Raises:
        ConfigError: This process has computed gradients, so its forks cannot.
        RayltError: A fork ended before its first call.
    """

    def __init__(self, config: Config, task: Task, host: ClientHost):
        super().__init__(config, task, host)
        wanted = config.resources.actors
        number = len(cores()) if wanted == "auto" else wanted
        self._workers = ForkedWorkers(self._work, min(number, len(self.all_sizes)))
        [(_, answer)] = self._workers.run(b"", deque([_Probe()]))
        if isinstance(answer, Lost):
            self.close()
            raise RayltError(
                "fleet: a forked process ended before its first call (processes). Free memory, or use fleet local.",
                code="client.not-started",
            )
        if answer is not None:
            self.close()
            raise ConfigError(
                "fleet: this process has computed gradients with torch, so its forks cannot (processes: "
                f"{answer.text}). Start the run in a new process, or use fleet local or ray.",
                code="config.conflict",
                key="fleet",
                value="processes",
            )

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        name = function_name(fn)
        tasks = deque(_Item(number, cloudpickle.dumps(item)) for number, item in enumerate(items))
        retries_left = dict.fromkeys(range(len(items)), self.config.federation.retries)
        results: dict[int, Tree] = {}
        faults: dict[int, str] = {}
        self.show_items(fn, 0, len(items))
        for task, result in self._workers.run(cloudpickle.dumps(fn), tasks):
            if isinstance(result, Lost) and retries_left[task.number]:
                retries_left[task.number] -= 1
                tasks.append(task)
            elif isinstance(result, Lost | Fault):
                faults[task.number] = LOST if isinstance(result, Lost) else result.text
            else:
                results[task.number] = from_arrays(result)
                self.show_items(fn, len(results), len(items))
        if faults:
            number = min(faults)
            raise RayltError(
                f"{name}, item {number}: {faults[number]}", code="server.map-failed", function=name, item=number
            )
        return [results[number] for number in range(len(items))]

    def close(self) -> None:
        self._workers.close()
        super().close()

    def _in_order(self, fn: ClientFunction, call: bytes, ids: Sequence[int]) -> Generator[Answer]:
        name = function_name(fn)
        limit = self.config.federation.deadline_s
        until = None if limit is None else time.monotonic() + limit
        size = 1 if until is not None else self._task_size(fn, len(ids))
        tasks = deque(self._calls(ids[start : start + size]) for start in range(0, len(ids), size))
        retries_left = dict.fromkeys(ids, self.config.federation.retries)
        answers: dict[int, Answer] = {}
        waiting = deque(ids)
        with closing(self._workers.run(call, tasks, until)) as ended:
            for task, result in ended:
                for id, outcome in _outcomes_of(task, result):
                    if isinstance(outcome, Lost) and len(task.clients) > 1:
                        # retry one by one, since any of them may have ended the process
                        tasks.append(self._calls([id]))
                    elif isinstance(outcome, Lost | Fault) and retries_left[id]:
                        retries_left[id] -= 1
                        self.round_stats.retried.append(id)
                        tasks.append(self._calls([id]))
                    else:
                        answers[id] = self._answer(id, name, outcome)
                self._show_arrived(name, len(ids) - len(waiting) + len(answers), len(ids))
                while waiting and waiting[0] in answers:
                    yield answers.pop(waiting.popleft())
        for id in waiting:
            cause = f"not done after federation.deadline_s = {limit:g} s"
            late = Answer(id, None, None, ClientError(id, self.round, name, cause, code="client.late"))
            yield answers.get(id, late)

    def _task_size(self, fn: ClientFunction, asked: int) -> int:
        """Return the number of clients of a task."""
        size = asked // (TASKS_PER_PROCESS * len(self._workers))
        if self._host.stacks(fn):
            size = max(size, min(MIN_TASK_CLIENTS, asked // len(self._workers)))
        return max(1, min(BLOCK, size))

    def _calls(self, ids: Sequence[int]) -> _Calls:
        return _Calls(self.round, tuple((id, self._private.get(id)) for id in ids))

    def _answer(self, id: int, name: str, outcome: CallResult) -> Answer:
        match outcome:
            case Lost():
                lost = ClientLost(id, self.round, name, LOST)
                self.note(str(lost))
                return Answer(id, None, None, lost)
            case Fault(code, text):
                return Answer(id, None, None, ClientError(id, self.round, name, text, code=code))
            case sent, state:
                return Answer(id, unpacked(pickle.loads(sent)), state)

    # functions that run in a forked process

    def _work(self, shared: bytes, task: _Calls | _Item | _Probe) -> object:
        """Call clients, or compute an item; an exception becomes a `Fault`."""
        if isinstance(task, _Probe):
            return _probe()
        if isinstance(task, _Item):
            return self._compute(shared, task)
        calls = [
            ClientCall(id, self._shards[id], None if state is None else from_arrays(pickle.loads(state)))
            for id, state in task.clients
        ]
        stacked = {}
        if self._host.why_alone is None:
            fn, message = pickle.loads(shared)
            stacked = self._host.run_stacks(fn, from_arrays(message), task.round, calls)
        outcomes = []
        for call in calls:
            try:
                outcome = stacked.get(call.id)
                if outcome is None:
                    fn, message = pickle.loads(shared)  # a new copy, since a function may have changed its message
                    outcome = self._host.run(fn, from_arrays(message), task.round, call.id, call.shard, call.private)
                sent, state = packed(*outcome)
                # pickle now: a reply may share memory with the model, which the next client trains
                outcomes.append((pickle.dumps(sent), pickle.dumps(state)))
            except (Exception, SystemExit) as error:
                outcomes.append(Fault.of(error))
        return outcomes

    def _compute(self, shared: bytes, task: _Item) -> Tree | Fault:
        try:
            fn, item = pickle.loads(shared), pickle.loads(task.item)
            return to_arrays(compute(fn, item, 1, self._host.device))
        except Exception as error:
            return Fault("server.map-failed", user_fault(error))


def _probe() -> Fault | None:
    """Compute a gradient; return the reason why this process cannot."""
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        return Fault.of(error)
    return None


def _outcomes_of(task: _Calls, result: list[CallResult] | Lost) -> list[tuple[int, CallResult]]:
    """Return the outcome of each client's call of a task."""
    outcomes = [result] * len(task.clients) if isinstance(result, Lost) else result
    return [(id, outcome) for (id, _), outcome in zip(task.clients, outcomes, strict=True)]
