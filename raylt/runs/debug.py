"""`raylt debug`: repeat one client's call of a run in this process, where debuggers and `print` work."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.device import one_thread
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.fleet import Answer, Arrived
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import Unusable
from raylt.data.task import Task
from raylt.errors import CheckpointError, ClientError, ConfigError, did_you_mean
from raylt.runs.export.artefact import choose_client
from raylt.runs.export.trained_model import names_of
from raylt.runs.folder import provenance
from raylt.runs.in_process import open_in_process, with_device
from raylt.runs.run import Run

DeviceKind = Literal["cpu", "cuda"]


@dataclass
class ReplayedCall(Exception):
    """The exception that ends a replayed round, with the reply and duration of the repeated client call."""

    function: str
    seconds: float
    reply: Reply

    def entries(self) -> list[tuple[str, str, str]]:
        """Return the path, type and range of each leaf in the reply."""
        return [(path, *_describe(leaf)) for path, leaf in tree.leaves(self.reply.tree)]


def replay(
    run: Run, round: int, client: int | str, function: str | None, device: DeviceKind | None = None
) -> ReplayedCall:
    """Repeat one call to a client in a round, by default the first, without catching exceptions.

    Args:
        run: The run.
        round: Round from 1 to R; R + 1 for the method's last phase, and 0 for the joining of clients.
        client: Id or name of the client.
        function: Name of the client function to call; None for the first call to the client in the round.
        device: Device to use instead of resources.device, if this machine does not have the run's kind of device.

    Raises:
        CheckpointError: The checkpoint before that round was not kept.
        ConfigError: The run has no such round, the client is unknown, it was not asked in the round, or this device is
            of another kind than the run's.
    """
    names = [(id, name) for id, name in enumerate(run.task.client_names) if run.task.sizes[id]]
    asked_id = choose_client(client, names, str(run.folder)) if isinstance(client, str) else client
    saved = _checkpoint_before(run, round)

    called: list[str] = []

    def fleet(config: Config, task: Task, host: ClientHost) -> ReplayFleet:
        return ReplayFleet(config, task, host, round, asked_id, function, called)

    setup = run.setup if device is None else with_device(run.setup, device)
    with one_thread():  # as in the server, for the same bits
        experiment = open_in_process(setup, run.task, run.folder, saved, fleet)
        provenance.check_device(run.folder, setup.config, experiment.describe())
        try:
            if not experiment.done:
                experiment.step()
        except ReplayedCall as call:
            return call
    if function is not None and called:
        raise _not_called(round, client, function, called)
    raise _not_asked(run, round, client)


def _not_called(round: int, client: int | str, function: str, called: Sequence[str]) -> ConfigError:
    """Return the error for a function that a client was not called with in a round, with functions that it was."""
    return ConfigError(
        f"--function: client {client} did not run this function in round {round} ({function}). "
        f"{did_you_mean(function, called)}Choose one of {', '.join(dict.fromkeys(called))}.",
        code="client.not-asked",
        key="--function",
        value=function,
        client=client,
        round=round,
    )


def _not_asked(run: Run, round: int, client: int | str) -> ConfigError:
    """Return the error for a client that was not called in a round, with clients that were."""
    listed = [report["participants"] for report in run.reports if report["step"] == round]
    asked = [(each, run.task.client_names[each]) for each in listed[0]] if listed else []
    remedy = f"Choose one of {names_of(asked)}" if asked else "Choose another round or client"
    return ConfigError(
        f"--client: the client was not asked in round {round} ({client}). {remedy}.",
        code="client.not-asked",
        key="--client",
        client=client,
        round=round,
    )


def _checkpoint_before(run: Run, round: int) -> Checkpoint | None:
    """Return the checkpoint that a round starts from, or None for the first round."""
    if round <= 1:
        return None
    kept = checkpoint.steps(run.folder / "checkpoints")
    committed = len(run.reports)
    # an unfinished run may have failed in the round after its last step
    last = committed if run.state == "done" else min(committed + 1, run.config.federation.rounds + run.method.finishes)
    rounds = [step + 1 for step in [0, *kept] if step < last]
    if round > last:
        raise ConfigError(
            f"--round: {run.folder} has no such round ({round}). Rounds that can be replayed: "
            f"{', '.join(map(str, rounds))}.",
            code="config.out-of-range",
            key="--round",
            value=round,
            rounds=rounds,
        )
    if round - 1 not in kept:
        raise CheckpointError(
            f"{run.folder}: the checkpoint after round {round - 1} was not kept. Rounds that can be replayed: "
            f"{', '.join(map(str, rounds))}; output.keep={run.config.federation.rounds} keeps all.",
            code="checkpoint.not-kept",
            path=str(run.folder),
            step=round - 1,
            rounds=rounds,
        )
    return run.checkpoint_after(round - 1)


class ReplayFleet(LocalFleet):
    """A fleet that repeats a round up to one client's call, makes the call and raises `ReplayedCall` with the reply."""

    def __init__(
        self,
        config: Config,
        task: Task,
        host: ClientHost,
        round: int,
        client: int,
        function: str | None,
        called: list[str],
    ):
        super().__init__(config, task, host)
        self._wanted = round, client, function
        self._called = called  # gets the names of the functions that the round calls the client with

    def _answers(
        self,
        fn: ClientFunction,
        ids: list[int],
        message: Message,
        enough: int,
        usable: Callable[[int, Arrived], bool],
        sums: Schema | None,
    ) -> Iterator[Answer]:
        round, client, function = self._wanted
        name = function_name(fn)
        if self.round == round and client in ids:
            self._called.append(name)
        if self.round != round or client not in ids or function not in (None, name):
            return super()._answers(fn, ids, message, enough, usable, sums)
        private = next((state for _, state in self.private_states([client])), None) if client in self._private else None
        start = time.perf_counter()
        reply, _ = self._host.run(fn, message, self.round, client, self._shards[client], private)
        if isinstance(reply, Unusable):
            raise ClientError(
                client,
                round,
                name,
                f"the reply is rejected: {reply.fault}. Correct what the function returns",
                code="reply.rejected",
            )
        raise ReplayedCall(name, time.perf_counter() - start, reply)


def _describe(leaf: Any) -> tuple[str, str]:
    """Describe a leaf of a reply by its type and its range of values."""
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, f"{leaf}"
    kind = f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
    if leaf.numel() == 0:
        return kind, "empty"
    values = leaf.double()
    not_finite = int((~torch.isfinite(values)).sum())
    text = f"{values.min():.4g} .. {values.max():.4g}"
    return kind, f"{text}, {not_finite} not finite" if not_finite else text
