"""The commands `raylt methods | settings | recipes`: list methods, settings and recipes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, out, print_json
from raylt.disk import check_target
from raylt.errors import ConfigError, did_you_mean

MAX_KEY_WIDTH = 30  # characters in the first column of settings
IMAGE, CLASSES = "8x8x3", 10  # defaults when uploads and costs are measured


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show only this method, with its fields.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Measure uploads and passes of a client with this model.")] = None,
    image: Annotated[str, typer.Option(help="Size of the images for the measurement.")] = IMAGE,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes for the measurement.")] = CLASSES,
    page: Annotated[
        Path | None, typer.Option(help="Write all methods to this Markdown file, measured with resnet8.")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """List the methods by group, with their uploads and costs; NAME shows one method with its fields."""
    from raylt.cli.method_page import PAGE_MODEL, entries, one, table, write
    from raylt.methods import METHODS

    if page is not None and (name or model or format is Format.json or (image, classes) != (IMAGE, CLASSES)):
        raise ConfigError(
            f"--page: always has all methods, measured with {PAGE_MODEL} ({page}). Leave out NAME, --model, --image, "
            "--classes and --format.",
            code="config.conflict",
            key="--page",
        )
    if page is not None:
        check_target(page, "--page")
    if name is not None:
        from raylt.methods import make_method

        make_method({"name": name})  # raises an error if the method is unknown
    wanted = METHODS if name is None else {name: METHODS[name]}
    measured = model or (PAGE_MODEL if page is not None or name is not None else None)
    listing = entries(wanted, measured, image, classes)
    if page is not None:
        write(page, listing)
    elif format is Format.json:
        print_json(listing)
    elif name is not None:
        out.print(one(name, listing[name]))
        out.print(f"\n{_measured_with(measured, image, classes)}", soft_wrap=True)
    else:
        out.print(table(listing))
        if measured is not None:
            out.print(f"\n{_measured_with(measured, image, classes)}", soft_wrap=True)
        out.print(
            "\nraylt methods NAME shows one method with its fields; --model resnet8 measures all methods",
            soft_wrap=True,
        )


def _measured_with(model: str | None, image: str, classes: int) -> str:
    return (
        f"uploads and passes are measured with {model}, images of {image} and {classes} classes; --model, --image and "
        "--classes choose others"
    )


def settings(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Show only this section, such as local, or this setting, such as local.lr."
        ),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """List settings with their defaults, meanings and allowed values."""
    from raylt.config import UNLISTED, allowed
    from raylt.config import settings as all_settings

    listing = {
        key: {
            "default": None if field.is_required() else field.default,
            "allowed": allowed(field),
            "what": field.description,
        }
        for key, field in all_settings()
        if name is None or key == name or key.startswith(f"{name}.")
    }
    if not listing:
        raise _no_section(name)
    if format is Format.json:
        print_json(listing)
        return
    table = _plain("setting, default", "meaning, allowed values")
    width = max(len(part) for key, entry in listing.items() for part in (key, f"= {_default(key, entry)}"))
    table.columns[0].min_width = min(width, MAX_KEY_WIDTH)
    table.columns[0].max_width = MAX_KEY_WIDTH
    for key, entry in listing.items():
        table.add_row(f"{key}\n= {_default(key, entry)}", f"{entry['what']}\n{entry['allowed']}\n")
    out.print(table)
    if any("number" in entry["allowed"] for entry in listing.values()):
        out.print(UNLISTED)
    if name == "method":
        out.print(_names_by_group())
        out.print("\nraylt methods NAME shows a method with its fields, their defaults and ranges", soft_wrap=True)


def _default(key: str, entry: Mapping[str, Any]) -> str:
    return "(no default)" if key == "method" else _yaml(entry["default"])


def _names_by_group() -> Table:
    """Return the names of all methods, one row per group."""
    from raylt.cli.method_page import GROUPS, group
    from raylt.methods import METHODS

    table = _plain("methods", "names")
    for key, title in GROUPS.items():
        names = ", ".join(name for name, method in METHODS.items() if group(method) == key)
        table.add_row(title, f"{names}\n")
    table.columns[0].max_width = MAX_KEY_WIDTH
    return table


def _no_section(name: str | None) -> ConfigError:
    from raylt.config import settings as all_settings

    sections = list(dict.fromkeys(key.partition(".")[0] for key, _ in all_settings()))
    hint = did_you_mean(name or "", [*sections, *(key for key, _ in all_settings())])
    return ConfigError(
        f"settings: unknown section or setting ({name}). {hint}Give one of: {', '.join(sections)}.",
        code="config.unknown-name",
        key="settings",
        value=name,
    )


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
    out.print(
        "\nraylt run recipe:NAME runs one; the first lines of its file give results and duration",
        soft_wrap=True,
    )


def _plain(*heads: str) -> Table:
    return Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _yaml(value: object) -> str:
    """Return a value as text in YAML, as a settings file would contain it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
