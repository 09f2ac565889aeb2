"""`Desk`: a search while it runs. Trials are taken from it and tell it how far they are, wherever they run."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from raylt.config import Config, DataConfig
from raylt.data.task import Task, build_task
from raylt.errors import CheckpointError
from raylt.store import Folder
from tune.plan import Plan, State
from tune.record import TRIALS, Point, Record, read_ended

ERROR = "error.txt"         # in a trial's folder: what its last attempt ended with


class Watcher:
    """Told what happens in a search. Override what is of interest; nothing is done here."""

    def on_start(self, folder: Path, plan: Plan, state: State, at_once: int) -> None:
        """Before the first trial; of a search that is resumed, `state` has those that ended."""

    def on_trial(self, record: Record, state: State) -> None:
        """After a trial ended, however it did."""

    def on_message(self, text: str, minor: bool = False) -> None:
        """A line for people; minor: only for someone who watches."""

    def on_end(self) -> None:
        """At the end of the search, whatever it is."""


@lru_cache(maxsize=64)
def _task(data: str) -> Task:
    return build_task(DataConfig.model_validate_json(data))


def task_of(config: Config) -> Task:
    """The task of a configuration, kept for the next that has the same data."""
    return _task(config.data.model_dump_json())


def sizes(config: Config) -> list[int]:
    """Samples of each client that holds any."""
    task = task_of(config)
    return [n for k, n in enumerate(task.sizes.tolist()) if n and k not in task.newcomers]


class Desk:
    """The search while it runs: gives out trials, takes in what they tell, writes down those that ended."""

    def __init__(self, folder: Path, plan: Plan, watcher: Watcher):
        self.folder, self.plan, self.watcher = folder, plan, watcher
        self.state = State(plan, sizes)
        self._records: dict[str, Record] = {}
        with Folder.open(folder) as here:
            self._ended = read_ended(here)

    def next(self) -> Record | str:
        """A trial to run, WAIT or OVER; those that ended before an interruption are only taken note of."""
        while isinstance(record := self.state.next(), Record):
            self._records[record.id] = record
            line = self._ended.get(record.id)
            if line is None:
                return record
            record.end(line, self.folder / "trials" / record.id)
            self.state.update(record)
        return record

    def told(self, id: str, points: list[Point]) -> bool:
        """Takes in a trial's new points; whether it goes on."""
        record = self._records[id]
        record.points.update({point.step: point for point in points})
        self.state.update(record)
        return record.outcome is None or record.outcome.state != "stopped"

    def closed(self, id: str, failed: str | None) -> None:
        """A trial's process is through with it."""
        record, folder = self._records[id], self.folder / "trials" / id
        if record.closed:
            return
        record.closed = True
        if failed is not None:
            record.failed = failed
            with suppress(CheckpointError), Folder.open(folder) as here:
                record.failed = here.read_text(ERROR).strip()
        self.state.update(record)
        with Folder.open(self.folder) as here:
            here.append(TRIALS, record.line() + "\n")
        if record.failed is None:
            with suppress(CheckpointError), Folder.open(folder) as here:
                here.remove("checkpoints")
        self.watcher.on_trial(record, self.state)
