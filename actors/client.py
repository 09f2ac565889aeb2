"""`ClientActor`: a Ray actor that holds clients, pinned to its share of a GPU."""

import faulthandler
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from raylt.core.client import ClientFunction, Reply
from raylt.core.fleet import ItemFunction, compute
from raylt.core.host import Host
from raylt.core.setup import Setup
from raylt.core.wire import Unusable, packed
from raylt.data.task import Facts, Shard
from raylt.errors import one_line
from raylt.store import Folder
from raylt.tree import Tree, from_arrays, to_arrays

GONE_S = 30.0           # a killed process is gone in a second or two; its memory on a GPU too


@ray.remote
class ClientActor:
    """One client where slots allow, several where not. What it runs is `Host.run`, as in any other process."""

    label = "client"        # Ray asks for the name of one whose constructor could not be called

    def __init__(self, label: str, setup: Setup, facts: Facts, test: Shard, stacks: Path | None):
        self.label, self.stacks = label, stacks
        self.host = Host(setup, facts, test, device_here())

    def __repr__(self) -> str:
        return self.label                # what the dashboard shows

    def ready(self) -> tuple[str, int]:
        """Node and pid of the actor, once it is up."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def outlive(self, processes: list[tuple[str, int]]) -> None:
        """Waits until those of them that were on this node are gone, for `GONE_S` at most."""
        here, end = ray.get_runtime_context().get_node_id(), time.monotonic() + GONE_S
        pids = [pid for node, pid in processes if node == here]
        while any(_lives(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.05)

    def run(self, fn: ClientFunction, message: Tree, round: int, id: int, shard: Shard | None,
            private: Tree | None, patience: float) -> tuple[Reply | Unusable | str, Tree]:
        """`Host.run` with arrays for tensors. A function that raises gives one line that says so in the reply's place:
        Ray would bring the exception without the place where it was raised.

        Args:
            patience: seconds after which the stacks of a call that is still running are written down.
        """
        before = None if private is None else from_arrays(private)
        try:
            with self._watched(patience):
                reply, after = self.host.run(fn, from_arrays(message), round, id, shard, before)
            return packed(reply, after)
        except Exception as error:
            return one_line(error), {}

    def compute(self, fn: ItemFunction, item: Tree) -> Tree | str:
        """An item of `Fleet.map`, with arrays for tensors; one line for a function that raises."""
        try:
            threads = max(1, int(self.host.setup.config.resources.cpus_per_client))
            return to_arrays(compute(fn, from_arrays(item), threads))
        except Exception as error:
            return one_line(error)

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


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def device_here() -> torch.device:
    """The GPU that Ray gave to this process, or the CPU: a GPU that it may see need not be its own."""
    return torch.device("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")


def label_of(ids: list[int], sizes: Any, counts: Any) -> str:
    """`client 3 · 620 samples · 6/10 classes`; several clients as `clients 0-9 · 1407 samples`.

    Args:
        ids: ascending.
        sizes: samples per client, int64 [K].
        counts: samples or pixels per client and class, int64 [K, C].
    """
    if len(ids) == 1:
        mine = counts[ids[0]]
        return f"client {ids[0]} · {sizes[ids[0]]} samples · {(mine > 0).sum()}/{len(mine)} classes"
    return f"clients {ids[0]}-{ids[-1]} · {sizes[ids].sum()} samples"
