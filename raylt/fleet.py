"""`Fleet`: the only way to reach clients. Its three verbs say what the server gets to see.

    fleet.mean(fn, ids, message)   the sample-weighted mean of the replies
    fleet.sum(fn, ids, message)    their sum
    fleet.call(fn, ids, message)   every reply, by client

A transport (this process, or Ray) supplies one thing, `_answers`: run a client function on some clients and yield what
came of it in the order of the ids. Everything that decides a result is here, once: replies are checked before they
count, summed in id order in float64, and counted in bytes.
"""

import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.client import ClientFunction, Host, Message, Reply
from raylt.config import Config
from raylt.data.task import Task
from raylt.errors import ClientError, TooFewReplies, one_line
from raylt.tree import Fold, Tree


@dataclass
class Traffic:
    """Bytes of one kind of call: `down` in messages, `up` in replies, over `replies` clients."""

    down: int = 0
    up: int = 0
    replies: int = 0


@dataclass
class Ledger:
    """What happened in one round: traffic by client function, and the clients that made trouble."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)           # no usable answer, for whatever reason but a bad reply
    retried: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)  # reply not usable, and why


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
        self.sizes = {k: int(n) for k, n in enumerate(task.client_counts.sum(1)) if n > 0}
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
        fold = Fold()
        for _, reply in self._replies(fn, ids, message, alike=True):
            fold.add(reply.tree, reply.weight)
        return fold.mean()

    def sum(self, fn: ClientFunction, ids: Sequence[int], message: Message) -> Tree:
        """The sum of the replies in float64; a key that a client leaves out counts as zero."""
        fold = Fold()
        for _, reply in self._replies(fn, ids, message, alike=False):
            fold.add(reply.tree)
        return fold.sum()

    def call(self, fn: ClientFunction, ids: Sequence[int], message: Message) -> dict[int, Tree]:
        """Every usable reply, by client id, ascending."""
        return {id: reply.tree for id, reply in self._replies(fn, ids, message, alike=False)}

    @abstractmethod
    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int) -> Iterator[Answer]:
        """Runs `fn` on the clients and yields an answer for each, in the order of `ids` (ascending).

        It asks a client again up to `federation.retries` times, noting it in the ledger, and may leave out those that
        are late once `enough` have answered, or at the deadline: they are yielded with an error.
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

    def _replies(self, fn: ClientFunction, ids: Sequence[int], message: Message,
                 alike: bool) -> Iterator[tuple[int, Reply]]:
        name = getattr(fn, "__name__", "call")
        wanted = ids.enough if isinstance(ids, Cohort) else len(ids)
        ids, size = sorted(ids), tree.nbytes(message)
        # replies to a mean carry the model under the same names as the message did, or the first reply sets the form
        form = {"model": message["model"]} if alike and "model" in message else None
        if not ids:
            raise TooFewReplies(f"round {self.round}, {name}: no client was asked; give it at least one")
        traffic = self.ledger.traffic.setdefault(name, Traffic())
        needed = max(1, math.ceil(self.config.federation.quorum * wanted - 1e-9))
        usable, errors = 0, []
        for answer in self._answers(fn, ids, message, wanted):
            traffic.down += size
            error = answer.error
            if answer.reply is not None:
                traffic.up += tree.nbytes(answer.reply.tree)
                traffic.replies += 1
                fault = _fault(answer.reply, form, closed=alike and usable > 0)
                if fault is None:
                    if alike and usable == 0:
                        form = answer.reply.tree
                    usable += 1
                    self._private[answer.id] = answer.private
                    self.changed.add(answer.id)
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


def _fault(reply: Reply, form: Tree | None, closed: bool) -> str | None:
    """Why a reply cannot be used, or None: names, shapes and types as in `form`, finite numbers, a weight above 0.

    Args:
        closed: whether `form` holds all names that a reply may have.
    """
    if not (math.isfinite(reply.weight) and reply.weight > 0):
        return f"weight {reply.weight}"
    found = dict(tree.leaves(reply.tree))
    for path, leaf in found.items():
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                return f"{path} is not finite"
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            return f"{path} is {leaf}"
    for path, like in tree.leaves(form or {}):
        leaf = found.get(path)
        if leaf is None:
            return f"{path} is missing"
        if isinstance(like, Tensor) and not (isinstance(leaf, Tensor) and leaf.shape == like.shape
                                             and leaf.dtype == like.dtype):
            return f"{path} is {_kind(leaf)}, expected {_kind(like)}"
    if closed and (more := found.keys() - dict(tree.leaves(form or {})).keys()):
        return f"{min(more)} is additional"
    return None


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
    return type(leaf).__name__


class LocalFleet(Fleet):
    """All clients in this process, one after another: for tests and for small runs.

    Function, message and reply are pickled both ways, so a method that leans on shared memory fails here, in a unit
    test, and not on a cluster.
    """

    def __init__(self, config: Config, task: Task, host: Host):
        super().__init__(config, task)
        self._shards, self._host = task.shards, host

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int) -> Iterator[Answer]:
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
            answered += answer.error is None
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
