"""What a method asks of its clients, measured on a tiny run: what they send, bytes, passes over their samples."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from raylt.config import Config
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.method import Method
from raylt.core.server import Server, Stages
from raylt.core.setup import Setup
from raylt.data.maps import class_counts
from raylt.data.samples import Samples
from raylt.data.split import Split
from raylt.data.task import Shard, Task
from raylt.models import ModelFactory

CPU = torch.device("cpu")
EACH, CLIENTS = 2, 2            # images of each class at a client, and clients
# fields that say only how long something is computed on features; calls do not depend on them
SHORT: dict[str, Any] = {"epochs": 1, "synthesis_steps": 1, "matching_steps": 1}
UNTAUGHT: dict[str, dict[str, Any]] = {         # methods whose teacher would have to be fetched, without it
    "fedsm": {"teacher": "none"}, "clip2fl": {"kd": 0, "contrast": 0}}
WHEN = ("join", "round", "finish")


@dataclass
class Call:
    """A client function, as it is called at one client.

    Attributes:
        when: "join", "round" or "finish".
        name: of the function.
        sends: the parts of its reply, and what the server sees of each: mean, total or each.
        up, down: bytes of the reply and of the message.
        trained, read: passes over the client's samples with activations kept for a gradient, and without, where
            local.epochs is 1.
    """

    when: str
    name: str
    sends: dict[str, str] = field(default_factory=dict)
    up: float = 0.0
    down: float = 0.0
    trained: float = 0.0
    read: float = 0.0


def measure(method: Method, factory: ModelFactory, shape: tuple[int, int, int], classes: int, cut: bool = False
            ) -> list[Call]:
    """The calls of a method at one client: before the first round, in a round, and after the last.

    Args:
        method: fields of it that say only how long something is computed may be shortened here, see SHORT and UNTAUGHT.
        factory: of the model.
        shape: height, width and channels of an image.
        classes: C.
        cut: ends the last phase where the server begins a stage that it times: of a method that asks nobody after it.
    """
    kind = type(method)
    short = {name: value for name, value in SHORT.items() if name in kind.model_fields}
    method = kind(**method.model_dump() | short | UNTAUGHT.get(method.name, {}))
    task = _task(shape, classes)
    config = Config.model_validate({"method": {"name": method.name, **method.model_dump()}, "local": {
        "batch": EACH * classes, "epochs": 1}, "federation": {"rounds": 1}, "data": {"clients": CLIENTS}})
    setup = Setup(config, method, factory, None)
    with _counted_passes() as passes:
        fleet = _Fleet(config, task, _Host(passes, setup, task.facts, task.test, CPU))
        server = Server(config, task.facts, setup.new_model(task.facts), CPU, method.server_optimiser(),
                        Samples(task.test, task.facts, CPU))
        calls: list[Call] = []
        steps = [method.start, method.round, *([method.finish] if method.finishes else [])]
        for number, (when, step) in enumerate(zip(WHEN, steps, strict=False)):
            server.round, server.stages = number, _Cut() if when == "finish" and cut else Stages()
            fleet.begin(number)
            passes.counts.clear()
            with suppress(_OnItsOwn):
                step(server, fleet)
            calls += _calls(when, fleet, passes, EACH * classes)
    return calls


def _calls(when: str, fleet: "_Fleet", passes: "_Passes", samples: int) -> Iterator[Call]:
    """What the ledger and the count of passes say of a step; of joining only where something is done."""
    for name, traffic in fleet.ledger.traffic.items():
        trained, read = (count / samples / traffic.replies for count in passes.counts.get(name, (0, 0)))
        if when != "join" or traffic.up or trained or read:
            yield Call(when, name, fleet.sends[name], traffic.up / traffic.replies, traffic.down / traffic.replies,
                       trained, read)


class _OnItsOwn(Exception):
    """What the server does now, it does without clients."""


class _Cut(Stages):
    def time(self, name: str) -> Any:
        raise _OnItsOwn


class _Passes:
    """Images that went through the first layer of a client's encoder, or of a copy of it, by function."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        self.call: str | None = None

    def see(self, module: nn.Module, inputs: Any) -> None:
        if self.call is None or not getattr(module, "counted", False):
            return
        trained, read = self.counts.get(self.call, (0, 0))
        with_gradient = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        n = len(inputs[0])
        self.counts[self.call] = (trained + n, read) if with_gradient else (trained, read + n)


@contextmanager
def _counted_passes() -> Iterator[_Passes]:
    passes = _Passes()
    handle = register_module_forward_pre_hook(passes.see)
    try:
        yield passes
    finally:
        handle.remove()


class _Host(Host):
    def __init__(self, passes: _Passes, *args: Any):
        super().__init__(*args)
        self._passes = passes
        first = next(layer for layer in self.model.encoder.modules() if not list(layer.children()))
        first.counted = True                # pyright: ignore[reportArgumentType]     # copies of the model have it too

    def run(self, fn: Any, message: Any, round: int, id: int, shard: Shard | None, private: Any) -> Any:
        self._passes.call = getattr(fn, "__name__", "call")
        try:
            return super().run(fn, message, round, id, shard, private)
        finally:
            self._passes.call = None


class _Fleet(LocalFleet):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sends: dict[str, dict[str, str]] = {}          # by client function, its parts and their reductions

    def ask(self, fn: Any, cohort: Any, message: Any, weights: Any = None, /, **parts: Any) -> Any:
        self.sends[getattr(fn, "__name__", "call")] = {name: part.kind for name, part in parts.items()}
        return super().ask(fn, cohort, message, weights, **parts)


def _task(shape: tuple[int, int, int], classes: int) -> Task:
    rng = np.random.default_rng(0)

    def shard(each: int) -> Shard:
        y = np.repeat(np.arange(classes), each).astype(np.int64)
        return Shard(rng.integers(0, 256, (len(y), *shape)).astype(np.uint8), y)

    shards = tuple(shard(EACH) for _ in range(CLIENTS))
    rows = tuple(np.arange(len(shards[0])) + k * len(shards[0]) for k in range(CLIENTS))
    return Task("tiny", tuple(map(str, range(classes))), shape, (0.5,) * shape[2], (0.25,) * shape[2],
                np.stack([class_counts(s.labels(), classes) for s in shards]), ("many",) * classes, shards, shard(1),
                Split(rows, "0" * 64, "tiny", 1.0, "by_hand", 1.0, 0))
