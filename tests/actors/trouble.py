"""Methods and client functions that fail on purpose, in a module that actors can import by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.loss_terms import Objective
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedprox import FedProx
from raylt.models.split import SplitModel, StateDict

IDS = [0, 1, 2, 3, 5]  # the clients of tiny_task that hold samples
LARGE = torch.empty(2**18, device="meta")  # a part of a mebibyte


def configure(**federation: Any) -> Config:
    return Config.model_validate(
        {"method": "fedavg", "data": {"clients": 6}, "local": {"batch": 8}, "federation": {"rounds": 2} | federation}
    )


class Unable(FedProx):
    """A method whose clients raise in every training."""

    name: ClassVar[str] = "unable"

    def train(self, client: Client, message: Message) -> Reply:
        raise RuntimeError("no kernel for this device")


class Private(FedProx):
    """FedProx whose classifier stays with the client, which counts its calls; `victims` die in their first `times`
    trainings."""

    name: ClassVar[str] = "private"
    victims: tuple[int, ...] = ()
    times: int = 1
    folder: str = ""

    def shared(self, model: SplitModel) -> StateDict:
        return {key: value for key, value in model.entries().items() if not key.startswith("classifier")}

    def train(self, client: Client, message: Message) -> Reply:
        if client.id in self.victims and first(self.folder, client.id, self.times):
            client.state["calls"] = torch.tensor([-1.0])  # this state must be lost with the process
            os.kill(os.getpid(), signal.SIGKILL)
        client.state["calls"] = client.state.get("calls", torch.zeros(1)) + 1
        return super().train(client, message)


class Unstackable(FedAvg):
    """FedAvg with a loss that each client can compute and a stack cannot, since only some clients have its penalty."""

    name: ClassVar[str] = "unstackable"
    stackable: ClassVar[bool] = True

    def objective(self, client: Client, message: Message) -> Objective:
        weights = list(client.model.parameters()) if client.id % 2 else []
        return lambda batch: F.cross_entropy(client.model(batch.x), batch.y) + sum(w.sum() for w in weights)


class Broken(Method):
    """A method that fails when a client builds it."""

    name: ClassVar[str] = "broken"

    def shared(self, model: SplitModel) -> StateDict:
        raise ValueError("no such thing\nas a shared model")


def first(folder: str, id: int, times: int = 1) -> bool:
    """Count an attempt of client `id`; return whether it is one of the first `times`."""
    attempts = len(list(Path(folder).glob(f"{id}-*")))
    Path(folder, f"{id}-{attempts}").write_text(str(os.getpid()))
    return attempts < times


def count(client: Client, message: Message) -> Reply:
    """Count the client's calls in its private state; reply with the count and the process id."""
    client.state["calls"] = client.state.get("calls", 0) + 1
    return client.reply(calls=client.state["calls"], pid=os.getpid())


def die(client: Client, message: Message) -> Reply:
    if client.id in message["victims"] and first(message["folder"], client.id, message["times"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return count(client, message)


def stall(client: Client, message: Message) -> Reply:
    """Sleep for `seconds` in a victim's first attempt, then count the call."""
    if client.id in message["victims"] and first(message["folder"], client.id):
        time.sleep(message["seconds"])
    return count(client, message)


def stall_until_released(client: Client, message: Message) -> Reply:
    """Let a victim wait until its folder has the file "released", at most a minute; then count the call."""
    end = time.monotonic() + 60
    while client.id in message["victims"] and not Path(message["folder"], "released").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"client {client.id} was not released")
        time.sleep(0.02)
    return count(client, message)


def spoil(client: Client, message: Message) -> Reply:
    return client.reply(x=torch.tensor([float("nan") if client.id in message["victims"] else 1.0]))


def fail(client: Client, message: Message) -> Reply:
    raise ValueError(f"client {client.id} has\nbad luck")


def leave(client: Client, message: Message) -> Reply:
    raise SystemExit(3)


def half(client: Client, message: Message) -> Reply:
    """Reply with a type that numpy lacks, so that the reply cannot be sent."""
    return client.reply(x=torch.ones(1, dtype=torch.bfloat16))


def fail_each_fifth(client: Client, message: Message) -> Reply:
    """Raise at every fifth client."""
    if client.id % 5 == 0:
        raise ValueError("no luck")
    return client.reply(id=client.id)


def flaky(client: Client, message: Message) -> Reply:
    """Raise in the first attempt of client 70; send infinities from client 140."""
    if client.id == 70 and first(message["folder"], client.id):
        raise ValueError("no luck")
    client.state["calls"] = client.state.get("calls", 0) + 1
    x = torch.randn(5, generator=torch.Generator().manual_seed(client.id))
    return client.reply(x=x / 0 if client.id == 140 else x)


def scatter(client: Client, message: Message) -> Reply:
    """Reply with numbers of so different sizes that the last bits of their float64 sum depend on the order."""
    generator = torch.Generator().manual_seed(client.id)
    return client.reply(x=torch.randn(8, generator=generator) * 10.0 ** torch.randint(-6, 7, (8,), generator=generator))


def scatter_large(client: Client, message: Message) -> Reply:
    """Reply as `scatter` does, with a mebibyte of numbers; count the call in the client's private state."""
    client.state["calls"] = client.state.get("calls", 0) + 1
    generator = torch.Generator().manual_seed(client.id)
    sizes = 10.0 ** torch.randint(-9, 4, LARGE.shape, generator=generator)  # short enough for sums (robust/outliers.py)
    return client.reply(x=torch.randn(LARGE.shape, generator=generator) * sizes)


def die_once(folder: str, server: int, part: torch.Tensor) -> None:
    """A condition on a part that ends the first process that checks it, unless that is the server's process."""
    if os.getpid() == server:
        return
    try:
        Path(folder, "died").touch(exist_ok=False)  # of two processes that check at the same time, only one succeeds
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
