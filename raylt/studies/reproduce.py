"""Studies made from printed tables: the cells that are asked for, at full or reduced scale."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from raylt.errors import ConfigError
from raylt.studies.definition import Definition, define
from raylt.studies.expectations import PAPERS, Expectation, expectations
from raylt.studies.settings import slug


def select(paper: str, table: str | None = None, where: Mapping[str, str] | None = None,
           arms: Sequence[str] | None = None) -> list[Expectation]:
    """The printed cells that are asked for, those that cannot be run included.

    Args:
        paper: sfd, fedsm, mupfl or bpfed.
        table: as in print: 2, or III; all where it is None.
        where: letters and values, as in {"IF": "100", "alpha": "0.5", "dataset": "cifar10"}.
        arms: labels in print, upper or lower case.

    Raises:
        ConfigError: nothing is like that; names what there is.
    """
    cells = [e for e in expectations() if e.paper.lower() == paper.lower()]
    if not cells:
        raise ConfigError(f"{paper}: no such paper; there are: {', '.join(name.lower() for name in PAPERS)}")
    if table is not None:
        known = list(dict.fromkeys(e.table for e in cells))
        cells = [e for e in cells if table.upper() in e.table.upper().replace("=", " ").split()]
        if not cells:
            raise ConfigError(f"{paper} has no table {table}; there are: {', '.join(known)}")
    for key, value in (where or {}).items():
        known = list(dict.fromkeys(e.setting[key] for e in cells if key in e.setting))
        cells = [e for e in cells if _same(e.setting.get(key), value)]
        if not cells:
            raise ConfigError(f"--cells {key}={value}: no cell is like that; "
                              + (f"{key} has {', '.join(known)}" if known else
                                 "keys are dataset, IF, alpha, beta, K, E, lambda and clusters"))
    if arms:
        labels = list(dict.fromkeys(e.arm for e in cells))
        lower = {label.lower() for label in labels}
        for arm in arms:
            if arm.lower() not in lower:
                near = difflib.get_close_matches(arm, labels, 1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise ConfigError(f"--arms {arm}: no such row{hint} There are: {', '.join(labels)}")
        cells = [e for e in cells if e.arm.lower() in {arm.lower() for arm in arms}]
    return cells


def plan(cells: Sequence[Expectation], name: str, seeds: int, scale: float) -> Definition:
    """A study of the cells that can be run.

    Args:
        scale: share of the paper's rounds; at least one is run.

    Raises:
        ConfigError: none of them can be run.
    """
    runnable = [e for e in cells if e.problem is None]
    if not runnable:
        reasons = "; ".join(dict.fromkeys(e.problem for e in cells if e.problem))
        raise ConfigError(f"none of the {len(cells)} cells can be run: {reasons}")
    arms: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    only: dict[str, list[str]] = {}
    seen: dict[str, set[str]] = {}
    for each in runnable:
        cell = _cell_name(each)
        if each.identity() in seen.setdefault(cell, set()):          # the same run in two tables, or two figures of it
            continue
        seen[cell].add(each.identity())
        arm = _arm_name(each, arms)
        arms[arm] = each.changes
        rounds = each.config().federation.rounds
        settings[cell] = {"recipe": each.recipe, "federation.rounds": max(1, round(rounds * scale))}
        only.setdefault(cell, []).append(arm)
    first = runnable[0]
    reference = "FedAvg" if all("FedAvg" in names for names in only.values()) else None
    return define({"name": name, "about": f"{PAPERS[first.paper]}: {len(runnable)} printed cells, {scale:g} of the "
                   "rounds", "arms": arms, "cells": settings, "only": only, "seeds": seeds, "measure": first.measure,
                   "at": first.at, "reference": reference, "paper": first.paper, "scale": scale})


def name_of(paper: str, table: str | None, where: Mapping[str, str], scale: float) -> str:
    """What a study of these cells is called when it is not said."""
    parts = [paper.lower(), f"table{table}" if table else "", *(f"{key}{value}" for key, value in where.items()),
             "" if scale == 1 else f"scale{scale:g}"]
    return slug("-".join(part for part in parts if part))


def command(cell: Expectation) -> str:
    """What runs the cell by hand."""
    if cell.problem is not None:
        return ""
    words = [f"method={cell.changes['method']['name']}"] if "name" in cell.changes.get("method", {}) else []
    words += [f"method.{key}={_word(value)}" for key, value in cell.changes.get("method", {}).items() if key != "name"]
    words += [f"{key}={_word(value)}" for key, value in cell.changes.items() if key != "method"]
    return " ".join([f"raylt run recipe:{cell.recipe}", *words])


def _cell_name(each: Expectation) -> str:
    return ", ".join(part for part in each.cell.split(", ") if not part.startswith(("lambda", "clusters", "E ")))


def _arm_name(each: Expectation, arms: Mapping[str, dict[str, Any]]) -> str:
    """The row's label; where another cell uses it for other settings, with the data set."""
    name = each.arm.replace("[", "(").replace("]", ")")
    return name if arms.get(name, each.changes) == each.changes else f"{name} ({each.setting['dataset']})"


def _same(have: str | None, wanted: str) -> bool:
    try:
        return have is not None and float(have) == float(wanted)
    except ValueError:
        return have == wanted


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
