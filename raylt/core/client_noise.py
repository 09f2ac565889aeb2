"""Clients hidden in the models that they trained: DP-FedAvg (McMahan et al., ICLR 2018, Algorithm 1).

Neighbours are federations of which one has a client more. Every client's update, all entries of the model together, is
cut to the length S, `privacy.update_clip`, and counts once whatever its samples; the server adds their sum over q K,
the number of clients that a round asks on average, and noise of deviation z S / (q K) in every entry, z being
`privacy.noise_multiplier`. Opacus's accountant composes the rounds; sampling counts for something only where it is that
of the accountant, `federation.sampling=poisson`, drawn from the operating system's entropy as the noise is.

The server is trusted to add the noise. Losses are not reported: they would tell of clients. Counters stay as they were,
and running variances positive.
"""

import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.client import Message, Reply
from raylt.core.gathering import Replies
from raylt.core.reductions import Reduction
from raylt.errors import BudgetSpent, ConfigError
from raylt.tree import Tree

RELEASED = "model"          # the part that carries the update
LEAST_VARIANCE = 1e-3


@cache
def epsilon_of(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """What so many rounds come to, by Opacus's RDP accountant.

    Args:
        rate: the chance of each client to take part in a round; 1 claims nothing of sampling.
    """
    from opacus.accountants import RDPAccountant  # pyright: ignore[reportMissingImports]
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, rate, rounds)]
    return float(accountant.get_epsilon(delta=delta))


def rate_of(config: Config) -> float:
    """The rate that the accountant may know."""
    return config.federation.participation if config.federation.sampling == "poisson" else 1.0


def check_budget(config: Config) -> None:
    """Before anything starts: whether all rounds fit into the budget.

    Raises:
        ConfigError: they do not, or the accountant is missing.
    """
    privacy, federation = config.privacy, config.federation
    if privacy.update_epsilon is None:
        return
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError("privacy.update_epsilon: needs Opacus's accountant; pip install 'raylt[dp]'")
    if federation.robust is not None:
        raise ConfigError(f"privacy.update_epsilon: federation.robust = {federation.robust} has no sum that noise "
                          "could be measured for; set one of them to null")
    if federation.sampling == "fixed" and federation.participation < 1:
        raise ConfigError(f"privacy.update_epsilon: with federation.participation = {federation.participation:g} and "
                          "federation.sampling = fixed a client more means that another is not asked, which the noise "
                          "does not cover; set federation.sampling=poisson, or federation.participation=1")
    spent = epsilon_of(privacy.noise_multiplier, rate_of(config), federation.rounds, privacy.delta)
    if spent > privacy.update_epsilon:
        raise ConfigError(f"privacy.update_epsilon = {privacy.update_epsilon:g}: {federation.rounds} rounds come to "
                          f"{spent:.3g} with federation.sampling = {federation.sampling}; raise "
                          "privacy.noise_multiplier, or lower federation.rounds")


@dataclass(frozen=True)
class ClientNoise:
    """The clipping and the noise of one round.

    Attributes:
        start: the model that clients were sent.
    """

    config: Config
    start: Mapping[str, Tensor]
    round: int

    @classmethod
    def of(cls, parts: Mapping[str, Reduction], message: Message, config: Config, round: int) -> "ClientNoise | None":
        """Of a call that uploads a model; None where nothing is uploaded, or no budget is set.

        Raises:
            BudgetSpent: this round would exceed the budget.
            ConfigError: the call uploads something else as well.
        """
        budget = config.privacy.update_epsilon
        if budget is None or not parts:
            return None
        more = parts.keys() - {RELEASED, "loss"}
        if more or RELEASED not in parts or parts[RELEASED].kind != "mean":
            raise ConfigError(f"privacy.update_epsilon = {budget:g}: the part {min(more or parts)} is uploaded too, "
                              "and noise hides clients in the mean of their models alone; take a method that uploads "
                              "nothing else, such as fedavg")
        spent = epsilon_of(config.privacy.noise_multiplier, rate_of(config), round, config.privacy.delta)
        if spent > budget:
            raise BudgetSpent(f"round {round}: epsilon would be {spent:.3g}, privacy.update_epsilon = {budget:g}")
        return cls(config, message[RELEASED], round)

    @property
    def _expected(self) -> float:
        """q K; a client that holds nothing counts, one that joins after training does not."""
        clients = self.config.data.clients
        assert clients is not None, "a run's configuration says how many there are"
        return self.config.federation.participation * (clients - self.config.data.new_clients)

    def clipped(self, reply: Reply) -> Reply:
        """A reply whose update is no longer than S, which counts once and tells no loss."""
        model = reply.tree[RELEASED]
        changes = {name: value.double() - self.start[name].double() for name, value in model.items()
                   if value.is_floating_point()}
        length = torch.stack([change.norm() for change in changes.values()]).norm().item()
        share = min(1.0, self.config.privacy.update_clip / max(length, 1e-300))
        cut = {name: self.start[name].double() + share * changes[name] if name in changes else self.start[name]
               for name in model}
        return Reply(1.0, {name: cut if name == RELEASED else 0.0 for name in reply.tree})

    def noised(self, got: Replies) -> Replies:
        """The sum of the updates over q K, with noise, on top of the model that was sent."""
        privacy, rng = self.config.privacy, np.random.default_rng(secrets.randbits(256))
        deviation = privacy.noise_multiplier * privacy.update_clip / self._expected
        model = {}
        for name, mean in got[RELEASED].items():
            start = self.start[name]
            if not start.is_floating_point():
                model[name] = start
                continue
            step = (mean.double() - start.double()) * (len(got.weights) / self._expected)
            value = start.double() + step + deviation * torch.from_numpy(rng.standard_normal(tuple(start.shape)))
            model[name] = (value.clamp(min=LEAST_VARIANCE) if name.endswith("running_var") else value).to(start.dtype)
        return Replies({name: model if name == RELEASED else None for name in got}, got.weights)

    @property
    def statement(self) -> Tree:
        """What a summary says of it."""
        privacy: Any = self.config.privacy
        spent = epsilon_of(privacy.noise_multiplier, rate_of(self.config), self.round, privacy.delta)
        return {"epsilon": spent, "delta": privacy.delta, "sigma": privacy.noise_multiplier,
                "unit": "one client, added or removed", "covers": f"the models of {self.round} rounds",
                "against": "whoever sees the models; the server is trusted", "not_covered":
                "what is judged: accuracies on clients' own data are computed without noise"}
