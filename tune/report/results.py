"""Writes the results of a search: best.yaml, tables of its trials, and a plot."""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from raylt.config import yaml_text
from raylt.errors import CheckpointError, count_of
from raylt.formatting import in_percent, percent
from raylt.own_code.commands import own_command
from raylt.runs.folder.reader import Files
from raylt.store import Folder
from raylt.studies.report.text_table import TextTable
from raylt.typed_json import as_json
from tune.plan import SearchPlan, SearchState, front_of
from tune.records import TrialRecord
from tune.report.drawing import draw, draw_pareto, value_text
from tune.report.importance import importance

SEAL = "seal.json"  # Hashes of the other files that `write` writes.
RESULTS = (
    "trials.csv",
    "trials.json",
    "best.yaml",
    "importance.json",
    "search.png",
    "pareto.png",
)  # Files with hashes.
_HASHES = TypeAdapter(dict[str, str])
_IMPORTANCE = TypeAdapter(dict[str, dict[str, float]])


def write(folder: Path, plan: SearchPlan, state: SearchState) -> None:
    """Write the results of a search into its folder.

    best.yaml and the plots are written only if a trial has finished, pareto.png only for several metrics.
    """
    front = front_of(plan, state.trials)
    rows = [row(record) for record in state.trials]
    if plan.other_metrics:
        rows = [{**cells, "front": record in front} for cells, record in zip(rows, state.trials, strict=True)]
    trials = []
    for cells, record in zip(rows, state.trials, strict=True):
        trials.append({**cells, "points": [score.to_json() for score in record.counted_scores]})
    files: dict[str, str | bytes] = {
        "trials.csv": csv_table(rows),
        "trials.json": json.dumps(trials, indent=1) + "\n",
    }
    best = state.best()
    shares = {method: importance(plan, state, method) for method in plan.methods}
    if best is not None:
        files["best.yaml"] = best_yaml(folder, plan, best)
        files["importance.json"] = json.dumps(shares, indent=1) + "\n"
        files["search.png"] = draw(plan, state, shares)
        if plan.other_metrics:
            files["pareto.png"] = _draw_front(plan, state)
    with Folder.open(folder) as search_folder:
        for name, content in files.items():
            search_folder.write(name, content)
        search_folder.write(SEAL, json.dumps({name: _sha256(content) for name, content in files.items()}) + "\n")


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a CSV table of trials, with a column for each key.

    A text that spreadsheets would evaluate as a formula is prefixed with an apostrophe.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({key: f"'{value}" if _is_formula(value) else value for key, value in row.items()})
    return text.getvalue()


def _is_formula(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))


def _draw_front(plan: SearchPlan, state: SearchState) -> bytes:
    done = [record for record in state.trials if record.outcome is not None and record.outcome.state == "done"]
    return draw_pareto([record.figures for record in done], plan.metrics, [record.id for record in done])


def check_results(search_folder: Folder) -> str:
    """Check the results of a search against the hashes that `write` stored; return the names of the checked files.

    Raises:
        CheckpointError: A file is missing or was changed, or the hashes cannot be read.
    """
    seal = search_folder.path / SEAL
    content = search_folder.read(SEAL)
    try:
        hashes = as_json(content, _HASHES, SEAL)
    except CheckpointError as error:
        raise _changed_seal(seal, "cannot be read") from error
    present = set(search_folder.names()) & set(RESULTS)
    if unknown := hashes.keys() - set(RESULTS):
        raise _changed_seal(seal, f"lists a file that no search writes ({min(unknown)})")
    if unbound := present - hashes.keys():
        raise _changed_seal(seal, f"has no hash of a file ({min(unbound)})")
    for name, expected in hashes.items():
        if _sha256(search_folder.read(name)) != expected:
            raise CheckpointError(
                f"{search_folder.path / name}: the file was changed. Restore the original files.",
                code="search.changed",
                path=str(search_folder.path / name),
            )
    return ", ".join(hashes)


def _changed_seal(seal: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{seal}: {problem}. Restore the original files.", code="search.changed", path=str(seal))


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def row(record: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat mapping with its values, outcome and metrics."""
    outcome = record.outcome
    deciding = record.deciding_score
    return {
        "trial": record.id,
        "method": record.method,
        "state": outcome.state if outcome else "open",
        "score": outcome.score if outcome else None,
        "round": outcome.step if outcome else None,
        "client_steps": record.spent,
        **record.values,
        **{f"validation_{key}": value for key, value in (deciding.validation if deciding else {}).items()},
        **{f"test_{key}": value for key, value in (deciding.test if deciding else {}).items()},
        "failed": record.failed,
    }


def best_yaml(folder: Path, plan: SearchPlan, best: TrialRecord) -> str:
    """Return the best configuration as YAML, with the expected results of `raylt run best.yaml` as a comment."""
    deciding = best.deciding_score
    summary = Files(folder / "trials" / best.id).summary()
    assert deciding is not None
    share = best.config.data.validation
    seed = best.config.data.seed
    head = [
        run_command(folder),
        f"reproduces trial {best.id}: test accuracy {percent(summary['accuracy']['last'])}, model sha256 "
        f"{summary['model_sha256'][:16]}.",
        f"It was chosen for {plan.metric} {percent(deciding.value)} on {share:g} of the training samples, which this",
        "configuration keeps for validation too; train on all samples with data.validation=0.",
    ]
    if plan.splits > 1:
        head.append(f"This is the worst of {plan.splits} splits, with data.seed={seed + deciding.split}.")
    if plan.other_metrics:
        others = ", ".join(f"{name} {percent(deciding.validation[name])}" for name in plan.other_metrics)
        head.append(f"By the search's other metrics: {others}.")
    body = yaml_text.write(best.config.model_dump(mode="json"))
    return "".join(f"# {line}\n" for line in head) + body


def run_command(folder: Path) -> str:
    """Return the command that runs the best configuration of a search, with this process's plugins."""
    return own_command("run", folder / "best.yaml")


def table_of(plan: SearchPlan, state: SearchState, most: int = 20) -> TextTable:
    """Return a table of the trials, best trial first, with accuracies in percent.

    For several metrics, the state of finished trials on the Pareto front is "front".

    Args:
        plan: Settings of the search.
        state: The trials.
        most: Maximum number of rows.
    """
    keys = list(dict.fromkeys(key for space in plan.spaces.values() for key in space))
    short = [key.rpartition(".")[2] for key in keys]
    heads = [key if short.count(name) > 1 else name for key, name in zip(keys, short, strict=True)]
    front = front_of(plan, state.trials) if plan.other_metrics else []
    title = (
        f"{count_of(len(state.trials), 'trial')}, best first; percent: {', '.join(plan.metrics)} on validation "
        "samples, accuracy on the test set"
    )
    if plan.splits > 1:
        title += f"; finished trials: the worst of {plan.splits} splits"
    if plan.other_metrics:
        title += "; front: done and on the Pareto front"
    cost = () if plan.other_metrics else (plan.unit,)  # with several metrics, a row would be too wide
    head = ["trial", "state", "round", *plan.metrics, "test", *cost, *heads]
    order = {"done": 0, "stopped": 1, "failed": 2, "open": 3}
    rows = sorted(
        ((row(r), r) for r in state.trials),
        key=lambda pair: (order[pair[0]["state"]], -(pair[0]["round"] or 0), -(pair[0]["score"] or 0)),
    )
    texts = [
        [
            cells["trial"],
            "front" if record in front else cells["state"],
            str(cells["round"] or "-"),
            in_percent(cells["score"]),
            *(in_percent(record.figures.get(name)) for name in plan.other_metrics),
            in_percent(cells.get("test_accuracy")),
            *(f"{cells['client_steps']:,}" for _ in cost),
            *(value_text(cells.get(key)) for key in keys),
        ]
        for cells, record in rows[:most]
    ]
    hidden = [f"{len(rows) - most} more, in trials.csv"] if len(rows) > most else []
    columns = "l" + "r" * (len(head) - 1)
    return TextTable(title, head, texts, columns, grouped=False, naming=1, notes={"trials not shown": hidden})


def front_lines(folder: Path, plan: SearchPlan, state: SearchState) -> list[str]:
    """Return a line with the trials of the Pareto front and a command to run one; none for a search with one metric."""
    if not plan.other_metrics:
        return []
    names = ", ".join(record.id for record in front_of(plan, state.trials))
    command = own_command("run", folder / "trials/TRIAL/config.yaml")
    return [f"Pareto front by {', '.join(plan.metrics)}: {names}; to run one: {command}"]


def importance_lines(folder: Path) -> list[str]:
    """Return a line per method with the importance of each setting, its share of the scores' variance."""
    with Folder.open(folder) as search_folder:
        shares = search_folder.read_json("importance.json", _IMPORTANCE)
    return [
        f"importance for {method}: " + ", ".join(f"{key} {100 * share:.0f} %" for key, share in by_setting.items())
        for method, by_setting in shares.items()
        if by_setting
    ]
