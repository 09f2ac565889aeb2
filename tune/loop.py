"""The loop of a running search, which hands out trials and collects scores, wherever the trials run."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from raylt.config import Config, DataConfig
from raylt.data.splits.check import complete
from raylt.data.task import Task, build_task
from raylt.errors import CheckpointError
from raylt.runs.callbacks.base import Callback, TrialReport
from raylt.store import Folder
from tune.asha import rungs
from tune.plan import SearchPlan, SearchState, TaskSize
from tune.records import Score, TrialRecord, append_trial, read_ended, split_folder

ERROR = "error.txt"  # File in a trial's folder with the error of its last attempt.


@lru_cache(maxsize=4)
def _task(data: str, start: str, files: tuple[tuple[int, int] | None, ...]) -> Task:
    return build_task(DataConfig.model_validate_json(data))


def task_of(config: Config) -> Task:
    """Return the task of a configuration, cached for other configurations with the same data.

    Relative paths are relative to the working directory. A source that is one file is read again if the file has
    changed. Other sources are read again by the next search, see `forget_tasks`.
    """
    return _task(*_key(config.data))


def completed_for(config: Config, task: Task) -> Config:
    """Return a configuration with the settings that its task's split determines, such as the number of clients."""
    return config.model_copy(update={"data": complete(config.data, task.split)})


def forget_tasks() -> None:
    """Empty the cache of tasks, so that a search reads data that may have changed since an earlier one.

    The stamp of a folder does not show which files below it were replaced.
    """
    _task.cache_clear()
    _size.cache_clear()


def _key(data: DataConfig) -> tuple[str, str, tuple[tuple[int, int] | None, ...]]:
    """Return the cache key of a task: the data settings, the working directory, and the stamps of the files."""
    files = (data.source.partition(":")[2], data.split)
    return data.model_dump_json(), os.getcwd(), tuple(map(_stamp, files))


def _stamp(path: str | None) -> tuple[int, int] | None:
    """Return the size and modification time of a file or folder, or None if there is none at the path."""
    if not path:
        return None
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


def size_of(config: Config) -> TaskSize:
    """Return the sizes of a configuration's task on which the cost of a trial depends."""
    return _size(*_key(config.data))


@lru_cache(maxsize=1024)
def _size(data: str, start: str, files: tuple[tuple[int, int] | None, ...]) -> TaskSize:
    task = _task(data, start, files)
    clients = tuple(n for k, n in enumerate(task.sizes.tolist()) if k not in task.new_clients)
    return TaskSize(clients, task.spec.shape, task.spec.classes)


def holders(config: Config) -> int:
    """Return the number of clients that train and hold samples."""
    return sum(n > 0 for n in size_of(config).clients)


class SearchLoop:
    """A running search, which hands out trials, collects their scores and records ended trials.

    Raises:
        CheckpointError: trials.jsonl cannot be read.
    """

    def __init__(self, folder: Path, plan: SearchPlan, callback: Callback):
        self.folder = folder
        self.plan = plan
        self.callback = callback
        self.state = SearchState(plan, size_of)
        self._records: dict[str, TrialRecord] = {}
        with Folder.open(folder) as search_folder:
            self._ended = read_ended(search_folder)

    def next(self) -> TrialRecord | str:
        """Return the next trial to run, or WAIT or OVER. Trials that ended before an interruption are restored.

        Raises:
            CheckpointError: A restored trial does not fit the search.
        """
        while True:
            record = self.state.next()
            if not isinstance(record, TrialRecord):
                return record
            self._records[record.id] = record
            folder = self.folder / "trials" / record.id
            ended = self._ended.get(record.id)
            if ended is None:
                halving = self.plan.scheduler == "asha"
                steps = rungs(record.config.federation.rounds, self.plan.grace) if halving else []
                record.check_interrupted(folder, self.plan.metric, steps)
                return record
            record.restore(ended, folder)
            self.state.update(record)

    def add_scores(self, id: str, scores: list[Score]) -> bool:
        """Add new scores of a trial; return whether the trial should continue."""
        record = self._records[id]
        record.scores.update({score.step: score for score in scores})
        self.state.update(record)
        return record.outcome is None or record.outcome.state != "stopped"

    def close_trial(self, id: str, failed: str | None) -> None:
        """Record that the process of a trial has ended its work on the trial.

        Args:
            id: Id of the trial.
            failed: Error of a failed trial, used if the trial has not written an error to its folder; None if the
                trial did not fail.
        """
        record = self._records[id]
        folder = self.folder / "trials" / id
        if record.closed:
            return
        record.closed = True
        if failed is not None:
            record.failed = failed
            with suppress(CheckpointError), Folder.open(folder) as trial_folder:
                record.failed = trial_folder.read_text(ERROR).strip()
        self.state.update(record)
        with Folder.open(self.folder) as search_folder:
            append_trial(search_folder, record)
        if record.failed is None:
            for split in range(record.splits):
                with suppress(CheckpointError), Folder.open(split_folder(folder, split)) as trial_folder:
                    trial_folder.remove("checkpoints")
        best = self.state.best()
        ended = sum(other.closed for other in self.state.trials)
        others = self.plan.other_metrics
        self.callback.on_trial_end(report_of(record, others), None if best is None else report_of(best, others), ended)


def report_of(record: TrialRecord, other_metrics: Sequence[str] = ()) -> TrialReport:
    """Return the report about a trial that callbacks receive."""
    outcome = record.outcome
    return TrialReport(
        trial=record.id,
        values=record.values,
        state="failed" if record.failed is not None else "open" if outcome is None else outcome.state,
        round=None if outcome is None else outcome.step,
        score=None if outcome is None else outcome.score,
        failed=record.failed,
        other_scores={name: record.figures[name] for name in other_metrics if name in record.figures},
    )
