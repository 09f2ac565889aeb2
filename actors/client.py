"""`ClientActor`: a Ray actor that holds clients, pinned to its share of a GPU."""

import faulthandler
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from actors.faults import DeviceFull, told
from raylt.config import Config
from raylt.core.client import ClientFunction, Reply
from raylt.core.device import describe, open_device
from raylt.core.fleet import ItemFunction, compute
from raylt.core.full import is_full
from raylt.core.host import Host
from raylt.core.schema import Schema
from raylt.core.setup import Setup
from raylt.core.wire import Unusable, packed, unpacked
from raylt.data.packs import Pack
from raylt.data.task import Facts, Shard
from raylt.errors import ConfigError, RayltError, one_line
from raylt.store import Folder
from raylt.tree import Tree, from_arrays, snapshot, to_arrays

DATA = 0.5              # the rest is for models, activations and what CUDA needs
GONE_S = 30.0           # a killed process is gone in a second or two; its memory on a GPU too


@dataclass(frozen=True)
class Block:
    """Clients whose calls travel as one.

    Attributes:
        packs: numbers of those that come with the call, since the actor does not have them yet.
        clients: id, number of the pack that its data are in, and place among the private states that come with the
            call; None before a client's first.
    """

    round: int
    packs: list[int]
    clients: list[tuple[int, int, int | None]]


@ray.remote
class ClientActor:
    """One client where slots allow, several where not. What it runs is `Host.run`, as in any other process."""

    label = "client"        # Ray asks for the name of one whose constructor could not be called

    def __init__(self, label: str, setup: Setup, facts: Facts, test: Shard, stacks: Path | None):
        self.label, self.stacks = label, stacks
        self.packs: dict[int, Pack] = {}        # in Ray's memory: clients whose samples the host dropped come back
        self._parts = setup, facts, test
        self.refusal = self._open()

    def __repr__(self) -> str:
        return self.label                # what the dashboard shows

    def _open(self) -> RayltError | None:
        """Makes the host, or says why not: what a constructor raises would arrive as an actor's death."""
        setup, facts, test = self._parts
        try:
            device = device_here(setup.config)
            self.host = Host(setup, facts, test, device, room_here(device))
        except Exception as error:
            if is_full(error):
                return DeviceFull(one_line(error))
            if isinstance(error, ConfigError):
                return error
            raise
        return None

    def ready(self, again: bool = False) -> tuple[str, int, dict[str, str | None]]:
        """Node and pid of the actor, once it is up, and what it computes on.

        Args:
            again: whether it tries once more what it could not do before.

        Raises:
            ConfigError: its device cannot be used.
            DeviceFull: its device has no room.
        """
        if again:
            self.refusal = self._open()
        if self.refusal is not None:
            raise self.refusal
        return ray.get_runtime_context().get_node_id(), os.getpid(), describe(self.host.device)

    def outlive(self, processes: list[tuple[str, int]]) -> None:
        """Waits until those of them that were on this node are gone, for `GONE_S` at most."""
        here, end = ray.get_runtime_context().get_node_id(), time.monotonic() + GONE_S
        pids = [pid for node, pid in processes if node == here]
        while any(_lives(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)

    def run(self, fn: ClientFunction, message: Tree, block: Block, patience: float, sums: Schema | None,
            *objects: Any) -> Any:
        """`Host.run` of each client of a block, one after the other, with arrays for tensors. A function that raises
        gives one line that says so in the reply's place: Ray would bring the exception without the place where it was
        raised. The others of its block do not feel it.

        Args:
            patience: seconds after which the stacks of a call that is still running are written down.
            sums: what replies must look like, of a block that comes back as its sums. One in which a client's function
                raised does not: that client is asked again, and its reply added in its turn.
            objects: the packs that `block` names, then the private states that it has places for.

        Returns:
            The replies; and each client's private state, an object of its own.
        """
        self.packs |= dict(zip(block.packs, objects, strict=False))
        privates, received = objects[len(block.packs):], from_arrays(message)
        replies, states = [], []
        with self._watched(patience):
            for id, pack, place in block.clients:
                private = None if place is None else from_arrays(privates[place])
                reply, after = self._call(fn, received, block, id, self.packs[pack], private)
                replies.append(reply)
                states.append(after)
        if sums is not None and not any(isinstance(reply, str) for reply in replies):
            replies = sums.summed([id for id, *_ in block.clients], [unpacked(reply) for reply in replies])
        return replies, *states

    def _call(self, fn: ClientFunction, message: Tree, block: Block, id: int, pack: Pack, private: Tree | None
              ) -> tuple[Reply | Unusable | str, Tree]:
        try:
            shard = None if id in self.host.clients else pack.shard(id)
            reply, after = self.host.run(fn, message, block.round, id, shard, private)
            return packed(*(_copied(reply, after) if len(block.clients) > 1 else (reply, after)))
        except Exception as error:
            return told(error, self.host.device), {}

    def compute(self, fn: ItemFunction, item: Tree) -> Tree | str:
        """An item of `Fleet.map`, with arrays for tensors; one line for a function that raises."""
        try:
            threads = max(1, int(self.host.setup.config.resources.cpus_per_client))
            return to_arrays(compute(fn, from_arrays(item), threads, self.host.device))
        except Exception as error:
            return told(error, self.host.device)

    @contextmanager
    def _watched(self, patience: float) -> Iterator[None]:
        """The interpreter's own timer: it needs neither this thread nor its lock to write."""
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


def _copied(reply: Reply | Unusable, after: Tree) -> tuple[Reply | Unusable, Tree]:
    """Both with memory of their own: they may be the model's, into which the next client of the block is put."""
    return reply if isinstance(reply, Unusable) else Reply(reply.weight, snapshot(reply.tree)), snapshot(after)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def device_here(config: Config) -> torch.device:
    """The device of this process on Ray: the GPU that was leased to it, or the CPU.

    Raises:
        ConfigError: the GPU that was leased cannot be used.
    """
    return open_device(config, leased=bool(ray.get_gpu_ids()))


def room_here(device: torch.device) -> float:
    """Bytes of clients' samples that this process may hold on its device: `DATA` of its share of a GPU's memory."""
    if device.type != "cuda":
        return math.inf
    share = min(1.0, ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0))
    return DATA * share * torch.cuda.get_device_properties(device).total_memory


def label_of(ids: list[int], sizes: Any, counts: Any, names: Sequence[str] = ()) -> str:
    """`client 3 · 620 samples · 6/10 classes`; several clients as `clients 0-9 · 1407 samples`.

    Args:
        ids: ascending.
        sizes: samples per client, int64 [K].
        counts: samples or pixels per client and class, int64 [K, C].
        names: of each client; by default their numbers.
    """
    if len(ids) == 1:
        mine = counts[ids[0]]
        name = names[ids[0]] if names else ids[0]
        return f"client {name} · {sizes[ids[0]]} samples · {(mine > 0).sum()}/{len(mine)} classes"
    return f"clients {ids[0]}-{ids[-1]} · {sizes[ids].sum()} samples"
