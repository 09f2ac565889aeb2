"""Features drawn with replacement from those of all clients, without their being in one place.

A client draws as many as are wanted of each of its classes; the server takes each place from one of the clients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raylt.tree import Tree


def class_bootstrap(z: Tensor, y: Tensor, size: int, generator: torch.Generator) -> dict[int, Tree]:
    """Of each class that occurs: its count `n`, and `z` float32 [size, d], so many of its features with replacement.

    Args:
        z: features [n, d].
        y: int64 [n].
        generator: of the CPU.
    """
    drawn: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c]
        rows = torch.randint(len(own), (size,), generator=generator)
        drawn[c] = {"n": len(own), "z": own[rows.to(own.device)]}
    return drawn


def bootstrap_of_clients(drawn: Sequence[Tree], generator: torch.Generator) -> dict[int, Tensor]:
    """Of each class that a client has, ascending, as many features [size, d] of all clients together.

    Args:
        drawn: what `class_bootstrap` gave each client, in a fixed order.
        generator: of the CPU.
    """
    features: dict[int, Tensor] = {}
    for c in sorted({c for of_client in drawn for c in of_client}):
        holders = [of_client[c] for of_client in drawn if c in of_client]
        z = torch.stack([holder["z"] for holder in holders])                    # [K, size, d]
        weight = torch.tensor([holder["n"] for holder in holders], dtype=torch.float64)
        whose = torch.multinomial(weight, z.shape[1], replacement=True, generator=generator)
        features[c] = z[whose, torch.arange(z.shape[1])]
    return features
