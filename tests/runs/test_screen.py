"""The bar of a run on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

# a screen that is told of long rounds with many clients; what is in the way of a line is as long as it gets
TOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from raylt.config import Config
from raylt.runs.screen import Screen
config = Config.model_validate({"method": {"name": "sfd"}, "federation": {"rounds": 1000}})
def line(step, seconds):
    return {"step": step, "accuracy": 0.32, "clients": None, "global_accuracy": None, "seconds": seconds - 10,
            "evaluation_seconds": 10.0}
def report(step, phase="round"):
    return SimpleNamespace(**line(step, 400), phase=phase, rejected={}, lost=[], figures={"loss": 12.345})
screen = Screen()
screen.on_start(Path("runs/one"), config, [line(step, 400) for step in range(1, 997)])
def show(stage, done=0, total=0):
    screen.on_progress(stage, done, total)
    screen._bar.refresh()
show("join", 3, 1000)
screen.on_step(report(997))
show("semantic_statistics", 1000, 1000)
screen.on_step(report(998))
screen.on_step(report(999))
show("train", 999, 1000)
screen.on_step(report(1000))
show("synthesis")
screen.on_step(report(1001, "finish"))
screen.on_end({})
"""


def lines_on_a_terminal(command, folder):
    """What a command shows on a terminal of 80 columns, without its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, close_fds=True,
                               env=environment | {"TERM": "xterm-256color"})
    os.close(theirs)
    content = bytearray()

    def read():
        try:
            while part := os.read(ours, 2**16):
                content.extend(part)
        except OSError:                     # how Linux tells that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=200) == 0
    reader.join()
    os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.slow
def test_at_80_columns_nothing_but_the_bar_is_cut(tmp_path):
    lines = [line for line in lines_on_a_terminal([sys.executable, "-c", TOLD], tmp_path) if line.startswith("round")]
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    shown = [re.sub(" *[━╸╺]* +", " ", line).strip() for line in lines]
    # 400 s for each step: of step 996, after which 4 rounds and the last phase come, 2000 s are left
    figures = r"loss 12.345 acc 32.0 % \(best 32.0\)"
    for expected in (r"round 996/1000 joining 3/1000 33:(20|19|18)",
                     rf"round 997/1000 semantic s 1000/1000 {figures} 26:(40|39|38)",
                     rf"round 999/1000 training 999/1000 {figures} 13:(20|19|18)",
                     # the last phase is no round, and is in the time that is left
                     rf"round 1000/1000 synthesis {figures} 06:(40|39|38)"):
        assert any(re.fullmatch(expected, line) for line in shown), expected
    assert re.fullmatch(f"round 1000/1000 {figures} 00:00", shown[-1])
