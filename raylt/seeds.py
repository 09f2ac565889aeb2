"""Randomness as a function of (seed, purpose, round, client), never of the order in which things ran."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *keys: str | int) -> int:
    """A seed in [0, 2**63) that depends on `seed` and every key, and on nothing else.

    It is the same on every machine and in every process (Python's own `hash` is not).
    """
    text = "\0".join([str(seed), *(f"{type(k).__name__}:{k}" for k in keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *keys: str | int, device: "torch.device | None" = None) -> Iterator[None]:
    """Runs a block under torch's global generators seeded by `seed_for(seed, *keys)`; they are restored afterwards."""
    import torch  # here: splits are drawn by processes that need no torch

    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if _has_gpu():
            torch.manual_seed(seed_for(seed, *keys))
        else:       # what torch would note for GPUs that may come, with a stack each time, is a tenth of a small call
            torch.default_generator.manual_seed(seed_for(seed, *keys))
        yield


@cache
def _has_gpu() -> bool:
    import torch
    return torch.cuda.is_available()
