"""results.json: the definition of a study and every record, all that tables and reports are made from."""

import json
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.config import DataConfig, check
from raylt.data.task import build_task
from raylt.errors import CheckpointError, ConfigError, DataError
from raylt.runs.files import Files
from raylt.studies.definition import Definition
from raylt.studies.records import Record
from raylt.studies.tuning import Outcomes
from raylt.typed import as_json, closed

FILE, SCHEMA = "results.json", 1
LIMIT = 2**30               # bytes of it
Holdings = dict[str, dict[str, Any]]


@closed
class _Results(TypedDict):
    """The content of results.json."""

    schema: int
    definition: dict[str, Any]
    records: list[dict[str, Any]]
    holdings: Holdings
    tuned: NotRequired[Outcomes]


_RESULTS = TypeAdapter(_Results)


def write_results(path: Path, definition: Definition, records: list[Record], holdings: Holdings,
                  tuned: Outcomes) -> None:
    content: dict[str, Any] = {"schema": SCHEMA, "definition": definition.model_dump(mode="json"),
                               "records": [record.to_json() for record in records], "holdings": holdings}
    store.write(path, json.dumps(content | ({"tuned": tuned} if tuned else {}), separators=(",", ":")) + "\n")


def read_results(path: Path) -> tuple[Definition, list[Record], Holdings, Outcomes]:
    """The inverse of `write_results`.

    Raises:
        CheckpointError: it cannot be read, or is of another schema.
    """
    content = as_json(store.read(path, LIMIT), _RESULTS, f"{path}: not the results of a study")
    if content["schema"] != SCHEMA:
        raise CheckpointError(f"{path}: has schema {content['schema']}, this raylt reads {SCHEMA}")
    records = [Record.from_json(record, str(path)) for record in content["records"]]
    return check(Definition, content["definition"]), records, content["holdings"], content.get("tuned", {})


def held_in(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """What clients hold in a run, see `Study.holdings`; None where its data are not on this machine."""
    try:
        task = build_task(DataConfig(**config["data"]), Files(folder).split())
    except (DataError, ConfigError):
        return None
    return {"names": list(task.class_names), "groups": list(task.groups), "counts": task.client_counts.tolist()}
