"""Which finished runs may stand beside each other: those of one split, budget, optimiser, evaluation and code."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raylt.config import completed
from raylt.errors import CheckpointError
from raylt.studies.records import Record

_PASSES = ("epochs", "batch")       # of the local section: they are the budget, the rest is the optimiser


def check_comparable(done: Sequence[Record], own: Mapping[str, Collection[str]], mix_versions: bool = False) -> None:
    """Raises a CheckpointError where finished runs of one cell cannot stand beside each other; names both and why.

    Args:
        own: see `compare`; an arm with settings of its own under `data` has a split of its own, one with such under
            `federation` or of the passes over the data a budget, one with others under `local` an optimiser, one with
            such under `evaluation` is judged at other rounds.
        mix_versions: whether the code may differ.
    """
    first: dict[tuple[str, str], Record] = {}
    decided = {arm: {_fact_of(key) for key in settings} for arm, settings in own.items()}
    for record in done:
        codes = record.made.get("codes", ["unknown"])
        if len(codes) > 1 and not mix_versions:
            raise CheckpointError(f"{record.folder}: was made by {len(codes)} versions of the code; run it again, or "
                                  "--mix-versions compares it all the same")
        for what, fact in facts_of(record).items():
            if what in decided.get(record.arm, ()) or (what == "code" and mix_versions):
                continue
            where = {"split": f"{record.cell}\0{record.seed}", "code": ""}.get(what, record.cell)
            other = first.setdefault((what, where), record)
            theirs = facts_of(other)[what]
            if theirs != fact:
                raise CheckpointError(f"{record.folder} and {other.folder} cannot be compared: {what} differs "
                                      f"({_without(fact, theirs)}; {_without(theirs, fact)}); compare runs of one "
                                      "study, or run one of them again"
                                      f"{'; --mix-versions compares them all the same' if what == 'code' else ''}")


def versions_of(done: Sequence[Record]) -> list[str]:
    """How many runs each version of the code made, where there are several."""
    made = Counter(" and ".join(code[:12] for code in record.made.get("codes", ["unknown"])) for record in done)
    return [f"{code}: {runs} runs" for code, runs in made.items()] if len(made) > 1 else []


def facts_of(record: Record) -> dict[str, str]:
    """What must be equal in runs that are compared."""
    assert record.summary is not None
    return {"split": record.summary["split_sha256"][:12], "budget": _budget(record.config),
            "optimiser": _optimiser(record.config), "evaluation": _judging(record.config),
            "code": record.made.get("codes", ["unknown"])[0][:12]}


def _fact_of(key: str) -> str:
    """The fact that a setting decides; empty where it decides none."""
    section, _, name = key.partition(".")
    if section == "local":
        return "budget" if name in _PASSES else "optimiser"
    return {"data": "split", "federation": "budget", "evaluation": "evaluation"}.get(section, "")


def _without(fact: str, theirs: str) -> str:
    """What a fact says that another does not."""
    return ", ".join(part for part in fact.split(", ") if part not in theirs.split(", "))


def _budget(config: dict[str, Any]) -> str:
    federation, local = config["federation"], config["local"]
    return (f"{federation['rounds']} rounds, {federation['participation']:g} of the clients, {local['epochs']} epochs "
            f"in batches of {local['batch']}")


def _optimiser(config: dict[str, Any]) -> str:
    """How clients train; a setting that an older record lacks has its default."""
    local = completed(config)["local"]
    return ", ".join(f"local.{name} {local[name]}" for name in sorted(local) if name not in _PASSES)


def _judging(config: dict[str, Any]) -> str:
    return f"every {config['evaluation']['every']} rounds, personal models {config['evaluation']['personal'] or 'last'}"
