"""With RAY_RUNTIME_ENV_HOOK=doomed.hook a run's server process dies as it starts, the first DOOMED_TIMES times.

Each that dies leaves a file in DOOMED_FOLDER.
"""

import os
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Doom(MetaPathFinder):
    """Waits for the first module that a server needs and no client does."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        folder = Path(os.environ["DOOMED_FOLDER"])
        if fullname == "actors.fleet" and len(list(folder.glob("died-*"))) < int(os.environ["DOOMED_TIMES"]):
            (folder / f"died-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def watch() -> None:
    """In every process of Ray's, before it knows what it will run."""
    sys.meta_path.insert(0, Doom())


def hook(runtime_env: dict | None) -> dict:
    """Ray calls this for `ray.init`."""
    return (runtime_env or {}) | {"worker_process_setup_hook": "doomed.watch"}
