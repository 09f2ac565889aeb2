"""Seals of recorded results: hashes that link each number in a results file to a run's summary.

A run's summary contains a hash of its own fields, and the hashes of the run and of the last line in metrics.jsonl. The
seal of a record consists of the summary's hash and of hashes of the record's other parts. The seal of a file consists
of the seals of all records in order, of hashes of the definition with its claims, the class counts and the tuning
outcomes, and of one hash over all of these. A record whose summary does not match its own hash gets no seal, and stays
unsealed in every copy.

The hashes reveal damage and edits. They are not a signature, since anyone can recompute all hashes for other numbers;
for signatures see raylt/runs/signature.py.
"""

from collections.abc import Mapping, Sequence
from math import isclose
from statistics import fmean
from typing import Any

from typing_extensions import TypedDict

from raylt.errors import CheckpointError
from raylt.metrics import GROUPS
from raylt.runs.folder.summary import ADDED
from raylt.studies.records.record import CLIENT_CURVES, CURVES, LATER_CURVES, RunRecord
from raylt.typed_json import closed, hash_json

_PLACE = ("cell", "arm", "seed", "folder", "state", "problem", "steps", "planned_steps", "error")
_TOLERANCE = 0.01  # seconds, since curves are rounded


@closed
class RecordSeal(TypedDict):
    """The hashes of the parts of one run's record.

    `summary` is the hash that the run gave to its summary.
    """

    place: str
    config: str
    curve: str
    made: str
    by_client: str
    summary: str


@closed
class FileSeal(TypedDict):
    """The hashes that seal a results file, with None for each unsealed record."""

    definition: str
    holdings: str
    tuned: str
    records: list[RecordSeal | None]
    sha256: str


def seal_record(record: RunRecord) -> RecordSeal | None:
    """Return the hashes that seal a record, or None if its summary does not match the hash that the run wrote."""
    if not record.sealed or (record.summary is not None and not is_intact(record.summary)):
        return None
    content = RunRecord.from_json(record.to_json()).to_json()  # numbers have the same types as after reading
    return {
        "place": hash_json({name: content[name] for name in _PLACE if name in content}),
        "config": hash_json(content["config"]),
        "curve": hash_json(content["curve"]),
        "made": hash_json(content["made"]),
        "by_client": hash_json(content["by_client"]),
        "summary": hash_json(None) if record.summary is None else record.summary["sha256"],
    }


def seal_file(definition: Any, holdings: Any, tuned: Any, records: Sequence[RunRecord]) -> FileSeal:
    """Compute the hashes that seal a results file with the given content."""
    content: Any = {
        "definition": hash_json(definition),
        "holdings": hash_json(holdings),
        "tuned": hash_json(tuned),
        "records": [seal_record(record) for record in records],
    }
    content["sha256"] = hash_json(content)
    return content


def check_seal(seal: FileSeal, content: Mapping[str, Any], records: Sequence[RunRecord], where: str) -> list[bool]:
    """Check the content of a results file against the hashes in its seal.

    Args:
        seal: The seal in the file.
        content: The file's definition, holdings and tuned.
        records: The file's records.
        where: Name of the file in error messages.

    Returns:
        Whether each record is sealed.

    Raises:
        CheckpointError: A part was changed. The message names it.
    """
    parts = {key: value for key, value in seal.items() if key != "sha256"}
    if seal["sha256"] != hash_json(parts):
        raise changed(where, "seal", "does not match its own hash")
    for name in ("definition", "holdings", "tuned"):
        if seal[name] != hash_json(content[name]):
            raise changed(where, name, "was changed after it was recorded")
    if len(seal["records"]) != len(records):
        raise changed(
            where, "records", f"differ in number from those sealed ({len(records)}, not {len(seal['records'])})"
        )
    for record, expected in zip(records, seal["records"], strict=True):
        if expected is None:
            continue
        actual = seal_record(record)
        if actual is None:
            raise changed(where, f"{record.folder}: summary", "does not have the hash that its run gave it")
        for part, sha256 in actual.items():
            if expected[part] != sha256:
                raise changed(where, f"{record.folder}: {part}", "was changed after it was recorded")
    return [each is not None for each in seal["records"]]


def changed(where: str, part: str, problem: str) -> CheckpointError:
    """Return the error for a results file in which one part has changed since it was recorded."""
    return CheckpointError(
        f"{where}: {part} {problem}. Restore the original file.", code="record.changed", path=where, part=part
    )


def is_intact(summary: Mapping[str, Any]) -> bool:
    """Return whether a summary still matches the hash that its run wrote into it."""
    body = {key: value for key, value in summary.items() if key != "sha256"}
    for first in range(len(ADDED), -1, -1):
        # reading a run folder sets later figures, which did not exist when the run ended, to None
        later = {name for name in ADDED[first:] if body.get(name) is None}
        if summary.get("sha256") == hash_json({key: value for key, value in body.items() if key not in later}):
            return True
    return False


def contradiction(record: RunRecord) -> str | None:
    """Return the part of a finished run's record that contradicts the run's summary, or None."""
    summary = record.summary
    if summary is None:
        return "state" if record.state == "done" else None
    curve = record.curve
    rounds = summary["rounds"]
    federation = record.config["federation"]
    planned = record.planned_steps
    all_taken = rounds == planned or (federation.get("patience") is not None and rounds < planned)
    if record.state != "done" or not max(rounds, 1) <= record.steps <= rounds + 1 or not all_taken:
        return "state"
    if record.config["method"]["name"] != summary["method"] or federation["rounds"] != planned:
        return "config"
    if record.config["seed"] != record.seed:
        return "seed"
    if curve.keys() | LATER_CURVES != set(CURVES) or any(len(values) != record.steps for values in curve.values()):
        return "curve"
    if any(None in curve[key] for key in ("step", "up", "down", "seconds")):
        return "curve"
    if curve["step"] != list(range(1, record.steps + 1)) or not _agree_at_the_end(curve, summary):
        return "curve"
    steps = rounds or 1  # a run without rounds has one step
    judged = [value for value in curve["accuracy"][:steps] if value is not None]
    accuracy = summary["accuracy"]
    if not judged or not isclose(fmean(judged[-10:]), accuracy["last10"], abs_tol=1e-9):
        return "curve"
    if max([*judged, accuracy["last"]]) != accuracy["best"]:
        return "curve"
    for kind, values in record.by_client.items():
        judged_values = [value for value in values if value is not None]
        mean = summary["clients"]["by"].get(kind, {}).get("mean")
        if judged_values and (mean is None or not isclose(fmean(judged_values), mean, abs_tol=1e-9)):
            return "by_client"
    code = summary["made"].get("code")
    if code is not None and code not in record.made.get("codes", []):
        return "made"
    return None


def _agree_at_the_end(curve: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> bool:
    """Return whether the last values of a curve equal the values in the summary."""
    expected = {"accuracy": summary["accuracy"]["last"], **summary["bytes"]}
    expected |= {group: (summary["groups"] or {}).get(group) for group in GROUPS}
    if any(curve[key][-1] != value for key, value in expected.items()):
        return False
    for measure, (kind, figure) in CLIENT_CURVES.items():
        if measure in curve and curve[measure][-1] != summary["clients"]["by"].get(kind, {}).get(figure):
            return False
    return abs(curve["seconds"][-1] - summary["seconds"]) <= _TOLERANCE
