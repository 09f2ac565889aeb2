"""A hook that shifts the clock of every Python process by the number of seconds in the file JUMP.

Set RAY_RUNTIME_ENV_HOOK=jumping.hook to use it. `python jumping.py run ...` is `raylt run ...` under this clock. The
kernel's clock is unchanged.
"""

import os
import time
from pathlib import Path

true_time = time.time


def jumped() -> float:
    try:
        return true_time() + float(Path(os.environ["JUMP"]).read_text())
    except (OSError, ValueError):  # the file does not exist yet, or is being written
        return true_time()


def start() -> None:
    time.time = jumped


def hook(runtime_env: dict | None) -> dict:
    """Have Ray shift the clock of its workers; `ray.init` calls this function."""
    return (runtime_env or {}) | {"worker_process_setup_hook": "jumping.start"}


if __name__ == "__main__":
    from raylt.cli.main import main

    start()
    main()
