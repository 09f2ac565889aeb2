"""What made a run: one line in `provenance.jsonl` for each time that it was started or taken up again.

A result is only comparable with another when the code that computed both is the same. `code` is a SHA-256 over the
sources that a number can depend on (data, models, core, operations, methods), so a change of the command line, of a
picture or of the documentation makes no run stale, and a change of an equation does.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from raylt.config import Config
from raylt.errors import CheckpointError, ConfigError
from raylt.store import Folder
from raylt.typed import as_json

SCHEMA = 2              # of summary.json and of the lines of metrics.jsonl; raylt/runs/schemas has both
FILE = "provenance.jsonl"
_LINE = TypeAdapter(dict[str, Any])
_ROOT = Path(__file__).parents[1]
_DECISIVE = ("config", "hyper", "metrics", "seeds", "tree", "registry", "recordable", "data", "models", "core", "ops",
             "methods")


def now() -> str:
    """The time in UTC, to the second, as ISO 8601 writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def code_sha256() -> str:
    """SHA-256 over the names and contents of the sources that results depend on."""
    digest = hashlib.sha256()
    for name in _DECISIVE:
        for file in sorted((_ROOT / name).rglob("*.py")) or [_ROOT / f"{name}.py"]:
            digest.update(f"{file.relative_to(_ROOT).as_posix()}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def here(fleet: str, config: Config, facts: Mapping[str, str | None]) -> dict[str, Any]:
    """Versions, machine and device of a run.

    Args:
        fleet: "ray" or "local". With Ray, clients may sit on machines that this process does not see.
        facts: what clients and server compute on, `Experiment.describe`.
    """
    return {
        "date": now(),
        "raylt": importlib.metadata.version("raylt"),
        "commit": _commit(),
        "code": code_sha256(),
        "python": platform.python_version(),
        "ray": importlib.metadata.version("ray"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "precision": config.local.precision,
        "deterministic": config.resources.deterministic,
        "graphs": config.resources.graphs,
        **facts,
        "fleet": fleet,
    }


def note(folder: Path, fleet: str, step: int, config: Config, facts: Mapping[str, str | None]) -> None:
    """Appends a line to the run's provenance: it starts, or goes on after `step` committed steps.

    Args:
        facts: as `here` has them.
    """
    line = json.dumps({**here(fleet, config, facts), "after_step": step}) + "\n"
    with Folder.open(folder) as there:
        cut = FILE in there.names() and not there.read(FILE).endswith(b"\n")       # by a kill
        there.append(FILE, "\n" * cut + line)


def check_device(folder: Path, config: Config, facts: Mapping[str, str | None]) -> None:
    """Before a run is gone on with, or a call of it made again: the kind of device is the one that it was made on.

    Raises:
        ConfigError: it is another, and resources.device does not name it.
    """
    lines = read(folder)
    then, now = lines[-1].get("device") if lines else None, facts["device"]
    if then is None or config.resources.device != "auto":
        return
    if (then == "cpu") != (now == "cpu"):
        kinds = ["cpu" if device == "cpu" else "cuda" for device in (then, now)]
        raise ConfigError(f"resources.device = auto: {folder} was made on {then} and would go on on {now}, which gives "
                          f"other bits; set resources.device={kinds[0]} where that is there, or "
                          f"resources.device={kinds[1]} to go on all the same")


def copy(source: Path, folder: Path) -> None:
    """Takes over the lines of another run, whose steps this one has."""
    with Folder.open(folder) as there:
        there.append(FILE, "".join(json.dumps(line) + "\n" for line in read(source)))


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, oldest first; those that a kill cut off are left out. Empty for a run of an older raylt."""
    with Folder.open(folder) as there:
        content = there.read_text(FILE) if FILE in there.names() else ""
    lines = []
    for line in content.splitlines():
        with suppress(CheckpointError):
            lines.append(as_json(line, _LINE, FILE))
    return lines


def of_summary(folder: Path) -> dict[str, Any]:
    """What summary.json says of how the run was made.

    Returns:
        The schema's version, the date of the end, what the last process was, how often the run was taken up, and under
        `mixed` each fact that changed between its processes.
    """
    lines = read(folder)
    seen = {key: sorted({str(line[key]) for line in lines if key in line})
            for key in ("code", "torch", "device", "driver", "cpu", "server_device")}
    mixed = {key: values for key, values in seen.items() if len(values) > 1}
    made = {key: value for key, value in lines[-1].items() if key != "after_step"} if lines else {}
    return {"schema": SCHEMA, "date": now(), "made": made | {"sessions": len(lines), "mixed": mixed}}


@functools.cache
def _commit() -> str | None:
    """The commit that raylt runs from, with -dirty where files differ from it; None where it was installed."""
    root = _ROOT.parent
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                              capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
