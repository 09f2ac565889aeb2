"""`Fleet`: the only way to reach clients. The server says what it wants to see of each part of their replies:

    got = fleet.ask(fn, cohort, message, model=mean.like(message["model"]), gradients=total, map=each)

`fleet.map(fn, items)` reaches no client: it spreads the server's own work over the processes that are there.

A transport (this process, or Ray) supplies one thing, `_answers`: run a client function on some clients and yield what
came of it in the order of the ids. Everything that decides a result is here, once: replies are checked before they
count, reduced in id order in float64, and counted in bytes.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.cohort import Cohort, Ledger, Traffic
from raylt.core.gathering import Gathering, Replies, usual_of
from raylt.core.protection import Protection
from raylt.core.reductions import Reduction
from raylt.core.schema import Arrived, Form, Schema
from raylt.core.server import Watch
from raylt.core.wire import Unusable
from raylt.data.task import Task
from raylt.errors import ClientError, Overflow, TooFewReplies
from raylt.tree import Tree

ItemFunction = Callable[[Tree], Tree]


def compute(fn: ItemFunction, item: Tree, threads: int, device: torch.device) -> Tree:
    """One item of `Fleet.map`: on the device of the process, with as many threads as everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)          # it decides the order of some sums
    try:
        result = fn(tree.to(item, device))
    finally:
        torch.set_num_threads(before)
    return tree.map_tensors(Tensor.contiguous, tree.to(tree.map_tensors(Tensor.detach, result), torch.device("cpu")))


@dataclass(frozen=True)
class Answer:
    """What came of one client's call: what it sent with the handle of its new private state, or an error."""

    id: int
    reply: Arrived | None
    private: Any
    error: ClientError | None = None


class Fleet(ABC):
    """All clients of an experiment; see the module's docstring.

    Attributes:
        ids: clients that hold samples and train, ascending.
        newcomers: those that hold samples and join only after training.
        sizes: samples per client, by id, of those that train; `all_sizes` of the newcomers, too.
        ledger: what happened since `begin`.
        watch: is told of each answer; None where nobody follows.
        changed: clients whose private state is newer than the last checkpoint.
    """

    def __init__(self, config: Config, task: Task):
        self.config = config
        self.all_sizes = {k: len(shard) for k, shard in enumerate(task.shards) if len(shard)}
        late = set(task.newcomers)
        self.newcomers = [k for k in self.all_sizes if k in late]
        self.sizes = {k: n for k, n in self.all_sizes.items() if k not in late}
        self.ids = list(self.sizes)
        self.round = 0
        self.ledger = Ledger()
        self.changed: set[int] = set()
        self.watch: Watch | None = None
        self.protection = Protection(config)
        self._private: dict[int, Any] = {}      # handles of the clients' private states: what an actor is rebuilt from

    @property
    def everyone(self) -> Cohort:
        """All clients that hold samples and train."""
        return Cohort(self.ids, everyone=True)

    def begin(self, round: int) -> None:
        """Starts a round: seeds follow its number, and its ledger is empty."""
        self.round, self.ledger = round, Ledger()

    def note(self, text: str) -> None:
        """Tells the user in a line of something that went wrong and was mended."""
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """What clients come to remember inside the block is forgotten after it."""
        before = dict(self._private), set(self.changed), self.round, self.ledger
        try:
            with self.protection.rehearsing():
                yield
        finally:
            self._private, self.changed, self.round, self.ledger = before

    def ask(self, fn: ClientFunction, cohort: Cohort | Iterable[int], message: Message,
            weights: Mapping[int, float] | None = None, /, **parts: Reduction) -> Replies:
        """Calls a client function on clients and reduces each part of their replies as asked for.

        A reply counts only if it has the weight that the server knows and exactly the parts that are named, each as
        its template says or, without one, as most of the replies have it (where two forms are equally frequent there
        is no telling, and none counts). No reply, whatever it holds, raises here: it is rejected, and the ledger says
        why.

        Args:
            fn: runs at each client, with the message; its name is that of the call in reports.
            cohort: who is asked; a plain list of ids is one that waits for all.
            weights: what each client's reply counts in a mean, by id, and what it must say; by default its samples.
            parts: `mean`, `total` or `each` by name of the part.

        Raises:
            TooFewReplies: fewer than `federation.quorum` of the clients replied usably.
        """
        cohort = cohort if isinstance(cohort, Cohort) else Cohort(cohort)
        name, schema = getattr(fn, "__name__", "call"), Schema(parts, self.all_sizes, weights)
        if not cohort.ids:
            raise TooFewReplies(f"round {self.round}, {name}: no client was asked; give it at least one")
        gathered: dict[Form, Gathering] = {}
        handling = self.protection.handling(self.round, message, parts, cohort,
                                            self.sizes if weights is None else weights)
        errors: list[ClientError | None] = []
        for answer in self._counted(name, fn, cohort, message, schema, handling.summable):
            if answer.reply is None:
                self.ledger.lost.append(answer.id)
                errors.append(answer.error)
            elif (fault := schema.fault(answer.id, answer.reply)) is not None:
                errors.append(self._reject(answer.id, name, fault))
            else:
                assert not isinstance(answer.reply, Unusable)
                with self.ledger.stages.time("aggregation"):
                    form = schema.form(answer.reply)
                    if form not in gathered:
                        gathered[form] = handling.gathering()
                    try:
                        sent = handling.sent(answer.reply) if isinstance(answer.reply, Reply) else answer.reply
                        gathered[form].add(answer.id, sent, answer.private)
                    except Overflow as overflow:
                        errors.append(self._reject(answer.id, name, str(overflow)))
        usual, faults = usual_of(gathered)
        errors += [self._reject(id, name, fault) for id, fault in faults.items()]
        self._check_quorum(name, cohort, 0 if usual is None else len(usual), errors)
        assert usual is not None
        self._private.update(usual.private)
        self.changed.update(usual.private)
        if not cohort.everyone:
            self.ledger.participants.update(usual.private)
        with self.ledger.stages.time("aggregation"):
            reduced = handling.received(usual.replies())
        self.ledger.traffic[name].add(usual.overhead)
        self.ledger.privacy = handling.statement or self.ledger.privacy
        return reduced

    @abstractmethod
    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        """A pure function of the server on each item, in the order of the items, on whatever processes are idle.

        It sees no client's data. An item whose process is lost is run again, with the same outcome.

        Raises:
            RayltError: it raised; names the item's place and the cause.
        """

    @abstractmethod
    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[int, Arrived], bool], sums: Schema | None) -> Iterator[Answer]:
        """Runs `fn` on the clients and yields an answer for each, in the order of `ids` (ascending).

        It asks a client again up to `federation.retries` times, noting it in the ledger. It leaves out those that are
        late once `enough` have answered usably; those that are late at the deadline are yielded with an error.

        Args:
            sums: where a block of clients (raylt.core.blocks) may come as its sums: what its replies must look like.
        """

    @abstractmethod
    def describe(self) -> dict[str, str | None]:
        """What its processes compute on, see `raylt.core.device.describe`; where they differ, each once."""

    @abstractmethod
    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        """The private states of clients, one at a time."""

    @abstractmethod
    def restore(self, id: int, private: Tree) -> None:
        """Sets a client's private state, as it was in a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the fleet holds."""

    def _counted(self, name: str, fn: ClientFunction, cohort: Cohort, message: Message, schema: Schema,
                 summable: bool) -> Iterator[Answer]:
        """The answers, with their bytes and the wait for them in the ledger."""
        size, traffic = tree.nbytes(message), self.ledger.traffic.setdefault(name, Traffic())
        # only where some may be left out does it matter, while calls run, which replies are usable
        everybody = cohort.needed == len(cohort)
        answers = self._answers(fn, list(cohort), message, cohort.needed,
                                lambda id, reply: everybody or schema.fault(id, reply) is None,
                                schema if summable and everybody else None)
        done = 0
        while True:
            if self.watch is not None:
                self.watch(name, done, len(cohort))
            with self.ledger.stages.time(name):
                answer = next(answers, None)
            if answer is None:
                return
            done += 1
            traffic.down += size
            if answer.reply is not None:
                reply = answer.reply
                traffic.up += tree.nbytes(reply.tree) if isinstance(reply, Reply) else reply.nbytes
                traffic.replies += 1
            yield answer

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Inside the block private states stay as they were, and what is asked for is for our own eyes: no federation
        would send it."""
        with self.rehearsing(), self.protection.judging():
            yield

    def _reject(self, id: int, name: str, fault: str) -> ClientError:
        self.ledger.rejected[id] = fault
        return ClientError(id, self.round, name, f"reply rejected: {fault}")

    def _check_quorum(self, name: str, cohort: Cohort, usable: int, errors: list[ClientError | None]) -> None:
        quorum = self.config.federation.quorum
        needed = max(1, math.ceil(quorum * cohort.needed - 1e-9))
        if usable < needed:
            diverged = str(errors[0]).endswith("is not finite")
            remedy = f"; if training diverged, lower local.lr ({self.config.local.lr:g})" if diverged else ""
            raise TooFewReplies(
                f"round {self.round}, {name}: {usable} of {cohort.needed} clients replied usably, federation.quorum = "
                f"{quorum:g} needs {needed}; first failure: {errors[0]}{remedy}") from errors[0]
