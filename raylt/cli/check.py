"""The command `raylt check`: test a method against the contract that all methods meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raylt.cli.options import Format, FormatOption, err, out, print_json
from raylt.errors import ConfigError

if TYPE_CHECKING:
    from raylt.contract.checks import Result


def check(
    what: Annotated[
        str,
        typer.Argument(metavar="FILE | METHOD", help="Python file with your own methods, or the name of a method."),
    ],
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=value ...]",
            help="Fields to check the method with, such as fewer steps to save time.",
        ),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Check a method against the contract of all methods, on a tiny task; stop at the first failure."""
    from raylt.contract.checks import run_checks
    from raylt.contract.fields import fields_without_effect
    from raylt.registry import is_plugin

    results: list[Result] = []
    methods = _methods(what, fields or [])
    for result in (each for method in methods for each in run_checks(method)):
        results.append(result)
        if err.is_terminal:
            err.print(f"{result.case}: {result.what}", soft_wrap=True)
        if result.fault is not None:  # one mistake also breaks most later checks
            break
    broken = next((result for result in results if result.fault is not None), None)
    if format is Format.json:
        print_json([{"case": r.case, "what": r.what, "fault": r.fault} for r in results])
    elif broken is None:
        out.print(f"{len(results)} of {len(results)} checks passed")
    else:
        out.print(
            f'{broken.case} fails check {len(results)}, "{broken.what}": {broken.fault}. Later checks were not run.',
            soft_wrap=True,
        )
    if broken is not None:
        raise typer.Exit(1)
    for method in methods:
        if idle := is_plugin("method", method.name) and fields_without_effect(method):
            err.print(
                f"{method.name}: other values of {', '.join(idle)} change nothing on the tiny task of the checks. If "
                "they should, see that the method reads them.",
                soft_wrap=True,
            )


def _methods(what: str, fields: Sequence[str]) -> list[Any]:
    from raylt.config import load
    from raylt.methods import METHODS, make_method
    from raylt.registry import load_plugin

    if what.endswith(".py"):
        names = [plugin.name for plugin in load_plugin(Path(what)) if plugin.kind == "method"]
        if not names:
            raise ConfigError(
                f"{what}: defines no method. Define a subclass of raylt.Method with a `name`.",
                code="plugin.no-method",
                path=what,
            )
    else:
        names = [what]
    if what not in METHODS and not what.endswith(".py"):
        make_method({"name": what})  # raises an error that lists the methods
    for field in fields:
        if "=" not in field:
            raise ConfigError(
                f"FIELD: does not have the form FIELD=value ({field}). To check one method of a file, give "
                f"raylt check --plugin {what if what.endswith('.py') else 'FILE'} {field}.",
                code="config.malformed",
                key="FIELD",
                value=field,
            )
    given = [f"method.{field}" for field in fields]
    return [make_method(load(None, [f"method={name}", *given]).method) for name in names]
