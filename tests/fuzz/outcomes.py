"""Outcomes of malformed inputs: `outcome` describes one in a word, and `TALLY` counts the words by generator."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raylt.errors import RayltError

SECONDS = 20  # CPU time of this process, far more than any case takes
PATIENCE = 10  # the limit by the clock is this many times longer, for a busy machine or an input that blocks
WORDS = ("refused", "the same", "false", "unforeseen", "hang")
TALLY: dict[str, Counter[str]] = {}


class Hang(BaseException):
    """The time limit was exceeded. A BaseException, so that no code takes it for a fault of the input."""


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
    """Return one of WORDS, and what was seen.

    Args:
        act: reads the input; raises a RayltError to refuse it, or returns the result.
        right: returns whether the result is that of an undisturbed input, or what this input says.
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
    """Return a table of the number of cases by generator and outcome."""
    lines = [f"{'':>16}{'cases':>8}" + "".join(f"{word:>12}" for word in WORDS)]
    for name, counts in TALLY.items():
        lines.append(f"{name:>16}{counts.total():>8}" + "".join(f"{counts[word]:>12}" for word in WORDS))
    return "\n".join(lines)
