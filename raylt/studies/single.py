"""Run folders that no study made, side by side as if one had."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raylt.config import Config, differences, settled
from raylt.errors import CheckpointError
from raylt.studies.definition import Definition
from raylt.studies.records import Record, read_run
from raylt.studies.settings import flat, label
from raylt.studies.study import Study


def of_runs(folders: Sequence[Path]) -> Study:
    """Single runs side by side: arms differ in method or model, cells in the data, seeds in both seeds."""
    records = [read_run(folder) for folder in folders]
    for record in records:
        if record.state == "damaged":
            raise CheckpointError(f"{record.problem}; raylt verify {record.folder} says what is whole")
        if not record.config:
            raise CheckpointError(f"{record.folder}: not a run folder that can be read "
                                  f"({record.problem or 'it has no config.yaml'})")
    trees = [flat(record.config) for record in records]
    arms = _arms(trees)
    cells = _labels([{k: v for k, v in tree.items() if k.startswith("data.") and k not in (
        "data.seed", "data.root", "data.download", "data.split")} for tree in trees])
    records = [replace(record, arm=arm, cell=cell, seed=tree["seed"])
               for record, tree, arm, cell in zip(records, trees, arms, cells, strict=True)]
    seen: dict[tuple[str, str, int], str] = {}
    for record in records:
        twin = seen.setdefault((record.arm, record.cell, record.seed), record.folder)
        if twin != record.folder:
            raise CheckpointError(_twins(record, next(each for each in records if each.folder == twin)))
    names = list(dict.fromkeys(record.arm for record in records))
    definition = Definition(name="runs", arms={name: {} for name in names},
                            seeds=sorted({record.seed for record in records}))
    return Study(definition, None, records)


def _twins(record: Record, other: Record) -> str:
    """Why two runs of one arm, cell and seed cannot both be taken."""
    apart = [f"{key} {before!r}, {after!r}" for key, before, after in differences(_settings(other), _settings(record))]
    both = f"{other.folder} and {record.folder}"
    if not apart:
        return f"{both} are runs of the same settings and seed; give one"
    return (f"{both} cannot stand beside each other, as runs of one method on one kind of data with seed {record.seed} "
            f"that differ in {'; '.join(apart)}; give one, or make them arms of a study")


def _settings(record: Record) -> dict[str, Any]:
    return settled(Config(**record.config))


def _arms(trees: list[dict[str, Any]]) -> list[str]:
    """The method of each run, with those fields that differ between the runs of that method, and the models."""
    names = [tree["method.name"] for tree in trees]
    models = _labels([{"model": tree["model"]} for tree in trees])
    labels = [""] * len(trees)
    for name in dict.fromkeys(names):
        places = [place for place, each in enumerate(names) if each == name]
        fields = [{k: v for k, v in trees[p].items() if k.startswith("method.") and k != "method.name"} for p in places]
        for place, text in zip(places, _labels(fields), strict=True):
            labels[place] = ", ".join(part for part in (name, text, models[place]) if part)
    return labels


def _labels(parts: list[dict[str, Any]]) -> list[str]:
    """What each of several mappings has that not all have alike, in words."""
    keys = [key for key in dict.fromkeys(key for part in parts for key in part)
            if len({str(part.get(key)) for part in parts}) > 1]
    return [label({key: part[key] for key in keys if key in part}) for part in parts]
