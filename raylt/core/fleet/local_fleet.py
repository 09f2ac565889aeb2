"""`LocalFleet`: a fleet that runs all clients in this process."""

import pickle
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import attrgetter

import cloudpickle
import numpy as np

from raylt.config import Config
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.fleet.block_sums import split_into_blocks
from raylt.core.fleet.client_host import ClientCall, ClientHost
from raylt.core.fleet.fleet import Answer, Arrived, Fleet, ItemFunction, compute
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import Fault, Unusable, packed, unpacked
from raylt.data.task import Task
from raylt.errors import ClientError, RayltError, user_fault
from raylt.own_code.shipment import pickle_modules_by_name
from raylt.seeds import seed_for
from raylt.tree import Tree, from_arrays, to_arrays


class LocalFleet(Fleet):
    """All clients in this process, run one after another: for tests and small runs.

    Function, message and reply are pickled and unpickled, so that a method that relies on shared memory already fails
    in a unit test.
    """

    def __init__(self, config: Config, task: Task, host: ClientHost):
        super().__init__(config, task)
        pickle_modules_by_name()
        self._shards = task.shards
        self._host = host
        host.on_problem = self.note

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        name = function_name(fn)
        threads = max(1, int(self.config.resources.cpus_per_client))
        results = []
        for number, item in enumerate(items):
            self.show_items(fn, number, len(items))

            def show(done: int, total: int, number: int = number) -> None:
                self.show_steps(fn, number, len(items), {number: (done, total)})

            try:
                fn_copy, item_copy = pickle.loads(cloudpickle.dumps((fn, item)))
                results.append(compute(fn_copy, item_copy, threads, self._host.device, show))
            except Exception as error:
                raise RayltError(
                    f"{name}, item {number}: {user_fault(error)}", code="server.map-failed", function=name, item=number
                ) from error
        return results

    def describe(self) -> dict[str, str | None]:
        return self._host.describe()

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, from_arrays(pickle.loads(self._private[id]))

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = pickle.dumps(to_arrays(private))

    def close(self) -> None:
        self._private.clear()

    def _answers(
        self,
        fn: ClientFunction,
        ids: list[int],
        message: Message,
        enough: int,
        usable: Callable[[int, Arrived], bool],
        sums: Schema | None,
    ) -> Iterator[Answer]:
        call = cloudpickle.dumps((fn, to_arrays(message)))  # cloudpickle supports functions of notebooks and plugins
        if enough >= len(ids):
            yield from self._in_order(fn, call, ids)
            return
        # simulate a random order of arrival: in id order the last clients would never take part
        rng = np.random.default_rng(seed_for(self.config.seed, "arrival", self.round))
        arriving = self._in_order(fn, call, rng.permutation(ids).tolist()[::-1])
        answers = []
        answered = 0
        while answered < enough and (answer := next(arriving, None)):
            answers.append(answer)
            answered += answer.reply is not None and usable(answer.id, answer.reply)
        arriving.close()
        yield from sorted(answers, key=attrgetter("id"))

    def _in_order(self, fn: ClientFunction, call: bytes, ids: Sequence[int]) -> Generator[Answer]:
        """Yield the clients' answers in the order of `ids`.

        Args:
            call: The pickled function and message.
        """
        name = function_name(fn)
        deadline = self.config.federation.deadline_s

        def answer(id: int) -> Answer:
            start = time.monotonic()
            answered = self._ask(call, id, name)
            # clients run one after another, so only a client's own time can make it late
            if deadline is None or time.monotonic() - start <= deadline:
                return answered
            cause = f"not done after federation.deadline_s = {deadline:g} s"
            return Answer(id, None, None, ClientError(id, self.round, name, cause, code="client.late"))

        if not self._host.stacks(fn):
            yield from map(answer, ids)
            return
        for block in split_into_blocks(ids):
            stacked = self._ask_stacks(call, block)
            yield from (stacked.get(id) or answer(id) for id in block)

    def _ask_stacks(self, call: bytes, ids: Sequence[int]) -> dict[int, Answer]:
        """Return the answers of clients that train in stacks; see `ClientHost.run_stacks`."""
        fn, message = pickle.loads(call)
        calls = [ClientCall(id, self._shards[id], self._private_state(id)) for id in ids]
        answers = {}
        for id, outcome in self._host.run_stacks(fn, from_arrays(message), self.round, calls).items():
            sent, after = packed(*outcome)  # a stack's replies share no memory with anything
            answers[id] = Answer(id, unpacked(sent), pickle.dumps(after))
        return answers

    def _ask(self, call: bytes, id: int, name: str) -> Answer:
        for retries in range(self.config.federation.retries, -1, -1):
            fn, message = pickle.loads(call)
            try:
                private = self._private_state(id)
                return _answer(id, *self._host.run(fn, from_arrays(message), self.round, id, self._shards[id], private))
            except (Exception, SystemExit) as error:  # SystemExit: on a cluster it ends the client's own process
                if retries == 0:
                    fault = Fault.of(error)
                    return Answer(id, None, None, ClientError(id, self.round, name, fault.text, code=fault.code))
                self.round_stats.retried.append(id)
        raise AssertionError("unreachable")

    def _private_state(self, id: int) -> Tree | None:
        handle = self._private.get(id)
        return None if handle is None else from_arrays(pickle.loads(handle))


def _answer(id: int, reply: Reply | Unusable, private: Tree) -> Answer:
    """Return an answer that shares no memory with a reply and a private state, as if it came from another process."""
    sent, after = packed(reply, private)
    return Answer(id, unpacked(pickle.loads(pickle.dumps(sent))), pickle.dumps(after))
