"""`ClientHost`: the clients that one process runs."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

from raylt import tree
from raylt.core.client import Client, ClientFunction, Message, Reply
from raylt.core.device import describe, is_full
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.wire import Unusable, room_for, sendable
from raylt.core.method import Method
from raylt.core.setup import Setup, private_entries
from raylt.core.training.stacked_sgd import MAX_STACKED_SAMPLES, ClientStack, why_alone
from raylt.data.samples import Samples
from raylt.data.task import Shard, TaskSpec
from raylt.errors import RayltError, one_line
from raylt.models.split import StateDict, set_training
from raylt.models.trainable import frozen_entries
from raylt.seeds import seeded
from raylt.tree import Tree

T = TypeVar("T")
IN_STACKS = "small clients"  # "stacked" in provenance.jsonl where small clients train in stacks
ReplyAndState = tuple[Reply | Unusable, Tree]  # a reply and the client's private state after the call


@dataclass(frozen=True)
class ClientCall:
    """One client's arguments of `ClientHost.run`, without the function and the message."""

    id: int
    shard: Shard | None
    private: Tree | None


class ClientHost:
    """The clients of one process.

    All clients share one model object: the host loads a client's private entries into it before the client's call and
    takes them out afterwards. So a process with a hundred clients holds one model. The result of a call depends on
    (private state, message, seed) only, not on the process.

    Args:
        setup: Method, configuration and model factory of the experiment.
        spec: Properties of the task that a method may know.
        test: The balanced test set.
        device: Device that runs the clients' calls.
        samples_room: Maximum size in bytes of all samples on the device. Beyond it, the host drops the samples of the
            least recently called client, and that client's next call must supply them again.
        on_problem: Called with one line of text, once for each text, about a problem from which the host recovers; by
            default a warning.
        any_processor: Whether to use stacks even on processors where the bits of one client depend on the others.

    Attributes:
        on_problem: See above.
        why_alone: The reason why no clients train in stacks, as a text; None if small clients do.
    """

    def __init__(
        self,
        setup: Setup,
        spec: TaskSpec,
        test: Shard,
        device: torch.device,
        samples_room: float = math.inf,
        on_problem: Callable[[str], None] = warnings.warn,
        any_processor: bool = False,
    ):
        self.setup = setup
        self.spec = spec
        self.device = device
        self.model = setup.new_model(spec).to(device)
        self.clients: dict[int, Client] = {}
        self.on_problem = on_problem
        self._problems: set[str] = set()
        self._samples_room = samples_room
        self._samples_bytes = 0
        self._initial = tree.snapshot(private_entries(setup.method, self.model))
        self._test = EvaluationSet(test, spec, device)
        self._threads = max(1, int(setup.config.resources.cpus_per_client))
        self.why_alone = why_alone(setup.config, setup.method, self.model, spec, setup.augment, device, any_processor)
        self._reply_room = room_for(tree.nbytes(dict(self.model.state_dict()) | frozen_entries(self.model)))

    def describe(self) -> dict[str, str | None]:
        """Describe the device (`raylt.core.device.describe`) and, as "stacked", the clients that train in stacks.

        "stacked" is None if `local.stacked` is off.
        """
        stacked = IN_STACKS if self.why_alone is None else f"no client, because {self.why_alone}"
        return describe(self.device) | {"stacked": None if self.setup.config.local.stacked == "off" else stacked}

    def stacks(self, fn: ClientFunction) -> bool:
        """Return whether small clients run this function in stacks (`local.stacked`)."""
        return self.why_alone is None and getattr(fn, "__func__", None) is Method.train

    def run_stacks(
        self, fn: ClientFunction, message: Message, round: int, calls: Sequence[ClientCall]
    ) -> dict[int, ReplyAndState]:
        """Run the training function once for each small client among several, in stacks.

        Args:
            fn: The training function.
            message: The message to the clients.
            round: Number of the round.
            calls: Calls of different clients.

        Returns:
            The result of `run` by client id. Clients that are not small are missing, and so are the clients of a stack
            that raised an error: `run` can run each alone, and its error names its client.
        """
        small = [call for call in calls if self._is_stacked(fn, call)]
        small.sort(key=self._size, reverse=True)
        outcomes: dict[int, ReplyAndState] = {}
        while small:
            stack, small = small[: self._stack.slots], small[self._stack.slots :]
            try:
                outcomes |= self._run_stack(fn, message, round, stack)
            except (Exception, SystemExit) as error:
                # report it: if each client succeeds alone, no other message would show that stacking failed
                self._report(f"a stack of clients failed, and each trains alone: {one_line(error)}")
        return outcomes

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self.on_problem(problem)

    def run(
        self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None, private: Tree | None
    ) -> ReplyAndState:
        """Run a client function once for one client.

        A small client's training runs in a stack of its own, so that its bits do not depend on its companions, and
        without a stack if that fails. If the device is full, the host drops the data of the other clients and runs the
        function again.

        Args:
            fn: The client function.
            message: The message to the client.
            round: Number of the round.
            id: Id of the client.
            shard: The client's data; required for the first call, and after the host dropped the data.
            private: The private state that the client's last call returned, or None before the first call.

        Returns:
            The reply, or the reason why it cannot be used, and the client's private state, both on the CPU.

        Raises:
            LateWrite: The function changed a tensor of the message, or one that it had handed over.
        """
        call = ClientCall(id, shard, private)
        if self._is_stacked(fn, call):
            try:
                return self._run_stack(fn, message, round, [call])[id]
            except RayltError:
                raise
            except Exception as error:  # of the client, which its call below raises again, or of the stack
                if is_full(error):
                    raise
        try:
            return self._run(fn, message, round, call)
        except Exception as error:
            if not (is_full(error) and self.drop(all_but=id)):
                raise
        # outside the handler, since the error's frames keep their objects alive
        return self._run(fn, message, round, call)

    @cached_property
    def _stack(self) -> ClientStack:
        return ClientStack(self.model, self.spec, self.setup.config.local.batch)

    def drop(self, all_but: int) -> bool:
        """Remove the data of all clients except the client `all_but` from the device.

        Returns:
            Whether there was another client's data to remove.
        """
        dropped = [id for id in self.clients if id != all_but]
        for id in dropped:
            self._release(id)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(dropped)

    def release(self, ids: Iterable[int]) -> None:
        """Remove the data of some clients from this process."""
        for id in self.clients.keys() & set(ids):
            self._release(id)

    def _run(self, fn: ClientFunction, message: Message, round: int, call: ClientCall) -> ReplyAndState:
        client, entries = self._begin(fn, round, call)
        arrived = tree.to({"entries": entries, "message": message}, self.device)
        client.receive(arrived["entries"])
        client.watch(arrived["message"])
        set_training(self.model)  # every call starts in the same mode, whatever the previous client left
        with self._seeded_call(fn, round, call.id):
            reply = self._run_work(lambda: fn(client, arrived["message"]), self.model.state_dict)
        client.check_stamps()
        return sendable(reply, {"model": self._private_entries(), "state": dict(client.state)}, self._reply_room)

    def _private_entries(self) -> StateDict:
        """Return the model's entries that are never sent.

        Their names do not change, so the method need not be asked for them after every call.
        """
        if not self._initial:
            return {}
        entries = self.model.state_dict()
        return {name: entries[name] for name in self._initial}

    def _is_stacked(self, fn: ClientFunction, call: ClientCall) -> bool:
        return self.stacks(fn) and self._size(call) <= MAX_STACKED_SAMPLES

    def _size(self, call: ClientCall) -> int:
        """Return a client's number of samples."""
        return len(self.clients.get(call.id) or call.shard or ())

    def _run_stack(
        self, fn: ClientFunction, message: Message, round: int, calls: Sequence[ClientCall]
    ) -> dict[int, ReplyAndState]:
        method: Method = fn.__self__  # pyright: ignore[reportFunctionMemberAccess]
        begun = [self._begin(fn, round, call) for call in calls]
        clients = [client for client, _ in begun]
        entries = {str(client.id): own for client, own in begun}
        arrived = tree.to({"entries": entries, "message": message}, self.device)
        privates = list(arrived["entries"].values())
        clients[0].watch(arrived["message"])  # the stack's clients share it; each is called alone after a change
        with self._seeded_call(fn, round, calls[0].id):
            results = self._run_work(
                lambda: self._stack.train(method, clients, privates, arrived["message"]), lambda: self._stack.first
            )
        outcomes = {}
        for client, (reply, private) in zip(clients, results, strict=True):
            client.check_stamps()
            outcomes[client.id] = sendable(reply, {"model": private, "state": dict(client.state)}, self._reply_room)
        return outcomes

    def _begin(self, fn: ClientFunction, round: int, call: ClientCall) -> tuple[Client, Tree]:
        """Begin a call; return the client and its model's private entries at the start."""
        client = self._admit(call.id, call.shard)
        private = {"model": self._initial, "state": {}} if call.private is None else call.private
        client.recall(private["state"])
        client.begin(function_name(fn), round)
        return client, private["model"]

    @contextmanager
    def _seeded_call(self, fn: ClientFunction, round: int, id: int) -> Iterator[None]:
        """Set the number of threads and torch's own generators for a call, and restore them afterwards."""
        threads = torch.get_num_threads()
        self._set_threads(self._threads)  # the same number everywhere, since it affects the order of some sums
        try:
            with seeded(self.setup.config.seed, function_name(fn), round, id, device=self.device):
                yield
        finally:
            self._set_threads(threads)

    @staticmethod
    def _set_threads(number: int) -> None:
        if torch.get_num_threads() != number:  # checking is cheaper than setting it again
            torch.set_num_threads(number)

    def _run_work(self, work: Callable[[], T], entries: Callable[[], StateDict]) -> T:
        """Run the work of a call; raise an error with the code reply.not-finite if it fails on a diverged model.

        Args:
            work: The work of the call.
            entries: Returns the entries of the trained model.
        """
        try:
            return work()
        except RayltError:
            raise
        except Exception as error:
            if is_full(error) or all(torch.isfinite(value).all() for value in entries().values()):
                raise
            raise RayltError(
                f"the model is infinite or not a number: {one_line(error)}", code="reply.not-finite"
            ) from error

    def _admit(self, id: int, shard: Shard | None) -> Client:
        client = self.clients.pop(id, None)
        if client is None:
            assert shard is not None, f"client {id} is not in this process and came without its data"
            samples = Samples(shard, self.spec, self.device)
            setup = self.setup
            client = Client(
                id, samples, self._test, self.model, setup.config, self.device, setup.augment, setup.schedule
            )
            self._samples_bytes += samples.nbytes
        self.clients[id] = client  # last in order, so that it is dropped last
        while len(self.clients) > 1 and self._samples_bytes > self._samples_room:
            self._release(next(iter(self.clients)))
        return client

    def _release(self, id: int) -> None:
        self._samples_bytes -= self.clients.pop(id).samples.nbytes
