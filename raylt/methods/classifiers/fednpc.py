"""FedNPC: a classifier trained further on random noise until it prefers no class (Gao et al., CVPR Findings 2026).

This follows the authors' code, the only public source. Departures from it:
[1] The classifier after the last step is used. The code uses the one after the step with the best test accuracy, or the
    trained classifier if no step is better.
[2] The rounds are FedAvg's, as in the code's `FedAvg-FedNPC`; in the code the first stage may be any method.
The encoder never sees the noise, and the clients take no part in this phase.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.fleet.fleet import Fleet
from raylt.core.server import Server
from raylt.core.training.optimisers import SGD
from raylt.data.task import Task
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.classifiers.family import AfterTraining
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, linear


class FedNPC(AfterTraining):
    """FedAvg [2], then a few steps of cross-entropy on features from N(0, I) with uniformly drawn labels."""

    name: ClassVar[str] = "fednpc"
    paper: ClassVar[str] = "Gao et al., CVPR Findings 2026"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("samples", "steps", "retrain_lr", "retrain_momentum")}

    samples: int = hp(10000, Choice(1000, 10000), "M, samples drawn for each step; from the code", ge=1)
    steps: int = hp(27, Choice(10, 27, 50), "full-batch steps; E = 28 of the code counts from 1", ge=0)
    retrain_lr: float = hp(0.1, LogUniform(0.01, 1.0), "learning rate on noise; from the code", gt=0)
    retrain_momentum: float = hp(0.9, Uniform(0, 0.99), "momentum on noise; from the code", ge=0, lt=1)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)

    def finish(self, server: Server, fleet: Fleet) -> None:
        own = server.model.classifier.state_dict()
        classifier = linear(own["weight"].clone(), own["bias"].clone())
        optimiser = SGD(classifier.parameters(), self.retrain_lr, self.retrain_momentum)
        model = server.model
        generator = torch.Generator().manual_seed(server.seed("noise"))
        with server.timings.time("re-training"):
            for _ in range(self.steps):
                z = torch.randn(self.samples, model.dim, generator=generator).to(server.device)
                y = torch.randint(model.classes, (self.samples,), generator=generator).to(server.device)
                optimiser.step(F.cross_entropy(classifier(z), y))
        server.state["classifier"] = tree.snapshot(classifier.state_dict())  # [1]
