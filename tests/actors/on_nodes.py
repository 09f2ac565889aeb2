"""Ask clients for large replies on a cluster of three nodes, for test_nodes.py; print the results as JSON.

python on_nodes.py CLIENTS FOLDER
"""

import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import trouble
from many import configure, make_fleet, make_many
from ray import cloudpickle
from ray.cluster_utils import Cluster
from tiny import fingerprint, make_experiment

from actors import dispatch, shards
from actors.calls import Addition, ClientCalls
from actors.dispatch import Dispatcher
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, total
from raylt.methods.fedavg import FedAvg
from raylt.runs.folder.notes import NOTES

NODE = {"num_cpus": 1, "object_store_memory": 200 * 2**20}


class Received:
    """Replaces `ray` in the dispatcher: counts the bytes of all results that reach the server."""

    def __init__(self) -> None:
        self.bytes = 0
        self.wait = ray.wait

    def get(self, ref: Any) -> Any:
        result = ray.get(ref)
        self.bytes += len(cloudpickle.dumps(result, protocol=5))
        return result


def ask(fleet: Fleet, part: Reduction) -> dict[str, Any]:
    """Ask all clients; return everything in which a fleet on Ray and one process could differ, but not `retried`."""
    fleet.begin(1)
    fleet._private.clear()
    got = fleet.ask(trouble.scatter_large, fleet.everyone, {}, x=part)
    return {
        "sums": fingerprint(dict(got)),
        "weights": {str(id): weight for id, weight in got.weights.items()},
        "up": fleet.round_stats.traffic["scatter_large"].up,
        "troubles": [fleet.round_stats.lost, {str(id): text for id, text in fleet.round_stats.rejected.items()}],
        "states": [fingerprint(state) for _, state in fleet.private_states(fleet.ids[::17])],
    }


def main(clients: int, folder: Path) -> None:
    torch.set_num_threads(1)
    part = total.like(trouble.LARGE)
    task, config = make_many(clients), configure(clients, retries=0)
    (folder / "local").mkdir()
    results = {"local": ask(make_experiment(config, task, folder / "local", FedAvg()).fleet, part)}
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    nodes = [cluster.head_node, cluster.add_node(**NODE), cluster.add_node(**NODE)]
    ray.init(address=cluster.address, log_to_driver=False, namespace="on-nodes")
    shards.MAX_PACK_BYTES = 500  # five to ten clients
    (folder / "notes").mkdir()
    fleet = make_fleet(config, task, 3, FedAvg(), folder / "notes")
    dispatch.ray = received = Received()
    additions: list[tuple[Addition, Any]] = []
    submit = ClientCalls._submit_addition

    def noted(self: ClientCalls, slot: Any, block: Any) -> tuple[Any, Any]:
        additions.append((block.ids, slot.home_node))
        return submit(self, slot, block)

    ClientCalls._submit_addition = noted

    def step(name: str, part: Reduction) -> None:
        additions.clear()
        received.bytes = 0
        results[name] = ask(fleet, part)
        results[name] |= {
            "received": received.bytes,
            "added": [len(ids) for ids, _ in additions],
            "adders": sorted({node for _, node in additions}),
            "retried": len(fleet.round_stats.retried),
        }

    step("node sums", part)
    held = Counter((slot.home_node, pack) for slot in fleet.slots for pack in slot.packs)
    results["packs"] = {str(node): sorted({pack for other, pack in held if other == node}) for node in range(3)}
    results["homes"] = [[slot.home_node, slot.home] for slot in fleet.slots]
    step("adder dies", part.where(partial(trouble.die_once, str(folder), os.getpid())))
    lost = lose_node(cluster, nodes, fleet)
    step("node lost", part)
    results["node lost"]["lost"] = lost
    results["notes"] = (folder / "notes" / NOTES).read_text().splitlines()
    fleet.close()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(results), flush=True)


def lose_node(cluster: Cluster, nodes: list[Any], fleet: Any) -> list[str]:
    """Arrange that a node is lost as soon as a block of which it holds replies is to be added up."""
    lost: list[str] = []
    submit = Dispatcher._submit
    ids = [node.node_id for node in nodes]

    def losing(self: Dispatcher) -> None:
        job = self.job
        complete = [block for queue in job._queues for block in queue.complete] if isinstance(job, ClientCalls) else []
        if complete and not lost:
            home = fleet.slots.home_nodes[complete[0].ids[0]]
            slot = next(slot for slot in fleet.slots if slot.home_node == home)
            number = ids.index(slot.process[0])
            if number:  # the head node has the server
                lost.append(slot.process[0])
                cluster.remove_node(nodes[number], allow_graceful=False)
        submit(self)

    Dispatcher._submit = losing
    return lost


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
