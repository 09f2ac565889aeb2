"""`raylt methods | settings | recipes`: what there is."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, out, print_json
from raylt.errors import ConfigError

IMAGE, CLASSES = "8x8x3", 10          # that sends and costs are measured on where nothing else is said


def methods(name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this method, with its fields.")
                            ] = None,
            model: Annotated[str | None, typer.Option(help="Measure what a client sends and computes, for this model."
                                                      )] = None,
            image: Annotated[str, typer.Option(help="The images that it is measured on.")] = IMAGE,
            classes: Annotated[int, typer.Option(min=2, help="Their classes.")] = CLASSES,
            page: Annotated[Path | None, typer.Option(help="Write all of them to this Markdown file, measured for "
                                                      "resnet8.")] = None,
            format: FormatOption = Format.table) -> None:
    """List the methods by what they change, with what they send and cost; NAME shows one with its fields."""
    from raylt.cli.method_page import PAGE_MODEL, entries, one, table, write
    from raylt.methods import METHODS
    if page is not None and (name or model or format is Format.json or (image, classes) != (IMAGE, CLASSES)):
        raise ConfigError(f"--page {page}: has all methods, measured for {PAGE_MODEL}; leave out NAME, --model, "
                          "--image, --classes and --format")
    if name is not None:
        from raylt.methods import make_method
        make_method({"name": name})             # says what there is where this is none
    wanted = METHODS if name is None else {name: METHODS[name]}
    measured = model or (PAGE_MODEL if page is not None or name is not None else None)
    listing = entries(wanted, measured, image, classes)
    if page is not None:
        write(page, listing)
    elif format is Format.json:
        print_json(listing)
    elif name is not None:
        out.print(one(name, listing[name]))
    else:
        out.print(table(listing))
        out.print("\nraylt methods NAME shows one with its fields; --model resnet8 measures them all", soft_wrap=True)


def settings(format: FormatOption = Format.table) -> None:
    """List all settings with their defaults, the values that they take, and what they mean."""
    from raylt.config import allowed
    from raylt.config import settings as all_settings
    listing = {key: {"default": None if field.is_required() else field.default, "allowed": allowed(field),
                     "what": field.description} for key, field in all_settings()}
    if format is Format.json:
        print_json(listing)
        return
    table = _plain("setting", "default", "takes", "what it means")
    table.columns[0].no_wrap = True
    for key, entry in listing.items():
        default = "must be named" if key == "method" else _yaml(entry["default"])
        table.add_row(key, default, entry["allowed"], entry["what"])
    out.print(table)


def recipes(format: FormatOption = Format.table) -> None:
    """List the configurations that come with raylt; raylt run recipe:NAME runs one."""
    from raylt.config import recipe
    from raylt.config import recipes as all_recipes
    listing = {name: {"what": what, "path": str(recipe(name))} for name, what in all_recipes().items()}
    if format is Format.json:
        print_json(listing)
        return
    table = _plain("recipe", "what")
    table.columns[0].no_wrap = True
    for name, entry in listing.items():
        table.add_row(name, entry["what"])
    out.print(table)
    out.print("\nraylt run recipe:NAME runs one; its figures and its time stand in the first lines of its file",
              soft_wrap=True)


def _plain(*heads: str) -> Table:
    return Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _yaml(value: object) -> str:
    """A value as it is written in a file of settings."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
