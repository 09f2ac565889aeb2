"""A program with two logical GPUs, for test_leases.py; it writes the outcomes of its runs as JSON lines to a file.

It does not print them, because Ray prints messages about ended processes to the same stream.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import ray
import torch
from ray.util import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raylt
from actors.capacity import nodes_of, plan, reserve
from raylt.config import Config, load
from raylt.core import device
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.errors import RayltError
from raylt.runs.folder import provenance

SETTINGS = ["method=fedavg", "federation.rounds=1", "local.epochs=1", "data.clients=4", "resources.cpus_per_client=0.5"]


def config_of(*settings: str) -> Config:
    return load(None, [*SETTINGS, *settings])


def free_gpus(wanted: float = 2.0) -> float:
    """Wait until `wanted` GPUs are free; return the number of free GPUs.

    Ray frees the GPUs of a killed actor only when its process is gone.
    """
    end = time.monotonic() + 30
    while (free := ray.available_resources().get("GPU", 0.0)) < wanted and time.monotonic() < end:
        time.sleep(0.1)
    return free


def carry_out(name: str, *settings: str) -> dict[str, object]:
    """Do a run; return the devices that it recorded, or the error that refused it."""
    folder = Path(sys.argv[1]) / name
    try:
        raylt.run(config_of("resources.actors=1", *settings), out=folder.parent, name=name, quiet=True)
    except RayltError as error:
        return {"refused": str(error), "exit_code": error.exit_code, "left": folder.exists()}
    (line,) = provenance.read(folder)
    return {"device": line["device"], "server_device": line["server_device"], "gpus": free_gpus()}


@ray.remote
class Place:
    def leased(self) -> list[int]:
        return ray.get_gpu_ids()


def places() -> dict[str, object]:
    """Return which GPUs a plan leases to the client actors and to the server."""
    chosen = plan(config_of(), 4, nodes_of(ray.nodes()))
    group = reserve(chosen.placement, 4)
    assert group.wait(60)
    server = Place.options(num_cpus=0, num_gpus=chosen.server_gpus).remote()
    actors = [
        Place.options(
            num_cpus=chosen.placement.cpus,
            num_gpus=chosen.placement.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, i),
        ).remote()
        for i in range(4)
    ]
    leases = ray.get([actor.leased.remote() for actor in [*actors, server]], timeout=60)
    for actor in [*actors, server]:
        ray.kill(actor)
    remove_placement_group(group)
    assert placement_group_table()
    return {"clients": leases[:4], "server": leases[4], "share": chosen.placement.gpus}


class Breaks(Method):
    """FedAvg whose client 1 loses its device once in round 2, and whose server loses its device once in round 3, the
    last."""

    name: ClassVar[str] = "breaks"
    paper: ClassVar[str] = "for tests"
    folder: str

    def train(self, client: Client, message: Message) -> Reply:
        self._mark(f"client-{os.getpid()}", str(ray.get_gpu_ids()))
        self._lose("a-client", client.id == 1 and client.round == 2)
        return super().train(client, message)

    def round(self, server: Server, fleet: Fleet) -> None:
        self._mark(f"server-{os.getpid()}", str(ray.get_gpu_ids()))
        self._lose("a-server", server.round == 3)
        super().round(server, fleet)

    def _mark(self, name: str, text: str = "") -> None:
        Path(self.folder, name).write_text(text)

    def _lose(self, name: str, now: bool) -> None:
        if now and not Path(self.folder, name).exists():
            self._mark(name)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def lost() -> dict[str, object]:
    """Run with processes that lose their GPUs, and the same undisturbed in this process; return both outcomes."""
    raylt.register(Breaks)
    marks = Path(sys.argv[1]) / "marks"
    marks.mkdir()
    config = config_of(
        f"method={Breaks.name}",
        f"method.folder={marks}",
        "federation.rounds=3",
        "data.clients=2",
        "resources.gpus_per_client=1",
    )
    disturbed = raylt.run(config, out=marks.parent, name="lost", quiet=True)
    leases = {who: [json.loads(mark.read_text()) for mark in marks.glob(f"{who}-*")] for who in ("client", "server")}
    undisturbed = raylt.run(config, out=marks.parent, name="undisturbed", fleet="local", quiet=True)
    retried = [int(id) for report in disturbed.reports for id in report["retried"]]
    return {
        "leases": leases,
        "same": disturbed.summary["model_sha256"] == undisturbed.summary["model_sha256"],
        "retried": retried,
        "gpus": free_gpus(),
    }


def tell(name: str, result: dict[str, object]) -> None:
    with Path(sys.argv[1], "results.jsonl").open("a") as results:
        results.write(json.dumps({name: result}) + "\n")


FREE = Path(sys.argv[1]) / "gpus-compute-as-cpus"


def compute_there() -> None:
    """Let Ray's workers compute on the CPU, without looking for the leased GPU, once the file FREE exists."""
    decide = device._on_gpu
    device._on_gpu = lambda config, leased=None: not FREE.exists() and decide(config, leased)


ray.init(
    address="local",
    num_cpus=4,
    num_gpus=2,
    include_dashboard=False,
    log_to_driver=False,
    configure_logging=False,
    object_store_memory=100 * 2**20,
    runtime_env={"worker_process_setup_hook": compute_there},
)
assert not torch.cuda.is_available(), "this test is for machines without a GPU"
for name, result in (
    ("places", places()),
    ("clients", carry_out("clients", "resources.device=cuda")),
    ("none", carry_out("none", "resources.gpus_per_client=0")),
    ("cpu", carry_out("cpu", "resources.device=cpu", "resources.gpus_per_client=0.25")),
):
    tell(name, result)
FREE.touch()
tell("lost", lost())
ray.shutdown()
