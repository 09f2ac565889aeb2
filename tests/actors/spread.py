"""A run of many tiny clients on the cluster at an address, for tests/actors/test_spread.py; prints what it came to.

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

from actors import dispatch
from raylt.core.blocks import Summed
from raylt.core.experiment import Experiment
from raylt.core.reductions import total
from raylt.methods.fedper import FedPer


def step(experiment: Experiment) -> dict[str, Any]:
    """One round, and what two runs could differ in: the model, what was counted, some clients' states; and sums in
    float64, since a model in float32 rarely shows in which order they were taken."""
    report, fleet = experiment.step(), experiment.fleet
    ids = fleet.ids[::97]
    sums = fingerprint(dict(fleet.ask(trouble.scatter, fleet.everyone, {}, x=total)))
    return {"sums": sums, "model": fingerprint(experiment.server.model.state_dict()), "loss": report.figures["loss"],
            "traffic": report.traffic["train"], "troubles": [report.lost, report.retried, report.rejected],
            "states": [fingerprint(state) for _, state in fleet.private_states(ids)]}


def config_of(clients: int) -> Any:
    """All clients are asked; nobody's own model is judged after the first round."""
    config = configure(clients, rounds=2, participation=1.0)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"personal": 0})})


@contextmanager
def noted() -> Iterator[list[tuple[int, bool]]]:
    """Who answers inside the block, in the order of arrival, and whether as a sum of its block."""
    arrived: list[tuple[int, bool]] = []
    take = dispatch.Dispatch._answer

    def note(self: Any, id: int, reply: Any, *rest: Any) -> None:
        arrived.append((id, type(reply) is Summed))
        take(self, id, reply, *rest)

    dispatch.Dispatch._answer = note
    try:
        yield arrived
    finally:
        dispatch.Dispatch._answer = take


def run(clients: int, actors: int, folder: Path) -> dict[str, Any]:
    """What a round in this many actors came to, what arrived as sums of blocks, and where the actors were."""
    config, task = config_of(clients), make_many(clients)
    fleet = make_fleet(config, task, actors, FedPer())
    with noted() as arrived:
        found = step(Experiment(make_setup(config, FedPer()), task, fleet, CPU, folder))
    nodes = {slot.process[0] for slot in fleet.slots if slot.process is not None}
    found |= {"summed": sum(in_sums for _, in_sums in arrived), "nodes": len(nodes), "actors": len(fleet.slots)}
    fleet.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    ray.init(address=sys.argv[1], log_to_driver=False, namespace="spread")
    print(json.dumps(run(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))), flush=True)
    ray.shutdown()
