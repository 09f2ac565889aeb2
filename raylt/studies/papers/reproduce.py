"""Studies that reproduce selected cells of the papers' tables, at full or reduced scale."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raylt.errors import ConfigError, did_you_mean
from raylt.studies.cells import slug
from raylt.studies.definition import Definition, define
from raylt.studies.papers.printed_tables import PAPERS, Expectation, base_of, expectations

KEYS = ("dataset", "IF", "alpha", "beta", "K", "E", "lambda", "clusters")


def select(
    paper: str, table: str | None = None, where: Mapping[str, str] | None = None, arms: Sequence[str] | None = None
) -> list[Expectation]:
    """Return the selected cells of a paper's tables, including cells that cannot be run.

    Args:
        paper: `sfd`, `fedsm`, `mupfl` or `bpfed`.
        table: Printed number, such as 2 or III, or the full name; by default all tables.
        where: Letters and values of the cells, such as {"IF": "100", "alpha": "0.5", "dataset": "cifar10"}.
        arms: Printed labels of the rows, in any case; by default all rows.

    Raises:
        ConfigError: No cell matches. The message lists the choices.
    """
    cells = [cell for cell in expectations() if cell.paper.lower() == paper.lower()]
    if not cells:
        raise unknown_name(
            "paper", "unknown paper", paper, f"Choose from {', '.join(name.lower() for name in PAPERS)}."
        )
    if table is not None:
        tables = list(dict.fromkeys(cell.table for cell in cells))
        cells = [cell for cell in cells if table.upper() in (cell.table.upper(), *numbers_of(cell.table))]
        if not cells:
            numbers = ", ".join(numbers_of(each)[0] for each in tables)
            raise unknown_name("table", f"{paper} has no such table", table, f"Choose from {numbers}.")
    for key, value in (where or {}).items():
        values = list(dict.fromkeys(cell.setting[key] for cell in cells if key in cell.setting))
        cells = [cell for cell in cells if same_value(cell.setting.get(key), value)]
        if not cells:
            choices = f"{key} has {', '.join(values)}" if values else f"The keys are {', '.join(KEYS)}"
            raise unknown_name("--cells", "no cell matches", f"{key}={value}", f"{choices}.")
    if not arms:
        return cells
    labels = list(dict.fromkeys(cell.arm for cell in cells))
    lower = {label.lower() for label in labels}
    for arm in arms:
        if arm.lower() not in lower:
            hint = did_you_mean(arm, labels)
            raise unknown_name("--arms", "unknown row", arm, f"{hint}Choose from {', '.join(labels)}.")
    return [cell for cell in cells if cell.arm.lower() in {arm.lower() for arm in arms}]


def numbers_of(table: str) -> list[str]:
    """Return the printed numbers in the name of a table: III of "III (IoT-J)", 4.3.3 of "text of 4.3.3"."""
    return re.findall(r"(?<!\S)(?:[IVX]+|\d[\d.]*)(?!\S)", table.upper())


def plan(cells: Sequence[Expectation], name: str, seeds: int, scale: float) -> Definition:
    """Return a study that reproduces the given cells of a paper's tables.

    Cells that cannot be run are left out. The bases of ablations are added, since ablations are judged by the
    difference to their base.

    Args:
        cells: Printed cells.
        name: Name of the study.
        seeds: Number of runs of each arm in each cell.
        scale: Share of the paper's rounds to run, at least one round.

    Raises:
        ConfigError: None of the cells can be run.
    """
    runnable = [cell for cell in cells if cell.problem is None]
    if not runnable:
        reasons = list(dict.fromkeys(cell.problem for cell in cells if cell.problem))
        raise ConfigError(
            f"paper: none of the cells can be run ({len(cells)} cells: {'; '.join(reasons)}). Select other cells.",
            code="study.not-runnable",
            cells=len(cells),
            reasons=reasons,
        )
    bases = [base for each in runnable if each.ablation and (base := base_of(each)) is not None]
    arms: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    only: dict[str, list[str]] = {}
    identities: dict[str, set[str]] = {}
    for each in [*runnable, *bases]:
        cell = _cell_name(each)
        if each.identity() in identities.setdefault(cell, set()):
            continue  # several printed cells can have the same run
        identities[cell].add(each.identity())
        arm = _arm_name(each, arms)
        arms[arm] = each.changes
        rounds = each.config().federation.rounds
        settings[cell] = {"recipe": each.recipe, "federation.rounds": max(1, round(rounds * scale))}
        only.setdefault(cell, []).append(arm)
    first = runnable[0]
    reference = "FedAvg" if all("FedAvg" in names for names in only.values()) else None
    return define(
        {
            "name": name,
            "about": f"{PAPERS[first.paper]}: {len(runnable)} printed cells, {scale:g} of the rounds",
            "arms": arms,
            "cells": settings,
            "only": only,
            "seeds": seeds,
            "measure": first.measure,
            "at": first.at,
            "reference": reference,
            "paper": first.paper,
            "scale": scale,
        }
    )


def name_of(paper: str, part: str, where: Mapping[str, str], scale: float) -> str:
    """Return the default name of a study that reproduces cells of a paper.

    Args:
        paper: Name of the paper.
        part: Part of the paper, such as "table2" or "fig6"; "" for all tables.
        where: Letters and values of the selected cells.
        scale: Share of the paper's rounds.
    """
    parts = [
        paper.lower(),
        part,
        *(f"{key}{value}" for key, value in where.items()),
        "" if scale == 1 else f"scale{scale:g}",
    ]
    return slug("-".join(part for part in parts if part))


def command(cell: Expectation) -> str:
    """Return the shell command that reproduces a cell of a paper's table, or "" if the cell cannot be run."""
    if cell.problem is not None:
        return ""
    method = cell.changes.get("method", {})
    words = [f"method={method['name']}"] if "name" in method else []
    words += [f"method.{key}={_word(value)}" for key, value in method.items() if key != "name"]
    words += [f"{key}={_word(value)}" for key, value in cell.changes.items() if key != "method"]
    return " ".join([f"raylt run recipe:{cell.recipe}", *words])


def unknown_name(key: str, problem: str, value: str, remedy: str) -> ConfigError:
    """Return the error for an unknown value of a command's option or argument.

    Args:
        key: Name of the option or argument.
        problem: Description of the problem.
        value: The unknown value.
        remedy: Sentence about valid values.
    """
    return ConfigError(f"{key}: {problem} ({value}). {remedy}", code="config.unknown-name", key=key, name=value)


def _cell_name(each: Expectation) -> str:
    return ", ".join(part for part in each.cell.split(", ") if not part.startswith(("lambda", "clusters", "E ")))


def _arm_name(each: Expectation, arms: Mapping[str, dict[str, Any]]) -> str:
    """Return the name of the arm that reproduces a cell of a paper's table.

    The name includes the data set if another cell has the same label but other settings.
    """
    name = each.arm.replace("[", "(").replace("]", ")")
    return name if arms.get(name, each.changes) == each.changes else f"{name} ({each.setting['dataset']})"


def same_value(value: str | None, wanted: str) -> bool:
    """Return whether two texts are the same number or the same word."""
    try:
        return value is not None and float(value) == float(wanted)
    except ValueError:
        return value == wanted


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
