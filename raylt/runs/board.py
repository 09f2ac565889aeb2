"""What TensorBoard shows of a run: every number of its reports."""

import secrets
from pathlib import Path
from typing import Any


class Board:
    """Writes TensorBoard's files into a run folder, from the first report on."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._events: Any = None

    def show(self, report: dict[str, Any]) -> None:
        """Adds the numbers of a step."""
        if self._events is None:
            from tensorboardX import SummaryWriter  # a second of imports that --help need not wait for
            # a name that nobody can have put a link at
            self._events = SummaryWriter(str(self._folder), purge_step=report["step"], flush_secs=5,
                                         filename_suffix=f".{secrets.token_hex(8)}")
        for name, value in _scalars(report):
            if name != "step":
                self._events.add_scalar(name, value, report["step"])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None


def _scalars(tree: dict[str, Any], path: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for key, value in tree.items():
        here = f"{path}/{key}" if path else key
        if isinstance(value, dict):
            scalars += _scalars(value, here)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars.append((here, value))
    return scalars
