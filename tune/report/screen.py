"""The callback that shows a search at the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raylt.errors import count_of
from raylt.formatting import percent
from raylt.runs.callbacks.base import Callback, TrialReport
from raylt.runs.callbacks.console import PlainConsole


class SearchProgress(Callback):
    """Callback that shows a running search on standard error: a progress bar, and a line per trial."""

    def __init__(self) -> None:
        self._console = PlainConsole(stderr=True)
        self._bar = Progress(
            TextColumn("trials"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: Any = None

    def on_message(self, text: str, minor: bool = False) -> None:
        if self._console.is_terminal or not minor:
            self._console.print(text, soft_wrap=True, markup=False)

    def on_search_start(self, folder: Path, methods: Sequence[str], trials: int | None, at_once: int) -> None:
        count = "as many trials as the budget allows" if trials is None else count_of(trials, "trial")
        self.on_message(f"search of {', '.join(methods)}: {count}, {at_once} in parallel, folder {folder}")
        self._task = self._bar.add_task("", total=trials, best="")
        self._bar.start()

    def on_trial_end(self, trial: TrialReport, best: TrialReport | None, ended: int) -> None:
        values = " ".join(f"{key}={value}" for key, value in trial.values.items())
        self.on_message(f"{trial.trial}  {_outcome_of(trial)}  {values}")
        best_text = ""
        if best is not None and best.score is not None:
            best_text = f"best {best.trial} {100 * best.score:.2f} %"
        self._bar.update(self._task, completed=ended, best=best_text)

    def on_search_end(self) -> None:
        self._bar.stop()


def _outcome_of(trial: TrialReport) -> str:
    if trial.failed is not None:
        return f"failed: {trial.failed}"
    if trial.score is None:
        return "ended, to be compared with earlier trials"
    others = "".join(f"  {name} {percent(value)}" for name, value in trial.other_scores.items())
    return f"{trial.state} after round {trial.round}  {percent(trial.score)}{others}"
