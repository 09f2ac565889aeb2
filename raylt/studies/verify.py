"""Checks of study folders and results files, for `raylt verify`.

See raylt/runs/verify.py for the checks of runs.
"""

from collections.abc import Iterator
from pathlib import Path

from raylt.errors import RayltError
from raylt.runs.folder import summary
from raylt.runs.folder.reader import Files
from raylt.runs.verify import Finding, finding_of
from raylt.studies.records import recorded_runs
from raylt.studies.records.record import read_run
from raylt.studies.records.recorded_runs import read_results
from raylt.studies.running.tuning import FILE as TUNED
from raylt.studies.running.tuning import read_tuned
from raylt.studies.study import FILE, Study, check_definition_seal


def verify_results(file: Path) -> list[Finding]:
    """Check a results file: its own hashes, and each record against the summary of its run."""
    try:
        _, records, _, _ = read_results(file)
    except RayltError as error:
        return [Finding(file.name, False, str(error))]
    sealed = [record for record in records if record.sealed]
    findings = [Finding(file.name, True, f"{len(records)} records, {len(sealed)} of them sealed")]
    for record in records:
        if not record.sealed:
            findings.append(Finding(record.folder, True, "unsealed: no hash binds its figures to its run"))
    return findings


def verify_study(folder: Path) -> list[Finding]:
    """Check a study's folder: its definition, its runs and its results files."""
    return list(_findings(folder))


def _findings(folder: Path) -> Iterator[Finding]:
    definition = finding_of(FILE, lambda: _describe_definition(folder))
    yield definition
    if (folder / TUNED).exists():
        yield finding_of(TUNED, lambda: f"outcomes of {sum(map(len, read_tuned(folder).values()))} searches")
    for name in (recorded_runs.RECORDED, recorded_runs.FILE):
        if (folder / name).exists():
            yield from verify_results(folder / name)
    if not definition.whole:
        return
    try:
        study = Study.open_unchecked(folder)
    except RayltError as error:
        yield Finding(str(folder), False, str(error))
        return
    yield finding_of("settings", lambda: _check_settings(study, folder))
    for record in study.records:
        if study.is_on_record(record) or record.state == "missing":
            continue
        yield finding_of(record.folder, lambda path=folder / record.folder: _describe_run(path))


def _describe_definition(folder: Path) -> str:
    check_definition_seal(folder)
    return "as raylt wrote it"


def _check_settings(study: Study, folder: Path) -> str:
    study.check_settings(folder)
    return "the runs have the settings that the study plans"


def _describe_run(folder: Path) -> str:
    """Return the state of a run as text; raise a RayltError if one of its files is damaged."""
    record = read_run(folder)
    files = Files(folder)
    if record.state in ("damaged", "done"):
        files.split()
        files.provenance()
        files.summary()  # raises the error that makes a run damaged
    if record.state == "done" and (folder / summary.MODEL).exists():
        files.model()
    return f"{record.state}, {record.steps} steps"
