"""Clients that join only after training."""

from collections.abc import Sequence

import numpy as np

from raylt.config import DataConfig
from raylt.errors import DataError
from raylt.seeds import seed_for


def draw_new_clients(clients: Sequence[np.ndarray], config: DataConfig) -> tuple[int, ...]:
    """Draw the ids of `config.new_clients` clients from those that hold samples, seeded by `config.seed`.

    Args:
        clients: For each client, rows of the training set.
        config: The settings in `data`.

    Returns:
        Ids, ascending.

    Raises:
        DataError: No client would be left to train.
    """
    if not config.new_clients:
        return ()
    holders = [k for k, rows in enumerate(clients) if len(rows)]
    if config.new_clients >= len(holders):
        raise DataError(
            f"data.new_clients: only {len(holders)} clients hold samples, and at least one must train "
            f"({config.new_clients}). Lower data.new_clients.",
            code="data.too-few",
            key="data.new_clients",
            value=config.new_clients,
        )
    rng = np.random.default_rng(seed_for(config.seed, "new clients"))
    return tuple(sorted(rng.choice(holders, config.new_clients, replace=False).tolist()))
