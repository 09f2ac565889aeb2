"""A control of ours: calibration on class means with the same noise in every direction and for every class.

What CCVR is above it is worth of the classes' covariances.
[1] The noise has the mean variance of a feature about its class's mean, over all samples and all d directions.
[2] A class that nobody holds gets no features.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from raylt.core.fleet import Fleet
from raylt.core.server import Server
from raylt.hyper import LogUniform, hp
from raylt.methods.classifiers.family import Calibrated
from raylt.ops.moments import isotropic_deviation, moments


class NoisyMeans(Calibrated):
    """FedAvg, then one pass over all clients."""

    name: ClassVar[str] = "noisymeans"
    paper: ClassVar[str] = "a control of raylt"
    sums_samples: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": (*Calibrated.later["finish"], "noise")}

    noise: float = hp(1.0, LogUniform(0.1, 10), "deviation of the noise, as a share of the features' own [1]", ge=0)

    def draw(self, server: Server, fleet: Fleet, generator: torch.Generator) -> dict[int, Tensor]:
        """mu_c + noise s xi."""
        held = {c: moments(sums) for c, sums in self.class_moments(server, fleet).items()}              # [2]
        deviation = self.noise * isotropic_deviation(list(held.values()))
        shape = self.virtual, server.model.dim
        return {c: (of_class.mean + deviation * torch.randn(shape, generator=generator, dtype=torch.float64)).float()
                for c, of_class in held.items()}
