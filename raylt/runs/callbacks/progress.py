"""Progress inside a step, as small files in the run folder.

The process that runs the experiment writes one file, which a terminal reads. Processes that work on items of
`Fleet.map` write one file per item, which the experiment's process reads. The files are not part of the run's results:
no other code reads them, and they need not be flushed to disk.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.round_stats import StageProgress
from raylt.errors import RayltError
from raylt.store import Folder
from raylt.typed_json import parse_json

FILE = ".progress"
ITEM_PREFIX = ".progress-"  # followed by the number of the item
WRITE_INTERVAL_S = 0.5  # minimum time between two writes in the same stage


def progress_writer(folder: Path) -> Callable[..., None]:
    """Return a function that writes the progress of a run into its folder.

    The function takes the arguments of a `ProgressHook`, or the fields of `ItemsProgress`.
    """
    last_stage = ""
    last_time = 0.0

    def write(stage: str, *figures: float) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if stage == last_stage and now - last_time < WRITE_INTERVAL_S:
            return
        last_stage = stage
        last_time = now
        _write(folder, FILE, [stage, *figures])

    return write


def item_writer(folder: Path, number: int) -> StageProgress:
    """Return a function that writes the number of finished steps of one `Fleet.map` item into the run folder."""
    last_time = time.monotonic()

    def write(done: int, total: int) -> None:
        nonlocal last_time
        now = time.monotonic()
        if now - last_time >= WRITE_INTERVAL_S:
            last_time = now
            _write(folder, f"{ITEM_PREFIX}{number}", [done, total])

    return write


def read_progress(folder: Path) -> tuple[str, int, int] | ItemsProgress | None:
    """Return the last reported progress of a run, or None if no progress can be read."""
    figures = _read(folder, FILE)
    if len(figures) == 3:
        stage, done, total = figures
        return str(stage), int(done), int(total)
    return ItemsProgress(*figures) if len(figures) == 6 else None


def read_items(folder: Path, numbers: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return (finished steps, all steps) for each `Fleet.map` item that has reported its progress."""
    figures_by_item = {number: _read(folder, f"{ITEM_PREFIX}{number}") for number in numbers}
    return {
        number: (int(figures[0]), int(figures[1])) for number, figures in figures_by_item.items() if len(figures) == 2
    }


def remove_items(folder: Path, numbers: Iterable[int]) -> None:
    """Remove the progress files of finished `Fleet.map` items."""
    with Folder.open(folder) as run_folder:
        for number in numbers:
            run_folder.remove(f"{ITEM_PREFIX}{number}")


def remove_progress(folder: Path) -> None:
    """Remove a run's progress file when no process works on the run any more."""
    with Folder.open(folder) as run_folder:
        run_folder.remove(FILE)


def _write(folder: Path, name: str, content: list[Any]) -> None:
    with Folder.open(folder) as run_folder:
        run_folder.remove(name)
        with run_folder.log(name) as stream:
            stream.write(json.dumps(content).encode())


def _read(folder: Path, name: str) -> list[Any]:
    """Return the content of a progress file, or an empty list if the file is missing or incomplete."""
    try:
        with Folder.open(folder) as run_folder:
            content = parse_json(run_folder.read(name, 1000), name) if run_folder.has(name) else []
    except RayltError:
        return []
    return content if isinstance(content, list) else []
