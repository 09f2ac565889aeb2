"""Studies that reproduce figures of the papers. Figures have no printed values, so there are no verdicts.

MuPFL's Fig. 6(b-d) shows the accuracy of clients' models by round on three data sets, and Fig. 8 the time and the
rounds until it reaches 90, 70 and 35 %. One study covers both figures. FedSM's Fig. 6 varies the number of active
clients. The text does not give the numbers on its axis, so raylt uses its own grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raylt.config import Config, check
from raylt.errors import did_you_mean
from raylt.studies.analysis.measures import At
from raylt.studies.definition import Definition, define
from raylt.studies.papers.reproduce import same_value, unknown_name
from raylt.studies.settings import read_recipe

CLIENTS = 20  # number of clients in FedSM's recipes


@dataclass(frozen=True)
class Figure:
    """A figure of a paper as arms over recipes.

    Attributes:
        number: Printed number; the first one if the study covers two figures.
        title: Description of the study.
        arms: Settings of each arm, by label.
        recipes: Recipe of each cell, by label, such as "cifar10, IF 10, alpha 1.0".
        base: Settings of all runs, which override those of the recipe.
        measure: Measure to compare.
        at: Rounds whose values are compared.
        targets: Value of the measure, by cell, for which the rounds to reach it are counted.
    """

    number: str
    title: str
    arms: dict[str, dict[str, Any]]
    recipes: dict[str, str]
    base: dict[str, Any] = field(default_factory=dict)
    measure: str = "accuracy"
    at: At = "last"
    targets: dict[str, float] = field(default_factory=dict)


ACTIVE_CLIENTS = Figure(
    "6",
    "Fig. 6 of FedSM: accuracy by the number of active clients",
    {f"{active} active": {"federation.participation": active / CLIENTS} for active in (4, 8, 12, 16, 20)},
    {
        f"{source}, IF {ratio}, alpha 0.5": f"fedsm/{source}_if{ratio}_alpha0.5_k20"
        for source in ("cifar10", "cifar100")
        for ratio in (100, 50, 10)
    },
    at="best",  # as in the paper's tables
)
CONVERGENCE = Figure(
    "6",
    "Fig. 6(b-d) and 8 of MuPFL: accuracy of clients' models by round, rounds and seconds until a target",
    {
        "MuPFL": {},
        "FedAvg": {"method": "fedavg"},
        "FedProx": {"method": {"name": "fedprox", "mu": 0.01}},
        "FedNova": {"method": "fednova"},
        "Ditto": {"method": "ditto"},
        "FedRep": {"method": "fedrep"},
        "CReFF": {"method": "creff"},
    },
    {
        "fashion_mnist, IF 10, alpha 1.0": "mupfl/fashion_mnist_if10_alpha1.0_k50",
        "cifar10, IF 10, alpha 1.0": "mupfl/cifar10_if10_alpha1.0_k50",
        "cifar100, IF 10, alpha 1.0": "mupfl/cifar100_if10_alpha1.0_k19",
    },
    {"evaluation.every": 1, "evaluation.personal": 1},
    "matched",
    targets={
        "fashion_mnist, IF 10, alpha 1.0": 0.9,
        "cifar10, IF 10, alpha 1.0": 0.7,
        "cifar100, IF 10, alpha 1.0": 0.35,
    },
)
FIGURES: dict[tuple[str, str], Figure] = {
    ("fedsm", "6"): ACTIVE_CLIENTS,
    ("mupfl", "6"): CONVERGENCE,
    ("mupfl", "8"): CONVERGENCE,
}


def figure_of(paper: str, number: str) -> Figure:
    """Return a figure of a paper.

    Args:
        paper: `fedsm` or `mupfl`.
        number: Printed number of the figure.

    Raises:
        ConfigError: The figure is unknown. The message lists the known figures.
    """
    figure = FIGURES.get((paper.lower(), number))
    if figure is None:
        names = [f"{paper} fig{number}" for paper, number in FIGURES]
        raise unknown_name("table", "unknown figure", f"{paper} fig{number}", f"Choose from {', '.join(names)}.")
    return figure


def plan_figure(
    figure: Figure,
    name: str,
    seeds: int,
    scale: float,
    where: Mapping[str, str] | None = None,
    arms: Sequence[str] | None = None,
) -> Definition:
    """Return the study that reproduces a figure.

    Args:
        figure: The figure, from `figure_of`.
        name: Name of the study.
        seeds: Number of runs of each arm in each cell.
        scale: Share of the recipe's rounds to run, at least one round.
        where: Letters and values of the cells, such as {"dataset": "cifar10", "IF": "10"}; by default all cells.
        arms: Labels of the arms, in any case; by default all arms.

    Raises:
        ConfigError: No cell or arm matches. The message lists the choices.
    """
    chosen = {cell: recipe for cell, recipe in figure.recipes.items() if _matches(cell, where or {})}
    if not chosen:
        given = ",".join(f"{key}={value}" for key, value in (where or {}).items())
        raise unknown_name("--cells", "no cell matches", given, f"The cells are {'; '.join(figure.recipes)}.")
    labels = {label.lower(): label for label in figure.arms}
    for arm in arms or ():
        if arm.lower() not in labels:
            hint = did_you_mean(arm, figure.arms)
            raise unknown_name("--arms", "unknown arm", arm, f"{hint}Choose from {', '.join(figure.arms)}.")
    wanted = [labels[arm.lower()] for arm in arms] if arms else list(figure.arms)
    return define(
        {
            "name": name,
            "about": f"{figure.title}, {scale:g} of the rounds",
            "base": figure.base,
            "arms": {label: figure.arms[label] for label in wanted},
            "cells": {
                cell: {"recipe": recipe, "federation.rounds": max(1, round(_rounds(recipe) * scale))}
                for cell, recipe in chosen.items()
            },
            "seeds": seeds,
            "measure": figure.measure,
            "at": figure.at,
        }
    )


def _rounds(recipe: str) -> int:
    config: Config = check(Config, read_recipe(recipe))
    return config.federation.rounds


def _matches(cell: str, where: Mapping[str, str]) -> bool:
    source, *words = cell.split(", ")
    values = {"dataset": source} | dict(word.split(" ") for word in words)
    return all(key in values and same_value(values[key], value) for key, value in where.items())
