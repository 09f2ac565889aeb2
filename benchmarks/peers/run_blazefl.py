"""Runs BlazeFL: its own FedAvg (`blazefl.contrib`), with clients on two threads.

Threads are the mode that its documentation recommends. Their Python code runs at the same time only in a free-threaded
Python, which BlazeFL 3 requires. The table says which Python ran. Every client's normalised images are tensors in
memory. Each client gets a new network, as in BlazeFL's example. The network has torch's own memory layout, because
BlazeFL cannot send weights in another one. Its other modes were not measured: a pool of processes that it starts in
each round, and one client after the other.
"""

import copy
import sys
from enum import StrEnum

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from torch.utils.data import DataLoader, TensorDataset
from workload import Work, mark


class ModelName(StrEnum):
    """Name of the only network."""

    NET = "net"


class Selector:
    """Returns a copy of the network with the common initial weights."""

    def __init__(self, net: torch.nn.Module):
        self.net = net

    def select_model(self, model_name: ModelName) -> torch.nn.Module:
        return copy.deepcopy(self.net)


class Clients:
    """Every client's images in a loader that shuffles them."""

    def __init__(self, work: Work):
        self.held = [TensorDataset(*work.images(rows)) for rows in work.clients]

    def get_dataloader(self, type_, cid, batch_size, generator) -> DataLoader:
        return DataLoader(self.held[cid], batch_size, shuffle=True, generator=generator)


def main() -> None:
    torch.set_num_threads(1)
    work = Work(sys.argv[1])
    scale, clients = work.scale, Clients(work)
    net = work.model().to(memory_format=torch.contiguous_format)
    server = FedAvgBaseServerHandler(
        Selector(net),
        ModelName.NET,
        clients,
        scale.rounds,
        scale.clients,
        scale.per_round / scale.clients,
        "cpu",
        scale.batch,
        seed=0,
    )
    trainer = FedAvgThreadPoolClientTrainer(
        Selector(net),
        ModelName.NET,
        clients,
        "cpu",
        scale.clients,
        epochs=1,
        batch_size=scale.batch,
        lr=scale.lr,
        seed=0,
        num_parallels=2,
    )
    trainer.progress_fn = lambda jobs: jobs  # no progress bar
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
        mark(server.round)
    work.finish("blazefl", server.model.state_dict())


if __name__ == "__main__":
    main()
