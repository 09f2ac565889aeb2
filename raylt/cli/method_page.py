"""Tables of the methods for the terminal, and the documentation page of their costs.

All content comes from the methods' declarations and from measurements on a tiny run.
"""

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
from raylt.contract.costs import ROUNDS, measure, relative_cost
from raylt.core.checkpoint.branch_points import stage_of
from raylt.core.method import Method
from raylt.errors import CheckpointError, ConfigError, without_remedy
from raylt.formatting import size
from raylt.hyper import range_of
from raylt.models import SplitModel, build_model

GROUPS = {
    "global": "One model for all clients, with another local training",
    "aggregation": "Another aggregation in each round",
    "statistics": "A classifier from statistics of the clients' features",
    "personal": "A personal model for each client",
}
PAGE_MODEL = "resnet8"
MethodEntry = dict[str, Any]
MAX_VALUES = 2**25  # of one image of each class; ten classes of 1024x1024x3 are below
ITEM = re.compile(r"(\[\d+\]|-) ")  # start of a departure in a module's docstring


def entries(methods: Mapping[str, type[Method]], model: str | None, image: str, classes: int) -> dict[str, MethodEntry]:
    """Return the facts and costs of each method as JSON values.

    `cost` is the mean number of a client's passes per round in a run of 30 rounds, as a multiple of FedAvg's; see
    `relative_cost`.

    Args:
        methods: The methods, by name.
        model: Name of the model with which calls are measured; None to measure nothing.
        image: Size of the images, as HEIGHTxWIDTHxCHANNELS.
        classes: Number of classes.

    Raises:
        ConfigError: The model is unknown, or does not take these images, or they are too large to measure.
    """
    sides = re.fullmatch(r"(\d+)x(\d+)x(\d+)", image)
    if sides is None or not all(side.strip("0") for side in sides.groups()):
        raise ConfigError(
            f"--image: is not HEIGHTxWIDTHxCHANNELS ({image}). Write it like 32x32x3.",
            code="config.wrong-type",
            key="--image",
            value=image,
        )
    # Python converts no text of thousands of digits, and nine digits are already too many
    height, width, channels = (int(side.lstrip("0")[:9]) for side in sides.groups())
    shape = height, width, channels
    if height * width * channels * classes > MAX_VALUES:
        raise ConfigError(
            f"--image: one image of each of {classes} classes has more than {MAX_VALUES} values ({image}). Give "
            "smaller images, or fewer classes.",
            code="config.out-of-range",
            key="--image",
            value=image,
            most=MAX_VALUES,
        )

    def costs(method: type[Method]) -> dict[str, Any]:
        if model is None:
            return {"calls": None, "cost": None}
        # the method of a plugin may call clients at any time
        cut = method.__module__.startswith("raylt.")
        calls = measure(method(), partial(_model, model), shape, classes, cut)
        cost = relative_cost(method(), partial(_model, model), shape, classes)
        return {"calls": [vars(call) for call in calls], "cost": cost}

    if model is not None:
        build_model(model, classes, shape)
    return {
        name: {
            "paper": method.paper,
            "year": year(method),
            "link": method.link,
            "group": group(method),
            "problems": list(method.problems),
            "personal": method.personal,
            "privileged": method.privileged,
            "about": inspect.cleandoc(method.__doc__ or ""),
            "notes": inspect.cleandoc(sys.modules[method.__module__].__doc__ or ""),
            **costs(method),
            "fields": {
                field: {
                    "default": info.default,
                    "range": str(range_of(info)),
                    "source": info.description,
                    "stage": stage_of(method, field),
                }
                for field, info in method.model_fields.items()
            },
        }
        for name, method in methods.items()
    }


def _model(name: str, classes: int, shape: tuple[int, int, int]) -> SplitModel:
    return build_model(name, classes, shape)


def group(method: type[Method]) -> str:
    """Return the key of the group (in GROUPS) to which a method belongs."""
    return method.group or ("personal" if method.personal else "global")


def year(method: type[Method]) -> int | None:
    """Return the year of a method's paper (the last year in the reference), or None if no year is given."""
    years = re.findall(r"\b(?:19|20)\d\d\b", method.paper)
    return int(years[-1]) if years else None


def sends(call: Mapping[str, Any]) -> str:
    """Return the names of the values that a client sends in a call, such as `model, loss; gradients of each`.

    Names of summed values come first, followed by values that the server sees from each client.
    """
    summed = [name for name, kind in call["sends"].items() if kind != "each"]
    apart = [f"{name} of each" for name, kind in call["sends"].items() if kind == "each"]
    return "; ".join(", ".join(part) for part in (summed, apart) if part) or "nothing"


def passes(call: Mapping[str, Any]) -> str:
    """Return the passes of a call over the samples as text, such as `1 trained, 2 read`."""
    return ", ".join(f"{call[kind]:g} {kind}" for kind in ("trained", "read") if call[kind]) or "none"


def table(listing: Mapping[str, MethodEntry]) -> Group:
    """Return a table of all methods, grouped, with one line per method."""
    parts = []
    for key, title in GROUPS.items():
        lines = {name: entry for name, entry in listing.items() if entry["group"] == key}
        measured = any(entry["calls"] is not None for entry in lines.values())
        rows = Table(
            "method",
            *(["sends in a round", "up", "down", "passes", "x FedAvg", "after training"] if measured else []),
            "paper",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_edge=False,
        )
        rows.columns[0].no_wrap = True
        for name, entry in lines.items():
            paper = entry["paper"] + (f" (privileged: {entry['privileged']})" if entry["privileged"] else "")
            rows.add_row(name, *(_costs(entry) if measured else []), paper)
        if lines:
            parts += [Text(f"{key}: {title.lower()}", style="table.title"), rows, ""]
    return Group(*parts)


def _costs(entry: MethodEntry) -> list[str]:
    """Return the table cells of a method's costs: reply parts, bytes and passes of a round, and of the last phase."""
    calls = entry["calls"] or []
    rounds = [call for call in calls if call["when"] == "round"]
    later = [f"{sends(call)} ({size(call['up'])})" for call in calls if call["when"] == "finish"]
    return [
        "; ".join(sends(call) for call in rounds),
        size(sum(call["up"] for call in rounds)),
        size(sum(call["down"] for call in rounds)),
        passes({kind: sum(call[kind] for call in rounds) for kind in ("trained", "read")}),
        "" if entry["cost"] is None else f"{entry['cost']:.1f}",
        "; ".join(later),
    ]


def one(name: str, entry: MethodEntry) -> Group:
    """Return the printed description of one method, with its calls and fields."""
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
    return Group(
        head,
        *privileged,
        *([entry["link"]] if entry["link"] else []),
        "",
        *reflowed(entry["notes"]),
        "",
        calls,
        f"passes in a round, on average over {ROUNDS} rounds at local.epochs=1: {entry['cost']:.1f} times FedAvg's",
        *(["", fields] if entry["fields"] else []),
    )


def reflowed(notes: str) -> list[str | Text | Table]:
    """Return the paragraphs and list items of a docstring, wrapped to the terminal's width.

    Indented lines continue an item; its text is printed next to its mark.
    """
    blocks: list[list[str]] = [[]]
    for line in notes.splitlines():
        starts_item = ITEM.match(line) is not None
        ends_item = bool(line) and not line[0].isspace() and bool(blocks[-1]) and ITEM.match(blocks[-1][0]) is not None
        if starts_item or ends_item or not line:
            blocks.append([])
        blocks[-1].append(line)
        if not line:
            blocks.append([])
    return [_block(lines) for lines in blocks if lines]


def _block(lines: list[str]) -> str | Text | Table:
    text = " ".join(" ".join(lines).split())
    mark = ITEM.match(lines[0])
    if mark is None:
        return Text(text)
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_row(Text(mark[1]), Text(text.removeprefix(mark[0])))
    return row


def write(page: Path, listing: Mapping[str, MethodEntry]) -> None:
    """Write the documentation page of the methods' costs.

    Raises:
        ConfigError: The page cannot be written.
    """
    try:
        store.write(page, markdown(listing))
    except CheckpointError as error:
        raise ConfigError(
            f"--page: {without_remedy(error)}. Give a file that can be written.",
            code="file.unwritable",
            path=str(page),
        ) from None


def markdown(listing: Mapping[str, MethodEntry]) -> str:
    """Return the documentation page of the methods' costs in Markdown."""
    lines = [
        "# Costs of all methods",
        "",
        "`raylt methods --page FILE` writes this page. Parts of replies, bytes and passes are measured in the third "
        f"round of a tiny run of {ROUNDS} rounds with {PAGE_MODEL} and ten classes, at `local.epochs=1`. Bytes are "
        "those of one client's replies and messages. Passes are over the client's samples: *trained* passes keep "
        "activations for a gradient, *read* passes do not. A pass through a part of the encoder counts as its share of "
        "the multiplications. *x FedAvg* is the number of passes as a multiple of FedAvg's, on average over the "
        f"{ROUNDS} rounds. A trained pass counts as three, a read pass as one. For this column each client has no "
        "samples of two classes, so `balancefl` reads its samples once more. *of each* means that the server sees the "
        "values of each client, so they cannot be summed on the way. FedSM and CLIP2FL are measured without their "
        "teachers.",
    ]
    for key, title in GROUPS.items():
        members = {name: entry for name, entry in listing.items() if entry["group"] == key}
        if members:
            lines += [
                "",
                f"## {key}: {title.lower()}",
                "",
                "| method | sends in a round | up | down | passes | x FedAvg | after training |",
                f"|{7 * '---|'}",
                *(f"| [`{name}`](#{name}) | {' | '.join(_costs(entry))} |" for name, entry in members.items()),
            ]
            for name, entry in members.items():
                lines += ["", *_section(name, entry)]
    return "\n".join(lines) + "\n"


def _section(name: str, entry: MethodEntry) -> list[str]:
    paper = f"[{entry['paper']}]({entry['link']})" if entry["link"] else entry["paper"]
    lines = [
        f"### {name}",
        "",
        f"{paper}. For {' and '.join(entry['problems'])}.",
        "",
        *([f"**Privileged**: {entry['privileged']}.", ""] if entry["privileged"] else []),
        "```text",
        *entry["notes"].splitlines(),
        "```",
    ]
    if entry["fields"]:
        lines += [
            "",
            "| field | default | searched | what it is |",
            "|---|---|---|---|",
            *(
                f"| `{field}` | {info['default']} | {info['range']} | {_what(info).replace('|', '/')} |"
                for field, info in entry["fields"].items()
            ),
        ]
    parts = [
        f"- {call['when']}, `{call['name']}`: {sends(call)}; {size(call['up'])} up, {size(call['down'])} down, "
        f"passes: {passes(call)}"
        for call in entry["calls"] or []
    ]
    return [*lines, "", "A client sends:", "", *parts]


def _what(info: Mapping[str, Any]) -> str:
    """Return the source of a method's field, and the stage from which the field acts."""
    return info["source"] + (f" (from {info['stage']} on)" if info["stage"] else "")
