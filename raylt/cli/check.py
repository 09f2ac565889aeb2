"""`raylt check`: whether a method keeps what every method keeps to."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from raylt.cli.options import Format, FormatOption, err, out, print_json
from raylt.errors import ConfigError

if TYPE_CHECKING:
    from raylt.contract.engine import Result


def check(what: Annotated[str, typer.Argument(metavar="FILE | METHOD", help="A Python file with methods of one's own, "
                                              "or a method's name.")],
          fields: Annotated[list[str] | None, typer.Argument(
              metavar="[FIELD=value ...]", help="Fields that the method is checked with, as those that decide how long "
              "it computes.")] = None, format: FormatOption = Format.table) -> None:
    """Check whether a method keeps to what every method keeps to, on a tiny problem; nothing is left behind."""
    from raylt.contract.engine import run_checks

    results: list[Result] = []
    for method in _methods(what, fields or []):
        for result in run_checks(method):
            results.append(result)
            if err.is_terminal:
                err.print(f"{result.case}: {result.what}", soft_wrap=True)
    short = [result for result in results if result.fault is not None]
    if format is Format.json:
        print_json([{"case": r.case, "what": r.what, "fault": r.fault} for r in results])
    else:
        table = Table("method", "what it keeps to", "what it does instead")
        for result in short:
            table.add_row(result.case, result.what, result.fault)
        if short:
            out.print(table)
        out.print(f"{len(results) - len(short)} of {len(results)} checks are kept")
    if short:
        raise typer.Exit(1)


def _methods(what: str, fields: Sequence[str]) -> list[Any]:
    from raylt.config import load
    from raylt.methods import METHODS, make_method
    from raylt.registry import load_plugin

    if what.endswith(".py"):
        names = [guest.name for guest in load_plugin(Path(what)) if guest.kind == "method"]
        if not names:
            raise ConfigError(f"{what}: defines no method (a subclass of raylt.Method with a `name`)")
    else:
        names = [what]
    if what not in METHODS and not what.endswith(".py"):
        make_method({"name": what})         # says what there is
    given = [f"method.{field}" for field in fields]
    return [make_method(load(None, [f"method={name}", *given]).method) for name in names]
