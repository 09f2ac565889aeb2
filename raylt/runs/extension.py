"""`raylt resume RUN federation.rounds=300`: a run goes on beyond its last round, as a run of its own.

Its folder stays as it is; the longer run gets one beside it. That run's identity has the new number of rounds and names
the shorter one by its SHA-256, and the steps that both share are taken over under it, as `branch` takes over its own.
What comes out is what a run of so many rounds from the start would have given, so nothing that a shared round did may
have depended on how many there would be.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path

from raylt.config import Config, differences, load, settled
from raylt.core import confusions
from raylt.core.confusions import Matrices
from raylt.core.method import Method
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import resolve
from raylt.runs.callbacks import Callback
from raylt.runs.descent import Report, descend
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind

ROUNDS = "federation.rounds"
STAGE = "rounds"            # in the new run's record of its parent


def resume(run: Run | Path | str, overrides: Sequence[str] = (), *, fleet: FleetKind = "ray",
           address: str | None = None, quiet: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
    """`Run.resume`; with another number of rounds, the longer run that begins as this one did.

    Raises:
        CheckpointError: as of `Run.resume`.
        ConfigError: the run cannot be longer, see `extend`.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    config = load(run.folder / "config.yaml", overrides)
    if [key for key, *_ in differences(settled(run.config), settled(config))] != [ROUNDS]:
        return run.resume(overrides, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)
    folder = run.folder.parent / f"{run.name}-{config.federation.rounds}"
    return extend(run, config, folder, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)


def extend(run: Run, config: Config, folder: Path, *, fleet: FleetKind = "ray", address: str | None = None,
           quiet: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
    """Goes on with a run to a larger number of rounds, in a new folder.

    Args:
        config: the run's own with more rounds.

    Raises:
        ConfigError: there are not more, or what was done so far depended on how many there would be.
        CheckpointError: the run committed nothing, or the folder exists.
    """
    check_extension(run, config.federation.rounds)
    saved, setup = run.checkpoint(), resolve(config)
    if saved is None:
        raise CheckpointError(f"{run.folder}: has no checkpoint that can be read; run it again with {ROUNDS}="
                              f"{config.federation.rounds}")

    def judge_again(report: Report) -> None:
        if report["step"] == run.config.federation.rounds:          # it was judged as the last is
            _as_any_round(report, config, setup.method, run, folder)

    return descend(run, config, setup, folder, STAGE, saved, judge_again, fleet=fleet, address=address, quiet=quiet,
                   callbacks=callbacks)


def check_extension(run: Run, rounds: int) -> None:
    """Raises a ConfigError where a run cannot go on to so many rounds, and says why."""
    before, method, local = run.config.federation.rounds, run.method, run.config.local
    asked = f"{ROUNDS} = {rounds}"
    if rounds < before:
        raise ConfigError(f"{asked}: {run.folder} has {before}; a run can be made longer, not shorter")
    if method.finishes:
        raise ConfigError(f"{asked}: {method.name} does something after the last round, which is round {before} here; "
                          "start a new run")
    if early := [name for name, after in method.stages(before).items() if after < before]:
        raise ConfigError(f"{asked}: {method.name} begins its stage {early[0]} some rounds before the last, which is "
                          f"round {before} here; start a new run")
    if local.schedule != "step":
        raise ConfigError(f"{asked}: with local.schedule = {local.schedule} the rate of every round depends on how "
                          "many there are; start a new run")
    if _reads_rounds(method):
        raise ConfigError(f"{asked}: rounds of {method.name} depend on how many there are (it reads their number); "
                          "start a new run")


def _reads_rounds(method: Method) -> bool:
    kinds = [kind for kind in type(method).__mro__ if issubclass(kind, Method) and kind is not Method]
    # of a method of one's own all of its file: a function beside it may read the number
    places = [kind if kind.__module__.startswith("raylt.") else inspect.getmodule(kind) or kind for kind in kinds]
    try:
        return any(word in inspect.getsource(place) for place in places
                   for word in ("server.rounds", "federation.rounds"))
    except (OSError, TypeError):        # typed at a prompt: nobody knows
        return True


def _as_any_round(report: Report, config: Config, method: Method, run: Run, folder: Path) -> None:
    """Takes out of the report of a last round what no other would have been judged by."""
    step, every = report["step"], config.evaluation
    shared_due = step % every.every == 0
    own_models = method.personal or config.federation.batchnorm == "local"
    clients_due = every.personal > 0 and step % every.personal == 0 if own_models else shared_due
    dropped = ["quality", "others"]
    if not own_models or not clients_due:
        dropped.append("by_client")
    if not shared_due:
        dropped += ["global_accuracy", "global_macro", "global_miou"]
    if not clients_due:
        dropped += ["accuracy", "macro", "miou", "groups", "clients"]
        report["figures"] = {name: value for name, value in report["figures"].items() if name != "validation"}
    report["figures"] = {name: value for name, value in report["figures"].items() if name != "new_clients"}
    report |= dict.fromkeys(dropped)
    if not report.get("confusion"):
        return
    kept = run.matrices(step)
    of_clients = (kept.clients, kept.own) if clients_due else ({}, {})
    kept = Matrices(kept.shared if shared_due else None, *of_clients)
    report["confusion"] = kept.sha256 if kept else None
    if kept:
        confusions.write(folder, step, kept)
    else:
        confusions.remove(folder, step)
