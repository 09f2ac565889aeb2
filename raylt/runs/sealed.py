"""summary.json: what a run came to, sealed by what it came from.

It has the run's SHA-256, that of the last line of metrics.jsonl, the model's, and under `sha256` one over all the rest.
"""

import json
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.core.checkpoint import Seal
from raylt.errors import CheckpointError
from raylt.runs.lines import Count, Lines, Seconds, Share
from raylt.runs.provenance import SCHEMA
from raylt.store import Folder
from raylt.typed import closed, hash_json

FILE = "summary.json"
MODEL = "model.safetensors"
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Spread = dict[str, Share]


@closed
class _Accuracy(TypedDict):
    last: Annotated[float, Field(ge=0, le=1)]
    last10: Annotated[float, Field(ge=0, le=1)]
    best: Annotated[float, Field(ge=0, le=1)]
    last10_values: NotRequired[Count]


@closed
class _Clients(TypedDict):
    mean: Share
    worst_decile: Share
    by: dict[str, Spread]
    sampled: NotRequired[dict[str, Any] | None]
    never_sampled: NotRequired[dict[str, Any] | None]


@closed
class _Bytes(TypedDict):
    up: Count
    down: Count


@closed
class Summary(TypedDict):
    """The content of summary.json; raylt/runs/schemas/summary.json says what is what."""

    schema: int
    date: str
    made: dict[str, Any]
    method: str
    split_sha256: Sha256
    model_sha256: Sha256
    task: str
    rounds: Count
    accuracy: _Accuracy
    macro: Share
    miou: Share
    global_accuracy: Share
    global_macro: Share
    global_miou: Share
    quality: NotRequired[dict[str, Share] | None]
    before_finish: Share
    groups: Spread
    groups_before_finish: Spread | None
    clients: _Clients
    others: dict[str, dict[str, Any]]
    bytes: _Bytes
    seconds: Seconds
    seconds_per_round: Seconds
    figures: dict[str, Any]
    troubles: dict[str, Count]
    privacy: NotRequired[dict[str, Any]]
    run: Sha256
    line: Sha256
    sha256: Sha256


_SUMMARY = TypeAdapter(Summary)


def seal(summary: dict[str, Any], of: Seal) -> dict[str, Any]:
    """A summary with what binds it to its run, and its own hash."""
    content = json.loads(json.dumps({**summary, "run": of.run, "line": of.line}))
    return {**content, "sha256": hash_json(content)}


def write(folder: Folder, summary: dict[str, Any]) -> None:
    folder.write(FILE, json.dumps(summary, indent=2) + "\n")


def read_summary(folder: Folder, known: Lines) -> dict[str, Any]:
    """The summary of a finished run.

    Args:
        known: the lines of the run.

    Raises:
        CheckpointError: it was changed, or is of another run.
    """
    here = folder.path / FILE
    summary: dict[str, Any] = {**folder.read_json(FILE, _SUMMARY)}
    if summary["schema"] != SCHEMA:
        raise CheckpointError(f"{here}: has schema {summary['schema']}, this raylt reads {SCHEMA}; run it again")
    if summary["sha256"] != hash_json({key: value for key, value in summary.items() if key != "sha256"}):
        raise CheckpointError(f"{here}: was changed after the run ended; put the original back")
    if summary["run"] != known.root:
        raise CheckpointError(f"{here}: is of another run ({summary['run'][:12]}, this one is {known.root[:12]}); put "
                              "the run's own back")
    if summary["line"] != known.head() or known.torn:
        raise CheckpointError(f"{here}: metrics.jsonl does not end with the line that the run ended with; put the "
                              "original back")
    return summary


def was_saved(known: Lines) -> bool:
    """Whether some step of a run was followed by a checkpoint: a line that was restored from one has no date."""
    return any("checkpoint" in report["stages"] or report["date"] is None for report in known.reports)
