"""Many images are decoded in other processes, with the same result, and all of these processes end."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raylt.data.images import cache_builder
from raylt.data.images.cache import Mapped
from raylt.data.images.cache_builder import COLOUR, pack
from raylt.data.images.image_trees import How, decode_tree
from raylt.data.images.workers import call_in_processes
from raylt.errors import DataError, RayltError

ROWS = 40


@pytest.fixture
def many(monkeypatch):
    """Split the work into calls of four rows, and start two processes after the second call."""
    monkeypatch.setattr(cache_builder, "SHARE", 4)
    monkeypatch.setattr(cache_builder, "WORTH_S", 1e-9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    asked = []

    def counted(count, calls, handles):
        asked.append(count)
        return call_in_processes(count, calls, handles)

    monkeypatch.setattr(cache_builder, "call_in_processes", counted)
    return asked


@dataclass(frozen=True)
class Worked:
    """Decodes a row to its number and notes its process id; if `dies` is set, row 20 kills the process."""

    folder: Path
    dies: bool = False

    def __call__(self, row, given):
        if self.dies and given == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if given == 30:
            raise DataError("no number")
        with (self.folder / "decoded").open("a") as file:
            file.write(f"{row} {os.getpid()}\n")
        return np.full((2, 2), given, np.uint8)

    def rows(self):
        return [int(line.split()[0]) for line in (self.folder / "decoded").read_text().splitlines()]

    def processes(self):
        return {int(line.split()[1]) for line in (self.folder / "decoded").read_text().splitlines()}


def packed(folder, decode, whole=True):
    def given(row):
        if row == 35:
            raise DataError("nothing there")
        return row

    path = folder / "cache" / "images.npy"
    return path, pack(path, (ROWS, 2, 2), given, decode, {"of": "numbers"}, whole=whole)


@pytest.mark.slow
def test_processes_decode_every_row_once_and_say_why_they_could_not(many, tmp_path):
    decode = Worked(tmp_path)
    path, bad = packed(tmp_path, decode, whole=False)
    assert many == [2]
    assert bad == {30: "no number", 35: "nothing there"}
    expected = [row * (row not in bad) for row in range(ROWS)]
    assert (np.load(path) == np.array(expected)[:, None, None]).all()
    assert sorted(decode.rows()) == [row for row in range(ROWS) if row not in bad]
    # two workers, and this process, which began
    assert len(decode.processes()) == 3
    assert os.getpid() in decode.processes()


@pytest.mark.slow
@pytest.mark.parametrize("channels", ["auto", 3])
def test_a_cache_has_the_same_bytes_made_by_one_process_or_several(many, tmp_path, monkeypatch, channels):
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    files = [f"größe {i:02}.png" for i in range(ROWS)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (20, 12), dtype=np.uint8)).save(tmp_path / "images" / file)
    (tmp_path / "images" / files[30]).write_bytes(b"not a picture")
    found = []
    for worth, folder in ((1e-9, "one"), (1e9, "other")):
        monkeypatch.setattr(cache_builder, "WORTH_S", worth)
        x, rows, notes = decode_tree("it", tmp_path / "images", files, How(8, channels, bad="skip"), tmp_path / folder)
        assert isinstance(x, Mapped)
        found.append((Path(x.path).read_bytes(), rows.tolist(), notes))
    assert many == [2]
    assert found[0] == found[1]
    assert files[30] in found[0][2][0]


def test_few_images_start_no_process(tmp_path):
    decode = Worked(tmp_path)
    packed(tmp_path, decode)
    assert decode.processes() == {os.getpid()}


@pytest.mark.slow
def test_a_process_that_dies_is_one_line_and_what_was_decoded_is_kept(many, tmp_path):
    with pytest.raises(
        RayltError,
        match=r"decoding of 40 images: one of the images 20 to 23: .* ended \(signal 9 \(Killed\)\)\. .*\w\. Decoded",
    ):
        packed(tmp_path, Worked(tmp_path, dies=True))
    assert not (tmp_path / "cache" / "images.npy").exists()
    before = Worked(tmp_path)
    kept = np.flatnonzero(np.fromfile(tmp_path / "cache" / "images.state", np.uint8) == COLOUR)
    assert {*range(8)} <= {*kept.tolist()} <= {*before.rows()}
    (tmp_path / "again").mkdir()
    decode = Worked(tmp_path / "again")
    path, _ = packed(tmp_path, decode, whole=False)
    assert sorted([*decode.rows(), *kept.tolist()]) == [row for row in range(ROWS) if row not in (30, 35)]
    assert np.load(path)[:30, 0, 0].tolist() == [*range(30)]


@dataclass(frozen=True)
class Faulty:
    def __call__(self, row, given):
        return np.full((2, 2), 1 // (given - 20) % 2, np.uint8) if given > 15 else np.zeros((2, 2), np.uint8)


@pytest.mark.slow
def test_what_a_process_trips_over_is_one_line(many, tmp_path):
    with pytest.raises(RayltError, match=r"decoding of 40 images: ZeroDivisionError: .*run the same command again"):
        packed(tmp_path, Faulty())


def test_calls_come_back_with_their_names_and_no_process_is_left():
    calls = ((name, (os.getppid,)) for name in "abcdefg")
    assert sorted(call_in_processes(2, calls, ())) == [(name, os.getpid()) for name in "abcdefg"]
    with pytest.raises(RayltError, match=r"^b: .* ended \(exit code 3\)\."):
        list(call_in_processes(1, iter([("a", (os.getpid,)), ("b", (os._exit, 3))]), ()))
    started = call_in_processes(2, ((name, (os.getpid,)) for name in range(100)), ())
    pids = {pid for _, (_, pid) in zip(range(20), started, strict=False)}
    started.close()
    for pid in pids:
        with pytest.raises(ChildProcessError):  # the process has ended and was waited for
            os.waitpid(pid, os.WNOHANG)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# a script without `if __name__ == "__main__"` next to a slow module
SCRIPT = """
print("once", flush=True)
import sys
from pathlib import Path
from slow import Slow
from raylt.data.images import cache_builder
cache_builder.SHARE, cache_builder.WORTH_S, cache_builder.os.sched_getaffinity = 4, 1e-9, lambda pid: {0, 1}
def make():
    here = Path(sys.argv[1])
    cache_builder.pack(here / "cache" / "images.npy", (40, 2, 2), int, Slow(here, float(sys.argv[2])), {})
"""
SLOW = """
import os, time
from dataclasses import dataclass
from pathlib import Path
import numpy as np
@dataclass(frozen=True)
class Slow:
    folder: Path
    seconds: float
    def __call__(self, row, given):
        if row >= 8:
            (self.folder / f"{os.getpid()}.pid").touch()
            time.sleep(self.seconds)
        return np.full((2, 2), row, np.uint8)
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes the script and starts it in a session of its own."""
    started = []

    def start(seconds, last="make()"):
        (tmp_path / "script.py").write_text(SCRIPT + last)
        (tmp_path / "slow.py").write_text(SLOW)
        started.append(
            subprocess.Popen(
                [sys.executable, "script.py", str(tmp_path), str(seconds)],
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )  # a shell's background job ignores the signal
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    [
        "make()",
        # a daemonic process, which may not have children of multiprocessing
        "import multiprocessing as m; p = m.get_context('fork').Process(target=make, daemon=True); p.start(); p.join();"
        "sys.exit(p.exitcode)",
    ],
)
def test_scripts_without_a_guard_and_daemons_decode_too(script, tmp_path, last):
    out, err = script(0, last).communicate(timeout=100)
    assert (out, err) == ("once\n", "")
    assert np.load(tmp_path / "cache" / "images.npy")[:, 0, 0].tolist() == [*range(40)]
    assert len([*tmp_path.glob("*.pid")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(script, tmp_path, how):
    process, deadline = script(1000), time.monotonic() + 100
    while len(pids := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, how)
    _, complained = process.communicate(timeout=20)
    assert process.returncode == -how
    assert complained.count("Traceback") == (how == signal.SIGINT)
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # the first two calls are noted only if the process could still write
    assert (tmp_path / "cache" / "images.state").exists() == (how == signal.SIGINT)
