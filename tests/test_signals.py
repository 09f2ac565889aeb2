"""Signals that stop a command, and output to a pipe whose reader has closed it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raylt
from raylt.signals import STOPS, handling_stops, starting_ray

PRINTS = """
import sys
from raylt.signals import guard_output

guard_output()
for number in range(20_000):
    print("line", number, file=sys.stdout if number % 2 else sys.stderr)
open(sys.argv[1], "w").close()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("code", [0, 3])
def test_a_command_outlives_head_and_keeps_its_exit_code(tmp_path, code, unbuffered):
    done = tmp_path / "done"
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS, done, str(code)],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    assert command.stderr is not None
    assert command.stdout.readline() == b"line 1\n"
    command.stdout.close()
    command.stderr.close()
    assert command.wait(60) == code
    assert done.exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_unbuffered_output_appears_at_once(stream):
    code = f"""
import sys
from raylt.signals import guard_output
guard_output()
print("half a line", end="", file=sys.{stream})
sys.stdin.read()
"""
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        **{stream: subprocess.PIPE},
    )
    assert getattr(command, stream).read(11) == b"half a line"
    command.communicate(timeout=60)


def test_help_ends_quietly_when_its_reader_closes_the_pipe():
    command = subprocess.Popen(
        [sys.executable, "-m", "raylt", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert (command.wait(60), command.stderr.read()) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("words", [("methods", "--format", "json"), ("methods",)])
def test_output_that_cannot_be_written_is_said_in_a_line(tmp_path, words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "raylt", *words]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error [file.unwritable]: output: ")
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_that_the_output_cannot_encode_is_escaped(tmp_path, encoding):
    command = [sys.executable, "-m", "raylt", "new", "method", tmp_path / "\u2603"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "\\u2603" in done.stdout


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]])
def test_a_command_without_output_opens_its_files_elsewhere(tmp_path, closed):
    code = """
from raylt.signals import guard_output
guard_output()
print("a line")
with open("f", "w") as file:
    assert file.fileno() > 2
    file.write("x")
"""
    command = [sys.executable, "-c", code]
    root = str(Path(raylt.__file__).parents[1])  # the child runs in another folder
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
        preexec_fn=lambda: [os.close(handle) for handle in closed],
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == "x"


@pytest.mark.slow
def test_a_run_on_ray_without_output_ends_with_its_own_exit_code(tmp_path):
    command = [sys.executable, "-m", "raylt", "run", "method=fedavg", "federation.rounds=1", "data.clients=2"]
    command += ["--out", str(tmp_path), "--name", "r"]
    done = subprocess.run(command, preexec_fn=lambda: [os.close(handle) for handle in (0, 1, 2)], check=False)
    assert done.returncode == 0
    assert (tmp_path / "r" / "summary.json").exists()


def reachable():
    """Undo what this process may have inherited from a background job or from nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(folder, *settings):
    """Start a long run in a process that Ctrl-C and a hang-up reach, and wait for its first round."""
    command = [sys.executable, "-m", "raylt", "run", "method=fedavg", "data.clients=3", *settings]
    process = subprocess.Popen(
        [*command, "federation.rounds=500", "--fleet", "local", "--out", folder, "--name", "r"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=reachable,
    )
    end = time.monotonic() + 60
    while not (folder / "r" / "metrics.jsonl").exists():
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM, signal.SIGINT, signal.SIGTERM], [signal.SIGHUP]], ids=["three at once", "hang-up"]
)
def test_signals_that_come_together_stop_a_run_once_and_without_a_traceback(tmp_path, signals):
    process = started(tmp_path)
    for number in signals:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"stopped; continue with raylt resume {tmp_path / 'r'}"
    assert "Traceback" not in err


TWICE = """
import os, signal, time
from raylt import signals

signals.SAME_SIGNAL_S = float({patience})
signals.stop_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print("cleaned up")
"""


@pytest.mark.parametrize(("patience", "code", "out"), [(0, 130, ""), (60, 0, "cleaned up\n")])
def test_a_second_signal_ends_a_command_at_once_unless_it_came_with_the_first(patience, code, out):
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(patience=patience)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


@pytest.fixture
def handlers():
    """Give signals their default handlers during a test; return a function that returns the handlers."""
    before = [signal.signal(number, signal.SIG_DFL) for number in STOPS]
    yield lambda: [signal.getsignal(number) for number in STOPS]
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)


def test_signals_that_are_not_ignored_are_handled_in_another_way_for_a_while(handlers):
    def stop(*_):
        raise SystemExit

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    before = handlers()
    with handling_stops(stop):
        assert handlers() == [signal.SIG_IGN if number == signal.SIGHUP else stop for number in STOPS]
    assert handlers() == before


@pytest.mark.parametrize("own", [True, False])
def test_the_handlers_that_ray_replaces_are_restored(handlers, own):
    def stop(*_):
        raise SystemExit

    before = stop if own else signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGHUP, before)
    with starting_ray():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGHUP) == before
    after = signal.getsignal(signal.SIGTERM)
    assert callable(after)
    with pytest.raises(SystemExit if own else KeyboardInterrupt):
        after(signal.SIGTERM, None)
