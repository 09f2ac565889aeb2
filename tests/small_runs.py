"""Runs of a few seconds, on the digits and in this process, for tests that read run folders."""

from pathlib import Path

import raylt
from raylt.config import load


def make_run(folder: Path, name: str, *settings: str) -> raylt.Run:
    """A finished run in `folder/name`; the settings name its method."""
    config = load(None, ["federation.rounds=1", "local.epochs=1", "data.clients=3", *settings])
    return raylt.run(config, out=folder, name=name, fleet="local", quiet=True)
