"""`Callback`: what whoever wants to follow a run is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylt.config import Config
from raylt.core.report import Report

if TYPE_CHECKING:
    from raylt.runs.grid import Picture


class Callback:
    """Told what happens in a run, in the process that started it. Override what is of interest; nothing is done here.

    What a callback raises ends the run, which can be resumed.
    """

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        """Before the first step.

        Args:
            folder: the run folder.
            config: with all fields of the method.
            reports: the steps that were committed before, of a run that is resumed.
        """

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """While a step goes on, at most a few times a second on Ray.

        Args:
            stage: the client function that runs, "evaluation", or what a method does at its server ("synthesis").
            done, total: clients that have answered and that were asked; 0 where none are.
        """

    def on_step(self, report: Report) -> None:
        """After a step was committed."""

    def on_message(self, text: str, minor: bool = False) -> None:
        """A line for people: what broke and was mended, where the run goes; minor: only for someone who watches."""

    def on_picture(self, picture: "Picture") -> None:
        """After the last step, with test images and what the model says of them. What is raised here is told, and the
        run is done all the same."""

    def on_end(self, summary: dict[str, Any] | None) -> None:
        """At the end, whatever it is.

        Args:
            summary: the content of summary.json; None where the run was interrupted or failed.
        """


class Callbacks(Callback):
    """Several as one, told in their order."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = tuple(callbacks)

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        for callback in self._callbacks:
            callback.on_start(folder, config, reports)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.on_progress(stage, done, total)

    def on_step(self, report: Report) -> None:
        for callback in self._callbacks:
            callback.on_step(report)

    def on_message(self, text: str, minor: bool = False) -> None:
        for callback in self._callbacks:
            callback.on_message(text, minor)

    def on_picture(self, picture: "Picture") -> None:
        for callback in self._callbacks:
            callback.on_picture(picture)

    def on_end(self, summary: dict[str, Any] | None) -> None:
        """All of them are told, whatever one raises; the first error is raised then."""
        errors = []
        for callback in self._callbacks:
            try:
                callback.on_end(summary)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
