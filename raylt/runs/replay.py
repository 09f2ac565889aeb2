"""`raylt debug`: one client's call of a run again, in this process, where a debugger and prints work."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core import checkpoint
from raylt.core.client import ClientFunction, Message, Reply
from raylt.core.fleet import Answer, Arrived
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.schema import Schema
from raylt.core.wire import Unusable
from raylt.data.task import Task
from raylt.errors import CheckpointError, ClientError, ConfigError
from raylt.runs import provenance
from raylt.runs.here import computed_on, one_thread, open_here
from raylt.runs.run import Run

DeviceKind = Literal["cpu", "cuda"]


@dataclass
class Replayed(Exception):
    """What came of the call."""

    function: str
    seconds: float
    reply: Reply

    def entries(self) -> list[tuple[str, str, str]]:
        """Path, kind and range of each part of the reply."""
        return [(path, *_describe(leaf)) for path, leaf in tree.leaves(self.reply.tree)]


class OneClient(LocalFleet):
    """Takes a round up to the call that is asked for; calls before it are answered by all clients, as they were."""

    def __init__(self, config: Config, task: Task, host: Host, round: int, client: int, function: str | None):
        super().__init__(config, task, host)
        self._wanted = round, client, function

    def _answers(self, fn: ClientFunction, ids: list[int], message: Message, enough: int,
                 usable: Callable[[int, Arrived], bool], sums: Schema | None) -> Iterator[Answer]:
        round, client, function = self._wanted
        name = getattr(fn, "__name__", "call")
        if self.round != round or client not in ids or function not in (None, name):
            return super()._answers(fn, ids, message, enough, usable, sums)
        private = next((state for _, state in self.private_states([client])), None) if client in self._private else None
        start = time.perf_counter()
        reply, _ = self._host.run(fn, message, self.round, client, self._shards[client], private)
        if isinstance(reply, Unusable):
            raise ClientError(client, round, name, f"reply rejected: {reply.fault}")
        raise Replayed(name, time.perf_counter() - start, reply)


def replay(run: Run, round: int, client: int, function: str | None, device: DeviceKind | None = None) -> Replayed:
    """The first call of a client in a round, or the one of `function`; what it raises is raised here.

    Args:
        round: 1..R, R + 1 for what the method does after the last one, 0 for how clients join.
        device: instead of resources.device; needed where the run was made on another kind than is here.

    Raises:
        CheckpointError: the checkpoint before that round is no longer there.
        ConfigError: the client was not asked, or the kind of device is another.
    """
    saved, checkpoints = None, run.folder / "checkpoints"
    if round > 1:
        kept = checkpoint.steps(checkpoints)
        if round - 1 not in kept:
            there = ", ".join(str(step + 1) for step in [0, *kept])
            raise CheckpointError(f"{run.folder}: the checkpoint after round {round - 1} is not kept; rounds that can "
                                  f"be replayed: {there}; output.keep={run.config.federation.rounds} keeps all")
        saved = run.checkpoint_after(round - 1)

    def fleet(config: Config, task: Task, host: Host) -> OneClient:
        return OneClient(config, task, host, round, client, function)

    setup = run.setup if device is None else computed_on(run.setup, device)
    with one_thread():              # as the server does: the same bits
        experiment = open_here(setup, run.task, run.folder, saved, fleet)
        provenance.check_device(run.folder, setup.config, experiment.describe())
        try:
            if not experiment.done:
                experiment.step()
        except Replayed as replayed:
            return replayed
    called = f"not called with {function}" if function else "not asked"
    raise ConfigError(f"--client {client}: {called} in round {round}; metrics.jsonl names the calls of each round")


def _describe(leaf: Any) -> tuple[str, str]:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, f"{leaf}"
    kind = f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.")
    if leaf.numel() == 0:
        return kind, "empty"
    values = leaf.double()
    bad = int((~torch.isfinite(values)).sum())
    return kind, f"{values.min():.4g} .. {values.max():.4g}" + (f", {bad} not finite" if bad else "")
