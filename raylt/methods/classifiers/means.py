"""Noisy means: a classifier calibrated on class means with isotropic noise, a control experiment of raylt.

The noise is the same for each class, so the difference between CCVR and this control is the benefit of the classes'
covariances.
[1] The noise has the mean variance of a feature around its class's mean, over all samples and all d directions.
[2] A class without samples at any client gets no features.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.core.server import Server
from raylt.data.task import Task
from raylt.hyper import LogUniform, hp
from raylt.methods.classifiers.family import Calibrated
from raylt.models.split import SplitModel
from raylt.ops.moments import isotropic_deviation, moments_from_sums


class NoisyMeans(Calibrated):
    """FedAvg, then calibration of the classifier on class means with noise."""

    name: ClassVar[str] = "noisymeans"
    paper: ClassVar[str] = "a control of raylt"
    sums_samples: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": (*Calibrated.later["finish"], "noise")}

    noise: float = hp(1.0, LogUniform(0.1, 10), "standard deviation of the noise, relative to the features' [1]", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        super().prepare(task, config, model)
        check_class_uploads(task, model, self.sums_like(model.dim))

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        """Return features of each class c: the class mean plus scaled isotropic Gaussian noise, mu_c + noise s xi."""
        class_moments = {c: moments_from_sums(sums) for c, sums in self.class_moments(server, fleet).items()}  # [2]
        deviation = self.noise * isotropic_deviation(list(class_moments.values()))
        shape = self.virtual, server.model.dim
        return {
            c: (of_class.mean + deviation * torch.randn(shape, generator=generator, dtype=torch.float64)).float()
            for c, of_class in class_moments.items()
        }
