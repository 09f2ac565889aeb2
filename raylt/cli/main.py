"""The command line: raylt run | resume | branch | tune | study | compare | report | reproduce | verdicts | ls |
follow | plot | export | predict | evaluate | check | verify | attack | data | methods | settings | recipes | plan |
debug | doctor. Exit code 2 for input that cannot be used, 1 for a failed run."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from raylt.cli import plot
from raylt.cli.attack import attack
from raylt.cli.check import check
from raylt.cli.cluster import doctor, plan
from raylt.cli.compare import compare, report
from raylt.cli.data import data
from raylt.cli.listings import methods, recipes, settings
from raylt.cli.models import evaluate, export, predict
from raylt.cli.options import err, out
from raylt.cli.page import page
from raylt.cli.reproduce import reproduce, verdicts
from raylt.cli.runs import branch, debug, resume, run
from raylt.cli.study import follow, ls, study
from raylt.cli.tune import tune
from raylt.cli.verify import verify
from raylt.errors import RayltError, one_line
from raylt.signals import interrupt_on_sigterm

EXAMPLES = "\n\n".join(("Examples:", "raylt run data.source=cifar10 method=sfd method.gamma=0.1 seed=1",
                        "raylt run recipe:demo method=fedavg --fleet local --name plain",
                        "raylt run data.source=folder:PATH method=fedper model=torchvision:resnet18 weights=imagenet"))
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command(epilog=EXAMPLES)(run)
for command in (resume, branch, tune, study, compare, report, page, reproduce, verdicts, ls, follow):
    app.command()(command)
app.add_typer(plot.app, name="plot")
for command in (export, predict, evaluate, check, verify, attack, data, methods, settings, recipes, plan, debug,
                doctor):
    app.command()(command)
ClickException: Any = typer.BadParameter.__mro__[2]     # of the copy of click that typer may bring


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version
        out.print(f"raylt {version('raylt')}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                                  help="Say which version this is.")] = False,
            plugin: Annotated[list[Path] | None, typer.Option(
                "--plugin", metavar="FILE", help="Bring methods, models, sources or augmentations of one's own in a "
                "Python file; may stand anywhere and be given several times.")] = None,
            debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from; may stand anywhere.")
                             ] = False) -> None:
    """Federated learning for non-IID, long-tailed data, on Ray."""
    if plugin:
        from raylt.registry import load_plugin
        for file in plugin:
            load_plugin(file)


def _plugins_first(arguments: list[str]) -> list[str]:
    """`run --plugin FILE ...` as `--plugin FILE run ...`: whatever a command names, its code comes before."""
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


def main() -> None:
    """The entry point: every error that raylt foresees is one line, and `--debug` shows where it came from."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments          # wherever it stands
    code = 0
    interrupt_on_sigterm()
    try:
        code = app(_plugins_first([a for a in arguments if a != "--debug"]), standalone_mode=False) or 0
    except ClickException as error:
        if message := error.format_message():           # none where the help was printed
            reason = message.replace("Value error, ", "").rstrip(".")
            err.print(f"error: {reason}; raylt --help shows what there is", soft_wrap=True)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, RayltError)
        err.print(f"error: {error}" if known else f"error: {one_line(error)}; --debug shows the traceback",
                  soft_wrap=True)
        code = error.exit_code if isinstance(error, RayltError) else 1
    if code == 130:                                     # typer makes Ctrl-C an exit
        err.print("stopped; to go on: raylt resume RUN, raylt tune --resume SEARCH, or the same raylt study",
                  soft_wrap=True)
    sys.exit(code)
