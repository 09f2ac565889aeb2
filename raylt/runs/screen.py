"""`Screen`: the callback that shows a run at the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raylt.config import Config
from raylt.core.report import Report
from raylt.runs.callbacks import Callback


class Screen(Callback):
    """Shows a run on standard error as it goes: a bar on a terminal, a line per round elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(
            "{task.fields[accuracy]}"), TextColumn("ETA"), TimeRemainingColumn(), console=self._console,
            disable=not self._console.is_terminal)
        self._task = self._bar.add_task("round", total=None, accuracy="starting", visible=False)
        self._rounds = 0

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self._rounds, taken = config.federation.rounds, len(reports)
        self.on_message(f"{config.method['name']} on {config.data.source}, run folder {folder}"
                        + (f", continuing after step {taken}" if taken else ""))
        self._bar.update(self._task, total=self._rounds, completed=min(taken, self._rounds), visible=True)
        self._bar.start()

    def on_step(self, report: Report) -> None:
        accuracy = "" if report.accuracy is None else f"accuracy {100 * report.accuracy:.2f} %"
        troubles = [f"client {id}: reply rejected ({why})" for id, why in report.rejected.items()]
        troubles += [f"client {id}: no reply" for id in report.lost]
        for trouble in troubles:
            self.on_message(f"round {report.step}, {trouble}")
        if self._console.is_terminal:
            self._bar.update(self._task, completed=min(report.step, self._rounds), accuracy=accuracy)
        else:
            what = f"round {report.step}/{self._rounds}" if report.phase == "round" else report.phase
            self.on_message("  ".join(part for part in (what, accuracy, f"{report.seconds:.2f} s") if part))

    def on_message(self, text: str, minor: bool = False) -> None:
        if self._console.is_terminal or not minor:
            self._console.print(text, soft_wrap=True, markup=False)

    def on_end(self, summary: dict[str, Any] | None) -> None:
        self._bar.stop()
