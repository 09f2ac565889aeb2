"""Cells of a study, and the folders of its runs.

`raylt ls` reads them without a `Definition`, so this module must not import torch.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raylt.errors import ConfigError

MAX_CELLS = 10_000
Cells = dict[str, list[Any]] | list[dict[str, Any]] | dict[str, dict[str, Any]]  # as a study's file has them

# Word for a setting in a cell's label: the papers' letter, or nothing if the value speaks for itself.
_LETTERS = {
    "data.imbalance": "IF",
    "data.alpha": "alpha",
    "data.clients": "K",
    "data.beta": "beta",
    "federation.rounds": "R",
    "federation.participation": "r",
    "data.source": "",
    "data.partition": "",
    "model": "",
}


def cells_by_label(cells: Cells) -> dict[str, dict[str, Any]]:
    """Return the settings of each cell by its label, in the file's order.

    A study without `cells` has one cell, labelled "".

    Args:
        cells: A product, a list of mappings, or mappings by name.

    Raises:
        ConfigError: Two cells would have the same label, or there are too many cells.
    """
    if isinstance(cells, list):
        return _labelled(cells or [{}])
    named = {name: settings for name, settings in cells.items() if isinstance(settings, dict)}
    if named:
        return named
    lists = {key: values for key, values in cells.items() if isinstance(values, list)}
    count = math.prod(map(len, lists.values()))
    if count > MAX_CELLS:
        raise ConfigError(
            f"study.cells: the lists make {count:,} cells. Give lists of at most {MAX_CELLS:,} combinations.",
            code="config.out-of-range",
            key="study.cells",
            value=count,
        )
    return _labelled([dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())])


def label(settings: Mapping[str, Any]) -> str:
    """Return the displayed name of a cell with these settings, such as "IF 100, alpha 0.5"."""
    words = []
    for key, value in settings.items():
        letter = _LETTERS.get(key, key.rpartition(".")[2])
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(f"{letter} {text}".strip())
    return ", ".join(words)


def slug(text: str) -> str:
    """Convert a name to a folder name: "IF 100, alpha 0.5" becomes "if100_alpha0.5"."""
    joined = re.sub(r"([A-Za-z]) (?=[\d.])", r"\1", text.lower()).replace(", ", "_")
    return re.sub(r"[^\w.+=-]+", "-", joined).strip("-")


def folder_of(cell: str, arm: str, seed: int) -> str:
    """Return the folder of a run, relative to the study's folder."""
    return "/".join(part for part in (slug(cell), slug(arm), f"seed-{seed}") if part)


def _labelled(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    named: dict[str, dict[str, Any]] = {}
    for cell in cells:
        name = label(cell)
        if name in named:
            raise ConfigError(
                f"study.cells: {named[name]} and {cell} would have the same name ({name!r}). Name each cell, as in "
                "cells: {NAME: {SETTING: VALUE}}, or leave one out.",
                code="study.duplicate-name",
                key="study.cells",
                name=name,
            )
        named[name] = cell
    return named
