"""`ClientActor`: a Ray actor that holds clients, pinned to its share of a GPU."""

from typing import Any

import ray
import torch

from raylt.client import ClientFunction, Host, Reply
from raylt.config import Config
from raylt.data.task import Facts, Shard
from raylt.errors import one_line
from raylt.fleet import ItemFunction, compute
from raylt.method import Method
from raylt.tree import Tree, from_arrays, to_arrays


@ray.remote
class ClientActor:
    """One client where slots allow, several where not. What it runs is `Host.run`, as in any other process."""

    label = "client"        # Ray asks for the name of one whose constructor could not be called

    def __init__(self, label: str, config: Config, method: Method, facts: Facts, test: Shard):
        self.label = label
        self.host = Host(config, method, facts, test, torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def __repr__(self) -> str:
        return self.label                # what the dashboard shows

    def ready(self) -> None:
        """Returns once the actor is up."""

    def run(self, fn: ClientFunction, message: Tree, round: int, id: int, shard: Shard | None,
            private: Tree | None) -> tuple[Reply | str, Tree]:
        """`Host.run` with arrays for tensors. A function that raises gives one line that says so in the reply's place:
        Ray would bring the exception without the place where it was raised.
        """
        before = None if private is None else from_arrays(private)
        try:
            reply, after = self.host.run(fn, from_arrays(message), round, id, shard, before)
            return Reply(reply.weight, to_arrays(reply.tree)), to_arrays(after)
        except Exception as error:
            return one_line(error), {}

    def compute(self, fn: ItemFunction, item: Tree) -> Tree | str:
        """An item of `Fleet.map`, with arrays for tensors; one line for a function that raises."""
        try:
            threads = max(1, int(self.host.config.resources.cpus_per_client))
            return to_arrays(compute(fn, from_arrays(item), threads))
        except Exception as error:
            return one_line(error)


def label_of(ids: list[int], counts: Any) -> str:
    """`client 3 · 620 samples · 6/10 classes`; several clients as `clients 0-9 · 1407 samples`.

    Args:
        ids: ascending.
        counts: samples per client and class, int64 [K, C].
    """
    if len(ids) == 1:
        mine = counts[ids[0]]
        return f"client {ids[0]} · {mine.sum()} samples · {(mine > 0).sum()}/{len(mine)} classes"
    return f"clients {ids[0]}-{ids[-1]} · {counts[ids].sum()} samples"
