"""Runs FLGo: its library's FedAvg on a custom task, with uniformly sampled clients.

One process. Its parallel options (num_parallels=2 with threads, processes or Ray) were not measured: each round of
them starts a new pool or sends the server to it, which may still save time where a client's training is long.
"""

import copy
import os

import flgo
import flgo_task
import torch
from flgo.algorithm import fedbase
from flgo.benchmark.toolkits.partition import BasicPartitioner
from workload import mark

work = flgo_task.WORK
scale = work.scale


class Given(BasicPartitioner):
    """Partitioner that gives each client the images in its index list."""

    def __init__(self):
        self.num_clients = scale.clients

    def __call__(self, data):
        return [rows.tolist() for rows in work.clients]


class Averaging:
    """FedAvg that reports the end of every round."""

    Client = fedbase.BasicClient

    class Server(fedbase.BasicServer):
        def iterate(self):
            updated = super().iterate()
            mark(self.current_round)
            return updated


def main() -> None:
    torch.set_num_threads(1)
    start = work.model()
    task = os.path.join(work.folder, "flgo")
    flgo.gen_task_by_(flgo_task, Given(), task, overwrite=True)
    runner = flgo.init(
        task,
        Averaging,
        {
            "num_rounds": scale.rounds,
            "proportion": scale.per_round / scale.clients,
            "sample": "uniform",
            "aggregate": "uniform",
            "num_epochs": 1,
            "batch_size": scale.batch,
            "learning_rate": scale.lr,
            "train_holdout": 0.0,
            "eval_interval": -1,
            "no_log_console": True,
            "no_tqdm": True,
            "num_parallels": 1,
        },
        model=flgo.convert_model(lambda: copy.deepcopy(start)),
    )
    runner.run()
    work.finish("flgo", {name.removeprefix("model."): value for name, value in runner.model.state_dict().items()})


if __name__ == "__main__":
    main()
