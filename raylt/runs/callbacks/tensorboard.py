"""The TensorBoard file of a run: settings under HPARAMS, a curve for each number in its reports, and a picture.

The picture shows predictions of the final model. The names of the curves come from the fields of `RoundReport`.

This module does not use a SummaryWriter, because its thread dies silently on a full disk and leaves the run waiting.
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from raylt.core.report import FIGURES
from raylt.runs.callbacks.prediction_grid import Picture
from raylt.store import Folder

_WORDS = {"mean": "mean", "worst_decile": "worst tenth", "up": "bytes up", "down": "bytes down"}
_RESULTS = ("accuracy", "groups/many", "groups/medium", "groups/few", "clients/local/mean")


class Board:
    """Writes a TensorBoard file into a run folder, starting with the first report.

    Args:
        settings: Function that returns the run's settings for HPARAMS, called when the file is created.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        self._file: str | None = None
        self._settings = settings

    def show(self, folder: Folder, report: dict[str, Any]) -> None:
        """Add the numbers in a step's report to the file."""
        self._add(folder, report["step"], [{"tag": tag, "simple_value": value} for tag, value in figures_of(report)])

    def picture(self, folder: Folder, step: int, picture: Picture) -> None:
        """Add a picture of predictions after a step."""
        image = {"height": picture.height, "width": picture.width, "colorspace": 3, "encoded_image_string": picture.png}
        self._add(folder, step, [{"tag": f"predictions/{picture.model}", "image": image}])

    def _add(self, folder: Folder, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import

        kinds: Any = event_pb2  # protobuf classes without static types
        summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        begins = kinds.SessionLog(status=kinds.SessionLog.START)
        now, events = time.time(), []
        if self._file is None:
            # an unguessable name, so that no link can be placed there beforehand
            self._file = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{secrets.token_hex(8)}"
            events = [
                kinds.Event(wall_time=now, file_version="brain.Event:2"),
                # makes TensorBoard drop events of an earlier session for this and later steps
                kinds.Event(wall_time=now, step=step, session_log=begins),
                *(kinds.Event(wall_time=now, summary=part) for part in _hparams(self._settings())),
            ]
        shown = summary(value=[summary.Value(**value) for value in values])
        events.append(kinds.Event(wall_time=now, step=step, summary=shown))
        folder.append(self._file, b"".join(_record(event.SerializeToString()) for event in events))


def curve_of(name: str) -> str:
    """Return the TensorBoard tag, `family/name`, for a number of a report.

    Args:
        name: Path of the number in a report, such as clients/owned/mean.
    """
    field, _, rest = name.partition("/")
    figure = FIGURES.get(field)
    if not rest:
        return figure.curve or name if figure is not None else name
    if figure is not None and rest in figure.curves:
        return figure.curves[rest]
    family = figure.curve if figure is not None and figure.curve else field
    words = [_WORDS.get(word, word.replace("_", " ")) for word in rest.split("/")]
    return f"{family}/{', '.join(words)}"


def figures_of(report: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (TensorBoard tag, value) for each number in a step's report.

    Args:
        report: A line of metrics.jsonl.
    """
    return [
        (curve_of(name), value)
        for name, value in _leaves(report, "/")
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "schema")
    ]


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None, by full key. Values are numbers or text."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in _leaves(config)
        if value is not None
    }


def _hparams(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return the records for TensorBoard's HPARAMS tab: the settings, and the curves that show the results."""
    from tensorboardX.summary import hparams

    return hparams(settings_of(settings), {curve_of(name): 0 for name in _RESULTS})


def _record(content: bytes) -> bytes:
    """Return content in the TFRecord format: length, CRC of the length, content, CRC of the content."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))


def _leaves(tree: dict[str, Any], between: str = ".", path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        inner = f"{path}{between}{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, between, inner)
        else:
            yield inner, value
