"""A run that is killed in the middle of a step, and the same run without a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "raylt"]
ENVIRONMENT = os.environ | {"PYTHONUNBUFFERED": "1"}


DEADLY = """
import importlib, os, signal
from raylt.cli.main import main
module, calls = importlib.import_module({module!r}), []
inner = module.{function}
def deadly(*parts, **named):
    calls.append(None)
    if len(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(*parts, **named)
module.{function} = deadly
main()
"""


def run_and_kill(folder: Path, settings: list[str], module: str, function: str, call: int) -> None:
    """Do two runs in `folder`: "straight" ends, and "killed" dies in the `call`-th call (from 1) of a module's
    function."""
    parts = ["run", *settings, "--fleet", "local", "--out", str(folder), "--name"]
    subprocess.run([*COMMAND, *parts, "straight"], check=True, env=ENVIRONMENT, capture_output=True)
    deadly = DEADLY.format(module=module, function=function, call=call)
    killed = subprocess.run([sys.executable, "-c", deadly, *parts, "killed"], env=ENVIRONMENT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()


def resume(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resume the killed run; return the summaries of the straight run and of this one."""
    subprocess.run(
        [*COMMAND, "resume", str(folder / "killed"), "--fleet", "local"],
        check=True,
        env=ENVIRONMENT,
        capture_output=True,
    )
    straight, killed = (json.loads((folder / name / "summary.json").read_text()) for name in ("straight", "killed"))
    return straight, killed
