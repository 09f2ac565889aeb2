"""Runs pfl-research: two processes of one thread each, started as its documentation describes.

The section is "Fast distributed simulations".

Users' images are tensors in memory; the central optimiser is SGD with rate 1, so the model becomes the mean. The
metrics function computes nothing: it would be called before and after the training of each user in round 1.
"""

import os
import socket
import subprocess
import sys

if "PFL_WORKER_RANK" not in os.environ:  # the second process; pfl reads this when it is imported
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = f"127.0.0.1:{port},127.0.0.1:{port}"
    SECOND = subprocess.Popen(
        [sys.executable, *sys.argv], env=os.environ | {"PFL_WORKER_RANK": "1"}, stdout=subprocess.DEVNULL
    )
    os.environ["PFL_WORKER_RANK"] = "0"

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from workload import Work, mark

FIRST = os.environ["PFL_WORKER_RANK"] == "0"


class Marks(TrainingProcessCallback):
    """Callback that reports the end of every round."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if FIRST:
            mark(central_iteration + 1)
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002  pfl draws from numpy's own generator
    work = Work(sys.argv[1])
    scale, net = work.scale, work.model()
    net.loss = lambda x, y: F.cross_entropy(net.train()(x), y)
    net.metrics = lambda x, y: {"images": Weighted(0, len(x))}
    order = np.random.default_rng(0).permutation(scale.clients).tolist()
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(work.images(work.clients[user]), user_id=str(user)),
        get_user_sampler("minimize_reuse", order),
    )
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=scale.rounds,
            evaluation_frequency=scale.rounds,
            train_cohort_size=scale.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=scale.lr, local_batch_size=scale.batch),
        callbacks=[Marks()],
        send_metrics_to_platform=False,
    )
    if FIRST:
        work.finish("pfl", net.state_dict())
        SECOND.wait()


if __name__ == "__main__":
    main()
