"""Runs on record beside a study's file, in `results/NAME.json`: they count as done, and only the rest is run.

A recorded run is taken where it is what the study plans: done, with the same settings, and made by the same code unless
versions may be mixed, and so is what its arms were tuned to. Runs that are taken stand in the study's folder as
recorded.json, so the folder tells it all.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raylt import store
from raylt.errors import ConfigError
from raylt.runs import provenance
from raylt.studies import results
from raylt.studies.definition import Definition, Planned
from raylt.studies.records import Record
from raylt.studies.results import Holdings
from raylt.studies.settings import differences, names_alone
from raylt.studies.tuning import Outcomes, asked, joined

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
        elif changed := _differences(record, plans[key]):
            other_settings.append(f"{record.folder} ({changed})")
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


def tuned_in(path: Path, definition: Definition, mix_versions: bool) -> Outcomes:
    """What tuning found for the runs on record, of those arms and cells for which the study asks the same now.

    Nothing where no recorded run was made by this code, unless versions may be mixed: the search is not by it either.

    Raises:
        CheckpointError: the file is there and cannot be read.
    """
    if definition.tune is None or not path.exists():
        return {}
    _, records, _, tuned = results.read_results(path)
    if not mix_versions and not any(each.made.get("codes") == [provenance.code_sha256()] for each in records):
        return {}
    bases = definition.bases()
    return {cell: {arm: outcome for arm, outcome in arms.items() if (cell, arm) in bases and outcome["asked"] == asked(
        definition.tune, arm, bases[cell, arm], bases[cell, definition.compared_to])} for cell, arms in tuned.items()}


def keep(folder: Path, definition: Definition, recorded: Recorded) -> None:
    """Writes what was taken into the study's folder, in place of what was taken before."""
    if recorded.records:
        results.write_results(folder / FILE, definition, list(recorded.records.values()), recorded.holdings, {})
    else:
        with store.Folder.open(folder) as opened:
            opened.remove(FILE)


def read(folder: Path, definition: Definition, tuned: Outcomes) -> Recorded:
    """What `keep` wrote, as far as the study still plans it; whose code it is was asked when it was kept."""
    if not (folder / FILE).exists():
        return Recorded()
    return take(folder / FILE, definition.runs(tuned), mix_versions=True)


def record(path: Path, definition: Definition, done: Sequence[Record], holdings: Holdings,
           tuned: Outcomes) -> list[str]:
    """Puts finished runs on record, in place of those of the same cell, arm and seed.

    A record is made to be given away, so that of files and folders in settings it has the names alone.
    Of the others those stay that the study would still make as they are, were it asked for their seeds, and for the
    arms and cells that it had when they were recorded. The rest is taken off: it must not stand beside the new ones.

    Returns:
        A line that says what was taken off, where anything was.
    """
    former, records, held, found = (results.read_results(path) if path.exists() else
                                    (definition, list[Record](), Holdings(), Outcomes()))
    wide, outcomes = _widened(definition, former), joined(found, tuned) if definition.tune else {}
    there = {(each.cell, each.arm, each.seed): _portable(each) for each in done}
    others = [(each, _changes(each, wide, outcomes)) for each in records
              if (each.cell, each.arm, each.seed) not in there]
    kept = {(each.cell, each.arm, each.seed): each for each, changes in others if not changes}
    there |= kept
    planned = [key for plan in definition.runs(tuned) if (key := (plan.cell, plan.arm, plan.seed)) in there]
    ordered = [there[key] for key in dict.fromkeys([*planned, *kept])]
    places = {(cell, arm) for cell, arm, _ in kept}
    cells, names = {cell for cell, _ in places}, {arm for _, arm in places} | definition.arms.keys()
    arms = {arm: each for arm, each in wide.arms.items() if arm in names}
    held = {cell: each for cell, each in held.items() if cell in cells}
    outcomes = {cell: {arm: each for arm, each in of_cell.items() if (cell, arm) in places}
                for cell, of_cell in outcomes.items()}
    # a study without cells stays one, unless runs are kept of a cell that it had
    former_cells = {cell: settings for cell, settings in wide.all_cells.items() if cell in cells}
    more = {"cells": former_cells | definition.all_cells} if former_cells.keys() - definition.all_cells.keys() else {}
    definition = _with(definition, arms=arms, **more)
    with store.folder_for(path.parent):
        results.write_results(path, definition, ordered, held | holdings, joined(outcomes, tuned))
    off = [f"{each.folder} ({changes})" for each, changes in others if changes]
    return [f"{path}: {len(off)} recorded runs are taken off, since the study would not make them as they are; the "
            f"first is {off[0]}"] if off else []


def _portable(record: Record) -> Record:
    """A record without the places of a machine's files, also where its figures quote them."""
    tree = record.to_json()
    tree["config"]["data"]["root"] = Path(tree["config"]["data"]["root"]).name
    text = json.dumps(tree)
    for place, name in names_alone(record.config).items():
        text = text.replace(json.dumps(place)[1:-1], json.dumps(name)[1:-1])
    return Record.from_json(json.loads(text))


def _widened(definition: Definition, former: Definition) -> Definition:
    """A study with the arms and cells that it had before, as far as it has none of that name now."""
    more = {arm: each for arm, each in former.arms.items() if arm not in definition.arms}
    return _with(definition, arms=definition.arms | more, cells=former.all_cells | definition.all_cells)


def _with(definition: Definition, **fields: Any) -> Definition:
    return Definition.model_validate(definition.model_dump(mode="json") | fields)


def _changes(record: Record, wide: Definition, outcomes: Outcomes) -> str:
    """Why a study would not make a run as it is on record; empty where it would."""
    cell, arm = record.cell, record.arm
    if cell not in wide.all_cells or arm not in wide.arms:
        return "the study has no such cell or arm"
    try:
        outcome = outcomes.get(cell, {}).get(arm)
        if outcome and wide.tune and outcome["asked"] != asked(wide.tune, arm, wide.base_of(cell, arm),
                                                               wide.base_of(cell, wide.compared_to)):
            return "its arm was tuned for something else"
        return _differences(record, wide.run(cell, arm, record.seed, outcomes))
    except ConfigError as error:
        return str(error)


def _differences(record: Record, plan: Planned) -> str:
    """What a run on record has that its plan has not; empty where it is what is planned."""
    try:
        return "; ".join(differences(record.config, plan.config, elsewhere=True))
    except ConfigError as error:
        return str(error)
