"""notes.log: remarks on a run's images, its problems and their remedies, one on each line.

If an error ended the run's last process, the file ends with a line that names the error.
"""

import re

from raylt.errors import RayltError, describe_error, on_one_line
from raylt.store import Folder

NOTES = "notes.log"
SERVER_DIED = "the server's process died"  # start of a note
TAIL_BYTES = 2**14  # the last line is shorter, since messages are shortened
FAILURE = re.compile(r"failed(?: \((?P<code>[a-z-]+\.[a-z-]+)\))?: (?P<problem>.+)")


def failure_note(error: BaseException) -> str:
    """Return the note about the error that ended a run."""
    code = f" ({error.code})" if isinstance(error, RayltError) and error.code else ""
    return f"failed{code}: {on_one_line(describe_error(error))}"


def failure(folder: Folder) -> tuple[str, str | None] | None:
    """Return the error that ended a run's last process.

    Returns:
        The message, and the code if the error had one. None if the notes do not end with an error.
    """
    if not folder.has(NOTES):
        return None
    with folder.stream(NOTES) as notes:
        size = notes.seek(0, 2)
        notes.seek(max(0, size - TAIL_BYTES))
        lines = notes.read().decode(errors="replace").rstrip("\n").rpartition("\n")
    last = FAILURE.fullmatch(lines[2])
    return None if last is None else (on_one_line(last["problem"]), last["code"])
