"""Sums over samples with Gaussian noise: (epsilon, delta) differential privacy for one upload of each client.

Two data sets are neighbours if one of them has exactly one additional sample. A sample contributes to the sums of its
client, and there to the sums of its class. Each reduction declares the maximum length L_i that a sample can add to each
leaf i (`Reduction.bounded`). Each leaf is scaled so that this length becomes 1 / sqrt(m), with m leaves in all, and a
sample changes all leaves together by at most 1. Noise of standard deviation sigma on the scaled leaves is noise of
sigma L_i sqrt(m) at leaf i. Epsilon and delta follow from sigma exactly (the analytic Gaussian mechanism; Balle and
Wang, ICML 2018, Theorem 8). Samples of different clients or classes contribute to different numbers before the noise is
added, so the same epsilon holds for every sample of every client.

Without `federation.secure` each client adds the full noise to every class, whether it has samples of the class or not,
so its upload alone is private. In a secure sum each client adds a share of the noise. The sum of the shares is the full
noise even if only the minimum number of clients survives.

Noise is drawn from the operating system's entropy, never from a seed of the run: anyone who can draw it again can
subtract it. It is drawn in floating point, whose gaps may reveal information (Mironov, CCS 2012). There is no defence
against this.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.client import Reply
from raylt.core.fleet.aggregation import Aggregator, Replies
from raylt.core.fleet.block_sums import SummedReply
from raylt.core.fleet.reductions import Reduction
from raylt.core.protection.accounting import calibrated_sigma
from raylt.tree import Tree


@dataclass(frozen=True)
class Noise:
    """The Gaussian noise on one upload of a client.

    Attributes:
        deviations: Standard deviation of the noise by part and, for a part with several leaves, by their last name.
        sigma: Standard deviation of the mechanism for sensitivity 1.
    """

    deviations: Mapping[str, Mapping[str, float] | float]
    sigma: float

    @classmethod
    def of(cls, parts: Mapping[str, Reduction], config: Config) -> "Noise | None":
        """Return the noise that the settings in `privacy` require, or None without a budget or a bounded sum."""
        budget = config.privacy
        bounded = {name: part.per_sample for name, part in parts.items() if part.per_sample is not None}
        if budget.epsilon is None or not bounded:
            return None
        leaves = sum(len(lengths) if isinstance(lengths, Mapping) else 1 for lengths in bounded.values())
        sigma = calibrated_sigma(budget.epsilon, budget.delta)
        scale = sigma * math.sqrt(leaves)
        deviations: dict[str, Mapping[str, float] | float] = {}
        for name, lengths in bounded.items():
            if isinstance(lengths, Mapping):
                deviations[name] = {leaf: scale * length for leaf, length in lengths.items()}
            else:
                deviations[name] = scale * lengths
        return cls(deviations, sigma)

    def add_to(self, reply: Reply, parts: Mapping[str, Reduction], share: float) -> Reply:
        """Return a reply with noise in every possible entry of its parts, even in entries that the client left out.

        Args:
            reply: The client's reply.
            parts: The reductions by name.
            share: This client's share of the variance.
        """
        rng = np.random.default_rng(secrets.randbits(256))
        noised = dict(reply.tree)
        for name, deviations in self.deviations.items():
            noised[name] = _with_noise(reply.tree[name], parts[name].template, deviations, math.sqrt(share), rng)
        return replace(reply, tree=noised)

    def noisy_parts(self, parts: Mapping[str, Reduction]) -> dict[str, Reduction]:
        """Return the reductions for parts with noise added, in which every entry is present and counts are floats."""
        return {
            name: part
            if name not in self.deviations
            else replace(part, template=_numbers(part.template), partial=False, condition=None)
            for name, part in parts.items()
        }

    def correct(self, name: str, value: Any, parts: Mapping[str, Reduction]) -> Any:
        """Correct a noisy sum to a value that samples can have, with the function `mend` of the sum's reduction.

        This is post-processing, which spends no budget.
        """
        mend = parts[name].mend
        return value if name not in self.deviations or mend is None else mend(value)


class SampleDP(Aggregator):
    """An aggregator that adds noise to a reply's sums over samples, and passes the reply to another aggregator.

    Args:
        inner: Aggregator of the replies with noise.
        noise: Noise of this call.
        parts: The reductions that the call asked for.
        share: Each client's share of the variance.
        statement: Description of the noise for the summary.
    """

    def __init__(self, inner: Aggregator, noise: Noise, parts: Mapping[str, Reduction], share: float, statement: Tree):
        super().__init__()
        self._inner = inner
        self._noise = noise
        self._parts = parts
        self._share = share
        self.weights = inner.weights
        self.overhead = inner.overhead
        self.statement = statement

    def accept(self, id: int, reply: Reply | SummedReply) -> None:
        assert isinstance(reply, Reply)
        noised = self._noise.add_to(reply, self._parts, self._share)
        # the reply without noise has been counted, and its size shows which classes the client has
        self.overhead.up += tree.nbytes(noised.tree) - tree.nbytes(reply.tree)
        self._inner.accept(id, noised)

    def result(self) -> Replies:
        noisy = self._inner.result()
        self.troubles = self._inner.troubles
        mended = {name: self._noise.correct(name, value, self._parts) for name, value in noisy.items()}
        return Replies(mended, noisy.weights)

    def empty(self) -> "SampleDP":
        assert self.statement is not None
        return SampleDP(self._inner.empty(), self._noise, self._parts, self._share, self.statement)


def _with_noise(
    value: Any, template: Any, deviations: Mapping[str, float] | float, root: float, rng: np.random.Generator
) -> Any:
    if isinstance(template, dict):
        present = value or {}
        noised = {}
        for key, inner in template.items():
            deviation = deviations
            if isinstance(deviations, Mapping) and not isinstance(inner, dict):
                deviation = deviations[key]
            noised[key] = _with_noise(present.get(key), inner, deviation, root, rng)
        return noised
    assert not isinstance(deviations, Mapping)
    if not isinstance(template, Tensor):
        return float(value or 0) + root * deviations * rng.standard_normal()
    drawn = torch.from_numpy(rng.standard_normal(tuple(template.shape))) * (root * deviations)
    return drawn if value is None else value.double() + drawn


def _numbers(template: Any) -> Any:
    """Return a template with its tensors converted to float64 and its numbers replaced by 0.0."""
    if isinstance(template, dict):
        return {key: _numbers(inner) for key, inner in template.items()}
    return template.to(torch.float64) if isinstance(template, Tensor) else 0.0


def statement(config: Config, noise: Noise) -> Tree:
    """Return a description of the noise for a run's summary."""
    budget = config.privacy
    rounds = model = ""
    if config.federation.rounds > 0:
        rounds = "earlier rounds and "
        model = "the model that computes the sums was trained without noise; "
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "sigma": noise.sigma,
        "covers": ", ".join(noise.deviations),
        "unit": "one sample, added or removed",
        "against": "anyone who sees the sum" if config.federation.secure else "anyone who sees an upload",
        "not_covered": f"{rounds}numbers of samples: {model}each upload has the client's number of samples; nor the "
        "mean and standard deviation of all training images, unless the data set publishes them",
    }
