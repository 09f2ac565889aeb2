"""Tables of comparisons, with accuracies in percent and differences in percentage points.

Equal runs give equal tables: nothing depends on the duration of a run unless the measure is `seconds`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from raylt.errors import ConfigError
from raylt.studies.analysis.answers import Flips
from raylt.studies.analysis.claims import Judged
from raylt.studies.analysis.comparison import Comparison, Row
from raylt.studies.analysis.measures import At, measure_of
from raylt.studies.analysis.statistics import Interval
from raylt.studies.analysis.time_to_accuracy import Reached
from raylt.studies.report.text_table import Places, TextTable

ANSWERS = "answers to the same test images"
UNSEALED = "unsealed: no hash binds these figures to their runs"
DIVERGED = "diverged, which counts as guessing a class, or as the worst finished run of the cell if that is worse"
PASSES = "forward and backward passes of a client in a run, as a multiple of FedAvg's, without the server's computation"
WITHOUT_CURVE = (
    "runs that were evaluated in fewer than two of their rounds, so the round is not known; evaluation.personal=1 "
    "evaluates clients' own models after each round"
)
HEADINGS = {
    "last": "last round",
    "last10": "mean of the last ten evaluated rounds",
    "validation": "round with the best accuracy on validation samples",
    "best": "best round on the test set",
}
Spread = Literal["interval", "sd"]  # meaning of the number after ±
Key = tuple[str, str]  # cell and arm


def comparison_table(comparison: Comparison, spread: Spread = "interval") -> TextTable:
    """Return the table of one measure: arms in cells, their differences to the reference arm, and the claims.

    Args:
        comparison: Comparison by the measure.
        spread: Number after ± next to a mean: half the width of its interval, or the standard deviation over the seeds.
    """
    cells = _has_cells(comparison)
    figures = _figure_names(comparison, spread)
    texts = {(row.cell, row.arm): _figures(comparison, row, spread) for row in comparison.rows}
    rows = _with_lost(texts, [comparison], len(figures) - 1)
    return TextTable(
        title=_title(comparison, spread),
        head=[*_if(cells, "cell"), "arm", *figures],
        rows=[[*_if(cells, cell), arm, *of_arm] for (cell, arm), of_arm in rows.items()],
        places=_places(list(rows), [comparison], {comparison.measure: 2 + cells}),
        columns=("ll" if cells else "l") + "r" * (len(figures) - 1) + "l",
        grouped=cells,
        naming=1 + cells,
        further=_further(comparison),
        notes=notes_of(comparison),
    )


def measures_table(comparisons: Sequence[Comparison], spread: Spread = "interval") -> TextTable:
    """Return the table of several measures of the same runs.

    Each cell is sorted by the first measure with values; arms without this measure are last. The column of a measure
    that no run has is empty.

    Args:
        comparisons: One comparison for each measure.
        spread: See `comparison_table`.

    Raises:
        ConfigError: A measure is named twice.
    """
    first = next((comparison for comparison in comparisons if comparison.rows), comparisons[0])
    names = [comparison.measure for comparison in comparisons]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise ConfigError(
            f"measure: given twice ({twice}). Name each measure once.",
            code="config.conflict",
            key="measure",
            name=twice,
        )
    rows_by_measure = {(row.cell, row.arm, each.measure): row for each in comparisons for row in each.rows}
    sign = -1 if measure_of(first.measure).higher else 1
    ordered = sorted(first.rows, key=lambda row: sign * row.mean.estimate)
    arms = dict.fromkeys((row.cell, row.arm) for row in [*ordered, *(row for each in comparisons for row in each.rows)])
    texts: dict[tuple[str, str], list[str]] = {}
    for cell, arm in arms:
        of_arm = [rows_by_measure.get((cell, arm, name)) for name in names]
        fullest = max((row for row in of_arm if row is not None), key=lambda row: len(row.values))
        figures = [_mean_text(row, name, spread) for row, name in zip(of_arm, names, strict=True)]
        texts[cell, arm] = [finished(fullest), *figures]
    rows = _with_lost(texts, comparisons, len(names))
    several = len({cell for cell, _ in rows}) > 1
    columns = [name if name == "seconds" else f"{name}, {unit(name)}" for name in names]
    title = f"ordered by {measure_of(first.measure).what}, {HEADINGS[first.at]}; {_spread_text(first, spread)}"
    return TextTable(
        title=title,
        head=[*_if(several, "cell"), "arm", "seeds", *columns],
        rows=[[*_if(several, cell), arm, *of_arm] for (cell, arm), of_arm in rows.items()],
        columns=("ll" if several else "l") + "r" * (1 + len(names)),
        grouped=several,
        naming=1 + several,
        places=_places(list(rows), comparisons, {name: 2 + several + number for number, name in enumerate(names)}),
        notes=_notes(
            first,
            _left_out_of_several(comparisons),
            _in_any(comparisons, lambda each: each.diverged),
            _in_any(comparisons, lambda each: each.models),
            _in_any(comparisons, lambda each: [] if each.at == "last" else each.one_round),
        ),
    )


def with_costs(table: TextTable, passes: Mapping[tuple[str, str], float | None]) -> TextTable:
    """Return a comparison's table, extended by a table of the passes of each arm.

    Args:
        table: The comparison's table.
        passes: Passes of a client in a run by cell and arm, as a multiple of FedAvg's; None if not measured.
    """
    rows = [[cell, arm, "-" if each is None else f"{each:.2f}"] for (cell, arm), each in passes.items()]
    return replace(table, further=[*table.further, (PASSES, ["cell", "arm", "passes"], rows)])


def with_target(table: TextTable, reaching: Sequence[Reached], target: float, measure: str = "accuracy") -> TextTable:
    """Append a table of the times to the target to a comparison's table; return the result."""
    costs = any(each.passes is not None for each in reaching)
    rows = []
    for each in reaching:
        mebibytes = None if each.bytes is None else each.bytes / 2**20
        figures = [each.rounds, *([each.passes] if costs else []), mebibytes, each.seconds]
        texts = ["-" if value is None else f"{value:.1f}" for value in figures]
        rows.append([each.cell, each.arm, _reached_by(each), *texts])
    title = f"until {measure} {100 * target:g} %: medians of the runs that reached it"
    passes = ["passes, in rounds of FedAvg"] if costs else []
    head = ["cell", "arm", "reached by", "rounds", *passes, "MiB up and down", "seconds"]
    unknown = list(dict.fromkeys(each.arm for each in reaching if each.without_curve))
    notes = {**table.notes, "without curve": [f"{', '.join(unknown)}: {WITHOUT_CURVE}"]} if unknown else table.notes
    return replace(table, further=[*table.further, (title, head, rows)], notes=notes)


def claims_table(studies: Mapping[str, Comparison]) -> TextTable:
    """Return a table of the claims of several studies, by name of the study.

    Raises:
        ConfigError: No study has a claim that its finished runs can decide.
    """
    tables = [
        (f"{name}, {HEADINGS[each.at]}: {family(each)}", *_claims(each))
        for name, each in studies.items()
        if each.claims
    ]
    if not tables:
        raise ConfigError(
            f"claims: finished runs cannot decide any claim ({', '.join(studies)}). Write claims in the study's file, "
            "or run the study.",
            code="study.no-figure",
            key="claims",
            studies=list(studies),
        )
    (title, head, rows), *further = tables

    def lines(of: Callable[[Comparison], list[str]]) -> list[str]:
        return [f"{name}: {line}" for name, each in studies.items() for line in of(each)]

    notes = {
        "judged on": lines(lambda each: each.tests),
        ANSWERS: lines(_answers),
        "arms with settings of their own": lines(lambda each: each.apart),
        "tuned on validation samples": lines(lambda each: each.tuned),
        "versions of the code": lines(lambda each: each.versions),
        UNSEALED: lines(lambda each: each.unsealed),
        DIVERGED: lines(lambda each: each.diverged),
        "left out": lines(lambda each: one_line_per_failure(each.left_out)),
    }
    return TextTable(title, head, rows, "l" * len(head), grouped=False, further=further, notes=notes)


def finished(row: Row) -> str:
    """Return a row's number of finished runs as text, with the diverged runs that its mean includes.

    Examples are "6", "4 of 6", "4 + 2 diverged" and "3 + 2 diverged of 6".
    """
    diverged = len(row.values) - row.finished
    if not diverged:
        return seeds_text(row.finished, row.planned)
    missing = f" of {row.planned}" if len(row.values) < row.planned else ""
    return f"{row.finished} + {diverged} diverged{missing}"


def seeds_text(n: int, planned: int) -> str:
    """Return a number of seeds as text, such as "4", or "4 of 6" if some are missing."""
    return str(n) if n == planned else f"{n} of {planned}"


def difference_text(row: Row, show: Callable[[float], str]) -> str:
    """Return a row's difference to the reference arm, with the number of pairs if some seeds have no partner."""
    if row.difference is None:
        return "-"
    text = margin(row.difference.difference, show, sign=True)
    return text if row.difference.n == len(row.values) else f"{text} (n = {row.difference.n})"


def formatter(measure: str) -> Callable[[float], str]:
    """Return a function that formats a measure's values without unit: shares in percent, bytes in MiB."""
    digits = 1 if measure == "seconds" else 2

    def show(value: float) -> str:
        text = f"{scale(measure) * value:.{digits}f}"
        return text.removeprefix("-") if float(text) == 0 else text

    return show


def scale(measure: str) -> float:
    """Return the factor that converts a measure's value to the unit that tables show."""
    if measure == "seconds":
        return 1
    return 2**-20 if measure.startswith("bytes") else 100


def unit(measure: str) -> str:
    """Return the unit of a measure in tables."""
    if measure.startswith("bytes"):
        return "MiB"
    return "s" if measure == "seconds" else "%"


def unit_of_difference(measure: str) -> str:
    """Return the unit of a difference between two values of a measure in tables."""
    return "points" if unit(measure) == "%" else unit(measure)


def difference_heading(claims: Sequence[Judged]) -> str:
    """Return the heading of the differences of claims, with their units."""
    return f"difference, {' or '.join(dict.fromkeys(unit_of_difference(each.claim.measure) for each in claims))}"


def claim_difference(judged: Judged, claims: Sequence[Judged]) -> str:
    """Return a claim's difference as text, with its unit if the claims have several."""
    measure = judged.claim.measure
    text = margin(judged.difference.difference, formatter(measure), sign=True)
    several = len({unit_of_difference(each.claim.measure) for each in claims}) > 1
    return f"{text} {unit_of_difference(measure)}" if several else text


def within(low: float, high: float, measure: str) -> tuple[float, float]:
    """Clip an interval to possible values of its measure: no bytes below 0, no share above 1."""
    return max(0.0, low), min(1.0, high) if unit(measure) == "%" else high


def interval(each: Interval, show: Callable[[float], str]) -> str:
    """Format an interval as "1.20 [0.40, 2.00]", or as the estimate alone if it has no bounds."""
    text = show(each.estimate)
    return text if each.low is None or each.high is None else f"{text} [{show(each.low)}, {show(each.high)}]"


def margin(each: Interval, show: Callable[[float], str], sign: bool = False) -> str:
    """Format a symmetric interval as "1.20 ± 0.80", or as the estimate alone if it has no bounds.

    Args:
        each: The interval.
        show: Function that formats a value.
        sign: Whether positive values get a plus sign.
    """
    text = show(each.estimate)
    if sign and not text.startswith("-"):
        text = f"+{text}"
    return text if each.high is None else f"{text} ± {show(each.high - each.estimate)}"


def probability(p: float | None) -> str:
    """Format a p value with three digits, or None as "-"."""
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def printed_text(judged: Judged) -> str:
    """Return the paper's printed difference and whether it lies in the interval, or "" if none is printed.

    Equal differences have no interval, so the printed difference is then neither in nor out.
    """
    if (printed := judged.claim.printed) is None:
        return ""
    measured = judged.difference.difference
    value = printed / scale(judged.claim.measure)
    if measured.high is None or measured.half == 0:
        return f"{printed:+.2f}"
    return f"{printed:+.2f}, {'in' if measured.holds(value) else 'out'}"


def claim_text(judged: Judged, at: At) -> str:
    """Return a claim as text, with its rounds if they differ from the table's."""
    return str(judged.claim) if judged.at == at else f"{judged.claim}, {HEADINGS[judged.at]}"


def family(comparison: Comparison) -> str:
    """Return the heading of the claims table, with the number of tests for which p values are adjusted."""
    tested = sum(judged.p is not None for judged in comparison.claims)
    chosen = ", of rounds chosen on the test set" if comparison.at == "best" else ""
    has_printed = any(judged.claim.printed is not None for judged in comparison.claims)
    printed = "; printed: the paper's difference, in or out of the interval" if has_printed else ""
    equal = any(judged.verdict in ("no difference", "no spread") for judged in comparison.claims)
    reasons = f"with fewer than six seeds{' or equal differences' if equal else ''}"
    if not tested:
        return f"claims{chosen}; no p values {reasons}{printed}"
    adjusted = f"p values adjusted by Holm in one family of {tested}, none {reasons}"
    return f"claims{chosen}; {adjusted}{printed}"


def _if(condition: bool, text: str) -> list[str]:
    return [text] if condition else []


def _has_cells(comparison: Comparison) -> bool:
    return any(row.cell for row in comparison.rows)


def _title(comparison: Comparison, spread: Spread) -> str:
    measure = measure_of(comparison.measure)
    differences = f"differences to {comparison.reference}, paired by seed"
    if spread == "sd":
        differences += f", ± {100 * comparison.level:g} % t interval"
    return (
        f"{measure.what}, {unit(comparison.measure)}, {HEADINGS[comparison.at]}; {_spread_text(comparison, spread)} "
        f"over seeds; {differences}"
    )


def _spread_text(comparison: Comparison, spread: Spread) -> str:
    return "± standard deviation" if spread == "sd" else f"± {100 * comparison.level:g} % t interval"


def _places(rows: Sequence[Key], comparisons: Sequence[Comparison], columns: Mapping[str, int]) -> Places:
    """Find the best and second-best mean of each cell and measure; return their ranks by row and column.

    Means with equal text in the table have the same rank. A cell with one arm, or with equal arms only, has no ranks.
    Of two arms, only the better one has a rank. A mean that includes diverged runs has none, since their values were
    not measured.

    Args:
        rows: Cell and arm of each row of the table.
        comparisons: Comparisons by one measure each.
        columns: Column of each measure.
    """
    places: Places = {}
    for comparison in comparisons:
        measure = comparison.measure
        by_row = {(row.cell, row.arm): row.mean.estimate for row in comparison.rows if row.finished == len(row.values)}
        sign = 1 if measure_of(measure).higher else -1
        show = formatter(measure)
        for cell in dict.fromkeys(cell for cell, _ in rows):
            values = {
                index: sign * float(show(by_row[key]))
                for index, key in enumerate(rows)
                if key[0] == cell and key in by_row
            }
            best_first = sorted(set(values.values()), reverse=True)
            if len(best_first) > 1:
                places |= {
                    (index, columns[measure]): best_first.index(value) + 1
                    for index, value in values.items()
                    if value in best_first[: 2 if len(values) > 2 else 1]
                }
    return places


def _in_any(comparisons: Sequence[Comparison], of: Callable[[Comparison], list[str]]) -> list[str]:
    """Return the different lines of several comparisons."""
    return list(dict.fromkeys(line for each in comparisons for line in of(each)))


def notes_of(comparison: Comparison) -> dict[str, list[str]]:
    """Return the headings and lines of the notes below a comparison's table; some lists are empty."""
    left_out = list(comparison.left_out)
    if not comparison.overall and len({row.cell for row in comparison.rows}) > 1:
        left_out.append("over cells: no table, since all arms have the same seeds in fewer than two of them")
    return _notes(comparison, left_out, comparison.diverged, comparison.models, comparison.one_round)


def _notes(
    comparison: Comparison, left_out: list[str], diverged: list[str], models: list[str], one_round: list[str]
) -> dict[str, list[str]]:
    return {
        "judged on": comparison.tests,
        "evaluated models": models,
        "one evaluated round": one_round,
        ANSWERS: _answers(comparison),
        "arms with settings of their own": comparison.apart,
        "tuned on validation samples": comparison.tuned,
        "versions of the code": comparison.versions,
        UNSEALED: comparison.unsealed,
        DIVERGED: diverged,
        "left out": one_line_per_failure(left_out),
    }


def _answers(comparison: Comparison) -> list[str]:
    """Return one line for each claim without a clear verdict, on the answers that differ between its arms."""
    unclear = ("no difference", "no spread", "open", "too few seeds")
    return [
        f"{f'{each.cell}, ' if each.cell else ''}{each.claim.better} and {each.claim.worse}: {answers_text(each.flips)}"
        for each in comparison.claims
        if each.flips is not None and each.verdict in unclear
    ]


def answers_text(flips: Flips) -> str:
    """Return as text how many answers differ between two arms, and how significant this is."""
    if not flips.better_alone + flips.worse_alone:
        open_points = f"{100 * flips.largest:.2f} points"
        none = f"of {flips.answers:,} answers, none is right with one arm only"
        return f"{none}; with {flips.images:,} images, up to {open_points} cannot be excluded"
    p = probability(flips.p)
    return (
        f"of {flips.answers:,} answers, {flips.better_alone:,} are right only with the first and "
        f"{flips.worse_alone:,} only with the second; exact McNemar p {p if p.startswith('<') else f'= {p}'}, treating "
        "all answers as independent"
    )


def one_line_per_failure(lines: Sequence[str]) -> list[str]:
    """Join the lines `RUN: failed: REASON` that have the same reason into one line.

    A wrong setting ends all runs of a study with the same error.
    """
    runs_by_line: dict[str, list[str]] = {}
    for line in lines:
        run, _, reason = line.partition(": ")
        failed = reason.startswith("failed: ")
        runs_by_line.setdefault(reason if failed else line, []).append(run if failed else "")
    joined = []
    for line, runs in runs_by_line.items():
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        joined.append(f"{runs[0]}{others}: {line}" if runs[0] else line)
    return joined


def _with_lost(texts: Mapping[Key, list[str]], comparisons: Sequence[Comparison], figures: int) -> dict[Key, list[str]]:
    """Return the rows of a table by cell and arm, ordered by cell, with rows for arms that have no figure.

    An arm with failed runs and no finished run has no figure. It is the last of its cell.

    Args:
        texts: Rows of the other arms.
        comparisons: The comparisons, whose order of cells is kept.
        figures: Number of columns after the seeds.
    """
    lost = {
        (cell, arm): [seeds_text(0, planned), *["-"] * figures]
        for each in comparisons
        for cell, arm, planned in each.lost
        if (cell, arm) not in texts
    }
    rows = {**texts, **lost}
    cells = list(dict.fromkeys([*(row.cell for each in comparisons for row in each.rows), *(cell for cell, _ in lost)]))
    return {key: rows[key] for key in sorted(rows, key=lambda key: cells.index(key[0]))}


def _figure_names(comparison: Comparison, spread: Spread) -> list[str]:
    """Return the headings of the columns after the arm's column."""
    has_optimism = any(row.optimism is not None for row in comparison.rows)
    return [
        "seeds",
        "mean",
        *_if(spread == "interval", "sd"),
        "difference",
        *_if(has_optimism, "best - last"),
        "values",
    ]


def _figures(comparison: Comparison, row: Row, spread: Spread) -> list[str]:
    show = formatter(comparison.measure)
    deviation = "-" if row.sd is None else show(row.sd)
    optimism = "-" if row.optimism is None else show(row.optimism)
    return [
        finished(row),
        _mean_text(row, comparison.measure, spread),
        *_if(spread == "interval", deviation),
        difference_text(row, show),
        *_if("best - last" in _figure_names(comparison, spread), optimism),
        " ".join(show(value) for value in row.values.values()),
    ]


def _mean_text(row: Row | None, measure: str, spread: Spread) -> str:
    if row is None:
        return "-"
    show = formatter(measure)
    if spread == "sd":
        return show(row.mean.estimate) + ("" if row.sd is None else f" ± {show(row.sd)}")
    return margin(row.mean, show)


def _left_out_of_several(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines about runs that the comparisons of several measures leave out.

    A "-" in the table means that no run of an arm has the figure. Runs are listed if a mean covers fewer runs than the
    table states.
    """
    first = next((comparison for comparison in comparisons if comparison.rows), comparisons[0])
    seeds = {(row.cell, row.arm): row.finished for row in first.rows}
    named = [
        each
        for each in comparisons
        if each is first or any(row.finished < seeds.get((row.cell, row.arm), 0) for row in each.rows)
    ]
    return _in_any(named, lambda each: each.left_out)


def _further(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the further tables (claims, figures over cells), if any: title, heading and rows of each."""
    tables = []
    if comparison.claims:
        tables.append((family(comparison), *_claims(comparison)))
    if comparison.overall:
        tables.append(_overall(comparison))
    return tables


def _reached_by(each: Reached) -> str:
    """Return how many finished runs reached the target, and how many others there are.

    A run without values by round may have reached it or not.
    """
    counted = [f"{each.reached} of {each.runs}"] if each.runs else []
    unknown = [f"{each.without_curve} without curve"] if each.without_curve else []
    diverged = [f"{each.diverged} diverged"] if each.diverged else []
    return ", ".join(counted + unknown + diverged)


def _overall(comparison: Comparison) -> tuple[str, list[str], list[list[str]]]:
    show = formatter(comparison.measure)
    rows = []
    for each in comparison.overall:
        better = "-" if each.improvement is None else interval(each.improvement, lambda value: f"{value:.2f}")
        rows.append([each.arm, interval(each.iqm, show), better])
    title = (
        f"{over_cells_of(comparison)}: interquartile mean, and probability that a run beats one of "
        f"{comparison.reference}; bootstrap within cells"
    )
    return title, ["arm", "interquartile mean", "probability of improvement"], rows


def over_cells_of(comparison: Comparison) -> str:
    """Return the heading of the figures over cells, which names the cells if they are not all."""
    if len(comparison.whole) == len({row.cell for row in comparison.rows}):
        return "over cells"
    return f"over cells {'; '.join(comparison.whole)} (all arms have the same seeds there)"


def _claims(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the heading and rows of the claims table."""
    claims = comparison.claims
    # a claim may be on another measure than the table's, which only some cells may have
    cells = len({each.cell for each in (*comparison.rows, *claims)}) > 1
    printed = any(each.claim.printed is not None for each in claims)
    heading = [
        "claim",
        *_if(cells, "cell"),
        "seeds",
        difference_heading(claims),
        *_if(printed, "printed"),
        "p",
        "verdict",
    ]
    rows = [
        [
            claim_text(each, comparison.at),
            *_if(cells, each.cell),
            seeds_text(each.difference.n, each.planned),
            claim_difference(each, claims),
            *_if(printed, printed_text(each)),
            probability(each.p),
            each.verdict,
        ]
        for each in claims
    ]
    return heading, rows
