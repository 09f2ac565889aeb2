"""Run `raylt` with a method that pauses once at each stage of a run, so that a test can do harm there.

python faulty.py run method=faulty ...        in a process; Ray's workers learn the method by Ray's own hooks
"""

import gc
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import torch

from raylt.core.checkpoint import checkpoint
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.item_progress import report_steps
from raylt.core.fleet.reductions import mean
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.data.task import TaskSpec
from raylt.methods import METHODS
from raylt.models.split import SplitModel, StateDict
from raylt.tree import Tree

# the round in which the method pauses at each stage; one more round follows each
STAGES = {"train": 2, "upload": 4, "aggregate": 6, "checkpoint": 8, "evaluate": 10}
ROUNDS = 11
WAIT_S = 60.0
sync = checkpoint.sync


class Faulty(Method):
    """FedAvg whose models depend on private state, so that a lost or doubly used state shows in the weights."""

    name: ClassVar[str] = "faulty"
    folder: str = ""  # markers: <stage>-reached holds a process id, <stage>-go ends the pause
    # client 1 raises in round 2, sends NaN in round 3 and a wrong shape in round 4; client 0 hangs in round 5
    ill: bool = False

    def train(self, client: Client, message: Message) -> Reply:
        if client.id == 0 and self.folder:
            self._mark("client.pid")
        self._pause("train", client.round, client.id)
        reply = super().train(client, message)
        calls = client.state.get("calls", torch.zeros(1)) + 1
        client.state["calls"] = calls
        model = {key: value.clone() for key, value in reply.tree["model"].items()}
        first = min(key for key, value in model.items() if value.is_floating_point())
        model[first] += 1e-4 * calls.item()
        client.state["stage"] = float(client.round)
        if self.ill and client.id == 1:
            if client.round == 2:
                raise ValueError("no luck")
            if client.round == 3:
                model[first].fill_(float("nan"))
            if client.round == 4:
                model[first] = model[first][:0]
        if self.ill and client.id == 0 and client.round == 5:
            self._hang()
        return Reply(reply.weight, {"model": model, "loss": reply.tree["loss"]})

    def shared(self, model: SplitModel) -> StateDict:
        """Return the shared entries; a client calls this last, for its reply, so the stage "upload" pauses here."""
        if self.folder:
            round = Path(self.folder, "under-way")
            if round.exists():
                self._pause("upload", int(round.read_text()), 0)
        return super().shared(model)

    def round(self, server: Server, fleet: Fleet) -> None:
        if not self.folder:
            super().round(server, fleet)
            return
        with Path(self.folder, "rounds").open("a") as stream:
            stream.write(f"{server.round}\n")
        message = self.message(server)
        Path(self.folder, "under-way").write_text(str(server.round))
        checkpoint.sync = lambda path: (self._pause("checkpoint", server.round), sync(path))[1]
        got = fleet.ask(self.train, self.sample(server, fleet), message, model=mean, loss=mean)
        Path(self.folder, "under-way").unlink()
        self._pause("aggregate", server.round)
        server.step(got["model"])
        server.log(loss=got["loss"])

    def global_model(self, server: Server) -> SplitModel:
        self._pause("evaluate", server.round)
        return super().global_model(server)

    def _pause(self, stage: str, round: int, client: int = 0) -> None:
        if self.folder and STAGES[stage] == round and client == 0 and self._mark(f"{stage}-reached"):
            end = time.monotonic() + WAIT_S
            while time.monotonic() < end and not Path(self.folder, f"{stage}-go").exists():
                time.sleep(0.02)

    def _mark(self, name: str) -> bool:
        """Write this process's id to a marker file; return whether the marker is new."""
        file = Path(self.folder, name)
        known = file.exists()
        beside = file.with_name(f"{name}.{os.getpid()}")
        beside.write_text(str(os.getpid()))
        beside.replace(file)
        return not known

    def _hang(self) -> None:
        if os.environ.get("FAULTY_LOCAL"):
            raise ValueError("in one process nobody can wait for this")
        self._mark("hangs")
        time.sleep(WAIT_S)


class Crowded(Method):
    """Raises an out-of-memory error in a client actor that starts beside more than `fit` others."""

    name: ClassVar[str] = "crowded"
    paper: ClassVar[str] = "for tests"
    folder: str
    fit: int

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        crowd(Path(self.folder), self.fit)
        return base


def fill(client: Client, message: Message) -> Reply:
    """Raise an out-of-memory error as long as more than `message["fit"]` live processes have been here."""
    mark = Path(message["folder"], f"at-{os.getpid()}")
    mark.touch()
    time.sleep(0.3)
    full = len([file for file in mark.parent.glob("at-*") if _lives(file)]) > message["fit"]
    if full:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return client.reply(id=client.id)


def crowd(folder: Path, fit: int) -> None:
    """Raise a CUDA allocation error as long as more than `fit` live processes have been here."""
    folder.joinpath(f"at-{os.getpid()}").touch()
    time.sleep(0.3)
    if len([file for file in folder.glob("at-*") if _lives(file)]) > fit:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def fill_item(item: Tree) -> Tree:
    """Return the `x` of an item of server-side work, unless more than `item["fit"]` processes use the device."""
    crowd(Path(item["folder"]), item["fit"])
    return {"x": item["x"]}


def step_slowly(item: Tree) -> Tree:
    """Report five slow steps of an item of server-side work."""
    for step in range(1, 6):
        time.sleep(0.6)
        report_steps(step, 5)
    return item


def break_device(client: Client, message: Message) -> Reply:
    """Raise the error of a lost device in the victim's first call."""
    if client.id == message["victim"] and not Path(message["folder"], "broken").exists():
        Path(message["folder"], "broken").touch()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return client.reply(id=client.id)


def need_room(client: Client, message: Message) -> Reply:
    """Raise an out-of-memory error if the process still holds the data of other clients and `alone` is set."""
    others = [other for other in gc.get_objects() if isinstance(other, Client) and other.id != client.id]
    if message["alone"] and others:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return client.reply(id=client.id)


def _lives(file: Path) -> bool:
    return Path("/proc", file.name.removeprefix("at-")).exists()


def sleep(client: Client, message: Message) -> Reply:
    time.sleep(message["seconds"].get(str(client.id), 0.0))
    return client.reply(id=client.id)


def register() -> None:
    """Register the method; Ray calls this in every worker process."""
    METHODS["faulty"] = Faulty


def hook(runtime_env: dict | None) -> dict:
    """Have Ray call `register` in its workers; `ray.init` calls this function."""
    return (runtime_env or {}) | {"worker_process_setup_hook": "faulty.register"}


class Holds:
    """An actor that only holds its resources."""


if __name__ == "__main__":
    import faulty  # imported by its module name, so that other processes can import its classes

    faulty.register()
    from raylt.cli.main import main

    sys.exit(main())
