"""Client-level differential privacy of trained models: DP-FedAvg (McMahan et al., ICLR 2018, Alg. 1).

Two federations are neighbours if one of them has exactly one additional client. Every client's update, over all entries
of the model together, is clipped to the length S, `privacy.update_clip`, and has the same weight whatever the number of
samples. The server adds to the model the sum of the updates divided by q K, the mean number of clients that a round
asks. It also adds noise of standard deviation z S / (q K) to every entry; z is `privacy.noise_multiplier`. Opacus's
accountant composes the rounds. It credits sampling only if clients are sampled as it assumes: by
`federation.sampling=poisson`, drawn from the operating system's entropy like the noise.

The server is trusted to add the noise. Losses are not reported, since they would reveal something about clients.
Counters do not change, and running variances stay positive.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.client import Message, Reply
from raylt.core.fleet.aggregation import Aggregator, Replies
from raylt.core.fleet.block_sums import SummedReply
from raylt.core.fleet.reductions import Reduction
from raylt.core.protection.accounting import epsilon_of, rate_of
from raylt.errors import BudgetSpent, ConfigError, count_of
from raylt.tree import Tree

RELEASED = "model"  # the part that carries the update
MIN_VARIANCE = 1e-3  # lower bound of running variances with noise


@dataclass(frozen=True)
class ClientNoise:
    """The clipping of clients' updates and the noise on their mean, in one round.

    Attributes:
        config: The run's configuration.
        start: The model that was sent to clients.
        round: Number of the round.
    """

    config: Config
    start: Mapping[str, Tensor]
    round: int

    @classmethod
    def of(cls, parts: Mapping[str, Reduction], message: Message, config: Config, round: int) -> "ClientNoise | None":
        """Return the noise for a call that uploads a model, or None if no model is uploaded or no budget is set.

        Raises:
            BudgetSpent: This round would exceed the budget.
            ConfigError: The call uploads other parts as well.
        """
        budget = config.privacy.update_epsilon
        if budget is None or not parts:
            return None
        additional = parts.keys() - {RELEASED, "loss"}
        if additional or RELEASED not in parts or parts[RELEASED].kind != "mean" or RELEASED not in message:
            part = min(additional or parts)
            raise ConfigError(
                f"privacy.update_epsilon: noise hides clients only in the mean of their models, and the part {part} is "
                f"uploaded too ({budget:g}). Choose a method that uploads nothing else, such as fedavg.",
                code="privacy.not-covered",
                key="privacy.update_epsilon",
                value=budget,
                part=part,
            )
        spent = epsilon_of(config.privacy.noise_multiplier, rate_of(config), round, config.privacy.delta)
        if spent > budget:
            raise BudgetSpent(
                f"round {round}: epsilon would be {spent:.3g}, above privacy.update_epsilon = {budget:g}. Stop the run "
                "after the previous round.",
                code="privacy.budget-spent",
                key="privacy.update_epsilon",
                round=round,
                spent=spent,
                value=budget,
            )
        return cls(config, message[RELEASED], round)

    @property
    def _expected_clients(self) -> float:
        """Return the expected number of sampled clients, q K, including clients without samples but not new clients."""
        clients = self.config.data.clients
        assert clients is not None, "the configuration of a run has the number of clients"
        return self.config.federation.participation * (clients - self.config.data.new_clients)

    def clip(self, reply: Reply) -> Reply:
        """Return a reply with its update clipped to the norm S = `privacy.update_clip`, weight 1 and loss 0."""
        model = reply.tree[RELEASED]
        changes = {
            name: value.double() - self.start[name].double()
            for name, value in model.items()
            if value.is_floating_point()
        }
        length = torch.stack([change.norm() for change in changes.values()]).norm().item()
        share = min(1.0, self.config.privacy.update_clip / max(length, 1e-300))
        cut = {
            name: self.start[name].double() + share * changes[name] if name in changes else self.start[name]
            for name in model
        }
        return Reply(1.0, {name: cut if name == RELEASED else 0.0 for name in reply.tree})

    def add_to(self, got: Replies) -> Replies:
        """Add the clients' noisy mean update to the model that was sent.

        The sum of the updates is divided by q K, then noise is added.
        """
        privacy = self.config.privacy
        rng = np.random.default_rng(secrets.randbits(256))
        deviation = privacy.noise_multiplier * privacy.update_clip / self._expected_clients
        model = {}
        for name, mean in got[RELEASED].items():
            start = self.start[name]
            if not start.is_floating_point():
                model[name] = start
                continue
            step = (mean.double() - start.double()) * (len(got.weights) / self._expected_clients)
            value = start.double() + step + deviation * torch.from_numpy(rng.standard_normal(tuple(start.shape)))
            model[name] = (value.clamp(min=MIN_VARIANCE) if name.endswith("running_var") else value).to(start.dtype)
        return Replies({name: model if name == RELEASED else None for name in got}, got.weights)

    @property
    def statement(self) -> Tree:
        """Return a description of the noise for a run's summary."""
        privacy: Any = self.config.privacy
        rate = rate_of(self.config)
        spent = epsilon_of(privacy.noise_multiplier, rate, self.round, privacy.delta)
        participants = sampled = ""
        if rate < 1:
            participants = " and participants"
            sampled = (
                "; epsilon assumes that no one sees which clients took part in a round, and metrics.jsonl lists them"
            )
        return {
            "epsilon": spent,
            "delta": privacy.delta,
            "sigma": privacy.noise_multiplier,
            "unit": "one client, added or removed",
            "covers": f"the models of {count_of(self.round, 'round')}",
            "against": "anyone who sees the models; the server is trusted",
            "not_covered": f"evaluations{participants}: accuracies on clients' own data are computed without noise, "
            "and so are the mean and standard deviation of all training images, unless the data set publishes "
            f"them{sampled}",
        }


class ClientDP(Aggregator):
    """An aggregator that clips each client's update, passes it to another aggregator, and adds noise to the result.

    Args:
        inner: Aggregator of the clipped replies.
        noise: Clipping and noise of this round.
    """

    def __init__(self, inner: Aggregator, noise: ClientNoise):
        super().__init__()
        self._inner = inner
        self._noise = noise
        self.weights = inner.weights
        self.overhead = inner.overhead
        self.statement = noise.statement

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        assert isinstance(reply, Reply)
        self._inner.accept(id, self._noise.clip(reply))

    def result(self) -> Replies:
        replies = self._inner.result()
        self.troubles = self._inner.troubles
        return self._noise.add_to(replies)

    def empty(self) -> "ClientDP":
        return ClientDP(self._inner.empty(), self._noise)
