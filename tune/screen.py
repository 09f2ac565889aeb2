"""`Screen`: the watcher that shows a search at the terminal."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tune.desk import Watcher
from tune.plan import Plan, Record, State
from tune.report import table_of


class Screen(Watcher):
    """Shows a search on standard error as it goes: a bar on a terminal, a line per trial."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = Progress(TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"),
                             TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal)
        self._plan: Plan
        self._state: State
        self._task: Any = None

    def on_start(self, folder: Path, plan: Plan, state: State, at_once: int) -> None:
        self._plan, self._state = plan, state
        total = sum(track.total for track in state.tracks.values())
        many = "as many trials as the budget allows" if total == math.inf else f"{total:.0f} trials"
        self.on_message(f"search of {', '.join(plan.methods)}: {many}, {at_once} at once, folder {folder}")
        self._task = self._bar.add_task("", total=None if total == math.inf else total, best="")
        self._bar.start()

    def on_message(self, text: str, minor: bool = False) -> None:
        if self._console.is_terminal or not minor:
            self._console.print(text, soft_wrap=True, markup=False)

    def on_trial(self, record: Record, state: State) -> None:
        outcome = record.outcome
        values = " ".join(f"{key}={value}" for key, value in record.values.items())
        if record.failed is not None:
            what = f"failed: {record.failed}"
        elif outcome is None or outcome.score is None:
            what = "ended, to be compared with earlier trials"
        else:
            what = f"{outcome.state} after round {outcome.step}  {100 * outcome.score:.2f} %"
        self.on_message(f"{record.id}  {what}  {values}")
        best = state.best()
        self._bar.update(self._task, completed=sum(r.closed for r in state.trials),
                         best="" if best is None or best.outcome is None or best.outcome.score is None
                         else f"best {best.id} {100 * best.outcome.score:.2f} %")

    def on_end(self) -> None:
        self._bar.stop()

    def table(self) -> Table:
        """The trials of the search that was shown, best first."""
        return table_of(self._plan, self._state)
