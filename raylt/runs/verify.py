"""`raylt verify`: check the files of a run folder, and repair damage without losing committed steps.

Each file is checked against the files that it must agree with. A repair removes leftovers of killed processes, and
damaged files after an undamaged checkpoint. It rewrites the model of a finished run from the last checkpoint.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.device import one_thread
from raylt.core.evaluation import counts
from raylt.errors import CheckpointError, RayltError, count_of
from raylt.runs.folder import metrics_log, provenance, summary
from raylt.runs.folder.identity import FILE as IDENTITY
from raylt.runs.folder.identity import ORIGINS
from raylt.runs.folder.reader import LOCK, OUTLINE, Files
from raylt.runs.folder.writer import Journal
from raylt.runs.in_process import on_any_device, open_in_process
from raylt.runs.run import Run
from raylt.runs.signature import ENDING
from raylt.store import Folder

CHECKPOINTS = "checkpoints"
UNSEALED = "unsealed: no hash binds it"
LAST_MISSING = "missing: the run cannot be branched or continued from its last step"
EVENTS = "events.out.tfevents."  # names of TensorBoard's files begin with it
ALL_EVENTS = f"{EVENTS}*"
# Error codes for things that are missing on this machine or in this process.
ABSENT = ("config.missing-package", "data.not-found", "plugin.missing")
BOUND = {
    IDENTITY,
    ORIGINS,
    OUTLINE,
    LOCK,
    CHECKPOINTS,
    "config.yaml",
    "split.json",
    counts.FOLDER,
    metrics_log.FILE,
    provenance.FILE,
    summary.FILE,
    summary.MODEL,
}


@dataclass(frozen=True)
class Finding:
    """The result of checking one file of a run.

    Attributes:
        what: Name of the file.
        whole: Whether it is undamaged, as far as it was checked.
        detail: Description of its content, its damage, or the reason why it was not checked.
        mendable: Action that `repair` would take; None if the file is undamaged or cannot be repaired.
        checked: False if the file or something that the check needs is missing.
    """

    what: str
    whole: bool
    detail: str
    mendable: str | None = None
    checked: bool = True


def verify(folder: Path, data: bool = True) -> list[Finding]:
    """Check every file of a run without changing anything.

    Args:
        folder: The run's folder.
        data: Whether to also read the run's data and compare them with their hashes.
    """
    return list(_findings(Run.open(folder), data))


def verify_inner(folder: Path, what: str, state: str, continues: bool = True) -> list[Finding]:
    """Check every file of a run that belongs to a study or search, but not its data.

    Args:
        folder: The run's folder.
        what: Name of the run in the findings.
        state: State of the run, for the finding.
        continues: Whether an unfinished run needs a checkpoint. A search removes the checkpoints of ended trials.

    Returns:
        A finding for each damaged file; if there is none, one for the whole run, which names the files without a
        recorded hash, except TensorBoard's files.
    """
    # a study does not need models, so they may have been removed
    removed = not os.path.lexists(folder / summary.MODEL)
    needless = {*([summary.MODEL] if removed else []), *([] if continues else [CHECKPOINTS])}
    findings = [each for each in verify(folder, data=False) if each.what not in needless]
    damaged = [Finding(f"{what}/{each.what}", False, each.detail) for each in findings if not each.whole]
    unbound = "".join(
        f"; {each.what}: {UNSEALED}" for each in findings if each.detail == UNSEALED and each.what != ALL_EVENTS
    )
    return damaged or [Finding(what, True, f"{state}{unbound}")]


def repair(folder: Path) -> list[str]:
    """Remove files left by killed processes, and damaged files after the last undamaged checkpoint.

    The damaged or missing model of a finished run is rewritten from the last checkpoint.

    Returns:
        A line for each repair.

    Raises:
        FolderHeld: Another process is working on the run.
        CheckpointError: The folder is not a run folder. Nothing is changed.
    """
    run = Run.open(folder)
    files = Files(run.folder)
    with Journal(folder), Folder.open(folder) as run_folder:
        done = [f"removed {name}, which a killed process left" for name in _sweep(run_folder)]
        target = _repair_target(files)
        if target is None:
            return done
        for step in target.unusable:
            with run_folder.inner(CHECKPOINTS) as checkpoints:
                checkpoints.remove(f"{step:06d}")
            done.append(f"removed checkpoint {step:06d}")
        if target.cut:
            run_folder.write(metrics_log.FILE, "".join(text + "\n" for text in target.lines.texts))
            done.append(f"cut {metrics_log.FILE} after line {len(target.lines.texts)}")
        if files.ended:
            done += _rewrite_model(run, files)
    return done


def _rewrite_model(run: Run, files: Files) -> list[str]:
    """Rewrite the model of a finished run from its last checkpoint, unless the model is undamaged.

    Returns:
        A line that says so, or why the model cannot be rewritten.
    """
    if _check_model(files).whole:
        return []
    last = len(files.lines().reports)
    if last not in checkpoint.steps(run.folder / CHECKPOINTS):
        return [f"{summary.MODEL} cannot be rewritten: the last checkpoint is missing. Put the original file back"]
    try:
        saved = files.checkpoint_after(last)
        recorded = files.summary()["model_sha256"]
        with one_thread():  # as in the server, for the same bits
            model = open_in_process(
                on_any_device(run.setup), run.outline, run.folder, saved, clients=False
            ).deployed_model()
    except RayltError as error:
        return [f"{summary.MODEL} cannot be rewritten: {error}"]
    if checkpoint.hash_tensors(model) != recorded:
        return [f"{summary.MODEL} cannot be rewritten: the last checkpoint gives another model on this machine"]
    checkpoint.replace_tensors(run.folder, summary.MODEL, model)
    return [f"rewrote {summary.MODEL} from the last checkpoint"]


@dataclass(frozen=True)
class _RepairTarget:
    """The state to which a run can be repaired.

    Attributes:
        lines: The undamaged lines.
        cut: Whether metrics.jsonl has more lines, which must be removed.
        unusable: Steps of checkpoints that are damaged or come after damaged lines.
    """

    lines: metrics_log.Lines
    cut: bool
    unusable: list[int]


def _repair_target(files: Files) -> _RepairTarget | None:
    """Return the state to which a run can be repaired, or None if it cannot be repaired."""
    root = files.identity["sha256"]
    steps = checkpoint.steps(files.path / CHECKPOINTS)
    with Folder.open(files.path) as folder:
        with suppress(CheckpointError):
            lines = metrics_log.read_lines(folder, root)
            damaged = [step for step in steps if isinstance(_checkpoint_at(files, step, lines), str)]
            return _RepairTarget(lines, lines.torn, damaged if len(damaged) < len(steps) else [])
        if summary.FILE in folder.names():
            return None  # not repairable: the run has ended, and its last lines are lost
        lines = _undamaged_lines(folder, root)
    for step in reversed(steps):
        if isinstance(_checkpoint_at(files, step, lines), Checkpoint):
            return _RepairTarget(lines, True, [other for other in steps if other > step])
    return None


def _undamaged_lines(folder: Folder, root: str) -> metrics_log.Lines:
    """Return the lines of metrics.jsonl before the first unreadable or wrongly linked line."""

    def is_damaged(most: int) -> bool:
        try:
            metrics_log.read_lines(folder, root, most)
        except CheckpointError:
            return True
        return False

    count = folder.read(metrics_log.FILE, metrics_log.MAX_FILE_BYTES).count(b"\n")
    first_damaged = bisect_left(range(count + 1), True, key=is_damaged)
    return metrics_log.read_lines(folder, root, first_damaged - 1)


def _findings(run: Run, data: bool) -> Iterator[Finding]:
    files = Files(run.folder)
    yield finding_of(IDENTITY, lambda: f"run {files.identity['sha256'][:16]}")
    yield finding_of("config.yaml", lambda: f"{files.config().method['name']}, as the run was made")
    if (run.folder / ORIGINS).is_symlink() or (run.folder / ORIGINS).exists():
        yield finding_of(ORIGINS, lambda: ", ".join(plugin["name"] for plugin in files.plugins()))
    yield finding_of(
        "split.json", lambda: f"split {files.split().sha256[:16]}, {count_of(len(files.split().clients), 'client')}"
    )
    yield finding_of(OUTLINE, lambda: "not kept" if files.outline() is None else "the task without its data")
    if data:
        yield _check_data(run)
    yield _check_lines(files)
    checkpoints = finding_of(CHECKPOINTS, lambda: str(len(checkpoint.steps(run.folder / CHECKPOINTS))))
    if checkpoints.whole:
        yield from _check_checkpoints(files)
    else:
        yield checkpoints
    yield from _check_matrices(files)
    yield finding_of(provenance.FILE, lambda: _describe_provenance(files))
    lock = finding_of(LOCK, lambda: _check_plain_file(run.folder, LOCK))
    if not lock.whole:
        yield lock
    if files.ended:
        yield finding_of(summary.FILE, lambda: f"accuracy {files.summary()['accuracy']['last']:.4f}")
        yield _check_model(files)
    with Folder.open(run.folder) as run_folder:
        unfinished = _unfinished(run_folder)
        for name in unfinished:
            yield Finding(name, False, "left by a process that was killed while it wrote", "remove it")
        yield from unbound_in(run_folder, BOUND | set(unfinished))


def unbound_in(folder: Folder, bound: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each file of a folder that has no recorded hash, and one for all files of TensorBoard.

    Args:
        bound: Names of the files with a recorded hash.
    """
    names = [name for name in folder.names() if name not in bound and not name.endswith(ENDING)]
    for name in dict.fromkeys(ALL_EVENTS if name.startswith(EVENTS) else name for name in names):
        yield Finding(name, True, UNSEALED)


def finding_of(what: str, read: Callable[[], str]) -> Finding:
    """Return the result of checking a file; `read` reads the file and describes its content."""
    try:
        return Finding(what, True, read())
    except RayltError as error:
        return Finding(what, False, str(error))


def _check_data(run: Run) -> Finding:
    """Compare a run's data with their hashes. Data that are not on this machine do not count as damage."""
    try:
        return Finding("data", True, f"{run.task.name}, as the run read it")
    except RayltError as error:
        absent = error.code in ABSENT
        return Finding("data", absent, str(error), checked=not absent)


def _describe_provenance(files: Files) -> str:
    lines = files.provenance()
    unbound = [line for line in lines if not provenance.LINKS & line.keys()]
    return f"processes: {len(lines)}" + (", unsealed: of an early version" if unbound else ", in order")


def _check_plain_file(folder: Path, name: str) -> str:
    """Raise CheckpointError unless this name belongs to a plain file."""
    with Folder.open(folder) as run_folder:
        if name in run_folder.names():
            run_folder.place(name)
    return name


def _check_lines(files: Files) -> Finding:
    try:
        lines = files.lines_alone()
    except CheckpointError as error:
        target = None
        with suppress(CheckpointError):
            target = _repair_target(files)
        remedy = None if target is None else f"cut it after line {len(target.lines.texts)} and continue from there"
        return Finding(metrics_log.FILE, False, str(error), remedy)
    if lines.torn:
        detail = f"a kill cut off the line after line {len(lines.texts)}"
        return Finding(metrics_log.FILE, False, detail, "cut it there")
    unsealed = not lines.sealed and not files.ended
    detail = f", line {len(lines.texts)} unsealed: of an early version" if unsealed else ""
    return Finding(metrics_log.FILE, True, f"{count_of(len(lines.texts), 'step')} in order{detail}")


def _check_checkpoints(files: Files) -> Iterator[Finding]:
    try:
        lines = files.lines_alone()
    except CheckpointError:
        lines = None
    states = {step: _checkpoint_at(files, step, lines) for step in checkpoint.steps(files.path / CHECKPOINTS)}
    any_usable = any(isinstance(state, Checkpoint) for state in states.values())
    for step, state in states.items():
        what = f"{CHECKPOINTS}/{step:06d}"
        if isinstance(state, Checkpoint):
            yield Finding(what, True, count_of(len(state.parts), "part"))
        else:
            yield Finding(what, False, str(state), "remove it" if any_usable and isinstance(state, str) else None)
    if lines is None:
        return
    if files.ended and len(lines.texts) not in states:
        # no damage, since the results need no checkpoint
        yield Finding(f"{CHECKPOINTS}/{len(lines.texts):06d}", True, LAST_MISSING, checked=False)
    elif not states and metrics_log.was_saved(lines):
        yield Finding(CHECKPOINTS, False, "missing: the run cannot continue")


def _check_model(files: Files) -> Finding:
    """Check the model of a finished run. It can be rewritten if the last checkpoint is undamaged."""
    finding = finding_of(summary.MODEL, lambda: f"{len(files.model())} entries, as recorded in {summary.FILE}")
    if finding.whole:
        return finding
    try:
        files.checkpoint_after(len(files.lines().reports))
    except CheckpointError:
        return finding
    return replace(finding, mendable="rewrite it from the last checkpoint")


def _check_matrices(files: Files) -> Iterator[Finding]:
    """Yield one finding if all files of confusion counts are undamaged, otherwise one per damaged file.

    A long run deletes its oldest counts, except for steps with a checkpoint. So after `KEPT` evaluations the first
    files may be missing, but later files may not.
    """
    hashes: dict[int, str] = {}
    with suppress(CheckpointError):
        hashes = {report["step"]: report["confusion"] for report in files.lines().reports if report.get("confusion")}
    steps = list(hashes)
    if len(steps) > counts.KEPT:
        absent, spared = counts.missing(files.path, steps), checkpoint.steps(files.path / CHECKPOINTS)
        first = next((step for step in steps if step not in absent and step not in spared), steps[-1])
        steps = [step for step in steps if step >= first or step in spared]
    findings = [
        finding_of(
            f"{counts.FOLDER}/{step:06d}.npz", lambda step=step: counts.read(files.path, step, hashes[step]).sha256
        )
        for step in steps
    ]
    damaged = [finding for finding in findings if not finding.whole]
    if steps and not damaged:
        yield Finding(counts.FOLDER, True, f"{count_of(len(steps), 'evaluation')}, as recorded in {metrics_log.FILE}")
    yield from damaged


def _checkpoint_at(files: Files, step: int, lines: metrics_log.Lines | None) -> Checkpoint | str | CheckpointError:
    """Return the checkpoint after a step, a text if it is damaged, or an error if it belongs to another run.

    Args:
        lines: Lines that the checkpoint must match; None if they cannot be read.
    """
    try:
        saved = checkpoint.at(files.path / CHECKPOINTS, step)
    except CheckpointError as error:
        return f"damaged ({error})"
    try:
        if lines is not None:
            lines.check(saved)
    except CheckpointError as error:
        return error
    return saved


def _unfinished(run_folder: Folder) -> list[str]:
    """Return the unfinished files that killed processes left."""
    names = run_folder.unfinished()
    with suppress(CheckpointError), run_folder.inner(CHECKPOINTS) as checkpoints:
        names += [f"{CHECKPOINTS}/{name}" for name in checkpoints.unfinished()]
    return names


def _sweep(run_folder: Folder) -> list[str]:
    """Remove the unfinished files that killed processes left, and return their names."""
    swept = checkpoint.sweep(run_folder)
    if CHECKPOINTS in run_folder.names():
        with run_folder.inner(CHECKPOINTS) as checkpoints:
            swept += [f"{CHECKPOINTS}/{name}" for name in checkpoint.sweep(checkpoints)]
    return swept
