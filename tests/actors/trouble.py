"""Methods and client functions that make trouble; a module of its own, since actors import it by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import torch

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.methods.fedprox import FedProx
from raylt.models.split import Params, SplitModel

IDS = [0, 1, 2, 3, 5]  # of tiny_task's clients, those that hold samples


def configure(**federation: Any) -> Config:
    return Config.model_validate(
        {"method": "fedavg", "data": {"clients": 6}, "local": {"batch": 8}, "federation": {"rounds": 2} | federation}
    )


class Private(FedProx):
    """Its classifier stays with the client, which also counts its calls. The `victims` die as they train, the first
    `times` times."""

    name: ClassVar[str] = "private"
    victims: tuple[int, ...] = ()
    times: int = 1
    folder: str = ""

    def shared(self, model: SplitModel) -> Params:
        return {key: value for key, value in model.entries().items() if not key.startswith("classifier")}

    def train(self, client: Client, message: Message) -> Reply:
        if client.id in self.victims and first(self.folder, client.id, self.times):
            client.state["calls"] = torch.tensor([-1.0])  # must be lost with the process
            os.kill(os.getpid(), signal.SIGKILL)
        client.state["calls"] = client.state.get("calls", torch.zeros(1)) + 1
        return super().train(client, message)


class Broken(Method):
    """Its constructor at a client fails."""

    name: ClassVar[str] = "broken"

    def shared(self, model: SplitModel) -> Params:
        raise ValueError("no such thing\nas a shared model")


def first(folder: str, id: int, times: int = 1) -> bool:
    """Whether this is one of the first `times` attempts of client `id`; counts it."""
    attempts = len(list(Path(folder).glob(f"{id}-*")))
    Path(folder, f"{id}-{attempts}").write_text(str(os.getpid()))
    return attempts < times


def count(client: Client, message: Message) -> Reply:
    """What a client remembers: the number of its calls."""
    client.state["calls"] = client.state.get("calls", 0) + 1
    return client.reply(calls=client.state["calls"], pid=os.getpid())


def die(client: Client, message: Message) -> Reply:
    if client.id in message["victims"] and first(message["folder"], client.id, message["times"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return count(client, message)


def stall(client: Client, message: Message) -> Reply:
    """The victims take `seconds` in their first attempt."""
    if client.id in message["victims"] and first(message["folder"], client.id):
        time.sleep(message["seconds"])
    return count(client, message)


def spoil(client: Client, message: Message) -> Reply:
    return client.reply(x=torch.tensor([float("nan") if client.id in message["victims"] else 1.0]))


def fail(client: Client, message: Message) -> Reply:
    raise ValueError(f"client {client.id} has\nbad luck")


def leave(client: Client, message: Message) -> Reply:
    raise SystemExit(3)


def half(client: Client, message: Message) -> Reply:
    """A type that numpy lacks, so that the reply cannot be sent."""
    return client.reply(x=torch.ones(1, dtype=torch.bfloat16))


def fail_each_fifth(client: Client, message: Message) -> Reply:
    """Raises at every fifth client."""
    if client.id % 5 == 0:
        raise ValueError("no luck")
    return client.reply(id=client.id)


def flaky(client: Client, message: Message) -> Reply:
    """Client 70 raises in its first attempt, 140 sends what is not finite."""
    if client.id == 70 and first(message["folder"], client.id):
        raise ValueError("no luck")
    client.state["calls"] = client.state.get("calls", 0) + 1
    x = torch.randn(5, generator=torch.Generator().manual_seed(client.id))
    return client.reply(x=x / 0 if client.id == 140 else x)


def scatter(client: Client, message: Message) -> Reply:
    """Numbers of so many sizes that float64 sums of them, in another order, end in other bits."""
    generator = torch.Generator().manual_seed(client.id)
    return client.reply(x=torch.randn(8, generator=generator) * 10.0 ** torch.randint(-6, 7, (8,), generator=generator))
