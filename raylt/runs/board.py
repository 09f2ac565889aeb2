"""What TensorBoard shows of a run: its settings under HPARAMS, every number of its reports as a curve, and at its end a
picture of predictions.

Written here and not by a SummaryWriter, whose thread ends without a word on a full disk and leaves the run waiting.
"""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from raylt.runs.grid import Picture
from raylt.store import Folder

# figures of a report, and the curves that they are; others are called as they are in the report
CURVES = {
    "accuracy": "accuracy/test set", "global_accuracy": "accuracy/global model", "macro": "accuracy/mean of classes",
    "groups/many": "accuracy/many-shot", "groups/medium": "accuracy/medium-shot", "groups/few": "accuracy/few-shot",
    "global_macro": "accuracy/global model, mean of classes", "miou": "iou/test set",
    "global_miou": "iou/global model", "quality/auc": "quality/AUC",
    "quality/calibration_error": "quality/calibration error", "figures/loss": "training/loss",
    "seconds": "seconds/training", "evaluation_seconds": "seconds/evaluation"}
FAMILIES = {"clients": "clients", "figures": "method", "traffic": "traffic", "stages": "seconds of stages",
            "others": "other models"}
WORDS = {"mean": "mean", "worst_decile": "worst tenth", "up": "bytes up", "down": "bytes down"}
RESULTS = ("accuracy/test set", "accuracy/many-shot", "accuracy/medium-shot", "accuracy/few-shot",
           "clients/local, mean")


class Board:
    """Writes a file for TensorBoard into a run folder, from the first report on.

    Args:
        settings: of the run, for HPARAMS; called when the file is begun.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        self._file: str | None = None
        self._settings = settings

    def show(self, folder: Folder, report: dict[str, Any]) -> None:
        """Adds the numbers of a step."""
        self._add(folder, report["step"], [{"tag": name, "simple_value": value} for name, value in figures_of(report)])

    def picture(self, folder: Folder, step: int, picture: Picture) -> None:
        """Adds a picture of predictions after a step."""
        image = {"height": picture.height, "width": picture.width, "colorspace": 3,
                 "encoded_image_string": picture.png}
        self._add(folder, step, [{"tag": f"predictions/{picture.whose}", "image": image}])

    def _add(self, folder: Folder, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # --help need not wait for it
        kinds: Any = event_pb2          # made when they are imported
        summary: Any = summary_pb2.Summary     # pyright: ignore[reportAttributeAccessIssue]
        begins = kinds.SessionLog(status=kinds.SessionLog.START)
        now, events = time.time(), []
        if self._file is None:
            # a name that nobody can have put a link at
            self._file = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{secrets.token_hex(8)}"
            events = [kinds.Event(wall_time=now, file_version="brain.Event:2"),
                      # what an earlier session wrote of this step and those after it counts no more
                      kinds.Event(wall_time=now, step=step, session_log=begins),
                      *(kinds.Event(wall_time=now, summary=part) for part in _hparams(self._settings()))]
        shown = summary(value=[summary.Value(**value) for value in values])
        events.append(kinds.Event(wall_time=now, step=step, summary=shown))
        folder.append(self._file, b"".join(_record(event.SerializeToString()) for event in events))


def curve_of(name: str) -> str:
    """The name of a figure's curve, in the family that TensorBoard puts it into.

    Args:
        name: its path in a report, as in clients/owned/mean.
    """
    if name in CURVES:
        return CURVES[name]
    family, _, rest = name.partition("/")
    words = [WORDS.get(word, word.replace("_", " ")) for word in rest.split("/")]
    return f"{FAMILIES.get(family, family)}/{', '.join(words)}" if rest else name


def figures_of(report: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a step by the names of their curves.

    Args:
        report: as a line of metrics.jsonl has it.
    """
    return [(curve_of(name), value) for name, value in _leaves(report, "/")
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "schema")]


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that have a value by their full keys; what is neither number nor text as text."""
    return {name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in _leaves(config) if value is not None}


def _hparams(settings: dict[str, Any]) -> tuple[Any, ...]:
    """What the HPARAMS tab reads: the settings by their full keys, and the curves that results are taken from."""
    from tensorboardX.summary import hparams

    return hparams(settings_of(settings), dict.fromkeys(RESULTS, 0))


def _record(content: bytes) -> bytes:
    """A TFRecord: length, its CRC, content, its CRC."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))


def _leaves(tree: dict[str, Any], between: str = ".", path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        here = f"{path}{between}{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, between, here)
        else:
            yield here, value
