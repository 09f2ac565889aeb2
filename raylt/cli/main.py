"""The command line `raylt`. Exit code 2 means unusable input, exit code 1 a failed run."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from raylt.cli.attack import attack
from raylt.cli.check import check
from raylt.cli.cluster import doctor, plan
from raylt.cli.data import data
from raylt.cli.jobs import stop, submit
from raylt.cli.listings import methods, recipes, settings
from raylt.cli.models import evaluate, export, predict
from raylt.cli.new import new
from raylt.cli.options import err, out
from raylt.cli.runs import branch, debug, resume, run
from raylt.cli.searches.tune import tune
from raylt.cli.serve import serve
from raylt.cli.studies import plot
from raylt.cli.studies.compare import compare, rank, report
from raylt.cli.studies.page import page
from raylt.cli.studies.reproduce import reproduce, verdicts
from raylt.cli.studies.study import follow, ls, study
from raylt.cli.verify import verify
from raylt.config.reading import reason_of
from raylt.disk import FULL
from raylt.errors import ConfigError, DiskFull, RayltError, abrupt_exits_raised, at_the_shell, no_exit, user_fault
from raylt.signals import STOPPED, guard_output

EXAMPLES = "\n\n".join(
    (
        "Examples:",
        "raylt run data.source=cifar10 method=sfd method.gamma=0.1 seed=1",
        "raylt run recipe:demo method=fedavg --fleet local --name plain",
        "raylt run data.source=folder:PATH method=fedper model=torchvision:resnet18 weights=imagenet",
    )
)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
# Panels of `raylt --help`, in the order of display.
PANELS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {
    "Run": (run, resume, stop, branch, tune, submit),
    "Study": (study, compare, rank, report, page, reproduce, verdicts),
    "Look": (ls, follow, plot.app, data, methods, settings, recipes, new),
    "Model": (export, predict, evaluate, serve),
    "Check and operate": (plan, check, verify, attack, debug, doctor),
}


def _register_commands() -> None:
    for panel, commands in PANELS.items():
        for command in commands:
            if isinstance(command, typer.Typer):
                app.add_typer(command, name="plot", rich_help_panel=panel)
            else:
                # pass all words after the submitted command on to that command
                takes_all = {"allow_extra_args": True, "ignore_unknown_options": True} if command is submit else None
                epilog = EXAMPLES if command is run else None
                app.command(rich_help_panel=panel, epilog=epilog, context_settings=takes_all)(command)


_register_commands()
CONTINUED = ("study", "reproduce")  # commands that continue their runs when they are given again
USAGE = "command.usage"
UNFORESEEN = "command.failed"
ClickException: Any = typer.BadParameter.__mro__[2]  # from the copy of click that typer may include


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out.print(f"raylt {version('raylt')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            "--plugin",
            metavar="FILE",
            help="Register methods, models, sources or augmentations from a Python file. May be repeated, and given "
            "anywhere.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors. May be given anywhere.")] = False,
) -> None:
    """Federated learning for non-IID, long-tailed data, on Ray."""
    if plugin:
        from raylt.registry import load_plugin

        for file in plugin:
            load_plugin(file)


def _plugins_first(arguments: list[str]) -> list[str]:
    """Move every --plugin option before the command, so that plugins are loaded before the command runs."""
    plugins, others, waiting = [], [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--plugin" and waiting:
            plugins += [argument, waiting.pop(0)]
        elif argument.startswith("--plugin="):
            plugins += ["--plugin", argument.removeprefix("--plugin=")]
        else:
            others.append(argument)
    return plugins + others


def _command(arguments: list[str]) -> str | None:
    """Return the name of the command among the arguments, or None if there is none."""
    words = _plugins_first(arguments)
    pairs = zip(["", *words], words, strict=False)
    return next((word for before, word in pairs if before != "--plugin" and not word.startswith("-")), None)


def _usage(error: Any, message: str) -> str:
    """Return the error message for a command's invalid words: the problem and the remedy.

    Args:
        error: Click's error. If a number has the wrong type or range, its cause is pydantic's error, which has the
            number.
        message: Click's message.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "raylt"
    remedy = f"Give what {command} --help lists."
    if isinstance(error.__cause__, ValidationError):
        mistake = error.__cause__.errors()[0]
        if mistake["type"] != "value_error":
            limits = {">=": error.param.min, "<=": error.param.max}
            bounds = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None)
            option = error.param.get_error_hint().strip("'")
            value = mistake["input"]
            reason = "is not a number" if str(value).casefold() == "nan" else reason_of(mistake)
            return f"{option}: {reason} ({value}). {f'Give a number {bounds}.' if bounds else remedy}"
    reason = " ".join(message.replace("Value error, ", "").split())
    return f"{reason}{'' if reason.endswith(('.', '?')) else '.'} {remedy}"


def _check_current_folder() -> None:
    """Raise ConfigError if the current folder was removed, in which torch cannot load its libraries."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"current folder: cannot be used ({error.strerror}). Go to a folder that exists, as in cd ~.",
            code="file.not-found",
        ) from None


def main() -> None:
    """Run the command line.

    An error is printed as one line with its code, or as a traceback with `--debug`.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments  # at any position
    code = 0
    guard_output()
    try:
        with at_the_shell(), no_exit(), abrupt_exits_raised():  # user code may call sys.exit
            _check_current_folder()
            code = app(_plugins_first([a for a in arguments if a != "--debug"]), standalone_mode=False) or 0
            if sys.stdout is not None:
                sys.stdout.flush()  # so that its errors are raised here
    except ClickException as error:
        if message := error.format_message():  # empty if the help was printed
            usage = RayltError(_usage(error, message), code=USAGE)  # shortens long words
            err.print(f"error [{USAGE}]: {usage}", soft_wrap=True)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = STOPPED
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:
            # an operating system error about a path that the user gave
            path = os.fsdecode(error.filename)
            if error.errno in FULL:
                error = DiskFull(Path(path), error.errno == errno.EFBIG)
            else:
                error = ConfigError(
                    f"{path}: {error.strerror}. Check the path, its permissions and the space left.",
                    code="file.unreadable",
                    path=path,
                )
        if isinstance(error, RayltError):
            err.print(f"error [{error.code}]: {error}", soft_wrap=True)
            code = error.exit_code
        else:
            err.print(f"error [{UNFORESEEN}]: {user_fault(error)}. Show the traceback with --debug.", soft_wrap=True)
            code = 1
    if code == STOPPED:  # typer converts Ctrl-C to an exit
        err.print("stopped; continue with the same command" if _command(arguments) in CONTINUED else "stopped")
    sys.exit(code)
