"""`raylt data`: who holds what, and what was decoded for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raylt.cli.options import Format, FormatOption, Settings, divide, err, out, print_json
from raylt.config import load_data
from raylt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raylt.data.caches import Cache


def data(settings: Settings = None,
         export: Annotated[Path | None, typer.Option(help="The file that the split is written to.")] = None,
         split: Annotated[Path | None, typer.Option("--import", help="The file of a split to use instead of drawing "
                                                    "one.")] = None,
         cache: Annotated[bool, typer.Option("--cache", help="List the caches of decoded images under data.root "
                                             "instead.")] = False,
         clear_cache: Annotated[str | None, typer.Option(metavar="NAME", help="Remove a cache of that list "
                                                         "instead; all removes every one.")] = None,
         format: FormatOption = Format.table) -> None:
    """Build the split of a configuration and show who holds what."""
    config = load_data(*divide(settings))
    if cache or clear_cache is not None:
        _show_caches(Path(config.root), clear_cache, format)
        return
    from raylt.data.heterogeneity import heterogeneity
    from raylt.data.task import build_task
    if split is not None:
        config = config.model_copy(update={"split": str(split)})
    task = build_task(config)
    if export is not None:
        try:
            task.split.save(export)
        except CheckpointError as error:
            raise ConfigError(f"--export {error}; give a file that can be written") from None
    figures = heterogeneity(task.client_counts)
    if format is Format.json:
        print_json({"sha256": task.split.sha256, "names": task.class_names, "groups": task.groups,
                    "client_names": task.client_names, "notes": task.notes, "heterogeneity": figures._asdict(),
                    "own_tests": None if task.own_tests is None else [len(rows) for rows in task.own_tests],
                    "classes": task.counts.tolist(), "clients": task.client_counts.tolist()})
        return
    from raylt.runs.summary import split_table
    for note in task.notes:
        err.print(note, soft_wrap=True)
    out.print(f"split {task.split.sha256}", soft_wrap=True)
    out.print(split_table(task, out.width))
    unit = {"classification": "samples", "segmentation": "pixels"}[task.kind]
    for group in ("many", "medium", "few"):
        sizes = [int(n) for n, its in zip(task.counts, task.groups, strict=True) if its == group]
        out.print(f"{group}: {len(sizes)} classes, {sum(sizes)} {unit}")
    out.print(str(figures), soft_wrap=True)


def _show_caches(root: Path, cleared: str | None, format: Format) -> None:
    from raylt.data.caches import caches, clear
    from raylt.runs.summary import size
    known = caches(root) if cleared is None else clear(root, cleared)
    if format is Format.json:
        print_json([cache._asdict() for cache in known])
        return
    if known:
        out.print(_table(known))
    what = "removed from" if cleared is not None else "in"
    out.print(f"{len(known)} caches, {size(sum(cache.size for cache in known))}, {what} {root / 'cache'}",
              soft_wrap=True)


def _table(known: "list[Cache]") -> object:
    from rich import box
    from rich.table import Table

    from raylt.runs.summary import size
    table = Table("cache", "of", "images", "side", "on disk", "written", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    for cache in known:
        table.add_row(cache.name, cache.of, str(cache.images or "-"), str(cache.side or "-"),
                      size(cache.size), cache.made)
    for column in table.columns:
        column.no_wrap = True               # a name is to be copied whole
    table.columns[1].no_wrap, table.columns[1].overflow = False, "fold"
    return table
