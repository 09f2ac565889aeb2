"""`raylt verify`: what of a run folder is whole, and what can be mended without making anything up."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raylt.core import checkpoint, confusions
from raylt.core.checkpoint import Checkpoint
from raylt.errors import CheckpointError, RayltError
from raylt.runs import lines, provenance, sealed
from raylt.runs.files import Files
from raylt.runs.identity import FILE as IDENTITY
from raylt.runs.identity import ORIGINS
from raylt.runs.journal import LOCK, OUTLINE, Journal
from raylt.runs.run import Run
from raylt.store import Folder

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Finding:
    """What is known of one file of a run.

    Attributes:
        detail: what it is, or what is the matter with it.
        mendable: what `repair` would do about it; None where it is whole, or nothing can be done.
    """

    what: str
    whole: bool
    detail: str
    mendable: str | None = None


def verify(folder: Path) -> list[Finding]:
    """Every file of a run, each held against those that it must agree with; nothing is changed."""
    return list(_findings(Run.open(folder)))


def repair(folder: Path) -> list[str]:
    """Removes what a kill left and what is damaged where something whole stands behind it.

    Returns:
        What was done, a line for each.

    Raises:
        FolderHeld: a process is at the run.
        CheckpointError: it is no run folder; nothing is touched.
    """
    files = Files(Run.open(folder).folder)
    with Journal(folder), Folder.open(folder) as here:
        done = [f"removed {name}, which a process left that was killed" for name in _sweep(here)]
        goal = _goal(files)
        if goal is None:
            return done
        for step in goal.needless:
            with here.inner(CHECKPOINTS) as inner:
                inner.remove(f"{step:06d}")
            done.append(f"removed checkpoint {step:06d}")
        if goal.cut:
            here.write(lines.FILE, "".join(text + "\n" for text in goal.lines.texts))
            done.append(f"cut {lines.FILE} after line {len(goal.lines.texts)}")
    return done


@dataclass(frozen=True)
class _Goal:
    """What a run can be brought back to.

    Attributes:
        lines: those that are whole.
        cut: whether metrics.jsonl has more.
        needless: steps of checkpoints that are damaged, or follow lines that are.
    """

    lines: lines.Lines
    cut: bool
    needless: list[int]


def _goal(files: Files) -> _Goal | None:
    """None where nothing can be mended."""
    root, steps = files.identity["sha256"], checkpoint.steps(files.path / CHECKPOINTS)
    with Folder.open(files.path) as folder:
        with suppress(CheckpointError):
            whole = lines.read_lines(folder, root)
            damaged = [step for step in steps if isinstance(_at(files, step, whole), str)]
            return _Goal(whole, whole.torn, damaged if len(damaged) < len(steps) else [])
        if sealed.FILE in folder.names():
            return None             # the run ended with lines that nobody has any more
        known = _whole_lines(folder, root)
    for step in reversed(steps):
        if isinstance(_at(files, step, known), Checkpoint):
            return _Goal(known, True, [other for other in steps if other > step])
    return None


def _whole_lines(folder: Folder, root: str) -> lines.Lines:
    """The lines before the first that cannot be read or does not follow."""
    def fails(most: int) -> bool:
        with suppress(CheckpointError):
            lines.read_lines(folder, root, most)
            return False
        return True

    count = folder.read(lines.FILE, lines.LIMIT).count(b"\n")
    return lines.read_lines(folder, root, bisect_left(range(count + 1), True, key=fails) - 1)


def _findings(run: Run) -> Iterator[Finding]:
    files = Files(run.folder)
    yield _look(IDENTITY, lambda: f"run {files.identity['sha256'][:16]}")
    yield _look("config.yaml", lambda: f"{files.config().method['name']}, as the run was made")
    if (run.folder / ORIGINS).is_symlink() or (run.folder / ORIGINS).exists():
        yield _look(ORIGINS, lambda: ", ".join(guest["name"] for guest in files.guests()))
    yield _look("split.json", lambda: f"split {files.split().sha256[:16]}, {len(files.split().clients)} clients")
    yield _look(OUTLINE, lambda: "not kept" if files.outline() is None else "what models need to know of the data")
    yield _look("data", lambda: f"{run.task.name}, as the run saw them")
    yield _lines(files)
    if (checkpoints := _look(CHECKPOINTS, lambda: str(len(checkpoint.steps(run.folder / CHECKPOINTS))))).whole:
        yield from _checkpoints(files)
    else:
        yield checkpoints
    yield from _matrices(files)
    for name in (provenance.FILE, LOCK):
        if not (other := _look(name, lambda name=name: _plain(run.folder, name))).whole:
            yield other
    if files.ended:
        yield _look(sealed.FILE, lambda: f"accuracy {files.summary()['accuracy']['last']:.4f}")
        yield _look(sealed.MODEL, lambda: f"{len(files.model())} entries, as {sealed.FILE} tells of them")
    with Folder.open(run.folder) as here:
        for name in _left(here):
            yield Finding(name, False, "left by a process that was killed while it wrote", "remove it")


def _plain(folder: Path, name: str) -> str:
    """Raises a CheckpointError where something else than a plain file has this name."""
    with Folder.open(folder) as here:
        if name in here.names():
            here.place(name)
    return name


def _look(what: str, read: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, read())
    except RayltError as error:
        return Finding(what, False, str(error))


def _lines(files: Files) -> Finding:
    try:
        known = files.lines()
    except CheckpointError as error:
        goal = None
        with suppress(CheckpointError):
            goal = _goal(files)
        return Finding(lines.FILE, False, str(error), None if goal is None else
                       f"cut it after line {len(goal.lines.texts)}, which the run goes on from")
    if known.torn:
        return Finding(lines.FILE, False, f"what follows line {len(known.texts)} was cut off by a kill", "cut it there")
    return Finding(lines.FILE, True, f"{len(known.texts)} steps, one after the other")


def _checkpoints(files: Files) -> Iterator[Finding]:
    try:
        known = files.lines()
    except CheckpointError:
        known = None
    states = {step: _at(files, step, known) for step in checkpoint.steps(files.path / CHECKPOINTS)}
    some = any(isinstance(state, Checkpoint) for state in states.values())
    for step, state in states.items():
        what = f"{CHECKPOINTS}/{step:06d}"
        if isinstance(state, Checkpoint):
            yield Finding(what, True, f"{len(state.parts)} parts")
        else:
            yield Finding(what, False, str(state), "remove it" if some and isinstance(state, str) else None)
    if not states and not files.ended and known is not None and sealed.was_saved(known):
        yield Finding(CHECKPOINTS, False, "gone: the run cannot go on")


def _matrices(files: Files) -> Iterator[Finding]:
    """One finding where they are all whole, else one for each that is not."""
    kept: list[int] = []
    with suppress(CheckpointError):
        kept = [report["step"] for report in files.lines().reports if report.get("confusion")]
    looks = [_look(f"{confusions.FOLDER}/{step:06d}.npz", lambda step=step: files.matrices(step).sha256)
             for step in kept]
    damaged = [look for look in looks if not look.whole]
    if kept and not damaged:
        yield Finding(confusions.FOLDER, True, f"of {len(kept)} evaluations, as {lines.FILE} tells of them")
    yield from damaged


def _at(files: Files, step: int, known: lines.Lines | None) -> Checkpoint | str | CheckpointError:
    """A checkpoint; what is damaged of it; or why it is not this run's.

    Args:
        known: the lines that it must fit; None where they cannot be told.
    """
    try:
        saved = checkpoint.at(files.path / CHECKPOINTS, step)
    except CheckpointError as error:
        return f"damaged ({error})"
    try:
        if known is not None:
            known.check(saved)
    except CheckpointError as error:
        return error
    return saved


def _left(here: Folder) -> list[str]:
    left = here.unfinished()
    with suppress(CheckpointError), here.inner(CHECKPOINTS) as inner:
        left += [f"{CHECKPOINTS}/{name}" for name in inner.unfinished()]
    return left


def _sweep(here: Folder) -> list[str]:
    swept = checkpoint.sweep(here)
    if CHECKPOINTS in here.names():
        with here.inner(CHECKPOINTS) as inner:
            swept += [f"{CHECKPOINTS}/{name}" for name in checkpoint.sweep(inner)]
    return swept
