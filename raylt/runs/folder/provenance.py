"""provenance.jsonl: one line, with versions and machine, for each time a run was started or continued.

A result is only comparable with another when the same code computed both. `code` is a SHA-256 over the sources that a
number can depend on (data, models, core, operations, methods). So a change of an equation makes runs stale, but a
change of the command line, of a picture or of the documentation does not.

Each line names the hash of the line before, the first that of the run (identity.py), and summary.json the hash of the
last: no line can be changed, left out or added unnoticed. Runs of early versions have lines without hashes.
"""

import functools
import hashlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
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
START = "directory"  # the key of the working directory, in which the relative paths of a run's settings start
BOUND = "provenance"  # in summary.json: the hash of the last line
LINKS = frozenset({"previous", "sha256"})  # in a line: what binds it to the line before
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
        fleet: "ray", "local" or "processes". With Ray, clients may be on machines that this process does not see.
        devices: from `Experiment.describe`.
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
        devices: from `Experiment.describe`.
    """
    with Folder.open(folder) as run:
        _append(run, [{**describe_process(fleet, config, devices), "after_step": step}])


def check_device(folder: Path, config: Config, devices: Mapping[str, str | None]) -> None:
    """Check that this device is of the same kind as the device on which the run started.

    Args:
        devices: from `Experiment.describe`.

    Raises:
        ConfigError: it is another kind, and resources.device does not name it.
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
    """Return the lines of a run's provenance, oldest first, without lines that a kill left incomplete.

    Raises:
        CheckpointError: a line was changed, removed or added.
    """
    with Folder.open(folder) as run:
        return _read(run)[0]


def check_summary(folder: Folder, summary: Mapping[str, Any]) -> None:
    """Check that the summary of a finished run has the hash of the last provenance line.

    Raises:
        CheckpointError: a line was changed, removed or added.
    """
    _, head = _read(folder)
    bound = summary.get(BOUND)
    if bound is not None and bound != head:
        raise _changed(folder, "does not end with the line that the run ended with")


def _append(run: Folder, contents: Sequence[Mapping[str, Any]]) -> None:
    _, head = _read(run)
    texts = []
    for content in contents:
        line = chain(dict(content), head)
        head = line["sha256"]
        texts.append(json.dumps(line) + "\n")
    cut_off = FILE in run.names() and not run.read(FILE).endswith(b"\n")  # by a kill
    run.append(FILE, ("\n" if cut_off else "") + "".join(texts))


def _read(run: Folder) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of a run's provenance, and the hash that the next line must repeat.

    Raises:
        CheckpointError: a line does not follow the line before it.
    """
    head = read_identity(run)["sha256"]
    lines: list[dict[str, Any]] = []
    for text in run.read_text(FILE).splitlines() if FILE in run.names() else []:
        try:
            line = as_json(text, _LINE, FILE)
        except CheckpointError:  # a kill cut it off
            continue
        number = len(lines) + 1
        if LINKS & line.keys():
            if not is_chained(line, head):
                raise _changed(run, f"line {number} was changed, or does not follow the line before it")
            head = line["sha256"]
        else:
            if lines and LINKS & lines[-1].keys():
                raise _changed(run, f"line {number} has no hash, and the line before it has one")
            head = hash_json([*lines, line])  # an early version wrote it
        lines.append(line)
    if _has_steps(run) and (not lines or lines[0].get("after_step", 0) != 0):
        raise _changed(run, "lacks the line of the process that started the run")
    return lines, head


def _has_steps(run: Folder) -> bool:
    """Return whether a step of the run was committed."""
    return run.has(STEPS) and (run.path / STEPS).stat().st_size > 0


def _changed(run: Folder, problem: str) -> CheckpointError:
    path = run.path / FILE
    return CheckpointError(f"{path}: {problem}. Put the original back.", code="run.changed", path=str(path))


def start_of(folder: Path) -> Path | None:
    """Return the folder that a run's relative paths refer to, or None if the run did not record it.

    A run that continues another run starts with that run's lines, and so has that run's folder.
    """
    lines = read(folder) if folder.is_dir() else []
    start = lines[0].get(START) if lines else None
    return Path(start) if isinstance(start, str) else None


def of_summary(folder: Path) -> dict[str, Any]:
    """Return the fields of a run's summary.json that describe how the run was made.

    Returns:
        The schema's version, the date of the end, the description of the last process, the number of processes, under
        `mixed` each field that changed between processes, and the hash of the last line.
    """
    with Folder.open(folder) as run:
        lines, head = _read(run)
    seen = {
        key: sorted({str(line[key]) for line in lines if key in line})
        for key in ("code", "torch", "device", "driver", "cpu", "server_device")
    }
    mixed = {key: values for key, values in seen.items() if len(values) > 1}
    hidden = LINKS | {"after_step", START}
    made = {key: value for key, value in lines[-1].items() if key not in hidden} if lines else {}
    made |= {"sessions": len(lines), "mixed": mixed}
    return {"schema": SCHEMA, "date": now(), "made": made, BOUND: head}


@functools.cache
def _commit() -> str | None:
    """Return the Git commit that raylt runs from, or None if raylt was installed.

    The suffix -dirty marks files that differ from the commit.
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
