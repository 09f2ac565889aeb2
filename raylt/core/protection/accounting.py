"""Privacy accounting for Gaussian noise: the epsilon of given noise, and the smallest noise for a given epsilon.

`calibrated_sigma` serves `privacy.epsilon` (one upload of sums over samples); `epsilon_of` serves
`privacy.noise_multiplier` (rounds of clients' models).
"""

import math
import warnings
from functools import cache

from raylt.config import Config

HIGH_ORDERS = (64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)  # small epsilons need them


def delta_of(sigma: float, epsilon: float) -> float:
    """Return the delta of the Gaussian mechanism with sensitivity 1, for a standard deviation and an epsilon.

    With s = sigma and e = epsilon: delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es).
    """
    from scipy.special import log_ndtr

    half = 1 / (2 * sigma)
    return math.exp(log_ndtr(half - epsilon * sigma)) - math.exp(epsilon + log_ndtr(-half - epsilon * sigma))


def calibrated_sigma(epsilon: float, delta: float) -> float:
    """Return the smallest standard deviation with which the Gaussian mechanism satisfies epsilon and delta."""
    low = 1e-4
    high = 1.0
    while delta_of(high, epsilon) > delta:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if delta_of(middle, epsilon) <= delta:
            high = middle
        else:
            low = middle
    return high


@cache
def epsilon_of(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """Return the epsilon that a number of rounds spend, by Opacus's RDP accountant.

    Opacus tries Renyi orders up to 63 alone, with which epsilon is never below 0.1 for delta = 1e-5. More orders give
    the same guarantee a smaller epsilon.

    Args:
        noise_multiplier: Standard deviation of the noise for sensitivity 1.
        rate: Probability that a client takes part in a round; 1 for no amplification by sampling.
        rounds: Number of rounds.
        delta: The delta of the guarantee.
    """
    from opacus.accountants import RDPAccountant  # pyright: ignore[reportMissingImports]

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, rate, rounds)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the", UserWarning)  # a bound at the last order is valid too
        spent = accountant.get_epsilon(delta=delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *HIGH_ORDERS])
    return max(0.0, float(spent))


def rate_of(config: Config) -> float:
    """Return the sampling rate that the privacy accountant may assume."""
    return config.federation.participation if config.federation.sampling == "poisson" else 1.0
