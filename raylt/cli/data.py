"""The command `raylt data`: show how the data is split over clients, and the caches of decoded images."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from raylt.cli.options import Format, FormatOption, Settings, divide, err, out, print_json
from raylt.config import load_data
from raylt.disk import check_target
from raylt.errors import CheckpointError, ConfigError, count_of, without_remedy
from raylt.formatting import percent

if TYPE_CHECKING:
    from raylt.data.images.cache import Cache
    from raylt.data.task import Task

SHORT_GROUPS = {"many": "many", "medium": "med.", "few": "few", "-": "-"}  # for columns of four letters


def data(
    settings: Settings = None,
    export: Annotated[Path | None, typer.Option(help="Write the split to this file.")] = None,
    split: Annotated[
        Path | None,
        typer.Option("--import", help="Use the split or index lists in this file instead of drawing a split."),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="List the caches of decoded images under data.root instead.")
    ] = False,
    clear_cache: Annotated[str | None, typer.Option(metavar="NAME", help="Remove the named cache, or all.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Build the split of a configuration, and print the samples of each client and class."""
    path, overrides = divide(settings)
    config = load_data(path, overrides if split is None else [*overrides, f"data.split={json.dumps(str(split))}"])
    if cache or clear_cache is not None:
        _show_caches(Path(config.root), clear_cache, format)
        return
    from raylt.config.idle import idle_data_settings
    from raylt.data.heterogeneity import heterogeneity
    from raylt.data.sources.sources import check_size
    from raylt.data.task import build_task

    check_size(config)
    if export is not None:
        check_target(export, "--export")
    for notice in idle_data_settings(config):
        err.print(notice, markup=False, soft_wrap=True)
    task = build_task(config)
    if export is not None:
        try:
            task.split.save(export)
        except CheckpointError as error:
            raise ConfigError(
                f"--export: {without_remedy(error)}. Give a file that can be written.",
                code="file.unwritable",
                key="--export",
                path=str(export),
            ) from None
    figures = heterogeneity(task.client_counts)
    if format is Format.json:
        print_json(
            {
                "sha256": task.split.sha256,
                "names": task.class_names,
                "groups": task.groups,
                "thresholds": task.thresholds,
                "client_names": task.client_names,
                "notes": task.notes,
                "heterogeneity": figures._asdict(),
                "own_tests": None if task.own_tests is None else [len(rows) for rows in task.own_tests],
                "classes": task.counts.tolist(),
                "clients": task.client_counts.tolist(),
            }
        )
        return
    for note in task.notes:
        err.print(note, soft_wrap=True)
    out.print(f"split {task.split.sha256}", soft_wrap=True)
    out.print(split_table(task, out.width))
    unit = {"classification": "samples", "segmentation": "pixels"}[task.kind]
    low, high = task.thresholds
    counted = ", with validation samples" if config.validation else ""
    for group, bounds in (("many", f"more than {high}"), ("medium", f"{low} to {high}"), ("few", f"fewer than {low}")):
        sizes = [int(n) for n, class_group in zip(task.counts, task.groups, strict=True) if class_group == group]
        classes = count_of(len(sizes), "class", "classes")
        out.print(f"{group}: {classes}, {sum(sizes)} {unit} ({bounds} of each class{counted})")
    out.print(str(figures), soft_wrap=True)


def _show_caches(root: Path, cleared: str | None, format: Format) -> None:
    from raylt.data.images.cache import caches, clear
    from raylt.formatting import size

    listed = caches(root) if cleared is None else clear(root, cleared)
    if format is Format.json:
        print_json([cache._asdict() for cache in listed])
        return
    if listed:
        out.print(_table(listed))
    what = "removed from" if cleared is not None else "in"
    out.print(
        f"{count_of(len(listed), 'cache')}, {size(sum(cache.size for cache in listed))}, {what} {root / 'cache'}",
        soft_wrap=True,
    )


def _table(listed: "list[Cache]") -> object:
    from rich import box
    from rich.table import Table

    from raylt.formatting import size

    table = Table(
        "cache",
        "of",
        "images",
        "side",
        "on disk",
        "written",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for cache in listed:
        table.add_row(
            cache.name, cache.of, str(cache.images or "-"), str(cache.side or "-"), size(cache.size), cache.made
        )
    for column in table.columns:
        column.no_wrap = True  # so that names can be copied
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    return table


def split_table(task: "Task", width: int) -> Table:
    """Return a table of each client's samples by class, abbreviated if it would exceed `width`.

    Column headings are class names. If these do not fit, they are numbers, with the names below the table.
    """
    console = Console(width=10_000)
    numbers = tuple(map(str, range(task.classes)))
    for heads, groups in ((task.class_names, task.groups), (numbers, [SHORT_GROUPS[group] for group in task.groups])):
        table = _class_table(task, heads, groups)
        if heads is numbers:
            table.padding = 0
        if Measurement.get(console, console.options, table).maximum <= width:
            if heads is numbers and numbers != tuple(task.class_names):
                table.caption = ", ".join(f"{c} {name}" for c, name in enumerate(task.class_names))
                table.caption_justify = "left"
            return table
    table = _counts_table("client", "samples", "classes", "of the largest")
    for k, (row, samples) in enumerate(zip(task.client_counts, task.sizes, strict=True)):
        largest = f"{task.class_names[row.argmax()]} {percent(row.max() / row.sum())}" if row.any() else ""
        table.add_row(task.client_names[k], str(samples), str((row > 0).sum()), largest)
    table.add_section()
    table.add_row("all", str(task.sizes.sum()), str(task.classes), "")
    return table


def _class_table(task: "Task", heads: Sequence[str], groups: Sequence[str]) -> Table:
    """Return a table of each client's samples by class, with each class's group in the last row."""
    table = _counts_table("client", *heads, "samples")
    for k, (row, samples) in enumerate(zip(task.client_counts, task.sizes, strict=True)):
        table.add_row(task.client_names[k], *(_short(n) if n else "·" for n in row), str(samples))
    table.add_section()
    table.add_row("all", *(_short(n) for n in task.counts), str(task.sizes.sum()))
    table.add_row("group", *groups, "")
    return table


def _counts_table(*heads: str) -> Table:
    """Return a table without rows, in which all columns except the first are right-aligned."""
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _short(count: int) -> str:
    """Return a count as short text: samples in full, pixels in thousands or millions."""
    if count < 100_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 1e7 else f"{count / 1e6:.0f}M"
