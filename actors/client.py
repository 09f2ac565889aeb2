"""The Ray actor that runs client functions on its share of a GPU.

Exceptions are returned as `Fault`, because Ray would drop the place where they were raised.
"""

import faulthandler
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from actors.shards import Pack
from raylt.config import Config
from raylt.core.client import ClientFunction, Reply
from raylt.core.device import is_full, open_device
from raylt.core.fleet.client_host import ClientCall, ClientHost, ReplyAndState
from raylt.core.fleet.fleet import ItemFunction, compute
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import Fault, Unusable, packed, unpacked
from raylt.data.task import Shard, TaskSpec
from raylt.errors import ConfigError, LateWrite, RayltError, count_of, one_line
from raylt.own_code.shipment import Shipment
from raylt.runs.callbacks.progress import item_writer
from raylt.store import Folder
from raylt.tree import Stamps, Tree, from_arrays, snapshot, to_arrays

LOST_DEVICE_EXIT = 86  # Exit code of a process that can no longer use its device.
DATA_SHARE = 0.5  # Share of the device memory for data; the rest is for models, activations and CUDA.
EXIT_TIMEOUT_S = 30.0  # Usually a killed process releases its GPU memory within two seconds.
_STICKY = (  # Parts of error messages after which every later CUDA call of the process fails.
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "invalid address space",
    "hardware stack error",
    "launch timed out",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "context is destroyed",
    "mps client has been terminated",
    "between the mps server and the mps client failed",
    "cuda error: unknown error",
)


class DeviceFull(RayltError):
    """Raised when the device has too little memory for another client actor."""

    def __init__(self, cause: str):
        super().__init__(
            f"resources: the device has no room for a client actor ({cause}). Free the device, or lower "
            "resources.actors.",
            code="device.full",
            cause=cause,
        )


class BlockClient(NamedTuple):
    """A client of a block, and where its call finds its data and its private state.

    Attributes:
        pack: Number of the pack with the client's data.
        private: Position among the private states that are sent with the call; None before the client's first call.
    """

    id: int
    pack: int
    private: int | None


@dataclass(frozen=True)
class Block:
    """The clients of one call, which an actor runs one after the other.

    Attributes:
        round: Number of the round.
        packs: Numbers of the packs of data that are sent with the call because the actor does not have them.
        clients: The clients, in order.
        keep: Whether the actor keeps the packs and the clients' samples after the call.
        stores_replies: Whether each reply becomes a separate object in the object store.
    """

    round: int
    packs: list[int]
    clients: list[BlockClient]
    keep: bool
    stores_replies: bool


@dataclass(frozen=True)
class BlockReplies:
    """The replies of a block's call, and the problems of its actor.

    Attributes:
        replies: Replies of the block's clients, in order; see `ClientActor.run`.
        problems: Lines about problems during the call from which the actor has recovered.
    """

    replies: list[Any]
    problems: list[str]


@ray.remote
class ClientActor:
    """Runs client functions for one client, or for several if there are more clients than actors.

    Args:
        label: Name that Ray's dashboard shows.
        setup: The experiment's `Setup`.
        spec: Description of the task.
        test: The balanced test set.
        stacks: File for the stack traces of a stuck call; None to write none.
    """

    label = "client"  # Ray asks for the name even if the constructor failed

    def __init__(self, label: str, setup: Shipment, spec: TaskSpec, test: Shard, stacks: Path | None):
        self.label = label
        self.stacks = stacks
        self._problems: list[str] = []  # problems of the call in progress
        self.packs: dict[int, Pack] = {}  # in Ray's memory; the host may drop a client's samples and need them again
        self._parts = setup, spec, test
        self.refusal = self._open()

    def __repr__(self) -> str:
        return self.label

    def _open(self) -> RayltError | None:
        """Create the client host; return the error if that fails.

        Ray would report an error in a constructor as the actor's death.
        """
        shipped, spec, test = self._parts
        try:
            setup = shipped.open()
            device = own_device(setup.config)
            self.host = ClientHost(setup, spec, test, device, data_room(device), self._note)
        except Exception as error:
            if is_full(error):
                return DeviceFull(one_line(error))
            if isinstance(error, ConfigError):
                return error
            raise
        return None

    def _note(self, problem: str) -> None:
        self._problems.append(problem)

    def ready(self, again: bool = False) -> tuple[str, int, dict[str, str | None], bool]:
        """Return the actor's node, pid and device, and whether small clients train in stacks, once it has started.

        Args:
            again: Whether to try again to use a device that could not be used before.

        Raises:
            ConfigError: The device cannot be used.
            DeviceFull: The device has too little free memory.
        """
        if again:
            self.refusal = self._open()
        if self.refusal is not None:
            raise self.refusal
        host = self.host
        return ray.get_runtime_context().get_node_id(), os.getpid(), host.describe(), host.why_alone is None

    def wait_until_gone(self, processes: list[tuple[str, int]]) -> None:
        """Wait until all given processes (node, pid) of this node have ended, but at most `EXIT_TIMEOUT_S` seconds."""
        this_node = ray.get_runtime_context().get_node_id()
        end = time.monotonic() + EXIT_TIMEOUT_S
        pids = [pid for node, pid in processes if node == this_node]
        while any(_lives(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)

    def run(
        self, fn: ClientFunction, message: Tree, block: Block, patience: float, sums: Schema | None, *objects: Any
    ) -> Any:
        """Run a client function on each client of a block, one after the other. Tensors are sent as arrays.

        If the function raises, the client's reply is a `Fault`; the other clients of the block are unaffected.

        Args:
            fn: The client function.
            message: The server's message.
            block: The clients.
            patience: Seconds after which the stack traces of a call that is still running are written to `stacks`.
            sums: Layout of the replies, for a block that returns its sum. If a client's function raised, the block
                returns its replies instead: that client is asked again, and its reply is added in id order.
            objects: The packs that `block` names, followed by the private states that `block` refers to.

        Returns:
            A `BlockReplies`, and each client's private state as a separate object. If the replies are separate objects
            too, they follow the states, and `BlockReplies` has None in their place.
        """
        packs = self.packs | dict(zip(block.packs, objects, strict=False))
        if block.keep:
            self.packs = packs
        privates = objects[len(block.packs) :]
        received = snapshot(from_arrays(message))  # a copy, since other blocks and actors read the message too
        message_stamps = Stamps()
        message_stamps.add(received, "message")
        replies = []
        states = []
        calls = [
            ClientCall(
                client.id,
                packs[client.pack].shard(client.id),
                None if client.private is None else from_arrays(privates[client.private]),
            )
            for client in block.clients
        ]
        with self._stacks_after(patience):
            stacked = self.host.run_stacks(fn, received, block.round, calls)
            for call in calls:
                reply, state = self._call(fn, received, message_stamps, block, call, stacked.get(call.id))
                replies.append(reply)
                states.append(state)
        if not block.keep:
            self.host.release(call.id for call in calls)
        problems, self._problems = self._problems, []
        if block.stores_replies:
            faults = [reply if isinstance(reply, Fault) else None for reply in replies]
            return BlockReplies(faults, problems), *states, *replies
        if sums is not None and not any(isinstance(reply, Fault) for reply in replies):
            replies = _summed(sums, [call.id for call in calls], replies)
        return BlockReplies(replies, problems), *states

    def add_up(self, sums: Schema, ids: list[int], replies: list[Any]) -> list[Any]:
        """Add up the replies of a block's clients from the object store.

        Args:
            sums: Layout of the replies.
            ids: Ids of the clients, ascending.
            replies: References to the clients' replies, which are fetched and added one by one.

        Returns:
            For each client, the same as `run` returns for a block that returns its sum.
        """
        return _summed(sums, ids, map(ray.get, replies))

    def _call(
        self,
        fn: ClientFunction,
        message: Tree,
        message_stamps: Stamps,
        block: Block,
        call: ClientCall,
        outcome: ReplyAndState | None,
    ) -> tuple[Reply | Unusable | Fault, Tree]:
        """Run a call, or take its outcome from a stack of clients; return the packed reply and private state."""
        try:
            if outcome is not None:
                return packed(*outcome)
            path = message_stamps.changed()
            if path is not None:  # on a CPU, all clients of a block share the memory of the message
                raise LateWrite(call.id, path)
            reply, state = self.host.run(fn, message, block.round, call.id, call.shard, call.private)
            if len(block.clients) > 1:
                reply, state = _copied(reply, state)
            return packed(reply, state)
        except Exception as error:
            return fault_of(error, self.host.device), {}

    def compute(self, fn: ItemFunction, item: Tree, number: int) -> Tree | Fault:
        """Compute one item of `Fleet.map`. Tensors are sent as arrays.

        Args:
            fn: The function.
            item: The item.
            number: Number of the item, under which its progress is written.
        """
        try:
            threads = max(1, int(self.host.setup.config.resources.cpus_per_client))
            on_step = None if self.stacks is None else item_writer(self.stacks.parent.parent, number)
            return to_arrays(compute(fn, from_arrays(item), threads, self.host.device, on_step))
        except Exception as error:
            return fault_of(error, self.host.device)

    @contextmanager
    def _stacks_after(self, patience: float) -> Iterator[None]:
        """Write this process's stack traces to a file if the block takes longer than `patience` seconds.

        The timer of `faulthandler` writes them; it needs neither this thread nor the interpreter lock.
        """
        if self.stacks is None:
            yield
            return
        with Folder.open(self.stacks.parent.parent) as run, run.inner(self.stacks.parent.name, make=True) as folder:
            folder.remove(self.stacks.name)
            with folder.log(self.stacks.name) as stream:
                faulthandler.dump_traceback_later(patience, file=stream)
                try:
                    yield
                finally:
                    faulthandler.cancel_dump_traceback_later()
                    silent = os.fstat(stream.fileno()).st_size == 0
            if silent:
                folder.remove(self.stacks.name)


def fault_of(error: BaseException, device: torch.device) -> Fault:
    """Convert an exception to a value that can be sent to the dispatcher.

    If this process can no longer use its device, it exits here without clean-up, which would access the device. The
    dispatcher then replaces the actor and repeats the call.
    """
    fault = Fault.of(error)
    if is_lost(error, device):
        print(f"this process can no longer use its device, and ends: {fault}", file=sys.stderr, flush=True)
        os._exit(LOST_DEVICE_EXIT)
    return fault


def is_lost(error: BaseException, device: torch.device) -> bool:
    """Return whether an error means that this process can no longer use its device.

    Torch raises most CUDA errors as plain `RuntimeError`, so only their messages distinguish them. Some errors are
    sticky: after an illegal access or a failed assertion, every later call of the process fails. Sticky errors with an
    unknown message are detected by a synchronisation, which then fails too.
    """
    if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _STICKY):
        return True
    if device.type != "cuda" or is_full(error):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def own_device(config: Config) -> torch.device:
    """Return the device of this process: the GPU that Ray leased to it, or the CPU.

    Raises:
        ConfigError: The leased GPU cannot be used.
    """
    return open_device(config, leased=bool(ray.get_gpu_ids()))


def data_room(device: torch.device) -> float:
    """Return the number of bytes of samples that this process may keep on its device.

    On a GPU this is `DATA_SHARE` of the process's part of the memory.
    """
    if device.type != "cuda":
        return math.inf
    share = min(1.0, ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))
    return DATA_SHARE * share * torch.cuda.get_device_properties(device).total_memory


def name_clients(ids: Sequence[int]) -> str:
    """Format client ids as text, as in `client 3` or `clients 3, 8, 11 and 9 more`."""
    if len(ids) == 1:
        return f"client {ids[0]}"
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"clients {', '.join(map(str, ids[:3]))}{more}"


def label_of(ids: list[int], sizes: Any, counts: Any, names: Sequence[str] = ()) -> str:
    """Return an actor's label, such as `client 3 · 620 samples · 6/10 classes`.

    An actor with several clients has a label such as `clients 0, 2, 4 and 7 more · 1407 samples`.

    Args:
        ids: Ids of the actor's clients, ascending.
        sizes: Number of samples of each client, int64 [K].
        counts: Number of samples or pixels of each client and class, int64 [K, C].
        names: Name of each client; by default its number.
    """
    if len(ids) == 1:
        class_counts = counts[ids[0]]
        name = names[ids[0]] if names else ids[0]
        samples = count_of(int(sizes[ids[0]]), "sample")
        return f"client {name} · {samples} · {(class_counts > 0).sum()}/{len(class_counts)} classes"
    return f"{name_clients(ids)} · {count_of(int(sizes[ids].sum()), 'sample')}"


def _copied(reply: Reply | Unusable, state: Tree) -> tuple[Reply | Unusable, Tree]:
    """Copy a reply and a private state, because they may share memory with the model that the next client uses."""
    return reply if isinstance(reply, Unusable) else Reply(reply.weight, snapshot(reply.tree)), snapshot(state)


def _summed(sums: Schema, ids: Sequence[int], replies: Iterable[Any]) -> list[Any]:
    """Return the result of `Schema.sum_block` for packed replies, packed again."""
    summed = sums.sum_block(ids, map(unpacked, replies))
    return [packed(reply, {})[0] if isinstance(reply, Reply) else reply for reply in summed]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
