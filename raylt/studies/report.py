"""The report of a study: one HTML file with everything in it, that needs no server, no network and no script."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from raylt import store
from raylt.errors import CheckpointError, ConfigError
from raylt.methods import METHODS
from raylt.studies import client_drawings, drawings
from raylt.studies.comparison import Comparison
from raylt.studies.drawings import Curve, Detail, Estimate
from raylt.studies.measures import measure_of, value_of
from raylt.studies.records import GROUPS, Record
from raylt.studies.study import Study
from raylt.studies.tables import (
    HEADINGS,
    claim_text,
    family,
    interval,
    margin,
    printed_text,
    probability,
    scale,
    shown,
    unit,
)
from raylt.studies.verdicts import verdicts


def write_report(study: Study, path: Path, mix_versions: bool = False) -> Path:
    """Writes the report of what is finished; what is not is named.

    Args:
        mix_versions: whether runs of several versions of the code may stand beside each other.

    Raises:
        ConfigError: no run is finished, or the file cannot be written.
    """
    text = render(study, mix_versions)
    try:
        store.write(path, text)
    except CheckpointError as error:
        raise ConfigError(f"{error}; give a file that can be written with --to") from None
    return path


def render(study: Study, mix_versions: bool = False) -> str:
    """The page."""
    done = [record for record in study.records if record.state == "done"]
    if not done:
        raise ConfigError(f"{study.definition.name}: no run is finished; raylt study runs them")
    comparison = study.compare(mix_versions=mix_versions)
    arms = list(dict.fromkeys(record.arm for record in study.records))
    place = {arm: number for number, arm in enumerate(arms)}
    show = shown(comparison.measure)
    cells = list(dict.fromkeys(record.cell for record in done))
    detail = Detail.of(len(cells), len({(record.arm, record.cell) for record in done}))
    content = {
        "study": study.definition, "what": measure_of(comparison.measure).what, "unit": unit(comparison.measure),
        "at": HEADINGS[comparison.at], "level": f"{100 * comparison.level:g}", "reference": comparison.reference,
        "arms": [(arm, drawings.looks(place[arm])) for arm in arms], "counts": _counts(study.records),
        "rows": [(row, margin(row.mean, show), "" if row.sd is None else show(row.sd),
                  "" if row.difference is None else margin(row.difference.difference, show, sign=True),
                  "" if row.optimism is None else show(row.optimism)) for row in comparison.rows],
        "optimism": any(row.optimism is not None for row in comparison.rows),
        "family": family(comparison),
        "claims": [(claim_text(each, comparison.at), each, probability(each.p),
                    margin(each.difference.difference, shown(each.claim.measure), sign=True), printed_text(each))
                   for each in comparison.claims],
        "printed": any(each.claim.printed is not None for each in comparison.claims),
        "overall": [(each.arm, interval(each.iqm, show), "" if each.improvement is None else
                     interval(each.improvement, lambda value: f"{value:.2f}")) for each in comparison.overall],
        "left_out": comparison.left_out, "apart": comparison.apart, "tuned": comparison.tuned,
        "cells": [_cell(study, comparison, cell, place, detail) for cell in cells],
        "verdicts": _verdicts(study, done, mix_versions), "costs": _costs(done), "runs": done, "made": _made(done),
        "departures": _departures({record.config["method"]["name"] for record in done}),
    }
    loader = jinja2.PackageLoader("raylt.studies", ".")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True,
                              undefined=jinja2.StrictUndefined).get_template("report.html.j2").render(**content)


def _cell(study: Study, comparison: Comparison, cell: str, place: dict[str, int], detail: Detail) -> dict[str, Any]:
    """The drawings of a cell."""
    done = [record for record in study.records if record.state == "done" and record.cell == cell]
    by_arm = {arm: [r for r in done if r.arm == arm] for arm in place if any(r.arm == arm for r in done)}
    rows = [row for row in comparison.rows if row.cell == cell]
    lines = {key: [line for arm, runs in by_arm.items() if (line := _curve(arm, place[arm], runs, key)) is not None]
             for key in ("accuracy", *GROUPS)}
    highest = max((max(line.high) for each in lines.values() for line in each), default=1.0)
    names = {"accuracy": "accuracy", **{group: f"{group}-shot classes" for group in GROUPS}}
    panels = [(f"{names[key]}, %", _safe(drawings.curves(each, f"{names[key]} by round, {cell}", highest, detail)))
              for key, each in lines.items() if any(len(line.rounds) > 1 for line in each)]
    grouped = [(arm, place[arm], *_grouped(runs)) for arm, runs in by_arm.items()]
    held = study.holdings.get(cell)
    clients = [(arm, place[arm], values) for arm, runs in by_arm.items() if (values := _clients(runs))]
    return {
        "name": cell, "panels": panels,
        "estimates": _safe(drawings.estimates(
            [Estimate(row.arm, place[row.arm], row.mean.estimate, row.mean.low, row.mean.high, [*row.values.values()])
             for row in rows], f"{comparison.measure} of every seed, {cell}", unit(comparison.measure),
            scale(comparison.measure))),
        "bars": _safe(drawings.bars(GROUPS, grouped, f"accuracy by group, {cell}")),
        "clients": _safe(client_drawings.strips(clients, f"accuracy of every client on its own class mix, {cell}",
                                                detail))
        if clients else "",
        "holdings": _safe(client_drawings.holdings(held["counts"], held["names"], f"who holds what, {cell}", detail))
        if held else "",
        "groups": ", ".join(f"{sum(g == group for g in held['groups'])} {group}" for group in GROUPS) if held else "",
    }


def _curve(arm: str, colour: int, runs: Sequence[Record], key: str) -> Curve | None:
    """The mean over the seeds in the rounds that were judged in all of them."""
    columns = [dict(zip(run.curve["step"], run.curve[key], strict=True)) for run in runs]
    # off a record they come as JSON's only kind of number
    steps = [int(step) for step in columns[0] if all(column.get(step) is not None for column in columns)]
    if not steps:
        return None
    values = [[float(column[step]) for column in columns] for step in steps]
    return Curve(arm, colour, steps, [fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values],
                 steps[-1] > runs[0].planned_steps)


def _grouped(runs: Sequence[Record]) -> tuple[list[float | None], list[list[float]]]:
    seeds = [[value for run in runs if (value := value_of(run, group, "last")) is not None] for group in GROUPS]
    return [fmean(values) if values else None for values in seeds], seeds


def _clients(runs: Sequence[Record]) -> list[float]:
    """Every judged client of the first seed, the lowest first."""
    values = min(runs, key=lambda run: run.seed).by_client.get("matched", [])
    return sorted(value for value in values if value is not None)


def _counts(records: Sequence[Record]) -> str:
    states = [record.state for record in records]
    return f"{len(states)} runs: " + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _verdicts(study: Study, done: Sequence[Record], mix_versions: bool) -> list[tuple[Any, str, str, str]]:
    if study.definition.paper is None:
        return []
    return [(v, f"{100 * v.cell.value:.2f}", "" if v.ours is None else margin(v.ours, lambda x: f"{100 * x:.2f}"),
             "" if v.difference is None else margin(v.difference.difference, lambda x: f"{100 * x:.2f}", sign=True))
            for v in verdicts(done, mix_versions=mix_versions) if v.ours is not None]


def _costs(done: Sequence[Record]) -> list[dict[str, Any]]:
    """Traffic and time of each arm in each cell, means over its runs."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in done:
        groups.setdefault((record.cell, record.arm), []).append(record)
    return [{"cell": cell, "arm": arm, "steps": max(run.steps for run in runs),
             "up": fmean(run.curve["up"][-1] for run in runs) / 2**20,
             "down": fmean(run.curve["down"][-1] for run in runs) / 2**20,
             "seconds": fmean(run.seconds for run in runs)} for (cell, arm), runs in groups.items()]


def _made(done: Sequence[Record]) -> list[tuple[str, str]]:
    """Versions and machines, each with all that occur."""
    facts = []
    for key, what in (("raylt", "raylt"), ("commit", "commit"), ("code", "SHA-256 of the code"), ("torch", "torch"),
                      ("ray", "Ray"), ("python", "Python"), ("system", "system"), ("cpu", "processor"),
                      ("device", "device"), ("fleet", "fleet")):
        values = list(dict.fromkeys(str(run.made[key]) for run in done if run.made.get(key) is not None))
        facts.append((what, "; ".join(values) or "not recorded"))
    dates = sorted(str(run.made["date"]) for run in done if run.made.get("date"))
    return [*facts, ("runs begun", f"{dates[0]} to {dates[-1]}" if dates else "not recorded")]


def _departures(names: set[str]) -> list[tuple[str, str, str]]:
    """Of each method its paper and what its file says of itself, departures from the paper among it."""
    found = []
    for name in sorted(names):
        method = METHODS.get(name)
        if method is not None:
            found.append((name, method.paper, inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")))
    return found


def _safe(svg: str) -> Markup:
    """A drawing, in which every text was escaped."""
    return Markup(svg)
