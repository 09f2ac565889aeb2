"""`Fleet`: runs client functions on clients and reduces each part of their replies as the server asks:

    got = fleet.ask(fn, cohort, message, model=mean.like(message["model"]), gradients=total, map=each)

`fleet.map(fn, items)` calls no client; it distributes the server's own work over the processes of the run.

A transport (this process, or Ray) supplies one thing, `_answers`: it runs a client function on some clients and yields
their answers in the order of the ids. Everything that decides a result is in this module, once: replies are checked
before they count, reduced in id order in float64, and counted in bytes.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.fleet.aggregation import Aggregator, LayoutVote, Replies
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.item_progress import ItemsHook, progress_of_items, steps_reported_to
from raylt.core.fleet.quorum import Call, Quorum
from raylt.core.fleet.reductions import Reduction
from raylt.core.fleet.robust.outliers import Outliers
from raylt.core.fleet.schema import Arrived, Schema
from raylt.core.fleet.wire import Fault, Unusable
from raylt.core.protection.protection import Protection
from raylt.core.round_stats import ProgressHook, RoundStats, StageProgress, Traffic
from raylt.data.task import Task
from raylt.errors import ClientError, ConfigError, Overflow, RayltError, TooFewReplies, shorten, type_name
from raylt.own_code.commands import own_command
from raylt.tree import Tree

ItemFunction = Callable[[Tree], Tree]


@dataclass(frozen=True)
class Answer:
    """The outcome of one client's call: a reply and a handle of the client's new private state, or an error."""

    id: int
    reply: Arrived | None
    private: Any
    error: ClientError | None = None


class Fleet(ABC):
    """All clients of an experiment, and the only way to call them.

    Attributes:
        ids: Clients that hold samples and train, ascending.
        new_clients: Clients that hold samples and join only after training.
        sizes: Samples per client that trains, by id; `all_sizes` has the new clients too.
        round_stats: Statistics of the round since `begin`.
        on_progress: Called for each answer; None without an observer.
        on_items: Called with the progress inside items of `map`; None without an observer.
        on_note: Called with each note; None for a RuntimeWarning.
        changed: Clients whose private state changed since the last checkpoint.
        quorum: The check that enough clients of each call sent a valid reply.
        run_folder: The run folder, with which `raylt debug` can repeat calls; None without one.
    """

    def __init__(self, config: Config, task: Task):
        self.config = config
        self.all_sizes = {k: len(shard) for k, shard in enumerate(task.shards) if len(shard)}
        late = set(task.new_clients)
        self.new_clients = [k for k in self.all_sizes if k in late]
        self.sizes = {k: n for k, n in self.all_sizes.items() if k not in late}
        self.ids = list(self.sizes)
        height, width, _ = task.shape
        self._labels = height * width if task.kind == "segmentation" else 1  # per sample
        self.round = 0
        self.round_stats = RoundStats()
        self.changed: set[int] = set()
        self.on_progress: ProgressHook | None = None
        self._arrived = -1  # answers to the call under way, as the observer knows it
        self.on_items: ItemsHook | None = None
        self.on_note: Callable[[str], object] | None = None
        self.run_folder: Path | None = None
        self._repeat_noted = False
        self._noted_failures: set[tuple[str, str]] = set()  # functions and causes of this round's failures
        self.protection = Protection(config, self.all_sizes)
        self.quorum = Quorum()
        self._private: dict[int, Any] = {}  # handles of the clients' private states, from which an actor is rebuilt

    @property
    def everyone(self) -> Cohort:
        """The clients that hold samples and train, as a cohort."""
        return Cohort(self.ids, everyone=True)

    def begin(self, round: int) -> None:
        """Start a round: set the round number, on which seeds depend, and reset the statistics."""
        self.round = round
        self.round_stats = RoundStats()
        self._noted_failures.clear()

    def note(self, text: str) -> None:
        """Tell the user, in one line, about a problem from which the run has recovered."""
        if self.on_note is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        else:
            self.on_note(text)

    def ask(
        self,
        fn: ClientFunction,
        cohort: Cohort | Iterable[int],
        message: Message,
        weights: Mapping[int, float] | None = None,
        /,
        **parts: Reduction,
    ) -> Replies:
        """Run one client function on many clients and reduce each part of their replies.

        A reply counts only if it has the weight that the server expects and exactly the named parts. Each part must
        look as its template says or, without a template, as in most of the replies. Where two layouts are equally
        frequent, no reply counts. A reply whose norm is far larger than the others' does not count either
        (robust/outliers.py). No reply can raise an error at the server: an unusable reply is rejected, and
        `round_stats` has the reason.

        Args:
            fn: Function that runs at each client with the message; reports name the call after it.
            cohort: Clients to ask; with a plain list of ids the server waits for all of them.
            weights: The weight of each client's reply in a mean, by id, which the reply must state; by default the
                number of its samples.
            parts: `mean`, `total` or `each` by name of the part.

        Raises:
            TooFewReplies: Fewer than `federation.quorum` of the clients sent usable replies, or the cohort is empty.
            ConfigError: A client does not exist, a weight is missing, negative or not finite, a part is not a
                reduction, or the message cannot be sent.
            Diverged: The same, and most of the clients sent values that no model can have.
            RayltError: The message is not finite.
        """
        cohort = cohort if isinstance(cohort, Cohort) else Cohort(cohort)
        name = function_name(fn)
        self._check_asked(name, cohort, weights, parts)
        self._check_message(name, message)
        check_finite(message, f"round {self.round}, {name}: the message to the clients", self.config)
        parts = self.protection.with_templates(parts, message)
        schema = Schema(parts, self.all_sizes, weights, self._labels)
        aggregator = self.protection.aggregator(
            self.round, message, parts, cohort, self.sizes if weights is None else weights
        )
        vote = LayoutVote(aggregator)
        outliers = Outliers(schema.length_bounds if aggregator.compares else {}, schema.lengths_of, self.all_sizes)
        answers = self._counted(name, fn, cohort, message, schema, aggregator.summable)
        privates, errors = self._collect(answers, name, schema, vote, outliers)
        usual, faults = vote.winner()
        errors += [self._reject(id, name, fault) for id, fault in faults.items()]
        valid = 0 if usual is None else len(usual.weights)
        self.quorum.check(self.config, Call(self.round, name, cohort, message), valid, errors)
        assert usual is not None
        self._check_total_weight(name, usual, parts)
        self._commit({id: privates[id] for id in usual.weights}, cohort)
        return self._result(name, usual)

    @abstractmethod
    def map(self, fn: ItemFunction, items: Sequence[Tree]) -> list[Tree]:
        """Run a pure server-side function on each item, in idle processes, and return the results in order.

        The function sees no client's data. An item whose process is lost is run again, up to `federation.retries`
        times, with the same outcome. A long function calls `report_steps` (item_progress.py).

        Raises:
            RayltError: The function raised; names the item's position and the cause.
        """

    def show_items(self, fn: ItemFunction, done: int, total: int) -> None:
        """Tell the observer how many items of a `map` call are done."""
        if self.on_progress is not None:
            self.on_progress(function_name(fn), done, total)

    def show_steps(self, fn: ItemFunction, done: int, total: int, steps: Mapping[int, tuple[int, int]]) -> None:
        """Tell the observer how many steps of each unfinished `map` item are done; see `progress_of_items`."""
        if self.on_items is not None:
            self.on_items(progress_of_items(function_name(fn), done, total, steps))

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Undo all changes to clients' private states when the block ends, and return to the round's statistics."""
        before = dict(self._private), set(self.changed), self.round, self.round_stats
        try:
            with self.protection.rehearsing():
                yield
        finally:
            self._private, self.changed, self.round, self.round_stats = before

    @contextmanager
    def judging(self, round: int | None = None) -> Iterator[None]:
        """Run calls inside the block as the researcher's evaluation: without masks or changes of private states.

        The round's statistics get the clients with problems, and neither traffic nor durations, since a federation
        would not make these calls.

        Args:
            round: The number of a further round, on which the seeds inside the block depend. The statistics then get
                nothing. By default the block belongs to the current round.
        """
        with self.rehearsing(), self.protection.judging():
            self.round = self.round if round is None else round
            self.round_stats = judged = RoundStats()
            yield
        if round is None:
            self.round_stats.add_troubles(judged)

    @abstractmethod
    def describe(self) -> dict[str, str | None]:
        """Return the distinct devices that the processes compute on (`raylt.core.device.describe`)."""

    @abstractmethod
    def private_states(self, ids: Iterable[int]) -> Iterator[tuple[int, Tree]]:
        """Yield clients' private states one at a time."""

    @abstractmethod
    def restore(self, id: int, private: Tree) -> None:
        """Set a client's private state to the value in a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Free everything that the fleet holds."""

    @abstractmethod
    def _answers(
        self,
        fn: ClientFunction,
        ids: list[int],
        message: Message,
        enough: int,
        usable: Callable[[int, Arrived], bool],
        sums: Schema | None,
    ) -> Iterator[Answer]:
        """Run `fn` on the clients, and yield one answer per client in ascending order of client ids.

        A client that fails is asked again up to `federation.retries` times, and `round_stats.retried` notes it. Once
        `enough` clients have answered usably, late clients are left out. Clients that are late at the deadline are
        yielded with an error.

        Args:
            sums: The schema of the replies where a block of clients (block_sums.py) may come as its sums; None where
                every reply must come by itself.
        """

    def _counted(
        self, name: str, fn: ClientFunction, cohort: Cohort, message: Message, schema: Schema, summable: bool
    ) -> Iterator[Answer]:
        """Yield the clients' answers, and record their bytes and the waiting time in `round_stats`."""
        size = tree.nbytes(message)
        traffic = self.round_stats.traffic.setdefault(name, Traffic())
        # replies need to be checked during the call only if some clients may be left out
        all_needed = cohort.needed == len(cohort)
        answers = self._answers(
            fn,
            list(cohort),
            message,
            cohort.needed,
            lambda id, reply: all_needed or schema.fault(id, reply) is None,
            schema if summable and all_needed else None,
        )
        done = 0
        self._arrived = -1
        while True:
            self._show_arrived(name, done, len(cohort))
            with self.round_stats.timings.time(name):
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

    def _check_asked(
        self, name: str, cohort: Cohort, weights: Mapping[int, float] | None, parts: Mapping[str, Any]
    ) -> None:
        """Check the arguments of a call, before any client is asked."""
        if not cohort.ids:
            raise TooFewReplies(
                f"round {self.round}, {name}: fleet.ask got an empty cohort (0 clients). Pass a client id, or "
                "raise federation.participation if clients are sampled.",
                code="reply.too-few",
                round=self.round,
                function=name,
                asked=0,
            )
        for id in cohort:
            if id not in self.all_sizes:
                raise self._wrong_call(
                    name, f"a client that does not exist or has no samples ({id}). Name clients of fleet.ids", id=id
                )
        for part, reduction in parts.items():
            if not isinstance(reduction, Reduction):
                raise self._wrong_call(
                    name, f"{type_name(reduction)} for the part {part}. Give mean, total or each", part=part
                )
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            raise self._wrong_call(name, f"{type_name(weights)} as weights. Give a dict from client ids to weights")
        for id in cohort:
            if id not in weights:
                raise self._wrong_call(name, f"no weight for client {id}. Give a weight for each client", id=id)
            if not _is_weight(weights[id]):
                raise self._wrong_call(
                    name,
                    f"the weight {shorten(str(weights[id]), 40)} for client {id}. Give finite numbers of at least 0",
                    id=id,
                )

    def _check_message(self, name: str, message: Any) -> None:
        """Check that a message can be sent to other processes."""
        if not isinstance(message, dict):
            raise self._wrong_call(
                name, f"{type_name(message)} as message. Give a dict of tensors, numbers and strings"
            )
        for path, leaf in tree.leaves(message):
            if isinstance(leaf, Tensor) and (leaf.requires_grad or leaf.device.type != "cpu"):
                problem = "requires gradients" if leaf.requires_grad else f"is on {leaf.device}"
                raise self._wrong_call(
                    name, f"a message with a tensor that {problem} ({path}). Send tree.snapshot(...) of it", path=path
                )

    def _check_total_weight(self, name: str, usual: Aggregator, parts: Mapping[str, Reduction]) -> None:
        """Check that the usable replies have a mean, if the call asks for one; robust rules need no weights."""
        if (
            self.config.federation.robust is None
            and any(part.kind == "mean" for part in parts.values())
            and not any(usual.weights.values())
        ):
            raise self._wrong_call(name, "weights of 0 for all usable replies. Give at least one larger weight")

    def _wrong_call(self, name: str, problem: str, **details: Any) -> ConfigError:
        """Return the error for an argument of `ask`."""
        return ConfigError(
            f"round {self.round}, {name}: fleet.ask got {problem}.",
            code="method.wrong-argument",
            round=self.round,
            function=name,
            **details,
        )

    def _collect(
        self, answers: Iterable[Answer], name: str, schema: Schema, vote: LayoutVote, outliers: Outliers
    ) -> tuple[dict[int, Any], list[ClientError]]:
        """Check all answers and add the valid replies to the vote.

        Returns:
            Handles of the new private states of clients with valid replies, and the errors of all other clients.
        """
        privates: dict[int, Any] = {}
        errors: list[ClientError] = []
        for answer in answers:
            error = self._take_in(answer, name, schema, vote, outliers)
            if error is None:
                privates[answer.id] = answer.private
            else:
                errors.append(error)
        for id, reply, fault in outliers.decided():
            if fault is None:
                vote.accept(id, reply, schema.layout(reply))
            else:
                errors.append(self._reject(id, name, fault))
        return privates, errors

    def _result(self, name: str, aggregator: Aggregator) -> Replies:
        """Return the reduced replies, and record the bytes, warnings and privacy of the aggregation."""
        with self.round_stats.timings.time("aggregation"):
            replies = aggregator.result()
        for trouble in aggregator.troubles:
            self.note(f"round {self.round}, {name}: {trouble}")
        self.round_stats.traffic[name].add(aggregator.overhead)
        self.round_stats.privacy = aggregator.statement or self.round_stats.privacy
        return replies

    def _show_arrived(self, name: str, arrived: int, asked: int) -> None:
        """Tell the observer how many answers have arrived, also those that wait for the answer of a lower id."""
        if self.on_progress is not None and arrived > self._arrived:
            self._arrived = arrived
            self.on_progress(name, arrived, asked)

    def _take_in(
        self, answer: Answer, name: str, schema: Schema, vote: LayoutVote, outliers: Outliers
    ) -> ClientError | None:
        """Check one client's answer and add its reply; return the error if the reply is unusable, otherwise None.

        A reply of suspicious length is set aside.
        """
        if answer.reply is None:
            assert answer.error is not None
            self.round_stats.lost.append(answer.id)
            self._note_failure(answer.error)
            return answer.error
        fault = schema.fault(answer.id, answer.reply)
        if fault is not None:
            return self._reject(answer.id, name, fault)
        assert not isinstance(answer.reply, Unusable)
        with self.round_stats.timings.time("aggregation"):
            if outliers.set_aside(answer.id, answer.reply):
                return None
            try:
                vote.accept(answer.id, answer.reply, schema.layout(answer.reply))
            except Overflow as overflow:
                return self._reject(answer.id, name, Fault(overflow.code, str(overflow)))
        return None

    def _note_failure(self, error: ClientError) -> None:
        """Note why a client's function failed, once in a round for each function and cause."""
        failure = error.function, error.cause
        if error.code not in ("client.lost", "client.late") and failure not in self._noted_failures:
            self._noted_failures.add(failure)
            self.note(str(error))
            self._note_repeat(error)

    def _note_repeat(self, error: ClientError) -> None:
        """Note, once in a run, the command that repeats a failed call, if the round starts from a checkpoint."""
        before = max(0, error.round - 1)
        if self.run_folder is None or self._repeat_noted or before % self.config.output.checkpoint_every:
            return
        self._repeat_noted = True
        while_kept = f", as long as the checkpoint after round {before} is kept" if before else ""
        place = ["--round", error.round, "--client", error.client, "--function", error.function]
        command = own_command("debug", self.run_folder, *place)
        self.note(f"{command} repeats the call of client {error.client}{while_kept}")

    def _reject(self, id: int, name: str, fault: Fault) -> ClientError:
        self.round_stats.rejected[id] = fault.text
        error = ClientError(id, self.round, name, f"reply rejected: {fault}", code=fault.code, value=fault.value)
        self._note_repeat(error)
        return error

    def _commit(self, privates: dict[int, Any], cohort: Cohort) -> None:
        """Store the new private states of the clients whose replies are used."""
        self._private.update(privates)
        self.changed.update(privates)
        if not cohort.everyone:
            self.round_stats.participants.update(privates)


def _is_weight(value: Any) -> bool:
    """Return whether a value can be the weight of a client's reply."""
    is_number = isinstance(value, int | float | np.number) or (isinstance(value, Tensor) and value.ndim == 0)
    return is_number and bool(0 <= value < math.inf)


def check_finite(parts: Tree, what: str, config: Config) -> None:
    """Raise an error if a tree contains NaN or an infinite value.

    Args:
        what: The tree, in words that a message starts with.

    Raises:
        RayltError: Names the first such value.
    """
    for path, leaf in tree.leaves(parts):
        if isinstance(leaf, Tensor):
            finite = not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
        else:
            finite = not isinstance(leaf, float) or math.isfinite(leaf)
        if not finite:
            raise RayltError(
                f"{what} holds a value that is infinite or not a number ({path}). Lower local.lr ({config.local.lr:g}) "
                "or weights and rates of the method.",
                code="server.not-finite",
                key="local.lr",
                value=config.local.lr,
                path=path,
            )


def compute(
    fn: ItemFunction, item: Tree, threads: int, device: torch.device, on_step: StageProgress | None = None
) -> Tree:
    """Run one item of `Fleet.map` on the process's device, with the same number of threads in every process.

    Args:
        on_step: Called with the steps that the function reports.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # it decides the order of some sums
    try:
        with steps_reported_to(on_step):
            result = fn(tree.to(item, device))
    finally:
        torch.set_num_threads(before)
    return tree.map_tensors(Tensor.contiguous, tree.to(tree.map_tensors(Tensor.detach, result), torch.device("cpu")))
