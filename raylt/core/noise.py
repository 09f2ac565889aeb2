"""Sums over samples with Gaussian noise: (epsilon, delta) differential privacy of what clients upload once.

Neighbours are data sets of which one holds a sample more. A sample adds to the sums of its client, and there to those
of its class; each reduction declares the length of what it can add to each leaf (`Reduction.bounded`). Leaf by leaf
these lengths L_i are brought to 1 / sqrt(m), m leaves in all, so that a sample moves everything together by at most 1;
noise of deviation sigma there is noise of sigma L_i sqrt(m) at leaf i. Epsilon and delta follow from sigma exactly
(the analytic Gaussian mechanism; Balle and Wang, ICML 2018, Theorem 8). Samples of other clients and of other classes
do not meet in a number before the noise is there, so the same epsilon holds for every sample of everybody.

Without `federation.secure` each client adds all of the noise, to every class, held or not: what it sends is private by
itself. In a secure sum a client adds the share that makes the noise whole as soon as the fewest clients are left that
the protocol ends with.

Noise is drawn from the operating system's entropy, never from a seed of the run: whoever could draw it again could take
it off. It is drawn in floating point, whose gaps may tell something (Mironov, CCS 2012); this is not defended against.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.client import Reply
from raylt.core.reductions import Reduction
from raylt.tree import Tree


def delta_of(sigma: float, epsilon: float) -> float:
    """Delta of the Gaussian mechanism with sensitivity 1: Phi(1/2s - es) - exp(e) Phi(-1/2s - es)."""
    from scipy.special import log_ndtr
    half = 1 / (2 * sigma)
    return math.exp(log_ndtr(half - epsilon * sigma)) - math.exp(epsilon + log_ndtr(-half - epsilon * sigma))


def sigma_of(epsilon: float, delta: float) -> float:
    """The least deviation whose delta is no larger."""
    low, high = 1e-4, 1.0
    while delta_of(high, epsilon) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle, epsilon) <= delta else (middle, high)
    return high


@dataclass(frozen=True)
class Noise:
    """The noise of one upload.

    Attributes:
        deviations: by part and, where it has several leaves, by their last name.
        sigma: of the mechanism, whose sensitivity is 1.
    """

    deviations: Mapping[str, Mapping[str, float] | float]
    sigma: float

    @classmethod
    def of(cls, parts: Mapping[str, Reduction], config: Config) -> "Noise | None":
        """What `privacy` asks for of these parts; None where it asks for none, or no part is a bounded sum."""
        budget = config.privacy
        bounded = {name: part.per_sample for name, part in parts.items() if part.per_sample is not None}
        if budget.epsilon is None or not bounded:
            return None
        leaves = sum(len(lengths) if isinstance(lengths, Mapping) else 1 for lengths in bounded.values())
        sigma = sigma_of(budget.epsilon, budget.delta)
        scale = sigma * math.sqrt(leaves)
        return cls({name: {leaf: scale * length for leaf, length in lengths.items()} if isinstance(lengths, Mapping)
                    else scale * lengths for name, lengths in bounded.items()}, sigma)

    def added(self, reply: Reply, parts: Mapping[str, Reduction], share: float) -> Reply:
        """A reply with noise in every entry that its parts can have, those that it left out among them.

        Args:
            share: of the variance that is this client's.
        """
        rng = np.random.default_rng(secrets.randbits(256))
        noised = dict(reply.tree)
        for name, deviations in self.deviations.items():
            noised[name] = _noised(reply.tree[name], parts[name].template, deviations, math.sqrt(share), rng)
        return replace(reply, tree=noised)

    def released(self, parts: Mapping[str, Reduction]) -> dict[str, Reduction]:
        """The parts as they are with noise: every entry is there, and counts are numbers."""
        return {name: part if name not in self.deviations else replace(
            part, template=_numbers(part.template), partial=False, condition=None) for name, part in parts.items()}

    def mended(self, name: str, value: Any, parts: Mapping[str, Reduction]) -> Any:
        """A noisy sum brought back to what sums of samples look like, as its reduction says: post-processing, which
        costs no privacy."""
        mend = parts[name].mend
        return value if name not in self.deviations or mend is None else mend(value)


def _noised(value: Any, template: Any, deviations: Mapping[str, float] | float, root: float,
            rng: np.random.Generator) -> Any:
    if isinstance(template, dict):
        held = value or {}
        return {key: _noised(held.get(key), inner, deviations if isinstance(inner, dict) or not isinstance(
            deviations, Mapping) else deviations[key], root, rng) for key, inner in template.items()}
    assert not isinstance(deviations, Mapping)
    if not isinstance(template, Tensor):
        return float(value or 0) + root * deviations * rng.standard_normal()
    drawn = torch.from_numpy(rng.standard_normal(tuple(template.shape))) * (root * deviations)
    return drawn if value is None else value.double() + drawn


def _numbers(template: Any) -> Any:
    """A template whose leaves are float64 or plain numbers."""
    if isinstance(template, dict):
        return {key: _numbers(inner) for key, inner in template.items()}
    return template.to(torch.float64) if isinstance(template, Tensor) else 0.0


def statement(config: Config, noise: Noise) -> Tree:
    """What a summary says of it."""
    budget = config.privacy
    return {"epsilon": budget.epsilon, "delta": budget.delta, "sigma": noise.sigma,
            "covers": ", ".join(noise.deviations), "unit": "one sample, added or removed",
            "against": "whoever sees the sum" if config.federation.secure else "whoever sees an upload",
            "not_covered": "the rounds before: the model that the sums were taken with was trained without noise; and "
                           "how many samples each client has, which goes with its upload"}
