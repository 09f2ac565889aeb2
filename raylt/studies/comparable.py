"""Which finished runs may stand beside each other: those of one split, budget, evaluation and code."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raylt.errors import CheckpointError
from raylt.studies.records import Record

# where the settings stand that decide what must be equal
_SECTIONS = {"split": {"data"}, "budget": {"federation", "local"}, "evaluation": {"evaluation"}}


def check_comparable(done: Sequence[Record], own: Mapping[str, Mapping[str, Any]], mix_versions: bool = False) -> None:
    """Raises a CheckpointError where finished runs of one cell cannot stand beside each other; names both and why.

    Args:
        own: see `compare`; an arm with settings of its own under `data` has a split of its own, one with such under
            `federation` or `local` a budget, one with such under `evaluation` is judged at other rounds.
        mix_versions: whether the code may differ.
    """
    first: dict[tuple[str, str], Record] = {}
    for record in done:
        assert record.summary is not None
        codes = record.made.get("codes", ["unknown"])
        if len(codes) > 1 and not mix_versions:
            raise CheckpointError(f"{record.folder}: was made by {len(codes)} versions of the code; run it again, or "
                                  "--mix-versions compares it all the same")
        facts = {("split", f"{record.cell}\0{record.seed}"): record.summary["split_sha256"][:12],
                 ("budget", record.cell): _budget(record.config), ("evaluation", record.cell): _judging(record.config),
                 ("code", ""): codes[0][:12]}
        sections = {key.partition(".")[0] for key in own.get(record.arm, ())}
        for (what, where), fact in facts.items():
            if sections & _SECTIONS.get(what, set()) or (what == "code" and mix_versions):
                continue
            other = first.setdefault((what, where), record)
            theirs = facts_of(other)[what]
            if theirs != fact:
                raise CheckpointError(f"{record.folder} and {other.folder} cannot be compared: {what} differs "
                                      f"({fact}; {theirs}); compare runs of one study, or run one of them again"
                                      f"{'; --mix-versions compares them all the same' if what == 'code' else ''}")


def versions_of(done: Sequence[Record]) -> list[str]:
    """How many runs each version of the code made, where there are several."""
    made = Counter(" and ".join(code[:12] for code in record.made.get("codes", ["unknown"])) for record in done)
    return [f"{code}: {runs} runs" for code, runs in made.items()] if len(made) > 1 else []


def facts_of(record: Record) -> dict[str, str]:
    """What must be equal in runs that are compared."""
    assert record.summary is not None
    return {"split": record.summary["split_sha256"][:12], "budget": _budget(record.config),
            "evaluation": _judging(record.config), "code": record.made.get("codes", ["unknown"])[0][:12]}


def _budget(config: dict[str, Any]) -> str:
    federation, local = config["federation"], config["local"]
    return (f"{federation['rounds']} rounds, {federation['participation']:g} of the clients, {local['epochs']} epochs "
            f"in batches of {local['batch']}")


def _judging(config: dict[str, Any]) -> str:
    return f"every {config['evaluation']['every']} rounds, personal models {config['evaluation']['personal'] or 'last'}"
