"""Checks of study folders and results files, for `raylt verify`.

See raylt/runs/verify.py for the checks of runs.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from raylt.disk import exists, is_folder
from raylt.errors import RayltError, count_of
from raylt.runs.folder import metrics_log
from raylt.runs.folder.reader import Files
from raylt.runs.verify import ABSENT, ALL_EVENTS, UNSEALED, Finding, finding_of, unbound_in, verify_inner
from raylt.store import Folder
from raylt.studies.records import recorded_runs
from raylt.studies.records.recorded_runs import read_results
from raylt.studies.running.tuning import FILE as TUNED
from raylt.studies.running.tuning import read_tuned
from raylt.studies.study import FILE, SEAL, Study, check_definition_seal

# Error codes that point to a missing plugin, or to a missing file that the plugin or the definition names.
OF_PLUGINS = ("config.unknown-name", "file.not-found")


def verify_results(file: Path) -> list[Finding]:
    """Check a results file: its own hashes, and each record against the summary of its run."""
    try:
        _, records, _, _ = read_results(file)
    except RayltError as error:
        return [Finding(file.name, False, str(error))]
    sealed = [record for record in records if record.sealed]
    findings = [Finding(file.name, True, f"{count_of(len(records), 'record')}, {len(sealed)} of them sealed")]
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
        absent = error.code in (*ABSENT, *OF_PLUGINS)
        yield Finding("settings" if absent else str(folder), absent, str(error), checked=not absent)
        if absent:
            yield from _check_runs_in(folder)
            yield from _check_others(folder)
        return
    yield finding_of("settings", lambda: _check_settings(study, folder))
    for record in study.records:
        if not study.is_on_record(record):
            yield from _check_run(
                folder / record.folder, record.folder, record.state, f", {count_of(record.steps, 'step')}"
            )
    yield from _check_runs_in(folder, {record.folder for record in study.records})
    yield from _check_others(folder)


def _check_runs_in(folder: Path, checked: Collection[str] = ()) -> Iterator[Finding]:
    """Check the runs in a study's folder that are not checked yet, also those that the study does not plan."""
    for path in sorted(folder.rglob("seed-*")):
        name = str(path.relative_to(folder))
        if is_folder(path) and name not in checked:
            yield from _check_run(path, name, Files(path).state)


def _check_others(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each file directly in the folder that has no recorded hash, such as process logs.

    The files of TensorBoard in all runs have one finding.
    """
    bound = {FILE, SEAL, TUNED, recorded_runs.RECORDED, recorded_runs.FILE}
    if any(folder.rglob(f"seed-*/{ALL_EVENTS}")):
        yield Finding(f"seed-*/{ALL_EVENTS}", True, UNSEALED)
    with Folder.open(folder) as study_folder:
        bound |= {name for name in study_folder.names() if not study_folder.has(name)}
        yield from unbound_in(study_folder, bound)


def _describe_definition(folder: Path) -> str:
    check_definition_seal(folder)
    return "as raylt wrote it"


def _check_settings(study: Study, folder: Path) -> str:
    study.check_settings(folder)
    study.check_tuned()
    return "the runs have the settings that the study plans"


def _check_run(folder: Path, name: str, state: str, steps: str = "") -> list[Finding]:
    if state == "missing":
        # without steps, a process died while it created the folder
        config = f"{name}/config.yaml"
        return [Finding(config, False, "missing: put it back")] if exists(folder / metrics_log.FILE) else []
    if state == "running":  # files still change, so they cannot be checked
        return [Finding(name, True, f"running{steps}")]
    return verify_inner(folder, name, f"{state}{steps}")
