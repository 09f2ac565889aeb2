"""`TerminalProgress`: the callback that shows a run at the terminal."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from raylt.config import Config
from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.report import RoundReport, shown_figure
from raylt.metrics import LOCAL
from raylt.registry import resolve
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.console import PlainConsole

STAGES = {
    "join": "joining",
    "train": "training",
    "synthesise": "synthesis",
    "evaluation": "judging",
    "try_models": "judging",
    "judge": "judging",
    "checkpoint": "saving",
}
ITEMS = {"synthesise": "class"}  # what an item is, by server function
BAR_WIDTH = 12  # columns; fewer if the rest of the line needs them
STAGE_WIDTH = 21  # columns
LINE_INTERVAL_S = 30.0  # minimum time between two lines on a long stage without a bar
TIMED_STEPS = 10  # number of last steps whose mean duration predicts the next ones

FIGURE_ORDER = "global", "accuracy", "matched", "local"  # later entries take precedence
FIGURE_NAMES = {
    "local": "clients' own images",
    "matched": "clients' own class mix",
    "accuracy": "accuracy",
    "global": "global model",
}
SHORT_NAMES = {"local": "own", "matched": "mix", "accuracy": "acc", "global": "global"}


class TerminalProgress(Callback):
    """Shows a run on standard error: a bar on a terminal, a line per round elsewhere.

    The bar counts a method's last phase as one more step, so the remaining time includes it.
    """

    def __init__(self) -> None:
        self._console = PlainConsole(stderr=True)
        self._time_left = TimeLeft()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[stage]}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False),
            self._time_left,
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("round", total=None, stage="starting", figures="", visible=False)
        self._rounds = 0
        self._best = BestFigure()
        self._stage = StagePace("")

    def on_message(self, text: str, minor: bool = False) -> None:
        if self._console.is_terminal or not minor:
            self._console.print(text, soft_wrap=True, markup=False)

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self._rounds = config.federation.rounds
        taken = len(reports)
        continuing = f", continuing after step {taken}" if taken else ""
        self.on_message(f"{config.method['name']} on {config.data.source}, run folder {folder}{continuing}")
        for report in reports:
            self._best.update(report)
            self._time_left.add_step(report["seconds"] + report["evaluation_seconds"])
        self._bar.update(
            self._task,
            total=self._rounds + resolve(config).method.finishes,
            completed=taken,
            description=self._round_text(taken),
            visible=True,
        )
        self._bar.start()

    def on_progress(self, stage: str, done: int, total: int) -> None:
        counts = f" {done}/{total}" if total else ""
        self._show_stage(stage, done / total if total else 0.0, counts, f": {done} of {total} done" if total else "")

    def on_items(self, progress: ItemsProgress) -> None:
        counts = f" {progress.done + 1}/{progress.total} {progress.step}/{progress.steps}"
        self._show_stage(progress.stage, progress.share, counts, f": {items_text(progress)}")

    def on_last_phase(self, seconds: float) -> None:
        self._time_left.last_phase = seconds

    def _show_stage(self, stage: str, share: float, counts: str, words: str) -> None:
        """Show a running stage: its counts on a progress bar, or its words as a line.

        Args:
            stage: Name of the stage.
            share: Completed share of the stage.
            counts: Counts for the progress bar.
            words: Description for a line of text.
        """
        name = STAGES.get(stage, stage.replace("_", " "))
        if stage != self._stage.name or share < self._stage.share:
            self._stage = StagePace(stage)
        self._stage.share = share
        left = self._stage.seconds_left()
        self._time_left.stage_left = left
        if not self._console.is_terminal and self._stage.line_is_due():
            about = "" if left is None else f", about {in_words(left)} left"
            self.on_message(f"  {name}{words}{about}")
        self._bar.update(self._task, stage=name[: STAGE_WIDTH - len(counts)] + counts)

    def on_step(self, report: RoundReport) -> None:
        figure = self._best.update(report.record())
        for id, reason in report.rejected.items():
            self.on_message(f"round {report.step}, client {id}: reply rejected ({reason})")
        for id in report.lost:
            self.on_message(f"round {report.step}, client {id}: no reply")
        self._time_left.add_step(report.seconds + report.evaluation_seconds)
        if not self._console.is_terminal:
            step = f"round {report.step}/{self._rounds}" if report.phase == "round" else report.phase
            self.on_message("  ".join(part for part in (step, figure, f"{report.seconds:.2f} s") if part))
            return
        loss = report.figures.get("loss")
        figures = [f"loss {loss:.3f}"] if isinstance(loss, float) else []
        self._bar.update(
            self._task,
            completed=report.step,
            description=self._round_text(report.step),
            stage="",
            figures=" ".join([*figures, self._best.text]),
        )

    def on_end(self, summary: dict[str, Any] | None) -> None:
        if summary is not None and summary.get("rounds", self._rounds) < self._rounds:  # federation.patience
            total = self._bar.tasks[0].total
            self._bar.update(self._task, completed=total, description=self._round_text(summary["rounds"]))
        self._bar.stop()

    def _round_text(self, steps: int) -> str:
        """Return the number of finished rounds as text; a phase after the last round is not counted."""
        return f"round {min(steps, self._rounds)}/{self._rounds}"


class StagePace:
    """Tracks one stage of the current step: its name, progress and start time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = 0.0  # completed share
        self._since = time.monotonic()
        self._line = self._since

    def seconds_left(self) -> float | None:
        """Return the seconds until the end of the stage at the current pace, or None before any progress."""
        return (time.monotonic() - self._since) / self.share * (1 - self.share) if self.share else None

    def line_is_due(self) -> bool:
        """Return whether another line on this stage is due; if so, restart the interval."""
        due = time.monotonic() - self._line >= LINE_INTERVAL_S
        if due:
            self._line = time.monotonic()
        return due


def items_text(progress: ItemsProgress) -> str:
    """Return the progress of a `Fleet.map` call as text, such as "class 3 of 10, step 40 of 100"."""
    item = ITEMS.get(progress.stage, "item")
    return f"{item} {progress.done + 1} of {progress.total}, step {progress.step} of {progress.steps}"


def in_words(seconds: float) -> str:
    """Return a duration as text, in seconds or minutes."""
    return f"{round(seconds)} s" if seconds < 90 else f"{round(seconds / 60)} min"


class TimeLeft(ProgressColumn):
    """Predicts the time until the end of a run from the durations of its last steps.

    Rich's own column ignores steps older than half a minute, but a round may take longer.
    """

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))
        self.stage_left: float | None = None  # seconds until the end of the current stage
        self.last_phase: float | None = None  # duration of the phase after the rounds, if the method knows it
        self._seconds: deque[float] = deque(maxlen=TIMED_STEPS)
        self._since = time.monotonic()

    def add_step(self, seconds: float) -> None:
        """Add the duration of a step that has just ended."""
        self._seconds.append(seconds)
        self._since = time.monotonic()
        self.stage_left = None

    def render(self, task: Task) -> Text:
        return Text(self.text(None if task.total is None else round(task.total - task.completed)))

    def text(self, steps: int | None) -> str:
        """Return the predicted time for the remaining steps as minutes and seconds, or `--:--` if unknown.

        Args:
            steps: Number of remaining steps; None if unknown.
        """
        if steps is None or (steps and not self._seconds):
            return "--:--"
        if steps and self.last_phase is not None:
            return _clock(self._left_with_last_phase(steps, self.last_phase))
        step = sum(self._seconds) / max(len(self._seconds), 1)
        left_of_step = step - (time.monotonic() - self._since)
        if steps == 1 and left_of_step < 0:  # the last step takes longer than earlier steps
            if self.stage_left is None:
                return "--:--"
            left_of_step = self.stage_left
        return _clock(max(left_of_step, 0) + step * (steps - 1) if steps else 0)

    def _left_with_last_phase(self, steps: int, last_phase: float) -> float:
        """Return the predicted time for the remaining steps in seconds, if the last step takes `last_phase` seconds."""
        passed = time.monotonic() - self._since
        if steps == 1:
            return max(last_phase - passed, 0) if self.stage_left is None else self.stage_left
        step = sum(self._seconds) / len(self._seconds)
        return max(step - passed, 0) + step * (steps - 2) + last_phase


def _clock(seconds: float) -> str:
    """Return seconds as text: MM:SS, or H:MM:SS from one hour on."""
    left = round(seconds)
    hours, minutes = left // 3600, left // 60 % 60
    return f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes:02}:{left % 60:02}"


class BestFigure:
    """Tracks the last and the best value of the displayed accuracy.

    This is the mean accuracy over clients on their own test images, if there are any. Otherwise it is the accuracy, or
    for clients' own models the mean over clients on their own class mix. Until the first of these values, it is the
    accuracy of the global model.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._last = 0.0
        self._best = 0.0

    def update(self, line: Mapping[str, Any]) -> str:
        """Read the figures from a step's line of metrics.jsonl, and return the text to display for the step."""
        local = (line["clients"] or {}).get(LOCAL)
        name, value = shown_figure(line)
        values = {
            "local": None if local is None else local["mean"],
            "matched": value if name == "matched" else None,
            "accuracy": line["accuracy"],
            "global": line["global_accuracy"],
        }
        kind = next((kind for kind in reversed(FIGURE_ORDER) if values[kind] is not None), None)
        if kind is None:
            return ""
        value = values[kind]
        assert value is not None
        if not self._kind or FIGURE_ORDER.index(kind) > FIGURE_ORDER.index(self._kind):
            self._kind = kind
            self._best = value  # earlier values belong to another figure
        if kind == self._kind:
            self._last = value
            self._best = max(self._best, value)
        return f"{FIGURE_NAMES[kind]} {100 * value:.2f} %"

    @property
    def text(self) -> str:
        """Return the text to show next to a progress bar."""
        if not self._kind:
            return ""
        return f"{SHORT_NAMES[self._kind]} {100 * self._last:.1f} % (best {100 * self._best:.1f})"
