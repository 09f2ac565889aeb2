"""`raylt methods | settings | recipes`: what there is."""

import json

from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, out, print_json


def methods(format: FormatOption = Format.table) -> None:
    """List the methods with their fields: default, search range, equation, and the later stage that they act from."""
    from raylt.hyper import range_of
    from raylt.methods import METHODS
    listing = {name: {"paper": method.paper, "problems": list(method.problems), "fields": {
        field: {"default": info.default, "range": str(range_of(info)), "source": info.description,
                "stage": method.stage_of(field)}
        for field, info in method.model_fields.items()}} for name, method in METHODS.items()}
    if format is Format.json:
        print_json(listing)
        return
    for name, entry in listing.items():
        out.print(f"[bold]{name}[/bold]  {entry['paper']}; {' and '.join(entry['problems'])}")
        table = _plain("field", "default", "range", "what")
        table.columns[0].no_wrap = True
        for field, its in entry["fields"].items():
            stage = f" (from {its['stage']} on)" if its["stage"] else ""
            table.add_row(field, str(its["default"]), its["range"], its["source"] + stage)
        if entry["fields"]:
            out.print(table)
        out.print()


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
        table.add_row(key, default, entry["allowed"].replace("[", "\\["), entry["what"])
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
