"""The methods as people read them: for a terminal, and as the page docs/methods.md; all of it read off the methods, off
measurements and off the tests."""

import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from raylt import store
from raylt.contract.costs import Call, measure
from raylt.core.method import Method
from raylt.errors import CheckpointError, ConfigError
from raylt.hyper import range_of
from raylt.models import SplitModel, build_model
from raylt.runs.summary import size

GROUPS = {"global": "One model for all, trained otherwise", "aggregation": "Put together otherwise in each round",
          "statistics": "A classifier from what clients say of their features",
          "personal": "A model of each client's own"}
PAGE_MODEL = "resnet8"
TELLING = re.compile(r"naive|by_hand|fedavg|oracle|to_the_bit|exactly|finite_differences|equation|algorithm|reduc")
Entry = dict[str, Any]


def entries(methods: Mapping[str, type[Method]], model: str | None, image: str, classes: int) -> dict[str, Entry]:
    """What there is to say of each method, as JSON has it.

    Args:
        model: what the calls are measured with; None: they are not.
        image: HEIGHTxWIDTHxCHANNELS.

    Raises:
        ConfigError: no such model, or it does not take these images.
    """
    sides = re.fullmatch(r"(\d+)x(\d+)x(\d+)", image)
    if sides is None or "0" in sides.groups():
        raise ConfigError(f"--image {image}: is written HEIGHTxWIDTHxCHANNELS, as in 32x32x3")
    height, width, channels = (int(side) for side in sides.groups())
    shape = height, width, channels

    def calls(method: type[Method]) -> list[Call] | None:
        # methods of one's own may ask clients at any time
        cut = method.__module__.startswith("raylt.")
        return None if model is None else measure(method(), partial(_model, model), shape, classes, cut)

    if model is not None:
        build_model(model, classes, shape)
    return {name: {
        "paper": method.paper, "year": year(method), "link": method.link, "group": group(method),
        "problems": list(method.problems), "personal": method.personal, "privileged": method.privileged,
        "about": inspect.cleandoc(method.__doc__ or ""),
        "notes": inspect.cleandoc(sys.modules[method.__module__].__doc__ or ""),
        "calls": None if (measured := calls(method)) is None else [vars(call) for call in measured],
        "fields": {field: {"default": info.default, "range": str(range_of(info)), "source": info.description,
                           "stage": method.stage_of(field)} for field, info in method.model_fields.items()},
    } for name, method in methods.items()}


def _model(name: str, classes: int, shape: tuple[int, int, int]) -> SplitModel:
    return build_model(name, classes, shape)


def group(method: type[Method]) -> str:
    """One of GROUPS."""
    return method.group or ("personal" if method.personal else "global")


def year(method: type[Method]) -> int | None:
    """The last that its paper's line names."""
    years = re.findall(r"\b(?:19|20)\d\d\b", method.paper)
    return int(years[-1]) if years else None


def sends(call: Mapping[str, Any]) -> str:
    """`model, loss; gradients of each`: the parts of a reply, those whose values the server sees client by client
    last."""
    summed = [name for name, kind in call["sends"].items() if kind != "each"]
    apart = [f"{name} of each" for name, kind in call["sends"].items() if kind == "each"]
    return "; ".join(", ".join(part) for part in (summed, apart) if part) or "nothing"


def passes(call: Mapping[str, Any]) -> str:
    """`1 trained, 2 read`."""
    return ", ".join(f"{call[kind]:g} {kind}" for kind in ("trained", "read") if call[kind]) or "none"


def table(listing: Mapping[str, Entry]) -> Group:
    """All methods by group, a line each."""
    parts = []
    for key, title in GROUPS.items():
        lines = {name: entry for name, entry in listing.items() if entry["group"] == key}
        measured = any(entry["calls"] is not None for entry in lines.values())
        rows = Table("method", *(["sends in a round", "up", "down", "passes", "after training"] if measured else []),
                     "paper", title=f"{key}: {title.lower()}", title_justify="left", box=box.SIMPLE_HEAD,
                     padding=(0, 1, 0, 0), show_edge=False)
        rows.columns[0].no_wrap = True
        for name, entry in lines.items():
            paper = entry["paper"] + (f" (privileged: {entry['privileged']})" if entry["privileged"] else "")
            rows.add_row(name, *(_costs(entry["calls"]) if measured else []), paper)
        if lines:
            parts += [rows, ""]
    return Group(*parts)


def _costs(calls: list[dict[str, Any]]) -> list[str]:
    """Of a round: what is sent, bytes up and down, passes; and what is sent afterwards."""
    rounds = [call for call in calls if call["when"] == "round"]
    later = [f"{sends(call)} ({size(call['up'])})" for call in calls if call["when"] == "finish"]
    return ["; ".join(sends(call) for call in rounds), size(sum(call["up"] for call in rounds)),
            size(sum(call["down"] for call in rounds)),
            passes({kind: sum(call[kind] for call in rounds) for kind in ("trained", "read")}), "; ".join(later)]


def one(name: str, entry: Entry) -> Group:
    """One method with its calls and fields."""
    plain: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False}
    calls = Table("when", "call", "sends", "up", "down", "passes", **plain)
    for call in entry["calls"] or []:
        calls.add_row(call["when"], call["name"], sends(call), size(call["up"]), size(call["down"]), passes(call))
    fields = Table("field", "default", "range", "what", **plain)
    fields.columns[0].no_wrap = True
    for field, info in entry["fields"].items():
        fields.add_row(field, str(info["default"]), info["range"], _what(info))
    about = f"  {entry['paper']}; {entry['group']}; {' and '.join(entry['problems'])}"
    head = Text.assemble((name, "bold"), about)
    privileged = [f"privileged: {entry['privileged']}"] if entry["privileged"] else []
    return Group(head, *privileged, *([entry["link"]] if entry["link"] else []), "",
                 entry["notes"], "", calls, *(["", fields] if entry["fields"] else []))


def write(page: Path, listing: Mapping[str, Entry]) -> None:
    """Writes the page; what methods are tested against is read from the tests beside it, where there are any.

    Raises:
        ConfigError: it cannot be written.
    """
    tests = page.resolve().parents[1] / "tests" if len(page.resolve().parents) > 1 else page.parent
    try:
        store.write(page, markdown(listing, tests))
    except CheckpointError as error:
        raise ConfigError(f"--page {error}; give a file that can be written") from None


def markdown(listing: Mapping[str, Entry], tests: Path) -> str:
    """The page.

    Args:
        tests: the folder of the project's tests.
    """
    lines = ["# The methods", "",
             "Written by `raylt methods --page docs/methods.md`; not edited by hand. What a client sends, bytes and "
             f"passes are measured on a tiny round with {PAGE_MODEL} and ten classes, at `local.epochs=1`: bytes of "
             "one client's replies and messages; passes over its samples, *trained* ones with activations kept for a "
             "gradient, *read* ones without. *of each*: the server sees the values client by client, so they cannot "
             "be summed up on the way. FedSM and CLIP2FL are measured without their teachers."]
    for key, title in GROUPS.items():
        mine = {name: entry for name, entry in listing.items() if entry["group"] == key}
        if mine:
            lines += ["", f"## {key}: {title.lower()}", "",
                      "| method | sends in a round | up | down | passes | after training |", f"|{6 * '---|'}",
                      *(f"| [`{name}`](#{name}) | {' | '.join(_costs(entry['calls'] or []))} |"
                        for name, entry in mine.items())]
            for name, entry in mine.items():
                lines += ["", *_section(name, entry, tests)]
    return "\n".join(lines) + "\n"


def _section(name: str, entry: Entry, tests: Path) -> list[str]:
    paper = f"[{entry['paper']}]({entry['link']})" if entry["link"] else entry["paper"]
    lines = [f"### {name}", "", f"{paper}. For {' and '.join(entry['problems'])}.", "",
             *([f"**Privileged**: {entry['privileged']}.", ""] if entry["privileged"] else []),
             "```text", *entry["notes"].splitlines(), "```"]
    if entry["fields"]:
        lines += ["", "| field | default | searched | what it is |", "|---|---|---|---|",
                  *(f"| `{field}` | {info['default']} | {info['range']} | {_what(info).replace('|', '/')} |"
                    for field, info in entry["fields"].items())]
    leaves = [f"- {call['when']}, `{call['name']}`: {sends(call)}; {size(call['up'])} up, {size(call['down'])} down, "
              f"passes: {passes(call)}" for call in entry["calls"] or []]
    against = tested_against(name, tests)
    return [*lines, "", "Leaves a client:", "", *leaves, *(["", "Tested against: " + "; ".join(against) + "."]
                                                          if against else [])]


def tested_against(name: str, tests: Path) -> list[str]:
    """What the names of a method's tests say that it is held against, and how many mistakes they must notice."""
    words = re.compile(rf"^from raylt\.methods\.{name}(?:\.method)? import", re.M)
    files = [file for file in sorted((tests / "methods").rglob("test_*.py")) if file.stem == f"test_{name}" or (
        file.parent.name == name) or words.search(file.read_text())]
    own = [file for file in files if name in (file.stem.removeprefix("test_"), file.parent.name)] or files
    names = [test.replace("_", " ") for file in own for test in re.findall(r"^def test_(\w+)", file.read_text(), re.M)
             if TELLING.search(test)]
    mutants = sum(len(re.findall(rf'^file = "raylt/methods/{name}[./]', file.read_text(), re.M))
                  for file in sorted((tests / "mutants").glob("*.toml")))
    mistakes = f"{mutants} mistakes that must be noticed" if mutants > 1 else "a mistake that must be noticed"
    return [*names, *([mistakes] if mutants else [])]


def _what(info: Mapping[str, Any]) -> str:
    """A field's source, and the stage that it acts from."""
    return info["source"] + (f" (from {info['stage']} on)" if info["stage"] else "")
