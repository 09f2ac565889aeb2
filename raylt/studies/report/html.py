"""The report of a study as one self-contained HTML file, without server, network or scripts."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from raylt import store
from raylt.errors import CheckpointError, ConfigError, count_of, spoken, without_remedy
from raylt.formatting import in_percent
from raylt.methods import METHODS
from raylt.metrics import GROUPS
from raylt.runs.callbacks.console import UNSAFE
from raylt.studies.analysis.comparison import Comparison, Row
from raylt.studies.analysis.measures import FINISH, by_step, measure_of, value_of
from raylt.studies.papers.verdicts import verdicts
from raylt.studies.records.record import RunRecord
from raylt.studies.report import svg
from raylt.studies.report.comparison_tables import (
    HEADINGS,
    claim_difference,
    claim_text,
    difference_heading,
    difference_text,
    family,
    finished,
    formatter,
    interval,
    margin,
    notes_of,
    over_cells_of,
    printed_text,
    probability,
    scale,
    seeds_text,
    unit,
    within,
)
from raylt.studies.report.svg import Bars, Curve, Detail, Estimate, Strip
from raylt.studies.study import Study

# Headings of the entries in a record's provenance.
_PROVENANCE = {
    "raylt": "raylt",
    "commit": "commit",
    "code": "SHA-256 of the code",
    "torch": "torch",
    "ray": "Ray",
    "python": "Python",
    "system": "system",
    "cpu": "processor",
    "device": "device",
    "fleet": "fleet",
}


def write_report(study: Study, path: Path, mix_versions: bool = False) -> Path:
    """Write the HTML report of a study's finished runs. The report also lists the other runs.

    Args:
        study: The study.
        path: The HTML file.
        mix_versions: Whether runs of several versions of the code may be compared.

    Raises:
        ConfigError: No run is finished, or the file cannot be written.
    """
    text = render(study, mix_versions)
    try:
        store.write(path, text)
    except CheckpointError as error:
        raise ConfigError(
            f"{without_remedy(error)}. Give a file that can be written{spoken(' with --to', '')}.",
            code="file.unwritable",
            path=str(path),
        ) from None
    return path


def render(study: Study, mix_versions: bool = False) -> str:
    """Return the report of a study as HTML; see `write_report`.

    Raises:
        ConfigError: No run is finished.
    """
    done = [record for record in study.records if record.state == "done"]
    if not done:
        raise ConfigError(
            f"{study.definition.name}: no run is finished. Run the study with {spoken('raylt study', 'raylt.study')}.",
            code="study.nothing-finished",
            name=study.definition.name,
        )
    comparison = study.compare(mix_versions=mix_versions)
    colours = {arm: number for number, arm in enumerate(dict.fromkeys(record.arm for record in study.records))}
    cells = list(dict.fromkeys(record.cell for record in done))
    detail = Detail.of(len(cells), len({(record.arm, record.cell) for record in done}))
    content = {
        "study": study.definition,
        "what": measure_of(comparison.measure).what,
        "unit": unit(comparison.measure),
        "at": HEADINGS[comparison.at],
        "level": f"{100 * comparison.level:g}",
        "reference": comparison.reference,
        "arms": [(arm, svg.looks(colour)) for arm, colour in colours.items()],
        "counts": _state_counts(study.records),
        "rows": _rows(comparison),
        "lost": [(cell, arm, seeds_text(0, planned)) for cell, arm, planned in comparison.lost],
        "optimism": any(row.optimism is not None for row in comparison.rows),
        "family": family(comparison),
        "claims": _claims(comparison),
        "difference": difference_heading(comparison.claims),
        "printed": any(each.claim.printed is not None for each in comparison.claims),
        "overall": _overall(comparison),
        "over": _capital(over_cells_of(comparison)),
        "notes": [(_capital(heading), lines) for heading, lines in notes_of(comparison).items() if lines],
        "cells": [_cell(study, comparison, cell, colours, detail) for cell in cells],
        "verdicts": _verdicts(study, mix_versions),
        "costs": _costs(done),
        "runs": done,
        "made": _provenance(done),
        "departures": _departures({record.config["method"]["name"] for record in done}),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("raylt.studies.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return UNSAFE.sub("?", environment.get_template("report.html.j2").render(**content))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _state_counts(records: Sequence[RunRecord]) -> str:
    states = [record.state for record in records]
    return f"{count_of(len(states), 'run')}: " + ", ".join(
        f"{states.count(state)} {state}" for state in dict.fromkeys(states)
    )


def _rows(comparison: Comparison) -> list[tuple[Any, ...]]:
    """Return the rows of a comparison with their figures formatted as text."""
    show = formatter(comparison.measure)
    return [
        (
            row,
            margin(row.mean, show),
            "" if row.sd is None else show(row.sd),
            difference_text(row, show),
            "" if row.optimism is None else show(row.optimism),
            finished(row),
        )
        for row in comparison.rows
    ]


def _claims(comparison: Comparison) -> list[tuple[Any, ...]]:
    """Return, for each claim, its text, verdict, p value, difference, the paper's difference and seeds."""
    return [
        (
            claim_text(each, comparison.at),
            each,
            probability(each.p),
            claim_difference(each, comparison.claims),
            printed_text(each),
            seeds_text(each.difference.n, each.planned),
        )
        for each in comparison.claims
    ]


def _overall(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return each arm with its interquartile mean and its probability of beating the reference arm."""
    show = formatter(comparison.measure)
    return [
        (
            each.arm,
            interval(each.iqm, show),
            "" if each.improvement is None else interval(each.improvement, lambda value: f"{value:.2f}"),
        )
        for each in comparison.overall
    ]


def _cell(study: Study, comparison: Comparison, cell: str, colours: dict[str, int], detail: Detail) -> dict[str, Any]:
    """Return the drawings of one cell of the study."""
    done = [record for record in study.records if record.state == "done" and record.cell == cell]
    runs_by_arm = {arm: [record for record in done if record.arm == arm] for arm in colours}
    runs_by_arm = {arm: runs for arm, runs in runs_by_arm.items() if runs}
    estimates = [_estimate(row, colours[row.arm], comparison.measure) for row in comparison.rows if row.cell == cell]
    bars = [Bars(arm, colours[arm], *_group_means(runs)) for arm, runs in runs_by_arm.items()]
    strips = [Strip(arm, colours[arm], values) for arm, runs in runs_by_arm.items() if (values := _clients(runs))]
    drawings = {
        "name": cell,
        "panels": _panels(cell, runs_by_arm, colours, detail),
        "estimates": _safe(
            svg.estimates(
                estimates,
                f"{comparison.measure} of every seed, {cell}",
                unit(comparison.measure),
                scale(comparison.measure),
            )
        ),
        "bars": _safe(svg.bars(GROUPS, bars, f"accuracy by group, {cell}")),
        "clients": "",
        "holdings": "",
        "groups": "",
    }
    if strips:
        title = f"accuracy of every client on its own class mix, {cell}"
        drawings["clients"] = _safe(svg.strips(strips, title, detail))
    if holdings := study.holdings.get(cell):
        title = f"samples of every client by class, {cell}"
        drawings["holdings"] = _safe(svg.holdings(holdings["counts"], holdings["names"], title, detail))
        classes = {group: sum(name == group for name in holdings["groups"]) for group in GROUPS}
        drawings["groups"] = ", ".join(f"{count} {group}" for group, count in classes.items())
    return drawings


def _estimate(row: Row, colour: int, measure: str) -> Estimate:
    """Return the mean of an arm with its interval, clipped to possible values of the measure."""
    low, high = row.mean.low, row.mean.high
    if low is not None and high is not None:
        low, high = within(low, high, measure)
    return Estimate(row.arm, colour, row.mean.estimate, low, high, list(row.values.values()))


def _panels(
    cell: str, runs_by_arm: dict[str, list[RunRecord]], colours: dict[str, int], detail: Detail
) -> list[tuple[str, Markup]]:
    """Return the title and drawing of each learning curve that has more than one point."""
    lines: dict[str, list[Curve]] = {}
    for key in ("accuracy", *GROUPS):
        curves = [_curve(arm, colours[arm], runs, key) for arm, runs in runs_by_arm.items()]
        lines[key] = [curve for curve in curves if curve is not None]
    highest = max((max(line.high) for each in lines.values() for line in each), default=1.0)
    panels = []
    for key, each in lines.items():
        if any(len(line.rounds) > 1 for line in each):
            name = key if key == "accuracy" else f"{key}-shot classes"
            panels.append((f"{name}, %", _safe(svg.curves(each, f"{name} by round, {cell}", highest, detail))))
    return panels


def _curve(arm: str, colour: int, runs: Sequence[RunRecord], key: str) -> Curve | None:
    """Return an arm's curve over the rounds that all its runs evaluated, or None if there are no such rounds."""
    columns = [by_step(run, run.curve[key]) for run in runs]
    steps = [step for step in columns[0] if all(column.get(step) is not None for column in columns)]
    if not steps:
        return None
    values = [[float(column[step]) for column in columns] for step in steps]
    return Curve(
        arm,
        colour,
        # JSON may store whole numbers as floats
        rounds=[max(run.steps for run in runs) if step == FINISH else int(step) for step in steps],
        mean=[fmean(of_step) for of_step in values],
        low=[min(of_step) for of_step in values],
        high=[max(of_step) for of_step in values],
        finish=steps[-1] == FINISH,
    )


def _group_means(runs: Sequence[RunRecord]) -> tuple[list[float | None], list[list[float]]]:
    """Return the mean accuracy of each class group, and the group's accuracies by seed."""
    seeds = [[value for run in runs if (value := value_of(run, group, "last")) is not None] for group in GROUPS]
    return [fmean(values) if values else None for values in seeds], seeds


def _clients(runs: Sequence[RunRecord]) -> list[float]:
    """Return the accuracies of the evaluated clients in the first seed's run, lowest first."""
    values = min(runs, key=lambda run: run.seed).by_client.get("matched", [])
    return sorted(value for value in values if value is not None)


def _verdicts(study: Study, mix_versions: bool) -> list[tuple[Any, str, str, str]]:
    """Return each verdict with its printed value, measured value and difference to FedAvg, as text."""
    if study.definition.paper is None:
        return []
    return [
        (
            verdict,
            in_percent(verdict.cell.value),
            margin(verdict.ours, in_percent),
            "" if verdict.difference is None else margin(verdict.difference.difference, in_percent, sign=True),
        )
        for verdict in verdicts(study.records, mix_versions=mix_versions)
        if verdict.ours is not None
    ]


def _costs(done: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the traffic and time of each arm in each cell, as means over its runs."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in done:
        groups.setdefault((record.cell, record.arm), []).append(record)
    return [
        {
            "cell": cell,
            "arm": arm,
            "steps": max(run.steps for run in runs),
            "up": fmean(run.curve["up"][-1] for run in runs) / 2**20,
            "down": fmean(run.curve["down"][-1] for run in runs) / 2**20,
            "seconds": fmean(run.seconds for run in runs),
        }
        for (cell, arm), runs in groups.items()
    ]


def _provenance(done: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """List the versions and machines that made the runs, with all occurring values."""
    entries = []
    for key, heading in _PROVENANCE.items():
        values = list(dict.fromkeys(str(run.made[key]) for run in done if run.made.get(key) is not None))
        entries.append((heading, "; ".join(values) or "not recorded"))
    dates = sorted(str(run.made["date"]) for run in done if run.made.get("date"))
    return [*entries, ("start of the runs", f"{dates[0]} to {dates[-1]}" if dates else "not recorded")]


def _departures(names: set[str]) -> list[tuple[str, str, str]]:
    """Return each method with its paper and its module's docstring, which lists departures from the paper."""
    departures = []
    for name in sorted(names):
        method = METHODS.get(name)
        if method is not None:
            text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
            departures.append((name, method.paper, text))
    return departures


def _safe(drawing: str) -> Markup:
    """Mark a drawing as safe HTML, since its texts are already escaped."""
    return Markup(drawing)
