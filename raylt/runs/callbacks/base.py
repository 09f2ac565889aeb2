"""`Callback`: the protocol of everything that observes a run, a study or a search."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylt.errors import ConfigError

if TYPE_CHECKING:  # avoids importing torch for observers of searches
    from raylt.config import Config
    from raylt.core.experiment import RoundReport
    from raylt.core.fleet.item_progress import ItemsProgress
    from raylt.runs.callbacks.prediction_grid import Picture


@dataclass(frozen=True)
class StudyStatus:
    """Progress of a study.

    Attributes:
        done, total: Number of finished runs, and of all runs of the study.
        running: Folders of the active runs, with the server's progress in brackets while only the server works.
        share: Completed share of the work, from 0 to 1.
        left_s: Estimated seconds until the end; None until a run has been timed.
        untimed_finish: Whether `left_s` does not include the last phases of some runs, because their duration is
            unknown.
    """

    done: int
    total: int
    running: Sequence[str]
    share: float
    left_s: float | None
    untimed_finish: bool = False


@dataclass(frozen=True)
class TrialReport:
    """The outcome of a search's trial that has ended.

    Attributes:
        trial: Name of the trial and of its folder.
        values: Settings that it tried, by dotted key.
        state: "done", "stopped" or "failed"; "open" if earlier trials must end before it can be compared.
        round: Round of the last score that counts; None if there is none yet.
        score: The last score that counts; None if there is none yet.
        failed: Reason why it failed, in one line; None if it did not fail.
        other_scores: Scores by the search's other metrics, by name; empty if there are none yet.
    """

    trial: str
    values: dict[str, Any]
    state: str
    round: int | None
    score: float | None
    failed: str | None
    other_scores: Mapping[str, float | None] = field(default_factory=dict)


class Callback:
    """An observer of a run, a study or a search, called in the process that started it.

    Every event has an empty default: override the ones of interest. An exception that a callback raises ends the run,
    study or search, which can be resumed.
    """

    def on_message(self, text: str, minor: bool = False) -> None:
        """Receive a line for the user, such as a note on a repaired fault.

        Args:
            text: The line.
            minor: Whether the line is of interest only while someone is watching.
        """

    # a run

    def on_start(self, folder: Path, config: "Config", reports: list[dict[str, Any]]) -> None:
        """Receive the folder and the configuration of a run before the first step.

        Args:
            folder: The run folder.
            config: Configuration with all fields of the method.
            reports: Lines of metrics.jsonl, if the run is resumed.
        """

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Receive the progress inside a step; on Ray at most a few times a second.

        Args:
            stage: Name of the running client or server function, "evaluation", or a stage of the method's server such
                as "synthesis".
            done: Number of clients that have replied, or of finished items of the server's own work.
            total: Number of clients that were asked, or of items; 0 if there are none.
        """

    def on_items(self, progress: "ItemsProgress") -> None:
        """Receive the progress of server-side work on several items, such as the synthesis of each class."""

    def on_last_phase(self, seconds: float) -> None:
        """Receive the expected duration of the method's last phase on one core, before the first step."""

    def on_step(self, report: "RoundReport") -> None:
        """Receive the report of a committed step: a round, or the method's work after the last round."""

    def on_picture(self, picture: "Picture") -> None:
        """Receive a picture of test images and predictions after the last step.

        An exception here becomes a message and does not end the run.
        """

    def on_end(self, summary: dict[str, Any] | None) -> None:
        """Receive the end of the run, whether it finished, failed or was interrupted.

        Args:
            summary: Content of summary.json; None if the run was interrupted or failed.
        """

    # a study

    def on_study_progress(self, status: StudyStatus) -> None:
        """Receive the progress of a study, after each event of its runs."""

    # a search

    def on_search_start(self, folder: Path, methods: Sequence[str], trials: int | None, at_once: int) -> None:
        """Receive the folder and size of a search before the search's first trial.

        Args:
            folder: The search's folder.
            methods: Names of the searched methods.
            trials: Total number of trials; None if the budget decides.
            at_once: Number of trials that run at the same time.
        """

    def on_trial_end(self, trial: TrialReport, best: TrialReport | None, ended: int) -> None:
        """Receive a trial that has ended, whether it finished, stopped early or failed.

        Args:
            trial: The trial.
            best: The best trial so far; None if no trial has a score yet.
            ended: Number of trials that have ended so far.
        """

    def on_search_end(self) -> None:
        """Receive the end of the search, whether it finished, failed or was interrupted."""


class Callbacks(Callback):
    """A callback that calls several callbacks in order."""

    def __init__(self, callbacks: Sequence[Callback]):
        self._callbacks = tuple(callbacks)

    def on_message(self, text: str, minor: bool = False) -> None:
        self._each(lambda callback: callback.on_message(text, minor))

    def on_start(self, folder: Path, config: "Config", reports: list[dict[str, Any]]) -> None:
        self._each(lambda callback: callback.on_start(folder, config, reports))

    def on_progress(self, stage: str, done: int, total: int) -> None:
        self._each(lambda callback: callback.on_progress(stage, done, total))

    def on_items(self, progress: "ItemsProgress") -> None:
        self._each(lambda callback: callback.on_items(progress))

    def on_last_phase(self, seconds: float) -> None:
        self._each(lambda callback: callback.on_last_phase(seconds))

    def on_step(self, report: "RoundReport") -> None:
        self._each(lambda callback: callback.on_step(report))

    def on_picture(self, picture: "Picture") -> None:
        self._each(lambda callback: callback.on_picture(picture))

    def on_end(self, summary: dict[str, Any] | None) -> None:
        """Call all callbacks even if one raises, then raise the first error."""
        errors = []
        for callback in self._callbacks:
            try:
                callback.on_end(summary)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def on_study_progress(self, status: StudyStatus) -> None:
        self._each(lambda callback: callback.on_study_progress(status))

    def on_search_start(self, folder: Path, methods: Sequence[str], trials: int | None, at_once: int) -> None:
        self._each(lambda callback: callback.on_search_start(folder, methods, trials, at_once))

    def on_trial_end(self, trial: TrialReport, best: TrialReport | None, ended: int) -> None:
        self._each(lambda callback: callback.on_trial_end(trial, best, ended))

    def on_search_end(self) -> None:
        self._each(lambda callback: callback.on_search_end())

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            call(callback)


def checked(callbacks: Any) -> Sequence[Callback]:
    """Return a user's callbacks after checking their types.

    Raises:
        ConfigError: The value is not a list, or an element is not a callback.
    """
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    wrong = [each for each in given if not isinstance(each, Callback)]
    if not wrong and isinstance(callbacks, Iterable):
        return given
    wrong = wrong or [callbacks]
    raise ConfigError(
        f"callbacks: is not a list of callbacks ({wrong[0]!r}). Give objects of subclasses of raylt.Callback, as in "
        "callbacks=[MyCallback()].",
        code="config.wrong-type",
        key="callbacks",
        value=repr(wrong[0]),
    )
