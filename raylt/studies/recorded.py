"""Runs on record beside a study's file, in `results/NAME.json`: they count as done, and only the rest is run.

A recorded run is taken where it is what the study plans: done, with the same settings, and made by the same code unless
versions may be mixed. Those that are taken stand in the study's folder as recorded.json, so the folder tells it all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raylt import store
from raylt.runs import provenance
from raylt.studies import results
from raylt.studies.definition import Definition, Planned
from raylt.studies.records import Record
from raylt.studies.results import Holdings
from raylt.studies.settings import differences

FILE = "recorded.json"
Key = tuple[str, str, int]          # cell, arm and seed


@dataclass(frozen=True)
class Recorded:
    """Runs that need not be done, since they are on record.

    Attributes:
        holdings: of their cells, see `Study.holdings`.
        passed_over: a line for each reason for which recorded runs were not taken.
    """

    records: dict[Key, Record] = field(default_factory=dict)
    holdings: Holdings = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)


def place_of(file: Path, definition: Definition) -> Path:
    """Where the runs of the study in this file are recorded."""
    return file.parent / "results" / f"{definition.name}.json"


def take(path: Path, planned: Sequence[Planned], mix_versions: bool) -> Recorded:
    """What is on record of the planned runs; nothing where there is no such file.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    if not path.exists():
        return Recorded()
    plans = {(plan.cell, plan.arm, plan.seed): plan for plan in planned}
    _, records, holdings, _ = results.read_results(path)
    current, taken = provenance.code_sha256(), dict[Key, Record]()
    other_code, other_settings = [], []
    for record in records:
        key = record.cell, record.arm, record.seed
        if record.state != "done" or key not in plans:
            continue
        if not mix_versions and record.made.get("codes") != [current]:
            other_code.append(record.folder)
        elif changed := differences(record.config, plans[key].config):
            other_settings.append(f"{record.folder} ({'; '.join(changed)})")
        else:
            taken[key] = record
    passed_over = []
    if other_code:
        passed_over.append(f"{path}: {len(other_code)} recorded runs were made by another version of the code and are "
                           "done again; --mix-versions takes them as they are")
    if other_settings:
        passed_over.append(f"{path}: {len(other_settings)} recorded runs had other settings and are done again, the "
                           f"first is {other_settings[0]}")
    return Recorded(taken, holdings if taken else {}, passed_over)


def keep(folder: Path, definition: Definition, recorded: Recorded) -> None:
    """Writes what was taken into the study's folder, in place of what was taken before."""
    if recorded.records:
        results.write_results(folder / FILE, definition, list(recorded.records.values()), recorded.holdings, {})
    else:
        with store.Folder.open(folder) as opened:
            opened.remove(FILE)


def read(folder: Path) -> Recorded:
    """What `keep` wrote."""
    if not (folder / FILE).exists():
        return Recorded()
    _, records, holdings, _ = results.read_results(folder / FILE)
    return Recorded({(r.cell, r.arm, r.seed): r for r in records}, holdings)


def record(path: Path, definition: Definition, done: Sequence[Record], holdings: Holdings,
           tuned: results.Outcomes) -> None:
    """Puts finished runs on record, in place of those of the same cell, arm and seed; the others stay as they were."""
    before = results.read_results(path) if path.exists() else (definition, [], {}, {})
    new = {(r.cell, r.arm, r.seed): r for r in done}
    old = {(r.cell, r.arm, r.seed): r for r in before[1]}
    ordered = [(plan.cell, plan.arm, plan.seed) for plan in definition.runs(tuned)]
    keys = [*(key for key in ordered if key in new or key in old), *(key for key in old if key not in set(ordered))]
    with store.folder_for(path.parent):
        results.write_results(path, definition, [new.get(key) or old[key] for key in keys],
                              before[2] | holdings, before[3] | tuned)
