"""What came of a malformed input: `outcome` says it in a word, `TALLY` counts the words by generator."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raylt.errors import RayltError

SECONDS = 20            # far more than any case takes on a busy machine
WORDS = ("refused", "the same", "false", "unforeseen", "hang")
TALLY: dict[str, Counter[str]] = {}


class Hang(BaseException):
    """Not an Exception: nothing on the way may take it for a fault of the input."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
        word, seen = "hang", f"more than {SECONDS} s"
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
