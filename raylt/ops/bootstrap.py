"""Random choice, with replacement, of features of all clients, without collecting all features in one process.

Each client draws `size` features of each of its classes. The server chooses a client for each of the `size` features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raylt.tree import Tree


def class_bootstrap(z: Tensor, y: Tensor, size: int, generator: torch.Generator) -> dict[int, Tree]:
    """Draw `size` features of each class with replacement; return them with the sample count of the class.

    Each class that occurs has the entries `n` and `z` [size, d].

    Args:
        z: Features, float32 [n, d].
        y: Labels, int64 [n].
        size: Number of draws per class.
        generator: Random generator on the CPU.
    """
    drawn: dict[int, Tree] = {}
    for c in y.unique().tolist():
        own = z[y == c]
        rows = torch.randint(len(own), (size,), generator=generator)
        drawn[c] = {"n": len(own), "z": own[rows.to(own.device)]}
    return drawn


def bootstrap_of_clients(drawn: Sequence[Tree], generator: torch.Generator) -> dict[int, Tensor]:
    """Choose `size` random features of each class from the features that the clients drew, [size, d].

    The result has the classes that any client has, ascending.

    Args:
        drawn: The result of `class_bootstrap` at each client, in a fixed order.
        generator: Random generator on the CPU.
    """
    features: dict[int, Tensor] = {}
    for c in sorted({c for of_client in drawn for c in of_client}):
        holders = [of_client[c] for of_client in drawn if c in of_client]
        z = torch.stack([holder["z"] for holder in holders])  # [K, size, d]
        weight = torch.tensor([holder["n"] for holder in holders], dtype=torch.float64)
        source = torch.multinomial(weight, z.shape[1], replacement=True, generator=generator)
        features[c] = z[source, torch.arange(z.shape[1])]
    return features
