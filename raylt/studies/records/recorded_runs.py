"""Files of study results, from which a study can take finished runs instead of running them again.

results.json contains a study's definition and all records, from which tables and reports are made. A seal protects its
content, see seal.py. Files of schema 1 are older than seals: their records are used, and every table lists them as
unsealed. `seal_results` adds seals to those records in such a file whose summaries still match their hashes.

`results/NAME.json`, next to a study's file, stores the study's finished and diverged runs in the same format. Finished
runs count as done, so the study runs only the others. A recorded run counts if it is done, has the planned settings
including tuned values, and was made by the same code and plugins, unless versions may be mixed. The study's folder
stores the runs that it took in recorded.json.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.config import Config, DataConfig, check, completed
from raylt.data.task import build_task
from raylt.disk import exists
from raylt.errors import CheckpointError, ConfigError, DataError, one_line, spoken
from raylt.registry import other_version
from raylt.runs.folder import provenance
from raylt.runs.folder.reader import Files
from raylt.runs.folder.summary import check_figures
from raylt.studies.definition import Definition, Planned
from raylt.studies.records.former_names import current_settings
from raylt.studies.records.record import RunRecord
from raylt.studies.records.seal import (
    FileSeal,
    changed,
    check_seal,
    contradiction,
    is_intact,
    seal_file,
)
from raylt.studies.running.tuning import Outcomes, joined, search_settings
from raylt.studies.settings import differences, file_names, flat
from raylt.typed_json import as_json, closed, hash_json

FILE = "results.json"
RECORDED = "recorded.json"
SCHEMA = 2
UNSEALED = 1  # schema of files without seals
MAX_FILE_BYTES = 2**30  # maximum size of a results file
Key = tuple[str, str, int]  # cell, arm and seed


@closed
class Holding(TypedDict):
    """The class counts of all clients in one cell, see `Study.holdings`."""

    names: list[str]
    groups: list[str]
    counts: list[list[int]]


Holdings = dict[str, Holding]  # by cell


@closed
class _Results(TypedDict):
    """The content of results.json."""

    schema: int
    definition: dict[str, Any]
    records: list[dict[str, Any]]
    holdings: Holdings
    tuned: NotRequired[Outcomes]
    seal: NotRequired[FileSeal]


_RESULTS = TypeAdapter(_Results)


@dataclass(frozen=True)
class Recorded:
    """Runs that a study takes from a results file.

    Attributes:
        records: Records by cell, arm and seed.
        holdings: Class counts of their cells, see `Study.holdings`.
        passed_over: One line for each reason why recorded runs were not taken.
    """

    records: dict[Key, RunRecord] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)


def write_results(
    path: Path, definition: Definition, records: list[RunRecord], holdings: Holdings, tuned: Outcomes
) -> None:
    """Write the results of a study to a JSON file.

    Args:
        path: The file.
        definition: The study.
        records: Records of its runs.
        holdings: Class counts by cell, see `Study.holdings`.
        tuned: Outcomes of tuning, by cell and arm.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "definition": definition.model_dump(mode="json"),
        "records": [record.to_json() for record in records],
        "holdings": holdings,
    }
    if tuned:
        content["tuned"] = tuned
    content = json.loads(json.dumps(content))  # as a reader sees it, with string keys
    content["seal"] = seal_file(content["definition"], content["holdings"], content.get("tuned", {}), records)
    store.write(path, json.dumps(content, separators=(",", ":")) + "\n")


def read_results(path: Path) -> tuple[Definition, list[RunRecord], Holdings, Outcomes]:
    """Read a study's results from a file that `write_results` wrote.

    Raises:
        CheckpointError: The file cannot be read, was changed after it was written, or has another schema.
    """
    where = str(path)
    content = as_json(store.read(path, MAX_FILE_BYTES), _RESULTS, f"{path}: not the results of a study")
    if content["schema"] not in (SCHEMA, UNSEALED):
        raise CheckpointError(
            f"{path}: this raylt reads schema {SCHEMA} ({content['schema']}). Read it with the raylt that wrote it.",
            code="record.other-schema",
            path=where,
            value=content["schema"],
        )
    seal = content.get("seal")
    if (seal is None) != (content["schema"] == UNSEALED):
        raise changed(where, "seal", "does not belong to this schema" if seal else "is missing")
    records = [RunRecord.from_json(record, where) for record in content["records"]]
    for record in records:
        if record.state == "done":
            _check_form(record, where)
    sealed = [False] * len(records) if seal is None else check_seal(seal, {"tuned": {}, **content}, records, where)
    methods = {record.arm: record.config["method"]["name"] for record in records if record.config}
    records = [
        replace(record, sealed=each, config=current_settings(record.config, methods.get(record.arm, "")))
        for record, each in zip(records, sealed, strict=True)
    ]
    definition = check(Definition, content["definition"])
    arms = {arm: current_settings(changes, methods.get(arm, "")) for arm, changes in definition.arms.items()}
    tuned = _with_current_names(content.get("tuned", {}), methods)
    return definition.model_copy(update={"arms": arms}), records, content["holdings"], tuned


def _with_current_names(tuned: Outcomes, methods: Mapping[str, str]) -> Outcomes:
    """Return tuning outcomes with the current names of method fields.

    Args:
        tuned: Outcomes by cell and arm.
        methods: Name of each arm's method.
    """
    return {
        cell: {
            arm: {**outcome, "values": current_settings(outcome["values"], methods.get(arm, ""))}
            for arm, outcome in arms.items()
        }
        for cell, arms in tuned.items()
    }


def seal_results(path: Path) -> list[str]:
    """Add seals (hashes) to a results file from an earlier version, which had none.

    Records whose summaries do not match their hashes stay unsealed.

    Returns:
        One line for each record that stays unsealed.

    Raises:
        CheckpointError: The file cannot be read, or is sealed already and was changed.
    """
    definition, records, holdings, tuned = read_results(path)
    lines = []
    sealed = []
    for record in records:
        problem = _unsealable(record)
        if problem:
            lines.append(f"{record.folder}: stays unsealed, since {problem}")
        sealed.append(replace(record, sealed=not problem))
    write_results(path, definition, sealed, holdings, tuned)
    return lines


def _unsealable(record: RunRecord) -> str | None:
    if record.summary is not None and not is_intact(record.summary):
        return "its summary does not have the hash that its run gave it"
    problem = contradiction(record)
    return f"its {problem} contradicts its summary" if problem else None


def _check_form(record: RunRecord, where: str) -> None:
    """Check the types of the fields that tables and reports read from a finished run's record.

    Raises:
        CheckpointError: A part has the wrong type, or contradicts another part. The message names it.
    """
    name = f"{where}: {record.folder}"
    if record.summary is None:
        raise changed(where, f"{record.folder}: summary", "is missing")
    check_figures(record.summary, name)
    try:
        check(Config, record.config)
        completed(record.config)
        problem = contradiction(record)
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}", code="file.malformed", path=where, key="config") from None
    except (KeyError, TypeError, AttributeError) as error:  # a section or a group is missing or malformed
        raise CheckpointError(
            f"{name}: a part of the record has the wrong type or is missing ({one_line(error)}). Restore the original "
            "file.",
            code="file.malformed",
            path=where,
        ) from None
    if problem:
        raise changed(where, f"{record.folder}: {problem}", "contradicts the summary of its run")


def read_holdings(config: dict[str, Any], folder: Path) -> Holding | None:
    """Return all clients' class counts in a run, or None if the run's data is not on this machine.

    See `Study.holdings`.
    """
    try:
        task = build_task(DataConfig(**config["data"]), Files(folder).split(), provenance.start_of(folder))
    except (DataError, ConfigError):
        return None
    return {"names": list(task.class_names), "groups": list(task.groups), "counts": task.client_counts.tolist()}


def record_path(file: Path, definition: Definition) -> Path:
    """Return the path of the file with the recorded runs of the study that `file` defines."""
    return file.parent / "results" / f"{definition.name}.json"


def load_planned(path: Path, planned: Sequence[Planned], mix_versions: bool) -> Recorded:
    """Load the planned runs that a results file contains.

    If the file does not exist, there are none.

    Args:
        path: The results file.
        planned: The planned runs.
        mix_versions: Whether to use runs that another version of the code made.

    Raises:
        CheckpointError: The file exists but cannot be read.
    """
    if not exists(path):
        return Recorded()
    plans = {(plan.cell, plan.arm, plan.seed): plan for plan in planned}
    _, records, holdings, _ = read_results(path)
    current = provenance.code_sha256()
    taken: dict[Key, RunRecord] = {}
    other_code: list[RunRecord] = []
    other_settings: list[tuple[RunRecord, str]] = []
    for record in records:
        plan = plans.get(_key(record))
        if record.state != "done" or plan is None:
            continue
        same_code = record.made.get("codes") == [current] and other_version(record.made.get("plugins", {})) is None
        if not mix_versions and not same_code:
            other_code.append(record)
        elif differing := _differences(record, plan):
            other_settings.append((record, differing))
        else:
            taken[_key(record)] = record
    passed_over = []
    if other_code:
        passed_over.append(
            f"{path}: another version of the code made {len(other_code)} recorded runs, which are repeated. "
            f"Use them with {spoken('--mix-versions', 'mix_versions=True')}."
        )
    if other_settings:
        first, differing = other_settings[0]
        passed_over.append(
            f"{path}: {len(other_settings)} recorded runs had other settings and are repeated. "
            f"The first is {first.folder} ({differing})."
        )
    return Recorded(taken, holdings if taken else {}, passed_over)


def load_tuned(path: Path, definition: Definition, mix_versions: bool) -> Outcomes:
    """Load the recorded outcomes of searches with unchanged settings, so that these searches need not run again.

    Unless versions may be mixed, no outcome is loaded if this version of the code made none of the recorded runs, since
    then another version also made the searches. The same holds for an arm if another version of a plugin made its runs.

    Raises:
        CheckpointError: The file exists but cannot be read.
    """
    if definition.tune is None or not exists(path):
        return {}
    _, records, _, tuned = read_results(path)
    current = provenance.code_sha256()
    if not mix_versions and not any(record.made.get("codes") == [current] for record in records):
        return {}
    planned = {(cell, arm) for cell in definition.all_cells for arm in definition.arms_of(cell)}
    if not mix_versions:
        planned -= {(each.cell, each.arm) for each in records if other_version(each.made.get("plugins", {}))}
    versions = _versions(records)
    outcomes: Outcomes = {}
    for cell, arms in tuned.items():
        outcomes[cell] = {}
        for arm, outcome in arms.items():
            if (cell, arm) in planned and outcome["asked"] in _search_hashes(definition, cell, arm, versions):
                asked = _search_hash(definition, cell, arm)  # this version's hash of the search
                outcomes[cell][arm] = {**outcome, "asked": asked}
    return outcomes


def store_taken(folder: Path, definition: Definition, recorded: Recorded) -> None:
    """Write a study's recorded runs into its folder, replacing those written earlier."""
    if recorded.records:
        write_results(folder / RECORDED, definition, list(recorded.records.values()), recorded.holdings, {})
    else:
        with store.Folder.open(folder) as opened:
            opened.remove(RECORDED)


def load_stored(folder: Path, definition: Definition, tuned: Outcomes) -> Recorded:
    """Load the runs that `store_taken` wrote, if the study still plans them.

    The version of their code was checked when they were stored.
    """
    if not (folder / RECORDED).exists():
        return Recorded()
    return load_planned(folder / RECORDED, definition.runs(tuned), mix_versions=True)


def update(
    path: Path, definition: Definition, ended: Sequence[RunRecord], holdings: Holdings, tuned: Outcomes
) -> list[str]:
    """Add finished and diverged runs to the record file, replacing runs with the same cell, arm and seed.

    Diverged runs are results, which rankings and claims count. But a study takes only finished runs from the file.

    Other recorded runs are kept if the study would still make them with the same settings. For this test, the study
    also has their seeds, and the arms and cells of its former definition. All other recorded runs are removed, since
    they cannot be compared with the new runs.

    Since record files are meant to be shared, paths in settings are reduced to the names of files and folders.

    Args:
        path: The record file, which need not exist.
        definition: The current definition of the study.
        ended: Finished and diverged runs.
        holdings: Class counts of their cells.
        tuned: Outcomes of tuning.

    Returns:
        One line about removed runs, or an empty list.
    """
    former = definition
    records: list[RunRecord] = []
    former_holdings: Holdings = {}
    former_tuned: Outcomes = {}
    if exists(path):
        former, records, former_holdings, former_tuned = read_results(path)
    wide = _with_former(definition, former)
    outcomes = joined(former_tuned, tuned) if definition.tune else {}

    new = {_key(record): _portable(record) for record in ended}
    older = [record for record in records if _key(record) not in new]
    versions = _versions(records)
    changes = {_key(record): _changes(record, wide, outcomes, versions) for record in older}
    kept = {_key(record): record for record in older if not changes[_key(record)]}
    removed = [f"{record.folder} ({changes[_key(record)]})" for record in older if changes[_key(record)]]

    cells_of_kept = {cell for cell, _, _ in kept}
    with store.folder_for(path.parent):
        write_results(
            path,
            _restricted(wide, definition, kept),
            _in_order(new | kept, kept, definition.runs(tuned)),
            {cell: each for cell, each in former_holdings.items() if cell in cells_of_kept} | holdings,
            joined(_outcomes_of(kept, outcomes), tuned),
        )
    if not removed:
        return []
    return [
        f"{path}: {len(removed)} recorded runs are removed, since the study would make them differently. "
        f"The first is {removed[0]}."
    ]


def _key(record: RunRecord) -> Key:
    return record.cell, record.arm, record.seed


def _with_former(definition: Definition, former: Definition) -> Definition:
    """Return a study's definition, extended by arms and cells of its former definition.

    Where both definitions have an arm or cell of the same name, the current one counts.
    """
    arms = {arm: changes for arm, changes in former.arms.items() if arm not in definition.arms}
    return _with(definition, arms=definition.arms | arms, cells=former.all_cells | definition.all_cells)


def _restricted(wide: Definition, definition: Definition, kept: Mapping[Key, RunRecord]) -> Definition:
    """Return a study's definition without those former arms and cells for which no runs were kept."""
    cells = {cell for cell, _, _ in kept}
    arms = {arm for _, arm, _ in kept} | definition.arms.keys()
    fields: dict[str, Any] = {"arms": {arm: changes for arm, changes in wide.arms.items() if arm in arms}}
    former_cells = {cell: settings for cell, settings in wide.all_cells.items() if cell in cells}
    # keep `cells` empty in a study without cells, unless runs of a former cell are kept
    if former_cells.keys() - definition.all_cells.keys():
        fields["cells"] = former_cells | definition.all_cells
    return _with(definition, **fields)


def _in_order(
    records: Mapping[Key, RunRecord], kept: Mapping[Key, RunRecord], planned: Sequence[Planned]
) -> list[RunRecord]:
    """Return the planned runs in their order, followed by the other kept runs."""
    keys = [(plan.cell, plan.arm, plan.seed) for plan in planned]
    ordered = dict.fromkeys([*(key for key in keys if key in records), *kept])
    return [records[key] for key in ordered]


def _outcomes_of(kept: Mapping[Key, RunRecord], outcomes: Outcomes) -> Outcomes:
    """Return the tuning outcomes of those cells and arms for which runs were kept."""
    pairs = {(cell, arm) for cell, arm, _ in kept}
    return {
        cell: {arm: outcome for arm, outcome in arms.items() if (cell, arm) in pairs} for cell, arms in outcomes.items()
    }


def _portable(record: RunRecord) -> RunRecord:
    """Return a record in which file names replace this machine's paths, in settings and in figures."""
    data = record.config["data"]
    config = {**record.config, "data": {**data, "root": Path(data["root"]).name}}
    text = json.dumps({**record.to_json(), "config": config})
    for path, name in file_names(record.config).items():
        text = text.replace(json.dumps(path)[1:-1], json.dumps(name)[1:-1])
    portable: dict[str, Any] = json.loads(text)
    if record.summary is not None and portable["summary"] != record.summary and is_intact(record.summary):
        # renew the hash, which was correct before names replaced paths
        portable["summary"]["sha256"] = hash_json(
            {key: value for key, value in portable["summary"].items() if key != "sha256"}
        )
    return replace(RunRecord.from_json(portable), sealed=record.sealed)


def _with(definition: Definition, **fields: Any) -> Definition:
    return Definition.model_validate(definition.model_dump(mode="json") | fields)


def _changes(record: RunRecord, wide: Definition, outcomes: Outcomes, versions: Iterable[frozenset[str]]) -> str:
    """Describe how a recorded run differs from the run that the study now plans; return "" if they agree."""
    cell = record.cell
    arm = record.arm
    if cell not in wide.all_cells or arm not in wide.arms:
        return "the study does not have this cell or arm"
    outcome = outcomes.get(cell, {}).get(arm)
    try:
        if outcome and wide.tune and outcome["asked"] not in _search_hashes(wide, cell, arm, versions):
            return "its arm was tuned with other settings"
        return _differences(record, wide.run(cell, arm, record.seed, outcomes))
    except ConfigError as error:
        return str(error)


def _versions(records: Iterable[RunRecord]) -> set[frozenset[str]]:
    """Return the sets of dotted setting names in the runs, one for each version of raylt that made them."""
    return {frozenset(flat(record.config)) for record in records if record.config}


def accepted_searches(definition: Definition, records: Iterable[RunRecord]) -> dict[tuple[str, str], set[str]]:
    """Return the hashes of each arm's search by cell and arm, as this version and those of the runs compute them."""
    versions = _versions(records)
    return {(cell, arm): _search_hashes(definition, cell, arm, versions) for cell, arm in definition.bases()}


def _search_hashes(definition: Definition, cell: str, arm: str, versions: Iterable[frozenset[str]]) -> set[str]:
    """Return the hashes of an arm's search as computed by this version and by each given version."""
    return {
        _search_hash(definition, cell, arm, version, former)
        for version in (None, *versions)
        for former in (False, True)
    }


def _search_hash(
    definition: Definition, cell: str, arm: str, version: frozenset[str] | None = None, former_names: bool = False
) -> str:
    """Return the hash of an arm's search; see `search_settings`."""
    assert definition.tune is not None
    base = definition.base_of(cell, arm)
    reference = definition.base_of(cell, definition.compared_to)
    return hash_json(search_settings(definition.tune, arm, base, reference, version, former_names))


def _differences(record: RunRecord, plan: Planned) -> str:
    """Return the settings in which a recorded run differs from the planned run, or "" if they agree."""
    try:
        return "; ".join(differences(record.config, plan.config, elsewhere=True))
    except ConfigError as error:
        return str(error)
