"""provenance.jsonl: one line, with versions and machine, for each time a run was started or continued.

Results are comparable only if the same code computed them. `code` is a SHA-256 over the sources that can affect results
(data, models, core, operations, methods). So a changed equation makes runs stale, but changes of the command line,
pictures or documentation do not.

Each line contains the hash of the line before; the first line contains the hash of the run (identity.py). Each line of
metrics.jsonl and each checkpoint contain the hash of the last provenance line at their time, and summary.json that of
the final one. So any line that is changed, left out or added is detected, except for processes after which no step was
committed. Early versions wrote lines without hashes, here and in metrics.jsonl.
"""

import functools
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from raylt.config import Config
from raylt.errors import CheckpointError, ConfigError
from raylt.machine import cores
from raylt.runs.folder.identity import read_identity
from raylt.store import Folder
from raylt.typed_json import as_json, chain, hash_json, is_chained

SCHEMA = 2  # version of summary.json and of the lines of metrics.jsonl
FILE = "provenance.jsonl"
STEPS = "metrics.jsonl"  # see metrics_log.py, which imports this module
START = "directory"  # key of the working directory, to which relative paths in a run's settings refer
BOUND = "provenance"  # key in summary.json: hash of the last line
NAMED = "provenance"  # key in a line of metrics.jsonl: hash of the last line at its time
LINKS = frozenset({"previous", "sha256"})  # keys of the hashes in a line
_LINE = TypeAdapter(dict[str, Any])
_ROOT = Path(__file__).parents[2]
_DECISIVE = (
    "config",
    "hyper",
    "metrics",
    "seeds",
    "tree",
    "registry",
    "recordability",
    "staging",
    "data",
    "models",
    "core",
    "ops",
    "methods",
)


def now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def code_sha256() -> str:
    """Return the SHA-256 over the names and contents of all source files that affect results."""
    digest = hashlib.sha256()
    for name in _DECISIVE:
        for file in sorted((_ROOT / name).rglob("*.py")) or [_ROOT / f"{name}.py"]:
            digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def describe_process(fleet: str, config: Config, devices: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the versions, machine and devices of this process.

    Args:
        fleet: "ray", "local" or "processes". With Ray, clients may run on other machines, which are not described.
        config: The configuration of the run.
        devices: Devices of the experiment, from `Experiment.describe`.
    """
    return {
        "date": now(),
        START: str(Path.cwd()),
        "raylt": importlib.metadata.version("raylt"),
        "commit": _commit(),
        "code": code_sha256(),
        "python": platform.python_version(),
        "ray": _ray_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(cores()),
        "precision": config.local.precision,
        "deterministic": config.resources.deterministic,
        "graphs": config.resources.graphs,
        **devices,
        "fleet": fleet,
    }


def _ray_version() -> str | None:
    """Return the version of Ray, or None if Ray is not installed (a fleet in one process does not need it)."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def note(folder: Path, fleet: str, step: int, config: Config, devices: Mapping[str, str | None]) -> None:
    """Append a line to the run's provenance when the run starts or continues after `step` committed steps.

    Args:
        folder: The run folder.
        fleet: "ray", "local" or "processes".
        step: Number of committed steps.
        config: The configuration of the run.
        devices: Devices of the experiment, from `Experiment.describe`.
    """
    with Folder.open(folder) as run:
        _append(run, [{**describe_process(fleet, config, devices), "after_step": step}])


def check_device(folder: Path, config: Config, devices: Mapping[str, str | None]) -> None:
    """Check that this device is of the same kind as the device on which the run started.

    Args:
        folder: The run folder.
        config: The configuration of the run.
        devices: Devices of the experiment, from `Experiment.describe`.

    Raises:
        ConfigError: The device is of another kind, and resources.device does not name this kind.
    """
    lines = read(folder)
    old, new = lines[-1].get("device") if lines else None, devices["device"]
    if old is None or config.resources.device != "auto":
        return
    if (old == "cpu") != (new == "cpu"):
        old_kind, new_kind = ("cpu" if device == "cpu" else "cuda" for device in (old, new))
        raise ConfigError(
            f"resources.device: with auto the run in {folder}, made on {old}, would continue on {new}, which gives "
            f"other bits. Set resources.device={old_kind} on a machine that has it, or resources.device={new_kind} to "
            "continue all the same.",
            code="device.changed",
            key="resources.device",
            path=str(folder),
            device=new,
        )


def copy(source: Path, folder: Path) -> None:
    """Copy the provenance of a run to another run that shares its first steps."""
    lines = [{key: value for key, value in line.items() if key not in LINKS} for line in read(source)]
    with Folder.open(folder) as run:
        _append(run, lines)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's provenance, oldest first, without incomplete lines from killed processes.

    Raises:
        CheckpointError: A line was changed, removed or added.
    """
    with Folder.open(folder) as run:
        return _read(run).lines


def head(run: Folder) -> str:
    """Return the hash of the last line of a run's provenance, or the hash of the run if there is no line.

    Raises:
        CheckpointError: A line was changed, removed or added.
    """
    return _read(run).heads[-1]


def check_named(run: Folder, sha256: str | None, where: str) -> None:
    """Check that a run's provenance has the line whose hash another file of the run contains.

    Args:
        sha256: The hash; None in files of early versions, which contain no hash.
        where: Name of the file in error messages.

    Raises:
        CheckpointError: The line is missing, or a line was changed, removed or added.
    """
    if sha256 is not None and sha256 not in _read(run).heads:
        raise _changed(run, f"the line that {where} names is missing")


def check_summary(folder: Folder, summary: Mapping[str, Any]) -> None:
    """Check that the summary of a finished run has the hash of the last provenance line.

    Raises:
        CheckpointError: A line was changed, removed or added.
    """
    last = head(folder)
    bound = summary.get(BOUND)
    if bound is not None and bound != last:
        raise _changed(folder, "the last line is not that with which the run ended")


def _append(run: Folder, contents: Sequence[Mapping[str, Any]]) -> None:
    before = _read(run)
    last = before.heads[-1]
    texts = []
    for content in contents:
        line = chain(dict(content), last)
        last = line["sha256"]
        texts.append(json.dumps(line) + "\n")
    if before.cut_off:
        run.write(FILE, "".join([*(json.dumps(line) + "\n" for line in before.lines), *texts]))
    else:
        run.append(FILE, "".join(texts))


@dataclass(frozen=True)
class _Chain:
    """The lines of a run's provenance.

    Attributes:
        lines: The lines, oldest first.
        heads: The hash of the run, followed by the hash of each line.
        cut_off: Whether the file contains more: a line that a kill cut off, or a last line without a line break.
    """

    lines: list[dict[str, Any]]
    heads: list[str]
    cut_off: bool


def _read(run: Folder) -> _Chain:
    """Read the lines of a run's provenance.

    Raises:
        CheckpointError: A line does not follow the line before it.
    """
    heads = [read_identity(run)["sha256"]]
    # read metrics.jsonl first, since a process writes its provenance line before its steps
    has_steps, named = _has_steps(run), _named(run)
    texts = (run.read_text(FILE) if FILE in run.names() else "").split("\n")
    rest = texts.pop()
    lines: list[dict[str, Any]] = []
    unread = False
    for number, text in enumerate([*texts, *filter(None, [rest])], 1):
        try:
            line = as_json(text, _LINE, FILE)
        except CheckpointError:
            # a kill may cut off the last line; early versions left it in the file and continued below
            if text.endswith("}") or (number <= len(texts) and named is not None):
                raise _changed(run, f"line {number} cannot be read") from None
            unread = True
            continue
        if LINKS & line.keys():
            if not is_chained(line, heads[-1]):
                raise _changed(run, f"line {number} was changed, or does not follow the line before it")
            heads.append(line["sha256"])
        else:
            if lines and LINKS & lines[-1].keys():
                raise _changed(run, f"line {number} has no hash, but the line before it has one")
            heads.append(hash_json([*lines, line]))  # from an early version
        lines.append(line)
    if has_steps and (not lines or lines[0].get("after_step", 0) != 0):
        raise _changed(run, "the line of the process that started the run is missing")
    if named is not None and named not in heads and _first_previous(run) == heads[0]:
        raise _changed(run, f"the line of the process that wrote the last line of {STEPS} is missing")
    return _Chain(lines, heads, unread or bool(rest))


def _has_steps(run: Folder) -> bool:
    """Return whether a step of the run was committed."""
    return run.has(STEPS) and (run.path / STEPS).stat().st_size > 0


def _named(run: Folder) -> str | None:
    """Return the provenance hash in the last line of metrics.jsonl, or None if there is none."""
    if not _has_steps(run):
        return None
    return _field(run.last_line(STEPS), NAMED)


def _first_previous(run: Folder) -> str | None:
    """Return the hash of the run that the first line of metrics.jsonl contains."""
    with run.stream(STEPS) as stream:
        return _field(stream.readline(), "previous")


def _field(line: bytes, name: str) -> Any:
    """Return a field of a line of metrics.jsonl, or None if the line is damaged (`read_lines` reports that)."""
    try:
        return as_json(line, _LINE, STEPS).get(name)
    except CheckpointError:
        return None


def _changed(run: Folder, problem: str) -> CheckpointError:
    path = run.path / FILE
    return CheckpointError(f"{path}: {problem}. Put the original back.", code="run.changed", path=str(path))


def start_of(folder: Path) -> Path | None:
    """Return the folder that a run's relative paths refer to, or None if the run did not record it.

    A run that continues another run starts with that run's lines, and so returns that run's folder.
    """
    lines = read(folder) if folder.is_dir() else []
    start = lines[0].get(START) if lines else None
    return Path(start) if isinstance(start, str) else None


def of_summary(folder: Path) -> dict[str, Any]:
    """Return the fields of a run's summary.json that describe how the run was made.

    Returns:
        The schema version, the date of the end, the description of the last process with the number of processes and,
        under `mixed`, each field that changed between processes, and the hash of the last line.
    """
    with Folder.open(folder) as run:
        made_by = _read(run)
    lines = made_by.lines
    seen = {
        key: sorted({str(line[key]) for line in lines if key in line})
        for key in ("code", "torch", "device", "driver", "cpu", "server_device")
    }
    mixed = {key: values for key, values in seen.items() if len(values) > 1}
    hidden = LINKS | {"after_step", START}
    made = {key: value for key, value in lines[-1].items() if key not in hidden} if lines else {}
    made |= {"sessions": len(lines), "mixed": mixed}
    return {"schema": SCHEMA, "date": now(), "made": made, BOUND: made_by.heads[-1]}


@functools.cache
def _commit() -> str | None:
    """Return the Git commit that raylt runs from, or None if raylt was installed.

    The suffix -dirty means that files differ from the commit.
    """
    root = _ROOT.parent
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
