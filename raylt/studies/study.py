"""`Study`: a folder of runs that belong together, from its definition to its tables."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from raylt import store
from raylt.config import Config, DataConfig, followed, settled
from raylt.data.task import build_task
from raylt.errors import CheckpointError, ConfigError, DataError
from raylt.runs import provenance
from raylt.runs.files import Files
from raylt.studies import results, schedule
from raylt.studies.comparison import Comparison, compare
from raylt.studies.definition import Definition, Planned, define, read_definition
from raylt.studies.measures import At
from raylt.studies.records import Record, read_run
from raylt.studies.settings import flat
from raylt.studies.tuning import Outcomes, describe, read_tuned, search_arms

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
    """

    def __init__(self, definition: Definition, folder: Path | None, records: list[Record],
                 holdings: dict[str, dict[str, Any]] | None = None, tuned: Outcomes | None = None):
        self.definition, self.folder, self.records = definition, folder, records
        self.tuned: Outcomes = tuned or {}
        if folder is not None and definition.tune is not None:
            self.tuned = read_tuned(folder)
        self._holdings = holdings

    @classmethod
    def preview(cls, definition: Definition, out: Path) -> "Study":
        """What `create` would take up; makes nothing."""
        study = cls(definition, out / definition.name, [])
        study.read()
        return study

    @classmethod
    def create(cls, definition: Definition, out: Path) -> "Study":
        """The study's folder, made or taken up. What was run before stays, arms, cells and seeds may have been added.

        Raises:
            CheckpointError: the folder is something else, or a run in it was made with other settings.
        """
        folder = out / definition.name
        if folder.exists() and not (folder / FILE).is_file() and any(folder.iterdir()):
            raise CheckpointError(f"{folder}: exists and is no study; give the study another name, or another --out")
        study = cls(definition, folder, [])
        study.read()
        for plan, record in zip(study.planned, study.records, strict=True):
            if record.config and (changed := differences(record.config, plan.config)):
                raise CheckpointError(f"{folder / plan.folder}: was made with other settings ({'; '.join(changed)}); "
                                      "give the study another name, or remove that run")
        with store.folder_for(folder) as made:
            made.write(FILE, yaml.safe_dump(definition.model_dump(mode="json", exclude_defaults=True),
                                            sort_keys=False, allow_unicode=True))
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
        raise CheckpointError(f"{path}: no study (it has no {FILE}); give a folder that raylt study made, or its "
                              f"{results.FILE}")

    @property
    def planned(self) -> list[Planned]:
        """Every run, with what its arm was tuned to."""
        return self.definition.runs(self.tuned)

    def read(self) -> list[Record]:
        """Reads the state of every run off its folder."""
        assert self.folder is not None
        self._holdings = None
        self.records = [replace(read_run(self.folder / plan.folder, plan.cell, plan.arm, plan.seed, plan.folder),
                                planned_steps=plan.config.federation.rounds)
                        for plan in self.planned]
        return self.records

    def run(self, watcher: schedule.Watcher | None = None, parallel: int | None = None,
            fleet: Literal["local", "ray"] = "local", address: str | None = None,
            mix_versions: bool = False) -> list[str]:
        """Tunes arms where the study says so, runs what is missing, goes on with what stopped, writes results.json.

        Args:
            parallel: runs at once; by default one per core.
            mix_versions: go on although runs were made by code that computes something else.

        Returns:
            The folders, relative to the study's, of runs that failed.

        Raises:
            CheckpointError: a run is damaged, or runs were made by another version of the code.
        """
        assert self.folder is not None
        if self.definition.tune is not None:
            self.tuned = search_arms(self.definition.bases(), self.definition.tune, self.definition.compared_to,
                                     self.folder, watcher or Silent(), parallel, fleet, address)
        for record in self.read():
            if record.state == "damaged":
                raise CheckpointError(f"{record.problem}; raylt verify {self.folder / record.folder} says what is "
                                      "whole; remove that run to do it again")
        if not mix_versions:
            self._check_versions()
        failed = schedule.run_all(self.planned, self.records, self.folder, watcher or Silent(), parallel, fleet,
                                  address)
        self.read()
        self.save_results()
        return failed

    def compare(self, measure: str | None = None, at: At | None = None, reference: str | None = None,
                level: float = 0.95) -> Comparison:
        """What the finished runs show, see `raylt.studies.comparison.compare`."""
        chosen = self.definition
        own = {arm: {key: value for key, value in flat(changes).items() if not key.startswith("method")}
               for arm, changes in chosen.arms.items()}
        lines = [describe(cell, arm, outcome) for cell, arms in self.tuned.items() for arm, outcome in arms.items()]
        for arms in self.tuned.values():
            for arm, outcome in arms.items():
                own[arm] = own.get(arm, {}) | {key: "as tuned" for key in outcome["values"] if key[:7] != "method."}
        return compare(self.records, reference or chosen.compared_to, chosen.parsed_claims, measure or chosen.measure,
                       at or chosen.at, level, own, lines)

    @property
    def holdings(self) -> dict[str, dict[str, Any]]:
        """Of each cell, for its first finished run: "names" and "groups" of the classes, "counts" by client and class.

        Cells whose data are not on this machine are left out.
        """
        if self._holdings is None:
            self._holdings = {}
            for record in sorted(self.records, key=lambda r: r.seed):
                if record.state == "done" and record.cell not in self._holdings:
                    folder = (self.folder or Path()) / record.folder
                    if (held := _held_in(record.config, folder)) is not None:
                        self._holdings[record.cell] = held
        return self._holdings

    def save_results(self) -> Path:
        """Writes results.json: the definition and every record, all that tables and reports are made from."""
        assert self.folder is not None
        path = self.folder / results.FILE
        results.write_results(path, self.definition, self.records, self.holdings, self.tuned)
        return path

    def _check_versions(self) -> None:
        current = provenance.code_sha256()
        for record in self.records:
            codes = record.made.get("codes", []) if record.state != "missing" else []
            if any(code != current for code in codes):
                raise CheckpointError(f"{record.folder}: was made by another version of the code ({codes[0][:12]}, "
                                      f"now {current[:12]}); --mix-versions goes on all the same, another name starts "
                                      "anew")


def differences(config: dict[str, Any], planned: Config) -> list[str]:
    """Settings of a run folder that are not those of its plan, resources and output apart."""
    made = Config(**config)
    before, after = flat(settled(made)), flat(settled(followed(planned, made)))
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in sorted(before | after)
            if before.get(key) != after.get(key)]


def study(definition: "Mapping[str, Any] | Path | str | Definition", out: Path | str = "runs", **how: Any) -> Study:
    """Runs a study to its end: `raylt.study("study.yaml")`, or with the same content as a mapping.

    Args:
        out: folder that the study's folder is made in.
        how: see `Study.run`.

    Raises:
        ConfigError: runs failed; they are named, and the others are there.
    """
    if isinstance(definition, str | Path):
        definition = read_definition(Path(definition))
    elif not isinstance(definition, Definition):
        definition = define(definition)
    made = Study.create(definition, Path(out))
    failed = made.run(**how)
    if failed:
        raise ConfigError(f"{made.folder}: {len(failed)} runs failed ({', '.join(failed)}); see the .failed "
                          "files there")
    return made


def _held_in(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    try:
        task = build_task(DataConfig(**config["data"]), Files(folder).split())
    except (DataError, ConfigError):
        return None
    return {"names": list(task.class_names), "groups": list(task.groups), "counts": task.client_counts.tolist()}
