"""Clients that join only after training."""

from collections.abc import Sequence

import numpy as np

from raylt.config import DataConfig
from raylt.errors import DataError
from raylt.seeds import seed_for


def draw_newcomers(clients: Sequence[np.ndarray], config: DataConfig) -> tuple[int, ...]:
    """The ids of `config.new_clients` of the clients that hold samples, ascending, drawn by `config.seed`.

    Args:
        clients: rows of the training set of each.

    Raises:
        DataError: nobody would be left to train.
    """
    if not config.new_clients:
        return ()
    holders = [k for k, rows in enumerate(clients) if len(rows)]
    if config.new_clients >= len(holders):
        raise DataError(f"data.new_clients = {config.new_clients}: only {len(holders)} clients hold samples, and at "
                        "least one must train; lower it")
    rng = np.random.default_rng(seed_for(config.seed, "new clients"))
    return tuple(sorted(rng.choice(holders, config.new_clients, replace=False).tolist()))
