"""What TensorBoard shows of a run: every number of its reports.

Written here and not by a SummaryWriter, whose thread ends without a word on a full disk and leaves the run waiting.
"""

import secrets
import socket
import struct
import time
from typing import Any

from raylt.store import Folder


class Board:
    """Writes a file for TensorBoard into a run folder, from the first report on."""

    def __init__(self) -> None:
        self._file: str | None = None

    def show(self, folder: Folder, report: dict[str, Any]) -> None:
        """Adds the numbers of a step."""
        from tensorboardX.proto import event_pb2, summary_pb2  # --help need not wait for it
        kinds: Any = event_pb2          # made when they are imported
        summary: Any = summary_pb2.Summary     # pyright: ignore[reportAttributeAccessIssue]
        begins = kinds.SessionLog(status=kinds.SessionLog.START)
        now, step, events = time.time(), report["step"], []
        if self._file is None:
            # a name that nobody can have put a link at
            self._file = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{secrets.token_hex(8)}"
            events = [kinds.Event(wall_time=now, file_version="brain.Event:2"),
                      # what an earlier session wrote of this step and those after it counts no more
                      kinds.Event(wall_time=now, step=step, session_log=begins)]
        values = [summary.Value(tag=name, simple_value=value) for name, value in _scalars(report) if name != "step"]
        events.append(kinds.Event(wall_time=now, step=step, summary=summary(value=values)))
        folder.append(self._file, b"".join(_record(event.SerializeToString()) for event in events))


def _record(content: bytes) -> bytes:
    """A TFRecord: length, its CRC, content, its CRC."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))


def _scalars(tree: dict[str, Any], path: str = "") -> list[tuple[str, float]]:
    scalars: list[tuple[str, float]] = []
    for key, value in tree.items():
        here = f"{path}/{key}" if path else key
        if isinstance(value, dict):
            scalars += _scalars(value, here)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            scalars.append((here, value))
    return scalars
