"""Every error that raylt raises on purpose.

    RayltError ─ ConfigError   ─ UnknownMethod      input: exit code 2
               ├ DataError                          input: exit code 2
               ├ ClientError   ─ ClientLost         one client's call failed
               ├ LateWrite                          a tensor was changed after it was handed over
               ├ TooFewReplies                      a round fell below its quorum
               ├ BudgetSpent                        more would be uploaded than privacy.epsilon allows
               ├ Overflow                           a value does not fit into a secure sum
               ├ ServerLost                         the process that aggregates died
               ├ CheckpointError                    a run folder that cannot be used
               │   └ FolderHeld                     another process is at it
               └ DiskFull                           a file could not be written for want of space

Each message is one line: what is wrong with which value, what was expected, what to do.
"""

import textwrap
import traceback
from pathlib import Path


class RayltError(Exception):
    """Base of all; `exit_code` is what the command line ends with."""

    exit_code = 1

    def __str__(self) -> str:
        """One line, whatever the names of files and settings in it are."""
        return "".join(letter if letter.isprintable() else "?" for letter in super().__str__())


class ConfigError(RayltError):
    """A setting is unknown, of the wrong type, out of range or in conflict with another."""

    exit_code = 2


class UnknownMethod(ConfigError):
    """No method has this name."""


class DataError(RayltError):
    """The data is missing, malformed or cannot be split as asked."""

    exit_code = 2


class ClientError(RayltError):
    """A client's function raised, or its reply cannot be used.

    Args:
        client: id of the client, or -1 when unknown.
        round: number of the round, from 1.
        function: name of the client function.
        cause: one line.
    """

    def __init__(self, client: int, round: int, function: str, cause: str):
        super().__init__(f"client {client}, round {round}, {function}: {cause}")
        self.client, self.round, self.function, self.cause = client, round, function, cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.client, self.round, self.function, self.cause)


class ClientLost(ClientError):
    """The process that held a client died before it replied."""


class LateWrite(RayltError):
    """A tensor of a reply or of a client's state was changed in place after it was handed over."""

    def __init__(self, path: str):
        super().__init__(f"{path} was changed after it was handed over; hand over a copy (tree.snapshot), or change "
                         "it before")
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)


class BudgetSpent(RayltError):
    """An upload with noise would exceed the run's privacy budget."""


class Overflow(RayltError):
    """A value is too large for the fixed point of a secure sum."""


class TooFewReplies(RayltError):
    """Fewer clients replied usably than `federation.quorum` asks for."""


class ServerLost(RayltError):
    """The process that hosts the experiment died; the last checkpoint is where to go on.

    Args:
        cause: one line.
    """

    def __init__(self, cause: str):
        super().__init__(f"{cause}; continue with raylt resume")
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.cause,)


class CheckpointError(RayltError):
    """A run folder exists already, is not whole, or belongs to another configuration."""

    exit_code = 2


class FolderHeld(CheckpointError):
    """Another process is at this run folder."""


class DiskFull(RayltError):
    """A file could not be written: the disk, or what the user may have of it, is full.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path):
        super().__init__(f"{path}: the disk is full; free some of it, then go on with raylt resume RUN (a search: "
                         "raylt tune --resume SEARCH, a study: the same raylt study)")
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)


def one_line(error: BaseException) -> str:
    """The type and message of an exception and the last line of project or user code that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = textwrap.shorten(" ".join(str(error).split()), 400, placeholder=" ...")
    return f"{type(error).__name__}: {said}{place}"
