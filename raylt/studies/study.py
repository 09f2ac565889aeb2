"""`Study`: a folder of runs that belong together, with its definition and tables.

`of_runs` makes a study of separate run folders.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import TypeAdapter

from raylt import store
from raylt.config import Config, DataConfig, settled
from raylt.config import differences as setting_differences
from raylt.data.task import JudgedImages, Task, judged_images_of
from raylt.disk import exists, folder_path, is_file
from raylt.errors import CheckpointError, ConfigError, RayltError, count_of, describe_error, quoted, spoken, type_name
from raylt.metrics import GROUPS
from raylt.notebook import html_table, later
from raylt.registry import check_origins, other_version
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.notebook_progress import observer
from raylt.runs.folder import provenance
from raylt.runs.folder.identity import PluginRecord
from raylt.runs.folder.reader import Files
from raylt.runs.runner import check_fleet
from raylt.runs.start import lacks_files, preview_run
from raylt.studies.analysis.comparison import Comparison, check_comparable, compare, condition_of
from raylt.studies.analysis.measures import At, value_of
from raylt.studies.cells import label
from raylt.studies.definition import Definition, Planned, define, read_definition, reread_definition
from raylt.studies.records import recorded_runs
from raylt.studies.records.record import RunRecord, read_run
from raylt.studies.records.recorded_runs import Holdings, Recorded
from raylt.studies.report.comparison_tables import formatter, unit
from raylt.studies.report.listing import run_folders
from raylt.studies.running import scheduler
from raylt.studies.running.time_left import Pace
from raylt.studies.running.tuning import FILE as TUNED
from raylt.studies.running.tuning import (
    Outcomes,
    check_same_searches,
    describe,
    joined,
    read_tuned,
    search_arms,
    search_settings,
    searched,
    write_tuned,
)
from raylt.studies.settings import differences, flat
from raylt.typed_json import hash_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "study.yaml"
SEAL = "seal.json"  # contains the hash of study.yaml
_SEAL = TypeAdapter(dict[str, str])
# Data settings that are not part of a cell's name.
_NOT_A_CELL = ("data.seed", "data.root", "data.download", "data.split")
# Settings in which the runs of one arm and cell may differ.
_BY_SEED = ("seed", *_NOT_A_CELL)


def study(
    definition: "Mapping[str, Any] | Path | str | Definition", out: Path | str = "runs", **options: Any
) -> "Study":
    """Run a study to its end.

    Args:
        definition: The study: a YAML file, a mapping with the same content, or a `Definition`.
        out: Folder in which to create the study's folder.
        options: Keyword arguments of `Study.run`.

    Returns:
        The study, with all runs finished.

    Raises:
        RayltError: Runs failed. The message names them; all other runs are finished.
    """
    record_file = None
    if isinstance(definition, str | Path):
        file = Path(definition)
        definition = read_definition(file)
        record_file = recorded_runs.record_path(file, definition)
    elif isinstance(definition, Mapping):
        definition = define(definition)
    elif not isinstance(definition, Definition):
        raise ConfigError(
            f"definition: is not a study ({type_name(definition)}). Give a YAML file, a mapping or a Definition.",
            code="config.wrong-type",
            key="definition",
            value=type_name(definition),
        )
    made = Study.create(definition, folder_path(out, "out"), record_file, options.get("mix_versions", False))
    failed = made.run(**options)
    if failed:
        raise RayltError(
            f"{made.folder}: {count_of(len(failed), 'run')} failed ({', '.join(failed)}). The .failed files in that "
            "folder contain the causes. Call the function again to retry them.",
            code="study.runs-failed",
            path=str(made.folder),
            runs=failed,
        )
    return made


def of_runs(folders: Sequence[Path]) -> "Study":
    """Return a study of separate runs.

    Arms differ in the method or the model, and cells in the data. The seed of a run is its `seed`. If all finished runs
    have clients' own models, the measure is the figure that `raylt run` shows for these models.

    Raises:
        CheckpointError: A folder cannot be read, two runs have the same arm, cell and seed, or two runs of one arm and
            cell differ in another setting than the seed.
    """
    records = [_readable(read_run(folder)) for folder in folders]
    trees = [flat(record.config) for record in records]
    arms = _arm_names(trees)
    cells = _labels([_cell_settings(tree) for tree in trees])
    records = [
        replace(record, arm=arm, cell=cell, seed=tree["seed"])
        for record, tree, arm, cell in zip(records, trees, arms, cells, strict=True)
    ]
    first_by_key: dict[tuple[str, str, int], RunRecord] = {}
    for record in records:
        first = first_by_key.setdefault((record.arm, record.cell, record.seed), record)
        if first.folder != record.folder:
            raise _duplicate_run(first, record)
    definition = Definition(
        name="runs",
        arms=_settings_of_arms(records),
        seeds=sorted({record.seed for record in records}),
        measure=_shown_measure(records),
    )
    return Study(definition, None, records)


def _shown_measure(records: Sequence[RunRecord]) -> str:
    """Return "local" or "matched" if all finished runs show this measure of clients' models, else "accuracy"."""
    summaries = [record.summary for record in records if record.summary is not None]
    shown = {(summary.get("shown") or {}).get("figure") for summary in summaries}
    for measure in ("local", "matched"):
        if shown == {measure}:
            return measure
    return "accuracy"


def check_open_runs(definition: Definition, plans: Sequence[Planned], ended: Sequence[RunRecord]) -> RayltError | None:
    """Check that a study's open runs can start, and that its claims can be tested.

    A claim on a class group can be tested if the group has test images in at least one cell. The claims are not checked
    if the test images of some cell are unknown.

    Only the first run of each arm in each cell is checked, not every seed. A study can be planned on a machine without
    its data: runs whose files are missing are not checked, and then neither are the claims.

    Args:
        definition: The study.
        plans: Runs that are not done.
        ended: Records of the other runs.

    Returns:
        The first error if files are missing for all of these runs; None if any run can start on this machine.

    Raises:
        ConfigError: A run cannot start, or the class group of a claim has no test images.
        DataError: The data are malformed or cannot be split as configured.
    """
    configs: dict[tuple[str, str], Config] = {}
    for plan in plans:
        configs.setdefault((plan.cell, plan.arm), plan.config)
    judged, cells = _judged_before(ended)
    task: Task | None = None
    data: DataConfig | None = None
    lacking: list[RayltError] = []
    for config in configs.values():
        if config.data != data:
            task, data = None, config.data
        try:
            _, previewed, _ = preview_run(config, task)
        except RayltError as error:
            if not lacks_files(error):
                raise
            lacking.append(error)
            continue
        if task is None:
            judged.append(judged_images_of(previewed))
        task = previewed
    if configs and not lacking and cells | {cell for cell, _ in configs} == definition.all_cells.keys():
        _check_claimed_groups(definition, judged)
    return lacking[0] if lacking and len(lacking) == len(configs) else None


def _check_plugins_of_runs(folder: Path) -> None:
    """Check that the plugins of the runs in a study's folder are registered.

    Raises:
        ConfigError: A plugin is missing or has another source.
    """
    for path in sorted(folder.rglob("seed-*")):
        recorded: list[PluginRecord] = []
        with suppress(CheckpointError):  # `verify` and `check_whole` report damaged runs
            recorded = Files(path).plugins()
        check_origins([{**plugin} for plugin in recorded], path)


def _judged_before(records: Sequence[RunRecord]) -> tuple[list[JudgedImages], set[str]]:
    """Return the test images on which finished runs were evaluated, and the cells of these runs."""
    summaries = [(record.cell, record.summary) for record in records if record.summary and record.summary.get("tests")]
    return [summary["tests"] for _, summary in summaries], {cell for cell, _ in summaries}


def _check_claimed_groups(definition: Definition, judged: Sequence[JudgedImages]) -> None:
    claimed = {
        group: claim
        for claim in definition.parsed_claims
        for group in GROUPS
        if group in [measure.partition("@")[0] for measure in claim.measures]
    }
    low, high = judged[-1]["thresholds"]
    for group, claim in claimed.items():
        if not any(images["groups"].get(group) for images in judged):
            raise ConfigError(
                f"study.claims: no test image is of a {group}-shot class ({claim}). Set data.groups, which is "
                f"[{low}, {high}], or change the claim.",
                code="study.empty-group",
                key="study.claims",
                value=str(claim),
                group=group,
                groups=[low, high],
            )


class Study:
    """A study: its definition (arms, cells and seeds), and the state of each run.

    Attributes:
        definition: Arms, cells, seeds and claims.
        folder: Folder of the runs; None if the results were read from a file.
        records: Record of each planned run, from the last call of `read`.
        tuned: Outcomes of tuning, by cell and arm, see raylt/studies/running/tuning.py.
        recorded: Runs from a results file, which need no run folder, see raylt/studies/records/recorded_runs.py.
    """

    def __init__(
        self,
        definition: Definition,
        folder: Path | None,
        records: list[RunRecord],
        holdings: Holdings | None = None,
        tuned: Outcomes | None = None,
    ):
        self.definition = definition
        self.folder = folder
        self.records = records
        self.tuned: Outcomes = tuned or {}
        if folder is not None and definition.tune is not None:
            self.tuned = read_tuned(folder)
        self.recorded = Recorded() if folder is None else recorded_runs.load_stored(folder, definition, self.tuned)
        self._holdings = holdings

    def __repr__(self) -> str:
        done = sum(record.state == "done" for record in self.records)
        return (
            f"Study({str(self.folder or self.definition.name)!r}, {done} of {count_of(len(self.records), 'run')} done)"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table of the runs' states, with the mean of the measure over finished runs."""
        groups: dict[tuple[str, str], list[RunRecord]] = {}
        for record in self.records:
            groups.setdefault((record.cell, record.arm), []).append(record)
        measure, at = self.definition.measure, self.definition.at
        rows = []
        for (cell, arm), records in groups.items():
            states = Counter(record.state for record in records)
            done = [value_of(record, measure, at) for record in records if record.state == "done"]
            values = [value for value in done if value is not None]
            rows.append(
                [
                    cell,
                    arm,
                    ", ".join(f"{count} {state}" for state, count in states.items()),
                    formatter(measure)(fmean(values)) if values else "-",
                ]
            )
        return html_table(["cell", "arm", "runs", f"{measure}, mean, {unit(measure)}"], rows, repr(self), right=[3])

    def plot(
        self,
        measures: Sequence[str] = (),
        over: Literal["rounds", "bytes", "seconds"] = "rounds",
        spread: Literal["interval", "sd"] = "interval",
        path: Path | str | None = None,
    ) -> "Figure":
        """Draw the learning curves of the arms, and return a figure that a notebook can show.

        Args:
            measures: Measures to draw, one panel each: accuracy, many, medium, few, local, matched, owned, clients or
                worst_decile. By default the main figure of clients' own models if there are any, the accuracy, and the
                class groups.
            over: Unit of the horizontal axis.
            spread: Meaning of the bands: the t interval of the mean, or one standard deviation over the seeds.
            path: File to save the picture to: .png, .pdf or .svg.

        Raises:
            ConfigError: There is nothing to draw, or the file cannot be written.
            CheckpointError: The runs cannot be compared.
        """
        return later("raylt.plots.objects", "draw_study")(self, measures, over, spread, path)

    @classmethod
    def preview(
        cls, definition: Definition, out: Path, record_file: Path | None = None, mix_versions: bool = False
    ) -> "Study":
        """Return the study that `create` would return, without writing anything. The runs' files may be missing.

        Args:
            definition: The study.
            out: Folder of the study's folder.
            record_file: File of the study's recorded results; runs in it count as done. It need not exist.
            mix_versions: Whether to use recorded runs that another version of the code made.

        Raises:
            ConfigError: A run cannot start, or a claim is about a class group that no cell has.
            DataError: The data are malformed or cannot be split as configured.
        """
        return cls._check(definition, out, record_file, mix_versions)[0]

    @classmethod
    def _check(
        cls, definition: Definition, out: Path, record_file: Path | None, mix_versions: bool
    ) -> "tuple[Study, RayltError | None]":
        """Return the study, and the first error if files are missing for all open runs; see `check_open_runs`."""
        folder = out / definition.name
        if not is_file(folder / FILE):
            definition.check_new()
        previewed = cls(definition, folder, [])
        if record_file is not None:
            outcomes = recorded_runs.load_tuned(record_file, definition, mix_versions)
            previewed.tuned = joined(outcomes, previewed.tuned)
            previewed.recorded = recorded_runs.load_planned(record_file, previewed.planned, mix_versions)
        previewed.read()
        previewed.check_settings(folder, before_search=True)
        previewed.check_tuned()
        still_open: list[Planned] = []
        ended: list[RunRecord] = []
        for plan, record in zip(previewed.planned, previewed.records, strict=True):
            if record.state == "done" or previewed.is_on_record(record):
                ended.append(record)
            else:
                still_open.append(plan)
        return previewed, check_open_runs(definition, still_open, ended)

    @classmethod
    def create(
        cls, definition: Definition, out: Path, record_file: Path | None = None, mix_versions: bool = False
    ) -> "Study":
        """Create the study's folder, or open it with its existing runs.

        The definition may have more arms, cells and seeds than when those runs were made.

        Args:
            definition: The study.
            out: Folder in which to create the study's folder.
            record_file: File of the study's recorded results; runs in it count as done. It need not exist.
            mix_versions: Whether to use recorded runs that another version of the code made.

        Raises:
            ConfigError, DataError: See `preview`. Also raised if files, such as the data set, are missing for all open
                runs.
            CheckpointError: The folder is not a study, a run in it was made with other settings, or the record file
                cannot be read.
        """
        folder = out / definition.name
        if folder.exists() and not (folder / FILE).is_file() and any(folder.iterdir()):
            raise CheckpointError(
                f"{folder}: exists and is not a study. Give the study another name, or another "
                f"{spoken('--out', 'out')}.",
                code="study.not-a-study",
                path=str(folder),
            )
        created, lacking = cls._check(definition, out, record_file, mix_versions)
        if lacking is not None:
            raise lacking
        content = definition.model_dump(mode="json", exclude_defaults=True)
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        with store.folder_for(folder) as opened:
            opened.write(SEAL, json.dumps({FILE: hashlib.sha256(text.encode()).hexdigest()}) + "\n")
            opened.write(FILE, text)
        if record_file is not None:
            recorded_runs.store_taken(folder, definition, created.recorded)
            if created.tuned:
                write_tuned(folder, created.tuned)
        return created

    @classmethod
    def open(cls, path: Path | str) -> "Study":
        """Open a study from its folder or from its results.json.

        Raises:
            CheckpointError: The path is neither.
        """
        path = folder_path(path, "path")
        if is_file(path) and path.suffix == ".json":
            definition, records, holdings, tuned = recorded_runs.read_results(path)
            return cls(definition, None, records, holdings, tuned)
        if is_file(path / FILE):
            check_definition_seal(path)
            opened = cls.open_unchecked(path)
            opened.check_settings(path)
            opened.check_whole()
            return opened
        remedy = f"Give a folder that a study made, or its {recorded_runs.FILE}."
        if not exists(path):
            raise CheckpointError(f"{path}: no such file or folder. {remedy}", code="file.not-found", path=str(path))
        raise CheckpointError(
            f"{path}: is not a study (it has no {FILE}). {remedy}", code="study.not-a-study", path=str(path)
        )

    @classmethod
    def open_unchecked(cls, folder: Path) -> "Study":
        """Open a study's folder even if runs are damaged or have other settings than the study plans.

        Raises:
            ConfigError: A setting is unknown; if a plugin of a run brings it, the message names the plugin.
        """
        try:
            opened = cls(reread_definition(folder / FILE), folder, [])
            opened.read()
        except ConfigError as error:
            if error.code == "config.unknown-name":
                _check_plugins_of_runs(folder)
            raise
        return opened

    @property
    def planned(self) -> list[Planned]:
        """Return every planned run, with its arm's tuned settings."""
        return self.definition.runs(self.tuned)

    def read(self) -> list[RunRecord]:
        """Read the record of every planned run, from its run folder or otherwise from a results file.

        Returns:
            The records, in the order of `planned`.
        """
        assert self.folder is not None
        self._holdings = None
        self.records = []
        for plan in self.planned:
            record = read_run(self.folder / plan.folder, plan.cell, plan.arm, plan.seed, plan.folder)
            on_record = self.recorded.records.get((plan.cell, plan.arm, plan.seed))
            if record.state == "missing" and on_record:
                self.records.append(on_record)
            else:
                self.records.append(replace(record, planned_steps=plan.config.federation.rounds))
        return self.records

    def run(
        self,
        callbacks: Sequence[Callback] | None = None,
        parallel: int | None = None,
        fleet: Literal["local", "ray"] = "local",
        address: str | None = None,
        mix_versions: bool = False,
        record_file: Path | None = None,
    ) -> list[str]:
        """Run the study: tune arms if configured, carry out unfinished runs, and write results.json.

        Args:
            callbacks: Observers of the study. By default a progress bar in a notebook, and none elsewhere.
            parallel: Number of simultaneous runs; by default one per GPU, or per core without GPUs.
            fleet: "local" for one process per run, or "ray" for client actors.
            address: Address of a running Ray cluster.
            mix_versions: Whether to continue if another version of the code made some of the runs.
            record_file: File of the study's recorded results, to which finished runs are added, also after an
                interruption.

        Returns:
            Folders of the failed runs, relative to the study's folder.

        Raises:
            CheckpointError: A run is damaged, or another version of the code made it.
            ConfigError: An address is given, but the fleet is not Ray.
        """
        check_fleet(fleet, address, ("local", "ray"))
        if parallel is not None and parallel < 1:
            raise ConfigError(
                f"parallel: not a number of runs ({parallel}). Give at least 1, or leave it out.",
                code="config.out-of-range",
                key="parallel",
                value=parallel,
            )
        assert self.folder is not None
        callback = observer(callbacks)
        self._check_runs(mix_versions)
        if self.definition.tune is not None:
            self.tuned = search_arms(
                self.definition.bases(),
                self.definition.tune,
                self.definition.compared_to,
                self.folder,
                callback,
                parallel,
                fleet,
                address,
            )
            self.read()
            self.check_settings(self.folder)
        # recorded runs have no folder from which other runs could continue
        with_folder = [
            (plan, record)
            for plan, record in zip(self.planned, self.records, strict=True)
            if not self.is_on_record(record)
        ]
        plans = [plan for plan, _ in with_folder]
        records = [record for _, record in with_folder]
        pace = Pace(self.records)
        try:
            failed = scheduler.run_all(plans, records, self.folder, callback, parallel, fleet, address, pace)
        except BaseException:
            try:
                self._save(record_file, callback)
            except Exception as error:  # raise the error of the runs, not this one
                callback.on_message(describe_error(error))
            raise
        self._save(record_file, callback)
        return failed

    def _save(self, record_file: Path | None, callback: Callback) -> None:
        """Read the runs again and write the results."""
        self.read()
        for line in self.save_results(record_file):
            callback.on_message(line)

    def compare(
        self,
        measure: str | None = None,
        at: At | None = None,
        reference: str | None = None,
        level: float = 0.95,
        mix_versions: bool = False,
        may_lack: bool = False,
    ) -> Comparison:
        """Compare the finished runs; see `raylt.studies.analysis.comparison.compare`."""
        definition = self.definition
        tuned = searched(self.tuned)
        own = {
            arm: {
                key: value
                for key, value in flat(changes).items()
                if not key.startswith("method") and key not in tuned.get(arm, ())
            }
            for arm, changes in definition.arms.items()
        }
        metric = definition.tune.metric if definition.tune else None
        planned = {(record.cell, record.arm) for record in self.records}  # without arms removed since their search
        lines = [
            describe(cell, arm, outcome, metric)
            for cell, arms in self.tuned.items()
            for arm, outcome in arms.items()
            if (cell, arm) in planned
        ]
        diverged = any(record.diverged for record in self.records)  # only diverged runs need the number of classes
        return compare(
            self.records,
            reference or definition.compared_to,
            definition.parsed_claims,
            measure or definition.measure,
            at or definition.at,
            level,
            own,
            tuned,
            lines,
            mix_versions,
            may_lack,
            {cell: len(holding["names"]) for cell, holding in self.holdings.items()} if diverged else None,
        )

    def check_comparable(self, mix_versions: bool = False) -> None:
        """Check that the finished runs of each cell can be compared; see `check_comparable` in comparison.py.

        Raises:
            CheckpointError: Runs differ in split, budget, optimiser, evaluation or code.
        """
        tuned = searched(self.tuned)
        own = {arm: {*flat(changes), *tuned.get(arm, ())} for arm, changes in self.definition.arms.items()}
        check_comparable([record for record in self.records if record.state == "done"], own, mix_versions)

    @property
    def holdings(self) -> Holdings:
        """Return each client's class counts, from the first finished run of each cell.

        Each cell has "names" and "groups" of the classes, and "counts" by client and class. A cell is left out if its
        data are not on this machine.
        """
        if self._holdings is None:
            self._holdings = {}
            for record in sorted(self.records, key=lambda r: r.seed):
                if record.state != "done" or record.cell in self._holdings:
                    continue
                if self.is_on_record(record):
                    class_counts = self.recorded.holdings.get(record.cell)
                else:
                    folder = (self.folder or Path()) / record.folder
                    class_counts = recorded_runs.read_holdings(record.config, folder)
                if class_counts is not None:
                    self._holdings[record.cell] = class_counts
        return self._holdings

    def save_results(self, record_file: Path | None = None) -> list[str]:
        """Write results.json, which contains the definition and the record of every run.

        Args:
            record_file: File of recorded results, to which finished and diverged runs are added.

        Returns:
            Lines that name the removed records; see `raylt.studies.records.recorded_runs.update`.
        """
        assert self.folder is not None
        recorded_runs.write_results(
            self.folder / recorded_runs.FILE, self.definition, self.records, self.holdings, self.tuned
        )
        ended = [record for record in self.records if record.state == "done" or record.diverged]
        if record_file is None or not ended:
            return []
        return recorded_runs.update(record_file, self.definition, ended, self.holdings, self.tuned)

    def is_on_record(self, record: RunRecord) -> bool:
        """Return whether a run's record comes from a results file instead of a run folder."""
        return self.recorded.records.get((record.cell, record.arm, record.seed)) is record

    @property
    def unplanned(self) -> list[str]:
        """The run folders that the study no longer plans, relative to its folder.

        They are of arms, cells or seeds that its file no longer has.
        """
        if self.folder is None or not exists(self.folder):
            return []
        planned = {plan.folder for plan in self.planned}
        return sorted({str(run.relative_to(self.folder)) for run in run_folders(self.folder)} - planned)

    def check_whole(self) -> None:
        """Check that no run of the study is damaged.

        Raises:
            CheckpointError: Files of a run contradict each other, were changed or cannot be read.
        """
        folder = self.folder or Path()
        for record in self.records:
            if record.state == "damaged":
                raise CheckpointError(
                    f"{_problem(record)}. Check it with raylt verify {quoted(folder / record.folder)}, or remove that "
                    "run to repeat it.",
                    code="study.damaged-run",
                    path=str(folder / record.folder),
                )

    def check_settings(self, folder: Path, before_search: bool = False) -> None:
        """Check that the runs in the folder have the settings that the study plans.

        Args:
            folder: The study's folder.
            before_search: Whether the arms are searched next. Runs of arms without tuned values are not checked then,
                since only the search tells their settings.

        Raises:
            CheckpointError: A run has other settings.
        """
        for plan, record in zip(self.planned, self.records, strict=True):
            untuned = self.definition.tune is not None and plan.arm not in self.tuned.get(plan.cell, {})
            if self.is_on_record(record) or not record.config or (untuned and before_search):
                continue
            changed = differences(record.config, plan.config)
            if changed:
                remedy = "Give the study another name, or remove that run."
                if untuned:
                    remedy = (
                        f"{TUNED} has no values of its arm: run the study's file again with "
                        f"{spoken('raylt study', 'raylt.study')}, which reads the finished searches."
                    )
                raise CheckpointError(
                    f"{folder / plan.folder}: was made with other settings ({'; '.join(changed)}). {remedy}",
                    code="study.changed",
                    path=str(folder / plan.folder),
                    differences=changed,
                )

    def check_tuned(self) -> None:
        """Check that the arms were tuned as the study plans."""
        definition = self.definition
        if definition.tune is not None and self.tuned:
            accepted = recorded_runs.accepted_searches(definition, self.records)
            check_same_searches(self.tuned, accepted, self.folder or Path(), self._search_changes)

    def _search_changes(self, cell: str, arm: str) -> list[str]:
        """Return the settings in which an arm's search differs from that of the definition in the folder.

        The list is empty if that definition is of another search than the outcome, or cannot be read.
        """
        if self.folder is None or not is_file(self.folder / FILE):
            return []
        try:
            former = reread_definition(self.folder / FILE)
        except ConfigError:
            return []
        if former.tune is None or arm not in former.arms or cell not in former.all_cells:
            return []
        before, after = (_search_settings(each, cell, arm) for each in (former, self.definition))
        if hash_json(before) != self.tuned[cell][arm]["asked"]:
            return []
        before, after = flat(before), flat(after)
        return [
            f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
            for key in sorted(before | after)
            if before.get(key) != after.get(key)
        ]

    def _check_runs(self, mix_versions: bool) -> None:
        """Check that no run is damaged, and that all runs were made by one version of the code and of each plugin.

        With `mix_versions`, several versions are accepted.
        """
        current = provenance.code_sha256()
        self.read()
        self.check_whole()
        for record in self.records:
            codes = record.made.get("codes", []) if record.state != "missing" else []
            if not mix_versions and any(code != current for code in codes):
                raise CheckpointError(
                    f"{record.folder}: was made by another version of the code ({codes[0][:12]}, now {current[:12]}). "
                    f"Continue with {spoken('--mix-versions', 'mix_versions=True')}, or give the study another name to "
                    "start again.",
                    code="study.other-code",
                    path=record.folder,
                    codes=list(codes),
                )
            plugin = other_version(record.made.get("plugins", {}))
            if not mix_versions and plugin is not None:
                raise CheckpointError(
                    f"{record.folder}: was made by another version of your {plugin}. Continue with "
                    f"{spoken('--mix-versions', 'mix_versions=True')}, or give the study another name to start again.",
                    code="study.other-code",
                    path=record.folder,
                    plugin=plugin,
                )


def check_definition_seal(folder: Path) -> None:
    """Check that study.yaml is unchanged since raylt wrote it into a study's folder.

    Raises:
        CheckpointError: It was changed, or the folder has no seal.
    """
    with store.Folder.open(folder) as opened:
        if SEAL not in opened.names():
            raise CheckpointError(
                f"{folder / SEAL}: is missing. Put it back, or run the study's file again with "
                f"{spoken('raylt study', 'raylt.study')}.",
                code="record.changed",
                path=str(folder / SEAL),
            )
        if opened.read_json(SEAL, _SEAL) != {FILE: opened.hash(FILE)}:
            raise CheckpointError(
                f"{folder / FILE}: was changed after raylt wrote it. Put the original back, or run the study's file "
                f"again with {spoken('raylt study', 'raylt.study')}.",
                code="record.changed",
                path=str(folder / FILE),
            )


def _readable(record: RunRecord) -> RunRecord:
    """Check that a record has a configuration and no contradictions, and return it.

    Raises:
        CheckpointError: The run is damaged or has no configuration.
    """
    if record.state == "damaged":
        raise CheckpointError(
            f"{_problem(record)}. Check it with raylt verify {quoted(record.folder)}.",
            code="study.damaged-run",
            path=record.folder,
        )
    if not record.config:
        raise CheckpointError(
            f"{record.folder}: is not a run folder that can be read ({record.problem or 'it has no config.yaml'}). "
            "Give folders that runs made.",
            code="study.not-a-study",
            path=record.folder,
        )
    return record


def _problem(record: RunRecord) -> str:
    return (record.problem or "").rstrip(".")


def _cell_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key.startswith("data.") and key not in _NOT_A_CELL}


def _search_settings(definition: Definition, cell: str, arm: str) -> dict[str, Any]:
    assert definition.tune is not None
    base, reference = (definition.base_of(cell, each) for each in (arm, definition.compared_to))
    return search_settings(definition.tune, arm, base, reference)


def _duplicate_run(first: RunRecord, second: RunRecord) -> CheckpointError:
    differing = [
        f"{key} {before!r}, {after!r}" for key, before, after in setting_differences(_settled(first), _settled(second))
    ]
    if differing:
        problem = f"have one method, one kind of data and seed {second.seed}, but differ in {'; '.join(differing)}"
        remedy = "Give one of them, or make them arms of a study."
    else:
        problem = "have the same settings and seed"
        remedy = "Give one of them."
    return CheckpointError(
        f"{first.folder} and {second.folder}: {problem}. {remedy}",
        code="study.duplicate-run",
        paths=[first.folder, second.folder],
        differences=differing,
    )


def _settings_of_arms(records: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    """Return, for each arm, the settings outside its method in which the arms of a cell differ.

    Settings of the budget, the optimiser and the evaluation are left out: `compare` refuses arms that differ in them.

    Raises:
        CheckpointError: Two runs of one arm and cell differ in another setting than the seed.
    """
    first_by_key: dict[tuple[str, str], tuple[RunRecord, dict[str, Any]]] = {}
    for record in records:
        settings = {key: value for key, value in flat(_settled(record)).items() if key not in _BY_SEED}
        first, expected = first_by_key.setdefault((record.arm, record.cell), (record, settings))
        if settings != expected:
            raise _mixed_arm(first, record)
    own: dict[str, dict[str, Any]] = {arm: {} for arm, _ in first_by_key}
    for cell in dict.fromkeys(cell for _, cell in first_by_key):
        arms = {arm: settings for (arm, of_arm), (_, settings) in first_by_key.items() if of_arm == cell}
        for key in dict.fromkeys(key for settings in arms.values() for key in settings):
            values = {arm: settings.get(key) for arm, settings in arms.items()}
            if key.startswith("method.") or condition_of(key) or len(set(map(repr, values.values()))) == 1:
                continue
            for arm, value in values.items():
                own[arm].setdefault(key, value)
    return own


def _mixed_arm(first: RunRecord, second: RunRecord) -> CheckpointError:
    differing = [
        f"{key} {before!r}, {after!r}"
        for key, before, after in setting_differences(_settled(first), _settled(second))
        if key not in _BY_SEED
    ]
    return CheckpointError(
        f"{first.folder} and {second.folder}: are runs of one arm ({first.arm}), but differ in {'; '.join(differing)}. "
        "Give runs that differ in their seed only, or make them arms of a study.",
        code="study.not-comparable",
        paths=[first.folder, second.folder],
        differences=differing,
    )


def _settled(record: RunRecord) -> dict[str, Any]:
    return settled(Config(**record.config))


def _arm_names(trees: list[dict[str, Any]]) -> list[str]:
    """Name each run by its method, by the fields that differ within the method, and by its model if models differ."""
    methods = [tree["method.name"] for tree in trees]
    models = _labels([{"model": tree["model"]} for tree in trees])
    names = [""] * len(trees)
    for method in dict.fromkeys(methods):
        positions = [position for position, name in enumerate(methods) if name == method]
        fields = [
            {key: value for key, value in trees[p].items() if key.startswith("method.") and key != "method.name"}
            for p in positions
        ]
        for position, text in zip(positions, _labels(fields), strict=True):
            names[position] = ", ".join(part for part in (method, text, models[position]) if part)
    return names


def _labels(parts: list[dict[str, Any]]) -> list[str]:
    """Return, for each mapping, a label with the values in which it differs from the other mappings."""
    keys = list(dict.fromkeys(key for part in parts for key in part))
    differing = [key for key in keys if len({str(part.get(key)) for part in parts}) > 1]
    return [label({key: part[key] for key in differing if key in part}) for part in parts]
