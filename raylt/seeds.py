"""Seeds that depend on (seed, purpose, round, client), not on the order of execution."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *keys: str | int) -> int:
    """Return a seed in [0, 2**63) that depends only on `seed` and the keys.

    Unlike Python's `hash`, it is the same on every machine and in every process.

    Args:
        seed: Seed of the run.
        keys: Purpose, round, client and so on. An integer and its text are different keys.
    """
    text = "\0".join([str(seed), *(f"{type(k).__name__}:{k}" for k in keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, *keys: str | int, device: "torch.device | None" = None) -> Iterator[None]:
    """Seed torch's global generators with `seed_for(seed, *keys)` inside the block, and restore them afterwards."""
    import torch  # Not at the top: processes that only draw splits do not need torch.

    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if _has_gpu():
            torch.manual_seed(seed_for(seed, *keys))
        else:  # torch.manual_seed also records a stack trace for CUDA, which takes a tenth of a small call's time.
            torch.default_generator.manual_seed(seed_for(seed, *keys))
        yield


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
