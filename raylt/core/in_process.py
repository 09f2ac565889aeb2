"""`LocalFleet`: the fleet whose clients all live in this process."""

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import cloudpickle
import numpy as np

from raylt.config import Config
from raylt.core.client import ClientFunction, Message
from raylt.core.device import describe
from raylt.core.fleet import Answer, Arrived, Fleet, ItemFunction, compute
from raylt.core.host import Host
from raylt.core.schema import Schema
from raylt.core.wire import packed, unpacked
from raylt.data.task import Task
from raylt.errors import ClientError, RayltError, one_line
from raylt.seeds import seed_for
from raylt.tree import Tree, from_arrays, to_arrays


class LocalFleet(Fleet):
    """All clients in this process, one after another: for tests and for small runs.

    Function, message and reply are pickled both ways, so a method that leans on shared memory fails here, in a unit
    test, and not on a cluster.
    """

    def __init__(self, config: Config, task: Task, host: Host):
        super().__init__(config, task)
        self._shards, self._host = task.shards, host

    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        threads, results = max(1, int(self.config.resources.cpus_per_client)), []
        for place, item in enumerate(items):
            try:
                ours, its = pickle.loads(cloudpickle.dumps((fn, item)))
                results.append(compute(ours, its, threads, self._host.device))
            except Exception as error:
                raise RayltError(f"{getattr(fn, '__name__', 'map')}, item {place}: {one_line(error)}") from error
        return results

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[int, Arrived], bool], sums: Schema | None) -> Iterator[Answer]:
        name = getattr(fn, "__name__", "call")
        call = cloudpickle.dumps((fn, to_arrays(message)))      # which knows what notebooks and plug-ins define
        deadline = self.config.federation.deadline_s
        start = time.monotonic()

        def answer(id: int) -> Answer:
            if deadline is not None and time.monotonic() - start > deadline:
                return Answer(id, None, None, ClientError(id, self.round, name, f"not done after {deadline:g} s"))
            return self._ask(call, id, name)

        if enough >= len(ids):
            yield from map(answer, ids)
            return
        # who would be the first is drawn: in their order the last clients would never take part
        drawn = np.random.default_rng(seed_for(self.config.seed, "arrival", self.round)).permutation(ids).tolist()
        answers, answered = [], 0
        while drawn and answered < enough:
            answers.append(answer(drawn.pop()))
            reply = answers[-1].reply
            answered += reply is not None and usable(answers[-1].id, reply)
        yield from sorted(answers, key=attrgetter("id"))

    def _ask(self, call: bytes, id: int, name: str) -> Answer:
        for retries in range(self.config.federation.retries, -1, -1):
            fn, message = pickle.loads(call)
            private = self._private.get(id)
            try:
                reply, after = packed(*self._host.run(fn, from_arrays(message), self.round, id, self._shards[id],
                                                      None if private is None else from_arrays(pickle.loads(private))))
                sent, kept = pickle.dumps(reply), pickle.dumps(after)
            except (Exception, SystemExit) as raised:       # as where a process of its own ends
                if retries == 0:
                    return Answer(id, None, None, ClientError(id, self.round, name, one_line(raised)))
                self.ledger.retried.append(id)
            else:
                return Answer(id, unpacked(pickle.loads(sent)), kept)
        raise AssertionError("unreachable")

    def describe(self) -> dict[str, str | None]:
        return describe(self._host.device)

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, from_arrays(pickle.loads(self._private[id]))

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = pickle.dumps(to_arrays(private))

    def close(self) -> None:
        self._private.clear()
