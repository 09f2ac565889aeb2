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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.cohort import Cohort, Ledger, Traffic
from raylt.core.schema import Form
from raylt.data.task import Task
from raylt.errors import ClientError, TooFewReplies
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


@dataclass(frozen=True)
class Answer:
    """What came of one client's call: a reply with the handle of the client's new private state, or an error."""

    id: int
    reply: Reply | None
    private: Any
    error: ClientError | None = None


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
