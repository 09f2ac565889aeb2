"""`Study`: a folder of runs that belong together, from its definition to its tables."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from raylt import store
from raylt.errors import CheckpointError, ConfigError
from raylt.runs import provenance
from raylt.studies import recorded, results, schedule
from raylt.studies.comparison import Comparison, compare
from raylt.studies.definition import Definition, Planned, define, read_definition
from raylt.studies.estimate import Pace
from raylt.studies.measures import At
from raylt.studies.recorded import Recorded
from raylt.studies.records import Record, read_run
from raylt.studies.settings import differences, flat
from raylt.studies.tuning import Outcomes, describe, joined, read_tuned, search_arms, searched, write_tuned

FILE = "study.yaml"


class Silent:
    """A watcher that shows nothing."""

    def says(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, running: Any, share: float, left_s: float | None) -> None:
        pass


class Study:
    """Arms over cells and seeds, and what has become of each run.

    Attributes:
        definition: what is compared.
        folder: that holds the runs; None for results that were read from a file.
        records: of every planned run, as they were when they were last read.
        tuned: what came of tuning, by cell and arm, see raylt/studies/tuning.py.
        recorded: runs that are on record and need no folder, see raylt/studies/recorded.py.
    """

    def __init__(self, definition: Definition, folder: Path | None, records: list[Record],
                 holdings: dict[str, dict[str, Any]] | None = None, tuned: Outcomes | None = None):
        self.definition, self.folder, self.records = definition, folder, records
        self.tuned: Outcomes = tuned or {}
        if folder is not None and definition.tune is not None:
            self.tuned = read_tuned(folder)
        self.recorded = Recorded() if folder is None else recorded.read(folder, definition, self.tuned)
        self._holdings = holdings

    @classmethod
    def preview(cls, definition: Definition, out: Path, record_file: Path | None = None,
                mix_versions: bool = False) -> "Study":
        """What `create` would take up; makes nothing."""
        study = cls(definition, out / definition.name, [])
        if record_file is not None:
            study.tuned = joined(recorded.tuned_in(record_file, definition, mix_versions), study.tuned)
            study.recorded = recorded.take(record_file, study.planned, mix_versions)
        study.read()
        return study

    @classmethod
    def create(cls, definition: Definition, out: Path, record_file: Path | None = None,
               mix_versions: bool = False) -> "Study":
        """The study's folder, made or taken up. What was run before stays, arms, cells and seeds may have been added.

        Args:
            record_file: results of the study that were kept, whose runs count as done; it need not exist.
            mix_versions: also those that were made by code that computes something else.

        Raises:
            CheckpointError: the folder is something else, a run in it was made with other settings, or the record
                cannot be read.
        """
        folder = out / definition.name
        if folder.exists() and not (folder / FILE).is_file() and any(folder.iterdir()):
            raise CheckpointError(f"{folder}: exists and is no study; give the study another name, or another --out")
        study = cls.preview(definition, out, record_file, mix_versions)
        for plan, made in zip(study.planned, study.records, strict=True):
            if not study.is_on_record(made) and made.config and (changed := differences(made.config, plan.config)):
                raise CheckpointError(f"{folder / plan.folder}: was made with other settings ({'; '.join(changed)}); "
                                      "give the study another name, or remove that run")
        with store.folder_for(folder) as opened:
            opened.write(FILE, yaml.safe_dump(definition.model_dump(mode="json", exclude_defaults=True),
                                              sort_keys=False, allow_unicode=True))
        if record_file is not None:
            recorded.keep(folder, definition, study.recorded)
            if study.tuned:
                write_tuned(folder, study.tuned)
        return study

    @classmethod
    def open(cls, path: Path) -> "Study":
        """A study's folder, its results.json, or a run folder by itself.

        Raises:
            CheckpointError: it is none of these.
        """
        if path.is_file() and path.suffix == ".json":
            definition, records, holdings, tuned = results.read_results(path)
            return cls(definition, None, records, holdings, tuned)
        if (path / FILE).is_file():
            study = cls(read_definition(path / FILE), path, [])
            study.read()
            return study
        problem = f"no study (it has no {FILE})" if path.exists() else "no such file or folder"
        raise CheckpointError(f"{path}: {problem}; give a folder that raylt study made, or its {results.FILE}")

    @property
    def planned(self) -> list[Planned]:
        """Every run, with what its arm was tuned to."""
        return self.definition.runs(self.tuned)

    def read(self) -> list[Record]:
        """Reads the state of every run off its folder; one that has none is done if it is on record."""
        assert self.folder is not None
        self._holdings = None
        self.records = []
        for plan in self.planned:
            found = read_run(self.folder / plan.folder, plan.cell, plan.arm, plan.seed, plan.folder)
            on_record = self.recorded.records.get((plan.cell, plan.arm, plan.seed))
            self.records.append(on_record if found.state == "missing" and on_record else
                                replace(found, planned_steps=plan.config.federation.rounds))
        return self.records

    def run(self, watcher: schedule.Watcher | None = None, parallel: int | None = None,
            fleet: Literal["local", "ray"] = "local", address: str | None = None,
            mix_versions: bool = False, record_file: Path | None = None) -> list[str]:
        """Tunes arms where the study says so, runs what is missing, goes on with what stopped, writes results.json.

        Args:
            parallel: runs at once; by default one per core.
            mix_versions: go on although runs were made by code that computes something else.
            record_file: results of the study that are kept: finished runs are put there, also when this is interrupted.

        Returns:
            The folders, relative to the study's, of runs that failed.

        Raises:
            CheckpointError: a run is damaged, or runs were made by another version of the code.
        """
        assert self.folder is not None
        self._check_runs(self.folder, mix_versions)
        if self.definition.tune is not None:
            self.tuned = search_arms(self.definition.bases(), self.definition.tune, self.definition.compared_to,
                                     self.folder, watcher or Silent(), parallel, fleet, address)
            self.read()
        # a run without a folder is nothing that another could go on from
        here = [(plan, found) for plan, found in zip(self.planned, self.records, strict=True)
                if not self.is_on_record(found)]
        try:
            return schedule.run_all([plan for plan, _ in here], [found for _, found in here], self.folder,
                                    watcher or Silent(), parallel, fleet, address, Pace(self.records))
        finally:
            self.read()
            for line in self.save_results(record_file):
                (watcher or Silent()).says(line)

    def compare(self, measure: str | None = None, at: At | None = None, reference: str | None = None,
                level: float = 0.95, mix_versions: bool = False) -> Comparison:
        """What the finished runs show, see `raylt.studies.comparison.compare`."""
        chosen = self.definition
        own = {arm: {key: value for key, value in flat(changes).items() if not key.startswith("method")}
               for arm, changes in chosen.arms.items()}
        lines = [describe(cell, arm, outcome) for cell, arms in self.tuned.items() for arm, outcome in arms.items()]
        return compare(self.records, reference or chosen.compared_to, chosen.parsed_claims, measure or chosen.measure,
                       at or chosen.at, level, own, searched(self.tuned), lines, mix_versions)

    @property
    def holdings(self) -> dict[str, dict[str, Any]]:
        """Of each cell, for its first finished run: "names" and "groups" of the classes, "counts" by client and class.

        Cells whose data are not on this machine are left out.
        """
        if self._holdings is None:
            self._holdings = {}
            for record in sorted(self.records, key=lambda r: r.seed):
                if record.state != "done" or record.cell in self._holdings:
                    continue
                if self.is_on_record(record):
                    held = self.recorded.holdings.get(record.cell)
                else:
                    held = results.held_in(record.config, (self.folder or Path()) / record.folder)
                if held is not None:
                    self._holdings[record.cell] = held
        return self._holdings

    def save_results(self, record_file: Path | None = None) -> list[str]:
        """Writes results.json: the definition and every record, all that tables and reports are made from.

        Args:
            record_file: results that are kept, to which finished runs are added.

        Returns:
            What was taken off those, see `raylt.studies.recorded.record`.
        """
        assert self.folder is not None
        results.write_results(self.folder / results.FILE, self.definition, self.records, self.holdings, self.tuned)
        done = [each for each in self.records if each.state == "done"]
        if record_file is None or not done:
            return []
        return recorded.record(record_file, self.definition, done, self.holdings, self.tuned)

    def is_on_record(self, record: Record) -> bool:
        """Whether a run is done because it is on record, and has no folder."""
        return self.recorded.records.get((record.cell, record.arm, record.seed)) is record

    def _check_runs(self, folder: Path, mix_versions: bool) -> None:
        """Raises a CheckpointError where a run is damaged, or was made by other code and versions may not be mixed."""
        current = provenance.code_sha256()
        for record in self.read():
            if record.state == "damaged":
                raise CheckpointError(f"{record.problem}; raylt verify {folder / record.folder} says what is whole; "
                                      "remove that run to do it again")
            codes = record.made.get("codes", []) if record.state != "missing" else []
            if not mix_versions and any(code != current for code in codes):
                raise CheckpointError(f"{record.folder}: was made by another version of the code ({codes[0][:12]}, "
                                      f"now {current[:12]}); --mix-versions goes on, another name starts anew")


def study(definition: "Mapping[str, Any] | Path | str | Definition", out: Path | str = "runs", **how: Any) -> Study:
    """Runs a study to its end: `raylt.study("study.yaml")`, or with the same content as a mapping.

    Args:
        out: folder that the study's folder is made in.
        how: see `Study.run`.

    Raises:
        ConfigError: runs failed; they are named, and the others are there.
    """
    record_file = None
    if isinstance(definition, str | Path):
        file, definition = Path(definition), read_definition(Path(definition))
        record_file = recorded.place_of(file, definition)
    elif not isinstance(definition, Definition):
        definition = define(definition)
    made = Study.create(definition, Path(out), record_file, how.get("mix_versions", False))
    failed = made.run(**how)
    if failed:
        raise ConfigError(f"{made.folder}: {len(failed)} runs failed ({', '.join(failed)}); see the .failed "
                          "files there")
    return made
