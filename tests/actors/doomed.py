"""A hook that kills a run's server process as it starts, the first DOOMED_TIMES times.

Set RAY_RUNTIME_ENV_HOOK=doomed.hook to use it. Each killed process leaves a file in DOOMED_FOLDER.
"""

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Doom(MetaPathFinder):
    """Kills the process when it imports the first module that a server needs and a client does not."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        folder = Path(os.environ["DOOMED_FOLDER"])
        if fullname == "actors.fleet" and len(list(folder.glob("died-*"))) < int(os.environ["DOOMED_TIMES"]):
            (folder / f"died-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """Install the import hook in every Ray worker process, before the worker knows what it will run."""
    sys.meta_path.insert(0, Doom())


def hook(runtime_env: dict | None) -> dict:
    """Have Ray call `watch` in its workers; `ray.init` calls this function."""
    return (runtime_env or {}) | {"worker_process_setup_hook": "doomed.watch"}
