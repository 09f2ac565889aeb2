"""Carries out a run from its first step to its summary, in this process or on Ray."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any, Literal, Protocol, get_args

from raylt.config import Config, EvaluationConfig
from raylt.config.idle import idle_settings
from raylt.core.checkpoint.checkpoint import Checkpoint, Seal
from raylt.core.device import one_thread
from raylt.core.fleet.client_host import IN_STACKS
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.method import Method
from raylt.core.report import CHECKPOINT, RoundReport
from raylt.core.server import ENDED_EARLY
from raylt.core.setup import Setup
from raylt.core.training.stacked_sgd import MAX_STACKED_SAMPLES
from raylt.data.augment import draw_view
from raylt.data.task import Task, judged_images_of
from raylt.disk import continuable
from raylt.errors import ConfigError, ServerLost, describe_error
from raylt.models.split import SplitModel
from raylt.models.trainable import trains_on_features
from raylt.own_code.commands import resume_call
from raylt.own_code.top_level_names import claim
from raylt.runs import stopping
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.prediction_grid import draw_prediction_grid
from raylt.runs.folder import provenance
from raylt.runs.folder.summary import SERVER_DEATHS, summarise
from raylt.runs.folder.writer import Journal
from raylt.runs.in_process import check_threads, forked_fleet, open_in_process
from raylt.runs.preparation import prepare
from raylt.seeds import seeded

FleetKind = Literal["ray", "local", "processes"]
MAX_SERVER_DEATHS = 3  # the run ends when the server's process dies this often in the same step


class Steps(Protocol):
    """The interface to an experiment in this process or in a server actor."""

    @property
    def done(self) -> bool: ...
    def describe(self) -> dict[str, str | None]: ...
    def advance(self, seal: Seal | None = None) -> RoundReport: ...
    def export_model(self) -> dict[str, str]: ...


def check_fleet(fleet: str, address: str | None, kinds: Sequence[str] = get_args(FleetKind)) -> None:
    """Raise ConfigError if the fleet is unknown, or if an address is given to a fleet without Ray.

    Args:
        kinds: Fleets that the caller supports.
    """
    if fleet not in kinds:
        raise ConfigError(
            f"fleet: unknown fleet ({fleet!r}). Give {', '.join(kinds[:-1])} or {kinds[-1]}.",
            code="config.unknown-name",
            key="fleet",
            value=fleet,
        )
    if fleet != "ray" and address is not None:
        raise ConfigError(
            f"address: only the fleet ray uses a cluster, and the fleet is {fleet} ({address}). Leave out the address, "
            "or set the fleet to ray.",
            code="config.conflict",
            key="address",
            value=address,
        )


def carry_out(
    setup: Setup, task: Task, journal: Journal, fleet: FleetKind, address: str | None, callback: Callback
) -> None:
    """Continue a run from its last committed step to the end, and unlock the run folder.

    Args:
        setup: Values that the configuration names.
        task: The data and their split.
        journal: The run folder, open for writing.
        fleet: "ray" for client actors, "local" for all clients in this process, "processes" for forks of it.
        address: Address of a running Ray cluster.
        callback: Receives the events of the run.

    Raises:
        CheckpointError: Steps were committed, but no checkpoint is usable.
        ConfigError: The fleet is unknown or cannot use the address, the cluster does not respond or is too small, or
            the device cannot be used.
        StopAsked: The run stopped after a checkpoint, because `raylt stop` requested it.
    """
    summary = None
    try:
        with journal, continuable(journal.folder, resume_call(journal.folder)):
            check_fleet(fleet, address)
            figures = _take_all_steps(setup, task, journal, fleet, address, callback)
            summary = journal.write_summary(figures | provenance.of_summary(journal.folder))
            stopping.withdraw(journal.folder)  # remove a request that came too late
            _show_predictions(setup, task, journal, callback)
    except BaseException:
        try:
            callback.on_end(summary)
        except Exception as error:  # the error that ended the run is more important
            with suppress(Exception):
                callback.on_message(f"on_end failed: {describe_error(error)}")
        raise
    callback.on_end(summary)


def _take_all_steps(
    setup: Setup, task: Task, journal: Journal, fleet: FleetKind, address: str | None, callback: Callback
) -> dict[str, Any]:
    """Take the remaining steps and compute the summary.

    If the server's process dies, continue from the last checkpoint.
    """
    started = False
    deaths = 0
    committed = -1
    while True:
        saved, faults = journal.rewind()
        for fault in faults:
            callback.on_message(f"{fault}; continuing after step {saved.facts['step'] if saved else 0}")
        if not started:
            journal.note_start(saved.facts["step"] if saved else 0)
            stopping.withdraw(journal.folder)
            callback.on_start(journal.folder, setup.config, journal.reports())
            if saved is None:
                journal.note_images(task.image_notes)
            for note in task.notes:
                callback.on_message(note)
            started = True
        try:
            return _take_steps(setup, task, journal, saved, fleet, address, callback)
        except ServerLost as error:
            before = committed
            committed = len(journal.reports())
            deaths = deaths + 1 if committed == before else 1
            remedy = "the run ends" if deaths == MAX_SERVER_DEATHS else "starting it again from the last checkpoint"
            journal.note(f"{error.cause}; {remedy}")
            if deaths == MAX_SERVER_DEATHS:
                journal.note_failure(error)
                raise
            callback.on_message(f"{error.cause}; {remedy}")
        except Exception as error:
            journal.note_failure(error)
            raise


def notices(setup: Setup, task: Task, model: SplitModel, saved: Checkpoint | None = None) -> Iterator[str]:
    """Yield what is unusual about a prepared run, and which of its settings have no effect."""
    config = setup.config
    if setup.has_random_frozen_parts and not trains_on_features(config.trainable, task.kind):
        yield f"the frozen parts of {config.model} are random, since weights is not set"
    if saved is None:
        yield from idle_settings(config)
        if not any(parameter.requires_grad for parameter in model.encoder.parameters()):
            yield from _idle_fields(setup.method, config)
        if not setup.method.personal and not model.local_buffers:
            for name in ("personal", "fresh"):
                value = getattr(config.evaluation, name)
                if value != EvaluationConfig.model_fields[name].default:
                    yield (
                        f"evaluation.{name} = {str(value).lower()} has no effect, because clients of "
                        f"{setup.method.name} use the global model"
                    )
    if config.views != Config.model_fields["views"].default and setup.augment is not draw_view:
        yield f"views = {config.views} has no effect, since only augmented images of a frozen encoder have views"


def _idle_fields(method: Method, config: Config) -> Iterator[str]:
    """Yield a notice for each field of `encoder_fields` that differs from its default."""
    for name in method.encoder_fields:
        value = getattr(method, name)
        if value != type(method).model_fields[name].default:
            yield (
                f"method.{name} = {str(value).lower()} has no effect, because trainable = {config.trainable} leaves "
                "nothing of the encoder to train"
            )


def _take_steps(
    setup: Setup,
    task: Task,
    journal: Journal,
    saved: Checkpoint | None,
    fleet: FleetKind,
    address: str | None,
    callback: Callback,
) -> dict[str, Any]:
    """Take the remaining steps, from a checkpoint that `Journal.rewind` returned, and compute the summary."""
    if fleet != "ray":
        check_threads(setup.config)
    setup, task, model = prepare(setup, task, saved, callback.on_message)
    for notice in notices(setup, task, model, saved):
        callback.on_message(notice)
    if setup.method.finishes:
        with one_thread(), seeded(0):
            seconds = setup.method.last_phase_seconds(task.spec, model)
        if seconds is not None:
            callback.on_last_phase(seconds)
    with _experiment(setup, task, journal, saved, fleet, address, callback) as experiment:
        facts = experiment.describe()
        provenance.check_device(journal.folder, setup.config, facts)
        provenance.note(journal.folder, fleet, len(journal.reports()), setup.config, facts)
        if facts["stacked"] not in (None, IN_STACKS):
            callback.on_message(f"local.stacked=auto stacks {facts['stacked']}")
        if facts["stacked"] == IN_STACKS:
            smallest = min(len(shard) for shard in task.shards if len(shard))
            if smallest > MAX_STACKED_SAMPLES:
                callback.on_message(
                    f"local.stacked=auto stacks no client, because each has more than {MAX_STACKED_SAMPLES} samples"
                )
        while not experiment.done:
            report = experiment.advance(journal.seal)
            journal.append(report)
            callback.on_step(report)
            if report.phase == "round" and ENDED_EARLY in report.figures:
                callback.on_message(f"rounds ended {report.figures[ENDED_EARLY]}")
            if CHECKPOINT in report.timings and not experiment.done and stopping.is_asked(journal.folder):
                raise stopping.StopAsked
        tests = judged_images_of(task)
        model = experiment.export_model()
        summary = summarise(journal.reports(), setup.method.name, task.split.sha256, tests, model)
        summary["troubles"][SERVER_DEATHS] = journal.server_deaths()
        return summary


def _experiment(
    setup: Setup,
    task: Task,
    journal: Journal,
    saved: Checkpoint | None,
    fleet: FleetKind,
    address: str | None,
    callback: Callback,
) -> AbstractContextManager[Steps]:
    if fleet != "ray":
        return _in_this_process(setup, task, journal, saved, fleet, callback)
    claim()
    from actors.launch import open_experiment  # the only import of Ray code

    return open_experiment(
        setup, task, journal.folder, address, callback.on_message, callback.on_progress, callback.on_items
    )


@contextmanager
def _in_this_process(
    setup: Setup, task: Task, journal: Journal, saved: Checkpoint | None, fleet: FleetKind, callback: Callback
) -> Iterator[Steps]:
    def note(text: str) -> None:
        journal.note(text)
        callback.on_message(text)

    of_clients = forked_fleet if fleet == "processes" else LocalFleet
    with one_thread():
        experiment = open_in_process(setup, task, journal.folder, saved, of_clients)
        experiment.fleet.run_folder = journal.folder
        experiment.fleet.on_note = note
        experiment.fleet.on_progress = callback.on_progress
        experiment.fleet.on_items = callback.on_items
        with closing(experiment.fleet):
            yield experiment


def _show_predictions(setup: Setup, task: Task, journal: Journal, callback: Callback) -> None:
    """Draw test images with predictions.

    A failure is only reported as a message, since the run is already finished.
    """
    try:
        picture = draw_prediction_grid(setup, task, journal.folder)
        journal.show(picture)
        callback.on_picture(picture)
    except Exception as error:
        callback.on_message(f"no picture of predictions: {describe_error(error)}")
