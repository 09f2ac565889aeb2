"""Run many tiny clients on the cluster at an address, for test_spread.py; print the results as JSON.

python spread.py ADDRESS CLIENTS ACTORS FOLDER
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import trouble
from many import configure, make_fleet, make_many
from tiny import CPU, fingerprint, make_setup

from actors.calls import ClientCalls
from raylt.core.experiment import Experiment
from raylt.core.fleet.block_sums import SummedReply
from raylt.core.fleet.reductions import total
from raylt.methods.fedper import FedPer


def step(experiment: Experiment) -> dict[str, Any]:
    """Run one round; return everything in which two runs could differ.

    Float64 sums are part of the result: a float32 model rarely shows the order in which they were added.
    """
    report, fleet = experiment.step(), experiment.fleet
    ids = fleet.ids[::97]
    sums = fingerprint(dict(fleet.ask(trouble.scatter, fleet.everyone, {}, x=total)))
    return {
        "sums": sums,
        "model": fingerprint(experiment.server.model.state_dict()),
        "loss": report.figures["loss"],
        "traffic": report.traffic["train"],
        "troubles": [report.lost, report.retried, report.rejected],
        "states": [fingerprint(state) for _, state in fleet.private_states(ids)],
    }


def config_of(clients: int) -> Any:
    """Return a config that asks all clients and judges no client's own model after round 1."""
    config = configure(clients, rounds=2, participation=1.0)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"personal": 0})})


@contextmanager
def noted() -> Iterator[list[tuple[int, bool]]]:
    """Collect the clients whose replies arrive inside the block, in order, as (id, whether summed in a block)."""
    arrived: list[tuple[int, bool]] = []
    accept = ClientCalls.accept

    def note(self: ClientCalls, outcome: Any, seconds: float) -> None:
        arrived.append((outcome.id, type(outcome.value) is SummedReply))
        accept(self, outcome, seconds)

    ClientCalls.accept = note
    try:
        yield arrived
    finally:
        ClientCalls.accept = accept


def run(clients: int, actors: int, folder: Path) -> dict[str, Any]:
    """Run a round with this many actors; return its results and the numbers of summed replies, nodes and actors."""
    config, task = config_of(clients), make_many(clients)
    fleet = make_fleet(config, task, actors, FedPer())
    with noted() as arrived:
        result = step(Experiment(make_setup(config, FedPer()), task, fleet, CPU, folder))
    nodes = {slot.process[0] for slot in fleet.slots if slot.process is not None}
    result |= {"summed": sum(in_sums for _, in_sums in arrived), "nodes": len(nodes), "actors": len(fleet.slots)}
    fleet.close()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    ray.init(address=sys.argv[1], log_to_driver=False, namespace="spread")
    print(json.dumps(run(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))), flush=True)
    ray.shutdown()
