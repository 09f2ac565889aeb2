"""Runs Flower: the simulation runtime with an actor for each CPU (`client_resources` num_cpus=1), Message API.

Data stay in each actor's memory, as does the network; evaluation by clients is off. Flower's usage reports are off.
`run_simulation` is what the simulation runtime offers to Python; Flower's documentation now prefers `flwr run`, not
measured here.
"""

import importlib
import sys
from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Work, mark

client, server = ClientApp(), ServerApp()


@cache
def loaded(folder: str) -> tuple[Work, torch.nn.Module]:
    """Load the data and a network, once for each process."""
    torch.set_num_threads(1)
    work = Work(folder)
    return work, work.model()


@client.train()
def train(message: Message, context: Context) -> Message:
    work, net = loaded(message.content["config"]["folder"])
    number = int(context.node_config["partition-id"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(net, number)
    return Message(
        content=RecordDict(
            {
                "arrays": ArrayRecord(net.state_dict()),
                "metrics": MetricRecord({"num-examples": len(work.clients[number])}),
            }
        ),
        reply_to=message,
    )


class Marked(FedAvg):
    """FedAvg that reports the end of every round."""

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        mark(server_round)
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    work, net = loaded(sys.argv[1])
    scale = work.scale
    strategy = Marked(
        fraction_train=scale.per_round / scale.clients,
        fraction_evaluate=0.0,
        min_train_nodes=scale.per_round,
        min_available_nodes=scale.clients,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=scale.rounds,
        train_config=ConfigRecord({"folder": sys.argv[1]}),
    )
    work.finish("flower", result.arrays.to_torch_state_dict())


def run() -> None:
    clients = Work(sys.argv[1]).scale.clients
    run_simulation(
        server,
        client,
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )


if __name__ == "__main__":
    importlib.import_module("run_flower").run()  # by its own name, so that Ray's workers find what is in it
