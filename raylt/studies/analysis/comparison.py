"""`Comparison`: compares a study's arms in each cell, with differences, intervals and tested claims.

Runs can be compared if they have the same split, budget, optimiser, evaluation and code.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, get_args

from raylt.config import completed
from raylt.errors import CheckpointError, ConfigError, count_of, did_you_mean, spoken
from raylt.notebook import later
from raylt.studies.analysis.answers import by_cell
from raylt.studies.analysis.claims import Claim, ClaimFigures, Judged, Values, difference, judge
from raylt.studies.analysis.measures import At, is_of_deployed_models, measure_of, of_rounds, value_of
from raylt.studies.analysis.statistics import Interval, Paired, improvement, mean_interval, over_cells
from raylt.studies.records.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CODE = "code"  # condition that versions of raylt differ in; "code of method NAME" for those of a plugin
_PASSES = (
    "epochs",
    "steps",
    "batch",
)  # settings of the local section that are the budget; the others are the optimiser
# Settings of other sections that belong to the budget or to the evaluation.
_BUDGET = ("federation.rounds", "federation.participation", "federation.patience")
_EVALUATION = ("evaluation.every", "evaluation.personal")


@dataclass(frozen=True)
class Row:
    """The figures of one arm in one cell.

    Attributes:
        values: Values of the finished and diverged runs, by seed.
        finished: Number of finished runs with a value.
        planned: Number of seeds of the cell.
        sd: Standard deviation over the seeds; None for a single seed.
        difference: To the reference arm over the seeds that both have; None for the reference itself.
        optimism: Mean difference of the best to the last round on the test set; None where the measure has no curve, or
            was evaluated in one round only.
    """

    cell: str
    arm: str
    values: dict[int, float]
    finished: int
    planned: int
    mean: Interval
    sd: float | None
    difference: Paired | None
    optimism: float | None


@dataclass(frozen=True)
class Overall:
    """The figures of one arm over all cells: interquartile mean, and probability of beating the reference arm."""

    arm: str
    iqm: Interval
    improvement: Interval | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """The content of a study's tables. Equal records of runs give equal comparisons.

    Attributes:
        lost: Cell, arm and planned seeds of each arm that has no row because its runs failed.
        whole: The cells that `overall` covers, in which all arms have the same seeds.
        diverged: One line for each arm, cell and error code with diverged runs, which count as guessing: the first
            run, the number of the others, and the first reason.
        left_out: One line for each run that is not averaged, each missing difference and each claim that is not judged,
            with the reason.
        apart: One line for each arm that has settings of its own besides its method.
        tuned: One line for each arm and cell that was tuned.
        versions: One line for each version of the code, where several made the runs.
        unsealed: One line for each arm and cell with runs that no hash binds to their summaries.
        tests: One line for each cell with the numbers of test images behind its figures, if its runs recorded them.
        models: A line that says which models each arm's figures belong to, if some arms have clients' own models and
            others do not.
        one_round: A line that names the arms that evaluated the measure in only one round, if other arms evaluated it
            in several.
    """

    measure: str
    at: At
    reference: str
    level: float
    rows: list[Row]
    lost: list[tuple[str, str, int]]
    claims: list[Judged]
    overall: list[Overall]
    whole: list[str]
    diverged: list[str]
    left_out: list[str]
    apart: list[str]
    tuned: list[str]
    versions: list[str]
    unsealed: list[str]
    tests: list[str]
    models: list[str]
    one_round: list[str]

    def __repr__(self) -> str:
        arms = ", ".join(_in_order(row.arm for row in self.rows))
        return f"Comparison({self.measure!r}, {len(self.rows)} rows, arms {arms or 'none'})"

    def _repr_html_(self) -> str:
        """Return the table that `raylt compare` prints, as HTML."""
        return later("raylt.studies.report.comparison_tables", "comparison_table")(self).html()

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Draw each arm's mean with its interval and seeds, and return a figure that a notebook can show.

        Args:
            path: File that the picture is written to as well, .png, .pdf or .svg.

        Raises:
            ConfigError: There is nothing to draw, or the file cannot be written.
        """
        return later("raylt.plots.objects", "draw_comparison")(self, path)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {"schema": 1, **asdict(self)}

    def frame(self) -> Any:
        """Return the values as a pandas frame, one row per arm, cell and seed."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"cell": row.cell, "arm": row.arm, "seed": seed, self.measure: value}
                for row in self.rows
                for seed, value in row.values.items()
            ]
        )


def compare(
    records: Sequence[RunRecord],
    reference: str,
    claims: Sequence[Claim] = (),
    measure: str = "accuracy",
    at: At = "last",
    level: float = 0.95,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    searched: Mapping[str, Collection[str]] | None = None,
    tuned: Sequence[str] = (),
    mix_versions: bool = False,
    may_lack: bool = False,
    classes: Mapping[str, int] | None = None,
) -> Comparison:
    """Compare the finished and the diverged runs of a study.

    The comparison also lists the other runs.

    Args:
        records: Runs in any state.
        reference: The arm that the others are compared to.
        claims: Statements to judge.
        measure: Figure of the runs, see `MEASURES`.
        at: Rounds whose figures count.
        level: Confidence of the intervals.
        own: Settings outside its method in which an arm may differ from the others, by arm and dotted key.
        searched: Settings in which an arm was tuned, by arm and dotted key; it may differ in these, too.
        tuned: Lines that say what the arms were tuned to.
        mix_versions: Whether runs of several versions of the code may be compared.
        may_lack: Whether a measure that no finished run has gives a comparison without rows, and no error.
        classes: Number of classes by cell. Where the measure is an accuracy, a diverged run counts as guessing among
            them, or as the worst finished run of its cell if that is worse. In a cell whose classes are not known,
            diverged runs are left out.

    Raises:
        ConfigError: The measure or the arm is unknown, no finished run has the measure, or only the last round has it.
        CheckpointError: Runs of one cell and seed differ in split, budget, optimiser, evaluation or code.
    """
    check_at(measure, at)
    if not 0 < level < 1:
        raise ConfigError(
            f"level: is not a confidence between 0 and 1 ({level}). Give 0.95, for example.",
            code="config.out-of-range",
            key="level",
            value=level,
        )
    done = [record for record in records if record.state == "done"]
    own = {arm: settings for arm, settings in (own or {}).items() if settings}
    searched = searched or {}
    differing = {arm: {*own.get(arm, ()), *searched.get(arm, ())} for arm in {*own, *searched}}
    check_comparable(done, differing, mix_versions)
    cells = _in_order(record.cell for record in records)
    arms = _in_order(record.arm for record in records)
    _check_reference(reference, arms)
    values, lacking = _values(done, measure, at)
    if done and not values and not may_lack:
        raise _no_figure(done, measure, at)
    guessing = _guessing(records, values, measure, classes or {})
    rows = _rows(records, values, guessing, cells, arms, reference, measure, level)
    figures = [_claim_figures(records, claim, at, classes or {}) for claim in claims]
    finished = dict.fromkeys(((record.arm, record.cell) for record in records), False)
    finished |= dict.fromkeys(((record.arm, record.cell) for record in done), True)
    unjudged = [line for each in figures for cell in cells for line in each.unjudged(cell, finished)]
    counted = {key: _by_seed(values, guessing, *key) for key in {*values, *guessing}}
    whole = _whole(counted, arms, cells)
    arms_in_rows = {row.arm for row in rows}
    return Comparison(
        measure=measure,
        at=at,
        reference=reference,
        level=level,
        rows=rows,
        lost=_lost(records, rows),
        claims=judge(figures, cells, level),
        overall=_overall(counted, arms, whole, reference, level, measure_of(measure).higher),
        whole=whole,
        diverged=_diverged([record for record in records if _is_guessing(record, guessing)]),
        left_out=[*_left_out(records, guessing), *lacking, *_unpaired(rows, reference, measure), *unjudged],
        apart=[_settings_line(arm, settings) for arm, settings in own.items() if arm in arms_in_rows],
        tuned=list(tuned),
        versions=_versions(done),
        unsealed=_unsealed(done),
        tests=_test_images(done, cells, measure),
        models=whose_models(done, measure),
        one_round=_with_one_round(done, measure),
    )


def check_at(measure: str, at: At) -> None:
    """Raise ConfigError if the rounds are unknown, or if a measure of the last round is wanted at others."""
    if at not in get_args(At):
        raise ConfigError(
            f"at: unknown rounds ({at!r}). Choose from {', '.join(get_args(At))}.",
            code="config.unknown-name",
            key="at",
            value=at,
        )
    if at != "last" and measure_of(measure).every_round is None:
        raise ConfigError(
            f"at: {measure} is known after the last round only ({at}). Give "
            f"{spoken('--at last', 'at=' + repr('last'))}.",
            code="config.conflict",
            key="at",
            value=at,
            measure=measure,
        )


def _check_reference(reference: str, arms: Sequence[str]) -> None:
    """Raise ConfigError if no run is of the reference arm."""
    if reference not in arms:
        raise ConfigError(
            f"reference: unknown arm ({reference}). {did_you_mean(reference, arms)}Choose from {', '.join(arms)}.",
            code="config.unknown-name",
            key="reference",
            name=reference,
        )


def _left_out(records: Iterable[RunRecord], guessing: Values) -> Iterator[str]:
    """Yield a line for each run that is not compared: it is not finished, and does not count as guessing."""
    for record in records:
        if record.state != "done" and not _is_guessing(record, guessing):
            yield unfinished(record)


def _diverged(records: Sequence[RunRecord]) -> list[str]:
    """Return one line for the diverged runs of an arm in a cell that have the same error code."""
    groups: dict[tuple[str, str, str | None], list[RunRecord]] = {}
    for record in records:
        groups.setdefault((record.cell, record.arm, record.error), []).append(record)
    return [line_of_arm(runs, f"failed: {runs[0].problem}") for runs in groups.values()]


def _unpaired(rows: Sequence[Row], reference: str, measure: str) -> list[str]:
    """Return a line for each cell without the reference arm, and for each arm without a seed of it."""
    lines = []
    for cell in _in_order(row.cell for row in rows):
        prefix = f"{cell}: " if cell else ""
        arms = {row.arm: row for row in rows if row.cell == cell}
        if reference not in arms:
            lines.append(f"{prefix}no differences, since the reference arm {reference} has no {measure}")
            continue
        lines += [
            f"{prefix}no difference of {arm}, since it has no seed in common with {reference}"
            for arm, row in arms.items()
            if arm != reference and row.difference is None
        ]
    return lines


def _test_images(done: Sequence[RunRecord], cells: Iterable[str], measure: str) -> list[str]:
    """Return a line for each cell that says on how many test images its runs were evaluated, where it is recorded."""
    lines = {cell: judged_on([record for record in done if record.cell == cell], measure) for cell in cells}
    return [f"{cell}: {line}" if cell else line for cell, line in lines.items() if line]


def whose_models(done: Sequence[RunRecord], measure: str) -> list[str]:
    """Return a line on whose models were evaluated; no line for one kind of model, or if some run does not tell."""
    if not is_of_deployed_models(measure):
        return []
    kinds: dict[tuple[str, str], str | None] = {}
    for record in done:
        shown = (record.summary or {}).get("shown") or {}
        kinds[record.arm, record.cell] = shown.get("figure")
    own = [key for key, figure in kinds.items() if figure != "accuracy"]
    if None in kinds.values() or len(own) in (0, len(kinds)):
        return []
    named = _names_of_arms(own, kinds)
    return [
        f"of {', '.join(named)}: clients' own models (accuracy and class groups: all their answers together); of the "
        "others: the global model"
    ]


def _names_of_arms(some: Sequence[tuple[str, str]], every: Collection[tuple[str, str]]) -> list[str]:
    """Return the names of arms, with the cell for an arm that some cells only have.

    Args:
        some: Arms and cells to name.
        every: Arms and cells of all runs.
    """
    partly = {arm for arm, cell in every if (arm, cell) not in some}
    return _in_order(f"{arm} in {cell}" if arm in partly else arm for arm, cell in some)


def _with_one_round(done: Sequence[RunRecord], measure: str) -> list[str]:
    """Return a line that names the arms whose runs of several rounds evaluated the measure in one of them."""
    curve = measure_of(measure).every_round
    if curve is None:
        return []
    counts: dict[tuple[str, str], int] = {}
    for record in done:
        if record.rounds > 1:
            key = record.arm, record.cell
            counts[key] = max(counts.get(key, 0), len(of_rounds(record, curve)))
    one = [key for key, count in counts.items() if count == 1]
    if max(counts.values(), default=0) < 2 or not one:
        return []
    return [
        f"{', '.join(_names_of_arms(one, counts))}: the last one; evaluation.personal=1 evaluates clients' own models "
        "after each round"
    ]


def judged_on(done: Sequence[RunRecord], measure: str) -> str:
    """Describe the numbers of test images on which a cell's runs were evaluated; "" if they are not recorded.

    The points that one image is worth are only given for the accuracy, which is the share of all test images.
    """
    summaries = [run.summary for run in done if run.summary and run.summary.get("tests")]
    if not summaries:
        return ""
    tests = summaries[0]["tests"]
    low, high = tests["thresholds"]
    groups = ", ".join(f"{group} {n}" for group, n in tests["groups"].items())
    of_images = measure == "accuracy" and summaries[0]["task"] != "segmentation"
    one = f", one image is {100 / tests['images']:.2g} points" if of_images else ""
    text = (
        f"n = {tests['images']} test images{one} ({groups}); many-shot classes have more than {high} training samples, "
        f"few-shot classes fewer than {low}"
    )
    if tests["own"] is not None:
        sizes = [n for summary in summaries for n in summary["tests"]["own"] or [] if n]
        counts = sorted({sum(n > 0 for n in summary["tests"]["own"] or []) for summary in summaries})
        low_count = "" if counts[0] == counts[-1] else f"{counts[0]} to "
        clients = f"{low_count}{count_of(counts[-1], 'client')}"
        have = "has" if counts[-1] == 1 else "have"
        low_size = f"{min(sizes)} to " if sizes and min(sizes) < max(sizes) else ""
        each = f"{low_size}{count_of(max(sizes), 'test image')} each" if sizes else "test images of their own"
        text += f"; {clients} {have} {each}"
    by_seed: dict[int, set[str]] = {}
    for run in done:
        if run.summary and run.summary.get("tests"):  # an arm of one client has none
            by_seed.setdefault(run.seed, set()).update(run.summary["tests"]["one_class"])
    if any(by_seed.values()):
        text += f"; clients evaluated on one class, whose figures say nothing: {_of_one_class(by_seed)}"
    return text


def _of_one_class(by_seed: Mapping[int, Collection[str]]) -> str:
    """Return the names of clients by seed as text: the names where all seeds have the same, otherwise their numbers."""
    first, *others = by_seed.values()
    if all(names == first for names in others):
        return ", ".join(sorted(first, key=lambda name: (len(name), name))[:10])
    numbers = [len(by_seed[seed]) for seed in sorted(by_seed)]
    return f"{min(numbers)} to {max(numbers)} by seed ({', '.join(map(str, numbers))})"


def check_comparable(done: Sequence[RunRecord], own: Mapping[str, Collection[str]], mix_versions: bool = False) -> None:
    """Check that the finished runs of one cell are comparable.

    An arm may differ from other arms in the conditions that its own settings decide, see `condition_of`. Settings under
    `data` decide the split. The rounds, the participation and the passes over the data decide the budget, other
    settings under `local` the optimiser, and `evaluation.every` and `evaluation.personal` the judged rounds.

    Args:
        done: Finished runs.
        own: Settings of single arms, by arm and dotted key.
        mix_versions: Whether the code may differ.

    Raises:
        CheckpointError: Two runs differ; the error names both runs and the difference.
    """
    first: dict[tuple[str, str], tuple[RunRecord, str]] = {}
    decided = {arm: {condition_of(key) for key in settings} for arm, settings in own.items()}
    for record in done:
        codes = record.made.get("codes", ["unknown"])
        if len(codes) > 1 and not mix_versions:
            raise CheckpointError(
                f"{record.folder}: was made by several versions of the code ({len(codes)}). Run it again, or compare "
                f"it with {spoken('--mix-versions', 'mix_versions=True')}.",
                code="study.other-code",
                path=record.folder,
                codes=list(codes),
            )
        for name, condition in _conditions(record).items():
            is_code = name.startswith(CODE)
            if name in decided.get(record.arm, ()) or (is_code and mix_versions):
                continue
            scope = "" if is_code else f"{record.cell}\0{record.seed}" if name == "split" else record.cell
            other, expected = first.setdefault((name, scope), (record, condition))
            if condition != expected:
                raise _not_comparable(record, other, name)


def _conditions(record: RunRecord) -> dict[str, str]:
    """Return the conditions of a run, such as its split and its budget, that must be equal in all compared runs."""
    assert record.summary is not None
    config = completed(record.config)  # settings that an older record lacks have their defaults
    return {
        "split": record.summary["split_sha256"][:12],
        "budget": _budget(config),
        "optimiser": _optimiser(config),
        "evaluation": _evaluation(config),
        CODE: record.made.get("codes", ["unknown"])[0][:12],
        **{f"{CODE} of {plugin}": sha256[:12] for plugin, sha256 in record.made.get("plugins", {}).items()},
    }


def condition_of(key: str) -> str:
    """Return the condition to which a setting belongs, such as "budget", or "" if it belongs to none."""
    section, _, name = key.partition(".")
    if section == "data":
        return "split"
    if section == "local":
        return "budget" if name in _PASSES else "optimiser"
    if key in _BUDGET:
        return "budget"
    return "evaluation" if key in _EVALUATION else ""


def _budget(config: dict[str, Any]) -> str:
    federation = config["federation"]
    local = config["local"]
    amount = f"{local['epochs']} epochs" if local["steps"] is None else f"{local['steps']} steps"
    patience = federation.get("patience")
    early = "" if patience is None else f", patience of {count_of(patience, 'round')}"
    return (
        f"{count_of(federation['rounds'], 'round')}{early}, {federation['participation']:g} of the clients, {amount} "
        f"in batches of {local['batch']}"
    )


def _optimiser(config: dict[str, Any]) -> str:
    """Describe how clients train in a run."""
    local = config["local"]
    return ", ".join(f"local.{name} {local[name]}" for name in sorted(local) if name not in _PASSES)


def _evaluation(config: dict[str, Any]) -> str:
    judged = config["evaluation"]
    return f"every {judged['every']} rounds, personal models {judged['personal'] or 'last'}"


def _not_comparable(record: RunRecord, other: RunRecord, name: str) -> CheckpointError:
    condition = _conditions(record)[name]
    condition_of_other = _conditions(other)[name]
    remedy = "Compare runs of one study, or run one of them again"
    mixed = f", or compare them with {spoken('--mix-versions', 'mix_versions=True')}"
    return CheckpointError(
        f"{record.folder} and {other.folder}: {name} differs ({_parts_only_in(condition, condition_of_other)}; "
        f"{_parts_only_in(condition_of_other, condition)}). {remedy}"
        f"{mixed if name.startswith(CODE) else ''}.",
        code="study.not-comparable",
        paths=[record.folder, other.folder],
        condition=name,
        values=[condition, condition_of_other],
    )


def _parts_only_in(condition: str, other: str) -> str:
    return ", ".join(part for part in condition.split(", ") if part not in other.split(", "))


def _versions(done: Sequence[RunRecord]) -> list[str]:
    """Return a line for each version of the code with the number of runs it made; no lines for a single version.

    Versions of a plugin follow in the same way.
    """
    made = Counter(" and ".join(code[:12] for code in record.made.get("codes", ["unknown"])) for record in done)
    lines = [f"{code}: {count_of(runs, 'run')}" for code, runs in made.items()] if len(made) > 1 else []
    own = Counter(plugin for record in done for plugin in record.made.get("plugins", {}).items())
    several = Counter(name for name, _ in own)
    return lines + [
        f"{name} {sha256[:12]}: {count_of(runs, 'run')}" for (name, sha256), runs in own.items() if several[name] > 1
    ]


def _unsealed(done: Sequence[RunRecord]) -> list[str]:
    """Return the number of runs whose records are not protected by hashes, by cell and arm."""
    counts = Counter((record.cell, record.arm) for record in done if not record.sealed)
    return [f"{f'{cell}, ' if cell else ''}{arm}: {count_of(runs, 'run')}" for (cell, arm), runs in counts.items()]


def _values(done: Sequence[RunRecord], measure: str, at: At) -> tuple[Values, list[str]]:
    """Return a measure's values by arm, cell and seed, and a line for each arm and cell without values."""
    values: Values = {}
    lacking: dict[tuple[str, str], list[RunRecord]] = {}
    for record in sorted(done, key=lambda r: r.seed):
        value = value_of(record, measure, at)
        if value is None:
            lacking.setdefault((record.cell, record.arm), []).append(record)
        else:
            values.setdefault((record.arm, record.cell), {})[record.seed] = value
    return values, [line_of_arm(runs, lacking_text(measure, at)) for runs in lacking.values()]


def lacking_text(measure: str, at: At) -> str:
    """Return the reason why a finished run without a measure is left out."""
    if at == "validation":
        return f"no {measure} of a round chosen on validation samples; set data.validation"
    return f"no {measure}"


def line_of_arm(runs: Sequence[RunRecord], problem: str) -> str:
    """Return a line about runs of one arm and cell that names the first run and the number of the others."""
    first = runs[0].folder
    others = len(runs) - 1
    return f"{first} (and {others} more of this arm): {problem}" if others else f"{first}: {problem}"


def _no_figure(done: Sequence[RunRecord], measure: str, at: At) -> ConfigError:
    """Return the error for a measure that no finished run has."""
    word, _, model = measure.partition("@")
    if model:
        models = _in_order(name for record in done for name in (record.summary or {}).get("others", {}))
        problem = "no finished run evaluated this model of its clients"
        remedy = f"Choose from {', '.join(f'{word}@{each}' for each in models)}." if models else f"Give {word}."
    elif at == "validation":
        problem = "no finished run has a round that was chosen on validation samples"
        remedy = "Set data.validation."
    else:
        problem = "no finished run has it"
        remedy = "Give another measure."
    return ConfigError(
        f"measure: {problem} ({measure}). {remedy}", code="study.no-figure", key="measure", name=measure, at=at
    )


def _guessing(records: Sequence[RunRecord], values: Values, measure: str, classes: Mapping[str, int]) -> Values:
    """Return the values with which diverged runs count, by arm, cell and seed.

    Finished runs may be worse than guessing, for example on few-shot classes. A diverged run then counts as the worst
    of them, since an arm must not be the best because its runs diverged.

    Args:
        records: Runs in any state.
        values: Values of the finished runs.
        measure: Name of the measure.
        classes: Number of classes by cell.
    """
    worst: dict[str, float] = {}
    for (_, cell), by_seed in values.items():
        worst[cell] = min([worst.get(cell, 1.0), *by_seed.values()])
    guessing: Values = {}
    for record in records:
        if record.diverged and measure_of(measure).guessed and record.cell in classes:
            value = min(1 / classes[record.cell], worst.get(record.cell, 1.0))
            guessing.setdefault((record.arm, record.cell), {})[record.seed] = value
    return guessing


def _is_guessing(record: RunRecord, guessing: Values) -> bool:
    return record.seed in guessing.get((record.arm, record.cell), {})


def _by_seed(values: Values, guessing: Values, arm: str, cell: str) -> dict[int, float]:
    """Return the values of an arm in a cell, of its finished and diverged runs, in the order of their seeds."""
    return dict(sorted({**values.get((arm, cell), {}), **guessing.get((arm, cell), {})}.items()))


def _rows(
    records: Sequence[RunRecord],
    values: Values,
    guessing: Values,
    cells: Sequence[str],
    arms: Sequence[str],
    reference: str,
    measure: str,
    level: float,
) -> list[Row]:
    rows = []
    done = [record for record in records if record.state == "done"]
    for cell in cells:
        seeds = _seeds_of(records, cell)
        for arm in arms:
            by_seed = _by_seed(values, guessing, arm, cell)
            if not by_seed:
                continue
            of_reference = _by_seed(values, guessing, reference, cell)
            rows.append(
                Row(
                    cell,
                    arm,
                    by_seed,
                    len(values.get((arm, cell), {})),
                    seeds,
                    mean_interval(list(by_seed.values()), level),
                    stdev(by_seed.values()) if len(by_seed) > 1 else None,
                    None if arm == reference else difference(by_seed, of_reference, level),
                    _optimism(done, arm, cell, measure),
                )
            )
    return rows


def _optimism(done: Sequence[RunRecord], arm: str, cell: str, measure: str) -> float | None:
    curve = measure_of(measure).every_round
    if curve is None:
        return None
    gaps = []
    for record in done:
        if (record.arm, record.cell) == (arm, cell) and len(of_rounds(record, curve)) > 1:
            best = value_of(record, measure, "best")
            last = value_of(record, measure, "last")
            if best is not None and last is not None:
                gaps.append(best - last)
    return fmean(gaps) if gaps else None


def _claim_figures(records: Sequence[RunRecord], claim: Claim, at: At, classes: Mapping[str, int]) -> ClaimFigures:
    """Return the values of both arms of a claim, and their failed runs. Diverged runs count as in the table.

    Values are from the last round, unless both measures have values of other rounds.
    """
    common = at if all(measure_of(name).every_round for name in claim.measures) else "last"
    done = [record for record in records if record.state == "done"]
    sides: list[Values] = []
    for name in claim.measures:
        values = _values(done, name, common)[0]
        guessing = _guessing(records, values, name, classes)
        sides.append({key: _by_seed(values, guessing, *key) for key in {**values, **guessing}})
    better, worse = sides
    failed: dict[tuple[str, str], set[int]] = {}
    for record in records:
        if record.state == "failed" and not any(_is_guessing(record, values) for values in sides):
            failed.setdefault((record.arm, record.cell), set()).add(record.seed)
    planned = {cell: _seeds_of(records, cell) for cell in _in_order(record.cell for record in records)}
    on_all_images = claim.measures == ("accuracy", "accuracy") and common == "last"
    flips = by_cell(records, claim.better, claim.worse) if on_all_images else {}
    return ClaimFigures(claim, common, better, worse, failed, planned, flips)


def _lost(records: Sequence[RunRecord], rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Return the cell, arm and planned seeds of each arm that has failed runs and no row."""
    present = {(row.cell, row.arm) for row in rows}
    failed = dict.fromkeys((record.cell, record.arm) for record in records if record.state == "failed")
    return [(cell, arm, _seeds_of(records, cell)) for cell, arm in failed if (cell, arm) not in present]


def _seeds_of(records: Sequence[RunRecord], cell: str) -> int:
    return len({record.seed for record in records if record.cell == cell})


def _whole(values: Values, arms: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Return the cells in which all arms have the same seeds."""
    whole = []
    for cell in cells:
        seeds = [values.get((arm, cell), {}).keys() for arm in arms]
        if seeds[0] and all(each == seeds[0] for each in seeds):
            whole.append(cell)
    return whole


def _overall(
    values: Values, arms: Sequence[str], whole: Sequence[str], reference: str, level: float, higher: bool
) -> list[Overall]:
    """Return each arm's figures over the given cells, or an empty list for fewer than two cells.

    Args:
        values: Values by arm, cell and seed.
        arms: Names of the arms.
        whole: The cells.
        reference: The arm that the others are compared to.
        level: Confidence of the intervals.
        higher: Whether a higher value is better.
    """
    if len(whole) < 2:
        return []
    by_arm = {arm: [list(values[arm, cell].values()) for cell in whole] for arm in arms}
    of_reference = by_arm[reference]
    overall = []
    for arm, of_arm in by_arm.items():
        better, worse = (of_arm, of_reference) if higher else (of_reference, of_arm)
        probability = None if arm == reference else improvement(better, worse, level)
        overall.append(Overall(arm, over_cells(of_arm, level), probability))
    return overall


def unfinished(record: RunRecord) -> str:
    """Return a line that names a run without a result, and the reason."""
    problem = f": {record.problem}" if record.problem else ""
    steps = f" after step {record.steps} of {record.planned_steps}" if record.state in ("stopped", "running") else ""
    return f"{record.folder}: {record.state}{steps}{problem}"


def _settings_line(arm: str, settings: Mapping[str, Any]) -> str:
    return f"{arm}: {', '.join(f'{key} {value}' for key, value in settings.items())}"


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
