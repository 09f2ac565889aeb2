"""The progress bar of a run on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import pytest

from raylt.core.fleet.item_progress import ItemsProgress
from raylt.runs.callbacks.terminal import TerminalProgress, TimeLeft, in_words

# long rounds with many clients, so that every text of the bar has its largest length
SCRIPT = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from raylt.config import Config
from raylt.runs.callbacks.terminal import TerminalProgress
config = Config.model_validate({"method": {"name": "sfd"}, "federation": {"rounds": 1000}})
def line(step, seconds):
    return {"step": step, "accuracy": 0.32, "clients": None, "global_accuracy": None, "seconds": seconds - 10,
            "evaluation_seconds": 10.0}
def report(step, phase="round"):
    figures = line(step, 400)
    return SimpleNamespace(
        **figures, phase=phase, rejected={}, lost=[], figures={"loss": 12.345}, record=lambda: figures
    )
screen = TerminalProgress()
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
    """Return the lines that a command shows on a terminal of 80 columns, without colours."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        close_fds=True,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(terminal)
    content = bytearray()

    def read():
        try:
            while part := os.read(controller, 2**16):
                content.extend(part)
        except OSError:  # Linux raises this when the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=200) == 0
    reader.join()
    os.close(controller)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.slow
def test_at_80_columns_nothing_but_the_bar_is_cut(tmp_path):
    lines = [line for line in lines_on_a_terminal([sys.executable, "-c", SCRIPT], tmp_path) if line.startswith("round")]
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    shown = [re.sub(" *[━╸╺]* +", " ", line).strip() for line in lines]
    # each step takes 400 s: after step 996 there are 4 rounds and the last phase, 2000 s
    figures = r"loss 12.345 acc 32.0 % \(best 32.0\)"
    for expected in (
        r"round 996/1000 joining 3/1000 33:(20|19|18)",
        rf"round 997/1000 semantic st 1000/1000 {figures} 26:(40|39|38)",
        rf"round 999/1000 training 999/1000 {figures} 13:(20|19|18)",
        # the last phase is not a round, but counts in the remaining time
        rf"round 1000/1000 synthesis {figures} 06:(40|39|38)",
    ):
        assert any(re.fullmatch(expected, line) for line in shown), expected
    assert re.fullmatch(f"round 1000/1000 {figures} 00:00", shown[-1])


def test_a_long_stage_says_how_far_it_is_where_there_is_no_bar(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("raylt.runs.callbacks.terminal.time.monotonic", lambda: now[0])
    screen = TerminalProgress()
    for done in range(11):
        screen.on_progress("synthesise", done, 10)
        now[0] += 40
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].strip() == "synthesis: 1 of 10 done, about 6 min left"
    assert lines[7].strip() == "synthesis: 8 of 10 done, about 80 s left"
    assert len(lines) == 10
    screen.on_progress("train", 0, 5)
    screen.on_progress("train", 1, 5)
    assert not capsys.readouterr().err  # a stage that has just begun is not shown


def test_progress_inside_the_servers_own_items_is_in_words_and_in_the_time_left(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("raylt.runs.callbacks.terminal.time.monotonic", lambda: now[0])
    screen = TerminalProgress()
    column = screen._time_left
    column.add_step(7)
    screen.on_last_phase(400.0)
    # two rounds are left, then the last phase
    assert column.text(3) == "06:54"
    now[0] += 5
    assert [column.text(steps) for steps in (3, 1, 0)] == ["06:49", "06:35", "00:00"]
    column.add_step(7)
    screen.on_items(ItemsProgress("synthesise", 0, 10, 1, 100, 0.001))
    now[0] += 100
    screen.on_items(ItemsProgress("synthesise", 2, 10, 40, 100, 0.24))
    assert column.text(1) == "05:17"
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.strip() == "synthesis: class 3 of 10, step 40 of 100, about 5 min left"


def test_the_time_left_in_the_last_step_is_that_of_its_stage(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("raylt.runs.callbacks.terminal.time.monotonic", lambda: now[0])
    screen = TerminalProgress()
    column = screen._time_left
    task = SimpleNamespace(total=2, completed=1)
    column.add_step(7)
    now[0] += 20
    assert column.render(task).plain == "--:--"
    screen.on_progress("synthesise", 0, 10)
    now[0] += 60
    screen.on_progress("synthesise", 1, 10)
    assert column.render(task).plain == "09:00"


def test_the_time_left_goes_by_the_last_ten_steps_and_has_hours(monkeypatch):
    monkeypatch.setattr("raylt.runs.callbacks.terminal.time.monotonic", lambda: 1000.0)
    column = TimeLeft()
    column.add_step(10_000)
    for _ in range(10):
        column.add_step(372.5)
    assert column.text(10) == "1:02:05"
    assert [in_words(seconds) for seconds in (75, 150)] == ["75 s", "2 min"]
