"""`Fleet`: the only way to reach clients. The server says what it wants to see of each part of their replies:

    got = fleet.ask(fn, cohort, message, model=mean.like(message["model"]), gradients=total, map=each)

`fleet.map(fn, items)` reaches no client: it spreads the server's own work over the processes that are there.

A transport (this process, or Ray) supplies one thing, `_answers`: run a client function on some clients and yield what
came of it in the order of the ids. Everything that decides a result is here, once: replies are checked before they
count, reduced in id order in float64, and counted in bytes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import ClientFunction, Message
from raylt.core.cohort import Cohort, Ledger, Traffic
from raylt.core.gathering import Gathering, Replies
from raylt.core.reductions import Reduction
from raylt.core.schema import Arrived, Form, Schema, difference
from raylt.core.wire import Unusable
from raylt.data.task import Task
from raylt.errors import ClientError, TooFewReplies
from raylt.tree import Tree

ItemFunction = Callable[[Tree], Tree]


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
    """What came of one client's call: what it sent with the handle of its new private state, or an error."""

    id: int
    reply: Arrived | None
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

    @property
    def everyone(self) -> Cohort:
        """All clients that hold samples."""
        return Cohort(self.ids, everyone=True)

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
        name, schema = getattr(fn, "__name__", "call"), Schema(parts, self.sizes, weights)
        if not cohort.ids:
            raise TooFewReplies(f"round {self.round}, {name}: no client was asked; give it at least one")
        gathered: dict[Form, Gathering] = {}
        errors: list[ClientError | None] = []
        for answer in self._counted(name, fn, cohort, message, schema):
            if answer.reply is None:
                self.ledger.lost.append(answer.id)
                errors.append(answer.error)
            elif (fault := schema.fault(answer.id, answer.reply)) is not None:
                errors.append(self._reject(answer.id, name, fault))
            else:
                assert not isinstance(answer.reply, Unusable)
                with self.ledger.stages.time("aggregation"):
                    form = schema.form(answer.reply)
                    gathered.setdefault(form, Gathering(parts)).add(answer.id, answer.reply, answer.private)
        usual, faults = _usual(gathered)
        errors += [self._reject(id, name, fault) for id, fault in faults.items()]
        self._check_quorum(name, cohort, 0 if usual is None else len(usual), errors)
        assert usual is not None
        self._private.update(usual.private)
        self.changed.update(usual.private)
        if not cohort.everyone:
            self.ledger.participants.update(usual.private)
        with self.ledger.stages.time("aggregation"):
            return usual.replies()

    @abstractmethod
    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        """A pure function of the server on each item, in the order of the items, on whatever processes are idle.

        It sees no client's data. An item whose process is lost is run again, with the same outcome.

        Raises:
            RayltError: it raised; names the item's place and the cause.
        """

    @abstractmethod
    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[int, Arrived], bool]) -> Iterator[Answer]:
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

    def _counted(self, name: str, fn: ClientFunction, cohort: Cohort, message: Message, schema: Schema) -> Iterator[
            Answer]:
        """The answers, with their bytes and the wait for them in the ledger."""
        size, traffic = tree.nbytes(message), self.ledger.traffic.setdefault(name, Traffic())
        # only where some may be left out does it matter, while calls run, which replies are usable
        everybody = cohort.needed == len(cohort)
        answers = self._answers(fn, list(cohort), message, cohort.needed,
                                lambda id, reply: everybody or schema.fault(id, reply) is None)
        while True:
            with self.ledger.stages.time(name):
                answer = next(answers, None)
            if answer is None:
                return
            traffic.down += size
            if answer.reply is not None:
                traffic.up += 0 if isinstance(answer.reply, Unusable) else tree.nbytes(answer.reply.tree)
                traffic.replies += 1
            yield answer

    def _reject(self, id: int, name: str, fault: str) -> ClientError:
        self.ledger.rejected[id] = fault
        return ClientError(id, self.round, name, f"reply rejected: {fault}")

    def _check_quorum(self, name: str, cohort: Cohort, usable: int, errors: list[ClientError | None]) -> None:
        quorum = self.config.federation.quorum
        needed = max(1, math.ceil(quorum * cohort.needed - 1e-9))
        if usable < needed:
            raise TooFewReplies(
                f"round {self.round}, {name}: {usable} of {cohort.needed} clients replied usably, federation.quorum = "
                f"{quorum:g} needs {needed}; first failure: {errors[0]}") from errors[0]


def _usual(gathered: dict[Form, Gathering]) -> tuple[Gathering | None, dict[int, str]]:
    """The replies of the most frequent form, and why each of the others does not count, by client id."""
    ranked = sorted(gathered, key=lambda form: -len(gathered[form]))
    if not ranked:
        return None, {}
    if len(ranked) > 1 and len(gathered[ranked[0]]) == len(gathered[ranked[1]]):
        text = difference(ranked[1], ranked[0]).replace("most replies", "as many replies")
        return None, {id: f"two forms are equally frequent: {text}" for form in ranked for id in gathered[form].private}
    faults = {id: difference(form, ranked[0]) for form in ranked[1:] for id in gathered[form].private}
    return gathered[ranked[0]], dict(sorted(faults.items()))
