"""What came of a malformed input: `outcome` says it in a word, `TALLY` counts the words by generator."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raylt.errors import RayltError

SECONDS = 20  # of this process: far more than any case takes
PATIENCE = 10  # times as long by the clock, where other processes keep the machine busy or the input blocks
WORDS = ("refused", "the same", "false", "unforeseen", "hang")
TALLY: dict[str, Counter[str]] = {}


class Hang(BaseException):
    """Not an Exception: nothing on the way may take it for a fault of the input."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    timers = {
        signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE * SECONDS),
        signal.SIGPROF: (signal.ITIMER_PROF, SECONDS),
    }
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def outcome(generator: str, act: Callable[[], Any], right: Callable[[Any], bool]) -> tuple[str, str]:
    """A word of WORDS, and what was seen.

    Args:
        act: reads the input; refuses it by a RayltError, or returns what it read.
        right: whether that is what an undisturbed input gives, or what this one says.
    """
    try:
        with _limited():
            value = act()
            word, seen = ("the same", "") if right(value) else ("false", repr(value)[:300])
    except RayltError as error:
        message = str(error)
        fit = error.exit_code == 2 and "\n" not in message and 0 < len(message) < 3000
        word, seen = ("refused", message) if fit else ("unforeseen", f"exit {error.exit_code}: {message[:300]!r}")
    except Hang:
        word, seen = "hang", f"more than {SECONDS} s of work, or {PATIENCE * SECONDS} s"
    except Exception as error:
        word, seen = "unforeseen", f"{type(error).__name__}: {str(error)[:300]}"
    TALLY.setdefault(generator, Counter())[word] += 1
    return word, seen


def table() -> str:
    """Cases by generator and outcome."""
    lines = [f"{'':>16}{'cases':>8}" + "".join(f"{word:>12}" for word in WORDS)]
    for name, counts in TALLY.items():
        lines.append(f"{name:>16}{counts.total():>8}" + "".join(f"{counts[word]:>12}" for word in WORDS))
    return "\n".join(lines)
