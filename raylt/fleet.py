"""`Fleet`: the only way to reach clients. Its three verbs say what the server gets to see.

    fleet.mean(fn, ids, message)   the sample-weighted mean of the replies
    fleet.sum(fn, ids, message)    their sum
    fleet.call(fn, ids, message)   every reply, by client

A fourth, `fleet.map(fn, items)`, reaches no client: it spreads the server's own work over the processes that are there.

A transport (this process, or Ray) supplies one thing, `_answers`: run a client function on some clients and yield what
came of it in the order of the ids. Everything that decides a result is here, once: replies are checked before they
count, summed in id order in float64, and counted in bytes.
"""

import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from raylt import tree
from raylt.client import ClientFunction, Host, Message, Reply
from raylt.config import Config
from raylt.data.task import Task
from raylt.errors import ClientError, RayltError, TooFewReplies, one_line
from raylt.form import Form
from raylt.server import Stages
from raylt.tree import Fold, Tree

ItemFunction = Callable[[Tree], Tree]
Verb = Literal["mean", "sum", "call"]


def compute(fn: ItemFunction, item: Tree, threads: int) -> Tree:
    """One item of `Fleet.map`: on the device of this process, with as many threads as everywhere."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)          # it decides the order of some sums
    try:
        result = fn(tree.to(item, device))
    finally:
        torch.set_num_threads(before)
    return tree.map_tensors(lambda t: t.detach().cpu().contiguous(), result)


@dataclass
class Traffic:
    """Bytes of one kind of call: `down` in messages, `up` in replies, over `replies` clients."""

    down: int = 0
    up: int = 0
    replies: int = 0


@dataclass
class Ledger:
    """What happened in one round: traffic by client function, the clients that made trouble, and the time it took.

    `stages` holds the wait for clients under the function's name, and "aggregation".
    """

    traffic: dict[str, Traffic] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)           # no usable answer, for whatever reason but a bad reply
    retried: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # reply not usable, and why
    participants: set[int] = field(default_factory=set)     # of a cohort, those who replied usably
    stages: Stages = field(default_factory=Stages)


@dataclass(frozen=True)
class Answer:
    """What came of one client's call: a reply with the handle of the client's new private state, or an error."""

    id: int
    reply: Reply | None
    private: Any
    error: ClientError | None = None


class Cohort(list[int]):
    """The clients asked in a round; the answers of `enough` of them are waited for (federation.over_select)."""

    def __init__(self, ids: Iterable[int], enough: int):
        super().__init__(ids)
        self.enough = enough


class Fleet(ABC):
    """All clients of an experiment; see the module's docstring.

    Attributes:
        ids: clients that hold samples, ascending.
        sizes: samples per client, by id.
        ledger: what happened since `begin`.
        changed: clients whose private state is newer than the last checkpoint.
    """

    def __init__(self, config: Config, task: Task):
        self.config = config
        self.sizes = {k: len(shard) for k, shard in enumerate(task.shards) if len(shard)}
        self.ids = list(self.sizes)
        self.round = 0
        self.ledger = Ledger()
        self.changed: set[int] = set()
        self._private: dict[int, Any] = {}      # handles of the clients' private states: what an actor is rebuilt from

    def begin(self, round: int) -> None:
        """Starts a round: seeds follow its number, and its ledger is empty."""
        self.round, self.ledger = round, Ledger()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """What clients come to remember inside the block is forgotten after it."""
        before = dict(self._private), set(self.changed), self.round, self.ledger
        try:
            yield
        finally:
            self._private, self.changed, self.round, self.ledger = before

    def mean(self, fn: ClientFunction, ids: Sequence[int], message: Message) -> Tree:
        """The mean of the replies weighted by the clients' samples; integer tensors take the maximum.

        Raises:
            TooFewReplies: fewer than `federation.quorum` of the clients replied usably.
        """
        fold, stages = Fold(), self.ledger.stages
        for _, reply in self._replies(fn, ids, message, verb="mean"):
            with stages.time("aggregation"):
                fold.add(reply.tree, reply.weight)
        with stages.time("aggregation"):
            return fold.mean()

    def sum(self, fn: ClientFunction, ids: Sequence[int], message: Message) -> Tree:
        """The sum of the replies in float64; a key that a client leaves out counts as zero."""
        fold, stages = Fold(), self.ledger.stages
        for _, reply in self._replies(fn, ids, message, verb="sum"):
            with stages.time("aggregation"):
                fold.add(reply.tree)
        with stages.time("aggregation"):
            return fold.sum()

    def call(self, fn: ClientFunction, ids: Sequence[int], message: Message) -> dict[int, Tree]:
        """Every usable reply, by client id, ascending."""
        return {id: reply.tree for id, reply in self._replies(fn, ids, message, verb="call")}

    @abstractmethod
    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        """A pure function of the server on each item, in the order of the items, on whatever processes are idle.

        It sees no client's data. An item whose process is lost is run again, with the same outcome.

        Raises:
            RayltError: it raised; names the item's place and the cause.
        """

    @abstractmethod
    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[Reply], bool]) -> Iterator[Answer]:
        """Runs `fn` on the clients and yields an answer for each, in the order of `ids` (ascending).

        It asks a client again up to `federation.retries` times, noting it in the ledger. It leaves out those that are
        late once `enough` have answered usably; those that are late at the deadline are yielded with an error.
        """

    @abstractmethod
    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        """The private states of clients, one at a time."""

    @abstractmethod
    def restore(self, id: int, private: Tree) -> None:
        """Sets a client's private state, as it was in a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the fleet holds."""

    def _replies(self, fn: ClientFunction, ids: Sequence[int], message: Message, verb: Verb) -> Iterator[
            tuple[int, Reply]]:
        name = getattr(fn, "__name__", "call")
        sampled, wanted = isinstance(ids, Cohort), ids.enough if isinstance(ids, Cohort) else len(ids)
        ids, size = sorted(ids), tree.nbytes(message)
        if not ids:
            raise TooFewReplies(f"round {self.round}, {name}: no client was asked; give it at least one")
        # a model comes back under the names and in the shapes that the message gave it; all of it, to a mean
        like = {"model": message["model"]} if verb != "sum" and "model" in message else {}
        form, given = Form(like, verb != "mean"), Form(like, verb != "mean")
        # only where some may be left out does it matter, while calls run, which replies are usable
        accept = (lambda _: True) if wanted == len(ids) else (lambda reply: given.fault(reply) is None)
        traffic = self.ledger.traffic.setdefault(name, Traffic())
        needed = max(1, math.ceil(self.config.federation.quorum * wanted - 1e-9))
        usable, errors = 0, []
        answers = self._answers(fn, ids, message, wanted, accept)
        while True:
            with self.ledger.stages.time(name):
                answer = next(answers, None)
            if answer is None:
                break
            traffic.down += size
            error = answer.error
            if answer.reply is not None:
                traffic.up += tree.nbytes(answer.reply.tree)
                traffic.replies += 1
                fault = form.fault(answer.reply)
                if fault is None:
                    if verb != "call":
                        form.extend(answer.reply)
                    usable += 1
                    self._private[answer.id] = answer.private
                    self.changed.add(answer.id)
                    if sampled:
                        self.ledger.participants.add(answer.id)
                    yield answer.id, answer.reply
                    continue
                self.ledger.rejected[answer.id] = fault
                error = ClientError(answer.id, self.round, name, f"reply rejected: {fault}")
            else:
                self.ledger.lost.append(answer.id)
            errors.append(error)
        if usable < needed:
            raise TooFewReplies(
                f"round {self.round}, {name}: {usable} of {wanted} clients replied usably, federation.quorum = "
                f"{self.config.federation.quorum:g} needs {needed}; first failure: {errors[0]}") from errors[0]


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
                ours, its = pickle.loads(pickle.dumps((fn, item)))
                results.append(compute(ours, its, threads))
            except Exception as error:
                raise RayltError(f"{getattr(fn, '__name__', 'map')}, item {place}: {one_line(error)}") from error
        return results

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[Reply], bool]) -> Iterator[Answer]:
        name = getattr(fn, "__name__", "call")
        call = pickle.dumps((fn, message))
        deadline = self.config.federation.deadline_s
        start, answered = time.monotonic(), 0
        for id in ids:
            if answered >= enough:
                return
            if deadline is not None and time.monotonic() - start > deadline:
                yield Answer(id, None, None, ClientError(id, self.round, name, f"not done after {deadline:g} s"))
                continue
            answer = self._ask(call, id, name)
            answered += answer.reply is not None and usable(answer.reply)
            yield answer

    def _ask(self, call: bytes, id: int, name: str) -> Answer:
        for retries in range(self.config.federation.retries, -1, -1):
            fn, message = pickle.loads(call)
            private = self._private.get(id)
            try:
                result = self._host.run(fn, message, self.round, id, self._shards[id],
                                        None if private is None else pickle.loads(private))
            except Exception as raised:
                if retries == 0:
                    return Answer(id, None, None, ClientError(id, self.round, name, one_line(raised)))
                self.ledger.retried.append(id)
            else:
                reply, after = pickle.loads(pickle.dumps(result))
                return Answer(id, reply, pickle.dumps(after))
        raise AssertionError("unreachable")

    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        for id in ids:
            yield id, pickle.loads(self._private[id])

    def restore(self, id: int, private: Tree) -> None:
        self._private[id] = pickle.dumps(private)

    def close(self) -> None:
        self._private.clear()
