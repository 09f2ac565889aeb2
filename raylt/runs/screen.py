"""`Screen`: the callback that shows a run at the terminal."""

import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from raylt.config import Config
from raylt.core.report import Report
from raylt.metrics import LOCAL
from raylt.registry import resolve
from raylt.runs.callbacks import Callback

STAGES = {"join": "joining", "train": "training", "evaluation": "judging", "judge": "judging", "checkpoint": "saving"}
BAR = 12                    # columns; fewer where the rest of the line needs them
STAGE = 20
ROUNDS = 10                 # whose seconds say how long the next ones take


class Screen(Callback):
    """Shows a run on standard error as it goes: a bar on a terminal, a line per round elsewhere.

    The bar counts what a method does after its last round as one more step, so the time that is left includes it.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(BAR), TextColumn("{task.fields[stage]}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False), left := _TimeLeft(), console=self._console,
            disable=not self._console.is_terminal)
        self._task = self._bar.add_task("round", total=None, stage="starting", figures="", visible=False)
        self._rounds, self._best, self._left = 0, _Best(), left

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self._rounds, taken = config.federation.rounds, len(reports)
        self.on_message(f"{config.method['name']} on {config.data.source}, run folder {folder}"
                        + (f", continuing after step {taken}" if taken else ""))
        for report in reports:
            self._best.take(report["accuracy"], report["clients"], report["global_accuracy"])
            self._left.take(report["seconds"] + report["evaluation_seconds"])
        self._bar.update(self._task, total=self._rounds + resolve(config).method.finishes, completed=taken,
                         description=self._place(taken), visible=True)
        self._bar.start()

    def on_progress(self, stage: str, done: int, total: int) -> None:
        counts = f" {done}/{total}" if total else ""
        self._bar.update(self._task,
                         stage=STAGES.get(stage, stage.replace("_", " "))[:STAGE - len(counts)] + counts)

    def on_step(self, report: Report) -> None:
        figure = self._best.take(report.accuracy, report.clients, report.global_accuracy)
        troubles = [f"client {id}: reply rejected ({why})" for id, why in report.rejected.items()]
        troubles += [f"client {id}: no reply" for id in report.lost]
        for trouble in troubles:
            self.on_message(f"round {report.step}, {trouble}")
        self._left.take(report.seconds + report.evaluation_seconds)
        if self._console.is_terminal:
            loss = report.figures.get("loss")
            figures = [f"loss {loss:.3f}"] if isinstance(loss, float) else []
            self._bar.update(self._task, completed=report.step, description=self._place(report.step), stage="",
                             figures=" ".join([*figures, self._best.text]))
        else:
            what = f"round {report.step}/{self._rounds}" if report.phase == "round" else report.phase
            self.on_message("  ".join(part for part in (what, figure, f"{report.seconds:.2f} s") if part))

    def _place(self, steps: int) -> str:
        """The rounds that are done; after them comes the last phase of a method that has one."""
        return f"round {min(steps, self._rounds)}/{self._rounds}"

    def on_message(self, text: str, minor: bool = False) -> None:
        if self._console.is_terminal or not minor:
            self._console.print(text, soft_wrap=True, markup=False)

    def on_end(self, summary: dict[str, Any] | None) -> None:
        self._bar.stop()


class _TimeLeft(ProgressColumn):
    """The time until the end, as the last rounds took; rich's own forgets what is older than half a minute, which is
    less than a round may take."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))
        self._seconds: deque[float] = deque(maxlen=ROUNDS)
        self._since = time.monotonic()

    def take(self, seconds: float) -> None:
        """A step is done, which took so long."""
        self._seconds.append(seconds)
        self._since = time.monotonic()

    def render(self, task: Task) -> Text:
        steps = None if task.total is None else round(task.total - task.completed)
        if steps is None or (steps and not self._seconds):
            return Text("--:--")
        step = sum(self._seconds) / max(len(self._seconds), 1)
        of_this = step - (time.monotonic() - self._since)
        if steps == 1 and of_this < 0:          # longer than those before it; nobody knows how long
            return Text("--:--")
        left = round(max(of_this, 0) + step * (steps - 1)) if steps else 0
        hours, minutes = left // 3600, left // 60 % 60
        return Text(f"{hours}:{minutes:02}:{left % 60:02}" if hours else f"{minutes:02}:{left % 60:02}")


class _Best:
    """The figure that says most of a run, and the best that was seen of it.

    Clients on their own test images come first, then what is deployed; of a personal method between its evaluations it
    is the global model's accuracy.
    """

    ORDER = "global", "accuracy", "local"

    def __init__(self) -> None:
        self._kind, self._last, self._best = "", 0.0, 0.0

    def take(self, accuracy: float | None, clients: dict[str, dict[str, float]] | None, shared: float | None) -> str:
        """Takes in a step's figures, each None where it was not judged; says this step's."""
        local = (clients or {}).get(LOCAL)
        known = {"local": None if local is None else local["mean"], "accuracy": accuracy, "global": shared}
        kind = next((kind for kind in reversed(self.ORDER) if known[kind] is not None), None)
        if kind is None:
            return ""
        value = known[kind]
        assert value is not None
        if not self._kind or self.ORDER.index(kind) > self.ORDER.index(self._kind):
            self._kind, self._best = kind, value        # what came before is of something else
        if kind == self._kind:
            self._last, self._best = value, max(self._best, value)
        return f"{_NAMES[kind]} {100 * value:.2f} %"

    @property
    def text(self) -> str:
        """For a bar."""
        if not self._kind:
            return ""
        return f"{_SHORT[self._kind]} {100 * self._last:.1f} % (best {100 * self._best:.1f})"


_NAMES = {"local": "clients' own images", "accuracy": "accuracy", "global": "global model"}
_SHORT = {"local": "own", "accuracy": "acc", "global": "global"}
