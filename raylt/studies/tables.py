"""Comparisons as tables. Accuracies are in percent, differences in points; nothing here depends on how long a run took
unless `seconds` is asked for, so equal runs print equal tables."""

from collections.abc import Callable, Mapping, Sequence

from raylt.errors import ConfigError
from raylt.studies.claims import Judged
from raylt.studies.comparison import Comparison, Row
from raylt.studies.measures import At, measure_of
from raylt.studies.sheet import Sheet
from raylt.studies.statistics import Interval

HEADINGS = {"last": "last round", "last10": "mean of the last ten judged rounds",
            "validation": "round with the best accuracy on validation samples", "best": "best round on the test set"}


def of_comparison(comparison: Comparison) -> Sheet:
    """One measure: every arm in every cell, its difference to the reference arm, claims, and what was left out."""
    several, figures = _several(comparison), _figures(comparison)
    rows = [[*([row.cell] if several else []), row.arm, *_cells(comparison, row)] for row in comparison.rows]
    columns = ("ll" if several else "l") + "r" * (len(figures) - 1) + "l"
    left_out = list(comparison.left_out)
    if not comparison.overall and len({row.cell for row in comparison.rows}) > 1:
        left_out.append("over cells: no table, since all arms have the same seeds in fewer than two of them")
    return Sheet(_title(comparison), [*(["cell"] if several else []), "arm", *figures], rows, columns, several,
                 naming=1 + several, further=_further(comparison), notes={
                     "arms with settings of their own": comparison.apart,
                     "tuned on validation samples": comparison.tuned, "versions of the code": comparison.versions,
                     "left out": left_out})


def of_measures(comparisons: Sequence[Comparison]) -> Sheet:
    """Several measures of the same runs side by side, in each cell the best arm by the first measure on top.

    Raises:
        ConfigError: a measure is named twice.
    """
    first, names = comparisons[0], [comparison.measure for comparison in comparisons]
    if len(set(names)) < len(names):
        raise ConfigError(f"measure {max(names, key=names.count)}: it is given twice; name each measure once")
    means = {(row.cell, row.arm, each.measure): row.mean for each in comparisons for row in each.rows}
    seeds = {(row.cell, row.arm): len(row.values) for row in first.rows}
    # an arm without a figure in any run shows "-"; runs are named where a mean is over fewer than the table says
    named = [each for each in comparisons if each is first or
             any(len(row.values) < seeds.get((row.cell, row.arm), 0) for row in each.rows)]
    cells = list(dict.fromkeys(row.cell for row in first.rows))
    sign = -1 if measure_of(first.measure).higher else 1
    ordered = sorted(first.rows, key=lambda row: (cells.index(row.cell), sign * row.mean.estimate))
    several = len(cells) > 1
    rows = [[*([row.cell] if several else []), row.arm, str(len(row.values)),
             *("-" if (mean := means.get((row.cell, row.arm, name))) is None else margin(mean, shown(name))
               for name in names)] for row in ordered]
    title = f"ordered by {measure_of(first.measure).what}, {HEADINGS[first.at]}; ± {100 * first.level:g} % t interval"
    units = {name: "" if name == "seconds" else f", {unit(name)}" for name in names}
    head = [*(["cell"] if several else []), "arm", "seeds", *(f"{name}{units[name]}" for name in names)]
    columns = ("ll" if several else "l") + "r" * (1 + len(names))
    return Sheet(title, head, rows, columns, several, naming=1 + several, notes={
        "arms with settings of their own": first.apart, "tuned on validation samples": first.tuned,
        "versions of the code": first.versions,
        "left out": list(dict.fromkeys(line for each in named for line in each.left_out))})


def of_claims(studies: Mapping[str, Comparison]) -> Sheet:
    """The claims of one or several studies, by name, and what their runs say of each.

    Raises:
        ConfigError: no study has a claim that its finished runs can answer.
    """
    tables = [(f"{name}, {HEADINGS[each.at]}: {family(each)}", *_claims(each)) for name, each in studies.items()
              if each.claims]
    if not tables:
        raise ConfigError(f"{', '.join(studies)}: no claim that a finished run can answer; a study's file has them "
                          "under claims")
    (title, head, rows), *further = tables
    left_out = [f"{name}: {line}" for name, each in studies.items() for line in each.left_out]
    return Sheet(title, head, rows, "l" * len(head), grouped=False, further=further, notes={"left out": left_out})


def shown(measure: str) -> Callable[[float], str]:
    """How a value of a measure is written, without its unit: shares in percent, bytes in MiB."""
    if measure == "seconds":
        return lambda value: f"{value:.0f}"
    return lambda value: f"{scale(measure) * value:.2f}"


def scale(measure: str) -> float:
    """What a value is multiplied by where it is shown in its `unit`."""
    return 1 if measure == "seconds" else 2**-20 if measure.startswith("bytes") else 100


def unit(measure: str) -> str:
    return "MiB" if measure.startswith("bytes") else "s" if measure == "seconds" else "%"


def interval(each: Interval, show: Callable[[float], str]) -> str:
    """1.20 [0.40, 2.00]; without brackets where there is no interval."""
    text = show(each.estimate)
    return text if each.low is None or each.high is None else f"{text} [{show(each.low)}, {show(each.high)}]"


def margin(each: Interval, show: Callable[[float], str], sign: bool = False) -> str:
    """+1.20 ± 0.80: an interval that is even on both sides; without a margin where there is no interval."""
    text = show(each.estimate)
    if sign and not text.startswith("-"):
        text = f"+{text}"
    return text if each.high is None else f"{text} ± {show(each.high - each.estimate)}"


def probability(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _title(comparison: Comparison) -> str:
    measure = measure_of(comparison.measure)
    return (f"{measure.what}, {unit(comparison.measure)}, {HEADINGS[comparison.at]}; ± {100 * comparison.level:g} % "
            f"t interval over seeds; differences to {comparison.reference}, paired by seed")


def _several(comparison: Comparison) -> bool:
    """Whether there are cells to tell apart."""
    return any(row.cell for row in comparison.rows)


def _figures(comparison: Comparison) -> list[str]:
    """What stands behind an arm's name."""
    optimism = ["best - last"] if any(row.optimism is not None for row in comparison.rows) else []
    return ["seeds", "mean", "sd", "difference", *optimism, "values"]


def _cells(comparison: Comparison, row: Row) -> list[str]:
    show = shown(comparison.measure)
    optimism = [] if "best - last" not in _figures(comparison) else [
        "-" if row.optimism is None else show(row.optimism)]
    return [str(len(row.values)), margin(row.mean, show), "-" if row.sd is None else show(row.sd),
            "-" if row.difference is None else margin(row.difference.difference, show, sign=True), *optimism,
            " ".join(show(value) for value in row.values.values())]


def _further(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heading and rows of the tables of claims and over cells, where there are any."""
    tables = []
    if comparison.claims:
        tables.append((family(comparison), *_claims(comparison)))
    if comparison.overall:
        show = shown(comparison.measure)
        rows = [[o.arm, interval(o.iqm, show), "-" if o.improvement is None else
                 interval(o.improvement, lambda value: f"{value:.2f}")] for o in comparison.overall]
        all_of_them = len(comparison.whole) == len({row.cell for row in comparison.rows})
        those = "" if all_of_them else f" {'; '.join(comparison.whole)} (all arms have the same seeds there)"
        tables.append((f"over cells{those}: interquartile mean, and probability that a run beats one of "
                       f"{comparison.reference}; bootstrap within cells",
                       ["arm", "interquartile mean", "probability of improvement"], rows))
    return tables


def _claims(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: a claim, its difference, where it has one the paper's, and the verdict."""
    claims = comparison.claims
    cells = len({row.cell for row in comparison.rows}) > 1
    printed = any(each.claim.printed is not None for each in claims)
    heading = ["claim", *(["cell"] if cells else []), "seeds", "difference", *(["printed"] if printed else []), "p",
               "verdict"]
    return heading, [[claim_text(each, comparison.at), *([each.cell] if cells else []), str(each.difference.n),
                      margin(each.difference.difference, shown(each.claim.measure), sign=True),
                      *([printed_text(each)] if printed else []), probability(each.p), each.verdict]
                     for each in claims]


def printed_text(judged: Judged) -> str:
    """The difference that a paper prints, and whether it lies in the interval of ours; "" of a claim without one."""
    if (printed := judged.claim.printed) is None:
        return ""
    ours, value = judged.difference.difference, printed / scale(judged.claim.measure)
    where = "" if ours.high is None else ", in" if ours.holds(value) else ", out"
    return f"{printed:+.2f}{where}"


def claim_text(judged: Judged, at: At) -> str:
    """A claim, with the rounds that it is of where they are not those of the tables around it."""
    return str(judged.claim) if judged.at == at else f"{judged.claim}, {HEADINGS[judged.at]}"


def family(comparison: Comparison) -> str:
    """What the claims' p values are adjusted for."""
    tested = sum(judged.p is not None for judged in comparison.claims)
    chosen = ", of rounds chosen on the test set" if comparison.at == "best" else ""
    printed = any(judged.claim.printed is not None for judged in comparison.claims)
    beside = "; printed: as the paper has it, in or out of the interval" if printed else ""
    if not tested:
        return f"claims{chosen}; no p values under six seeds{beside}"
    return f"claims{chosen}, one family of {tested} with a p value; adjusted by Holm, none under six seeds{beside}"
