"""`NotebookProgress`: the callback that shows a run, study or search in one notebook output, updated in place."""

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from raylt.config import Config
from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.report import RoundReport
from raylt.notebook import Output, in_notebook
from raylt.registry import resolve
from raylt.runs.callbacks.base import Callback, Callbacks, StudyStatus, TrialReport, checked
from raylt.runs.callbacks.terminal import (
    STAGES,
    BestFigure,
    StagePace,
    TerminalProgress,
    TimeLeft,
    in_words,
    items_text,
)

UPDATE_INTERVAL_S = 0.25  # minimum time between two updates, since each update is sent to the browser
SHOWN_NOTES = 20  # number of messages to show, the most recent ones


def progress_display() -> Callback:
    """Return the progress display for a notebook, or for a terminal outside notebooks."""
    return NotebookProgress() if in_notebook() else TerminalProgress()


def observer(callbacks: Sequence[Callback] | None) -> Callback:
    """Return one callback that calls the user's callbacks of a study or search.

    Without a list (None) it is the progress display in a notebook, and shows nothing elsewhere.

    Raises:
        ConfigError: The value is not a list, or an element is not a callback.
    """
    if callbacks is None:
        return NotebookProgress() if in_notebook() else Callback()
    return Callbacks(checked(callbacks))


class NotebookProgress(Callback):
    """Shows a run, a study or a search in one output of a notebook cell: a bar, a text and the last messages."""

    def __init__(self) -> None:
        self._output = Output()
        self._time_left = TimeLeft()
        self._best = BestFigure()
        self._share: float | None = None
        self._text = "starting"
        self._stage = ""
        self._pace = StagePace("")
        self._notes: list[str] = []
        self._steps = 0
        self._total = 0
        self._rounds = 0
        self._taken = 0  # completed rounds
        self._updated = 0.0

    def on_message(self, text: str, minor: bool = False) -> None:
        self._notes = [*self._notes, text][-SHOWN_NOTES:]
        self._show()

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self._rounds = config.federation.rounds
        self._total = self._rounds + resolve(config).method.finishes
        self._steps = len(reports)
        self._taken = min(self._steps, self._rounds)
        for report in reports:
            self._best.update(report)
            self._time_left.add_step(report["seconds"] + report["evaluation_seconds"])
        self.on_message(f"{config.method['name']} on {config.data.source}, run folder {folder}")
        self._show_step()

    def on_progress(self, stage: str, done: int, total: int) -> None:
        self._show_stage(stage, f" {done}/{total}" if total else "", done / total if total else 0.0)

    def on_items(self, progress: ItemsProgress) -> None:
        self._show_stage(progress.stage, f": {items_text(progress)}", progress.share)

    def on_last_phase(self, seconds: float) -> None:
        self._time_left.last_phase = seconds

    def _show_stage(self, stage: str, counts: str, share: float) -> None:
        if stage != self._pace.name or share < self._pace.share:
            self._pace = StagePace(stage)
        self._pace.share = share
        self._time_left.stage_left = self._pace.seconds_left()
        self._stage = STAGES.get(stage, stage.replace("_", " ")) + counts
        if time.monotonic() - self._updated >= UPDATE_INTERVAL_S:
            self._show_step()

    def on_step(self, report: RoundReport) -> None:
        self._best.update(report.record())
        self._time_left.add_step(report.seconds + report.evaluation_seconds)
        for id, reason in report.rejected.items():
            self.on_message(f"round {report.step}, client {id}: reply rejected ({reason})")
        for id in report.lost:
            self.on_message(f"round {report.step}, client {id}: no reply")
        self._steps = report.step
        self._taken = report.step if report.phase == "round" else self._taken
        self._stage = ""
        if report.step >= self._total or time.monotonic() - self._updated >= UPDATE_INTERVAL_S:
            self._show_step()

    def on_end(self, summary: dict[str, Any] | None) -> None:
        self._stage = "" if summary is not None else "stopped"
        if summary is not None:  # also if federation.patience ended the run early
            self._steps = self._total
            self._taken = summary["rounds"]
        self._show_step()

    def on_study_progress(self, status: StudyStatus) -> None:
        self._share = status.share
        left = "" if not status.left_s else f", about {in_words(status.left_s)} left"
        last_phases = " without last phases" if status.untimed_finish else ""
        running = f": {', '.join(status.running)}" if status.running else ""
        self._text = f"{status.done} of {status.total} runs{left}{last_phases}{running}"
        self._show()

    def on_search_start(self, folder: Path, methods: Sequence[str], trials: int | None, at_once: int) -> None:
        self._total = trials or 0
        self._text = f"search of {', '.join(methods)}, folder {folder}"
        self._show()

    def on_trial_end(self, trial: TrialReport, best: TrialReport | None, ended: int) -> None:
        self._share = ended / self._total if self._total else None
        best_text = "" if best is None or best.score is None else f", best {best.trial}: {100 * best.score:.2f} %"
        self._text = f"{ended}{f' of {self._total}' if self._total else ''} trials{best_text}"
        self._show()

    def _show_step(self) -> None:
        """Update the display with the progress of a run."""
        # a run may fail before its number of steps is known
        self._share = self._steps / self._total if self._total else None
        left = self._time_left.text(self._total - self._steps)
        parts = (f"round {self._taken}/{self._rounds}", self._stage, self._best.text)
        ended = self._steps >= self._total or self._stage == "stopped"
        self._text = "  ".join(part for part in (*parts, "" if ended else f"{left} left") if part)
        self._show()

    def _show(self) -> None:
        self._updated = time.monotonic()
        value = "" if self._share is None else f' value="{self._share:.4f}"'
        notes = "".join(f"<div>{escape(note)}</div>" for note in self._notes)
        self._output.show(f'<progress max="1"{value}></progress> {escape(self._text)}{notes}')
