"""Secrets in shares, of which any `threshold` give the secret and fewer say nothing (Shamir, CACM 1979)."""

import math
import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297        # the first beyond every secret of 32 bytes
SHARE_BYTES = 33


def threshold_of(members: int) -> int:
    """How many must survive: two thirds, at least two."""
    return max(2, math.ceil(2 * members / 3))


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """One share for each holder: the values at their numbers of a random polynomial whose value at 0 is the secret.

    Args:
        secret: of at most 32 bytes.
        holders: numbers from 1 on.
        threshold: so many shares are needed; the polynomial's degree is one less.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: evaluate(coefficients, x, PRIME) for x in holders}


def evaluate(coefficients: list[int], x: int, prime: int) -> int:
    """The value of a polynomial, its constant first, modulo a prime."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


def join(shares: Mapping[int, int], length: int = 32) -> bytes:
    """The secret of `length` bytes: Lagrange's polynomial through the shares, at 0.

    Raises:
        ValueError: these are fewer than the threshold, or of several secrets. Not every such mistake shows.
    """
    value = 0
    for x, share in shares.items():
        numerator = denominator = 1
        for other in shares:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        value = (value + share * numerator * pow(denominator, -1, PRIME)) % PRIME
    if value >= 256**length:
        raise ValueError(f"{len(shares)} shares give no secret of {length} bytes: too few, or of several secrets")
    return value.to_bytes(length, "big")
