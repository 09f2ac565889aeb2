"""A run that is killed in the middle of its third step, and the same run without a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "raylt"]
ENVIRONMENT = os.environ | {"PYTHONUNBUFFERED": "1"}


def run_and_kill(folder: Path, settings: list[str], pause: float) -> None:
    """Do two runs in `folder`: "straight" ends, and "killed" dies `pause` seconds after its second step was
    committed."""
    whole = [*COMMAND, "run", *settings, "--fleet", "local", "--out", str(folder), "--name"]
    subprocess.run([*whole, "straight"], check=True, env=ENVIRONMENT, capture_output=True)
    process = subprocess.Popen([*whole, "killed"], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    lines = folder / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (lines.exists() and lines.read_text().count("\n") == 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(pause)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "killed" / "checkpoints" / "000003").exists()


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


def run_and_kill_in(folder: Path, settings: list[str], module: str, function: str, call: int) -> None:
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
