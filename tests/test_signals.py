"""Output to a pipe whose reader has closed it."""

import subprocess
import sys

import pytest

PRINTS = """
import sys
from raylt.signals import outlive_pipes

outlive_pipes()
for number in range(20_000):
    print("line", number, file=sys.stdout if number % 2 else sys.stderr)
open(sys.argv[1], "w").close()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_outlives_head_and_keeps_its_exit_code(tmp_path, code):
    done = tmp_path / "done"
    command = subprocess.Popen(
        [sys.executable, "-c", PRINTS, done, str(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    assert command.stderr is not None
    assert command.stdout.readline() == b"line 1\n"
    command.stdout.close()
    command.stderr.close()
    assert command.wait(60) == code
    assert done.exists()


def test_help_ends_quietly_when_its_reader_closes_the_pipe():
    command = subprocess.Popen(
        [sys.executable, "-m", "raylt", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert (command.wait(60), command.stderr.read()) == (0, "")
