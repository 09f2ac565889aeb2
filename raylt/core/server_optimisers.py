"""What the server does with the mean of the clients' models: adaptive federated optimisation (Reddi et al., ICLR 2021).

Clients' mean minus the global model, Delta, is taken as a negative gradient. Entries that are not trained (BatchNorm's
running statistics and counters) are always the clients' mean.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Params = dict[str, Tensor]


class ServerOptimiser(Protocol):
    """A rule for the server's step."""

    def step(self, state: Params, delta: Params) -> Params:
        """What is added to each trained entry.

        Args:
            state: what the rule remembers, float64 by name; empty before the first step; changed in place.
            delta: the clients' mean minus the global model, float64.
        """
        ...


@dataclass(frozen=True)
class Momentum:
    """v <- beta v + Delta; w <- w + lr v (FedAvgM; Hsu et al., 2019)."""

    beta: float = 0.9
    lr: float = 1.0

    def step(self, state: Params, delta: Params) -> Params:
        for name, change in delta.items():
            state[name] = change.clone() if name not in state else self.beta * state[name] + change
        return {name: self.lr * state[name] for name in delta}


@dataclass(frozen=True)
class Adam:
    """Algorithm 2, FedAdam: m <- beta1 m + (1 - beta1) Delta; v <- beta2 v + (1 - beta2) Delta^2;
    w <- w + lr m / (sqrt(v) + tau). As there, m starts at 0, v at tau^2, and there is no bias correction."""

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, state: Params, delta: Params) -> Params:
        steps: Params = {}
        for name, change in delta.items():
            m = state.get(f"m.{name}", torch.zeros_like(change))
            v = state.get(f"v.{name}", torch.full_like(change, self.tau ** 2))
            state[f"m.{name}"] = m = self.beta1 * m + (1 - self.beta1) * change
            state[f"v.{name}"] = v = self.second(v, change.square())
            steps[name] = self.lr * m / (v.sqrt() + self.tau)
        return steps

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The second moment after a step, from Delta^2."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class Yogi(Adam):
    """Algorithm 2, FedYogi: v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
