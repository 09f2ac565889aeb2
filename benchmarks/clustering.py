"""Measures the cost of MuPFL's clustering (ACMU) at the server: seconds and peak memory for n updates of a model.

The updates are taken as `MuPFL.round` takes them.

    python benchmarks/clustering.py                          # 100 updates of ResNet-18, C = 10
    python benchmarks/clustering.py --model cnn --updates 10

Measured on one core of an AMD EPYC, other load on the machine: 100 updates of ResNet-18 take 26 CPU s, 17 of which for
the clusters and 9 for the means of Eq. 14 and 15.

One process with one thread, as in the server. The updates are n random ones in four planted groups, and what a client
sends with them: its start's classifier and the map of its last stage. The replies are there before the clock starts,
as they are in a round: 2 GiB of them in memory, the others in a file (raylt/core/fleet/value_store.py) in TMPDIR. The
memory that is shown is the process's own, without pages of the file, which the system takes back when it needs room.
Replies arrive outside of the heap, as they do from Ray, where MALLOC_MMAP_THRESHOLD_=1048576 is in the environment.
"""

import argparse
import threading
import time
from pathlib import Path

import torch

from raylt import tree
from raylt.config import Config, FederationConfig
from raylt.core.fleet.value_store import ValueStore
from raylt.core.server import Server
from raylt.data.task import TaskSpec
from raylt.methods.mupfl.bavd import layers_of
from raylt.methods.mupfl.clustering import form_clusters, mean_update
from raylt.methods.mupfl.method import MuPFL, own_entries
from raylt.registry import resolve
from raylt.tree import RunningSum, nbytes

GROUPS = 4
SHAPES = {"resnet18": (32, 32, 3), "resnet8": (32, 32, 3), "cnn": (28, 28, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="resnet18")
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    n, shape = arguments.updates, SHAPES[arguments.model]
    spec = TaskSpec("synthetic", tuple("abcdefghij"), shape, (0.5,) * shape[2], (0.25,) * shape[2])
    config = Config(model=arguments.model, method={"name": "mupfl"}, federation=FederationConfig(rounds=1))
    method = MuPFL()
    server = Server(config, spec, resolve(config).new_model(spec), torch.device("cpu"))
    server.round = 1
    message = {"model": tree.snapshot(method.shared(server.model))}
    replies = made(server, method, message["model"], n)
    memory = OwnMemory()
    before = memory.peak
    wall, cpu = time.perf_counter(), time.process_time()
    starts = {id: message["model"] | reply["start"] for id, reply in replies.items()}
    updates, maps = ({id: reply[name] for id, reply in replies.items()} for name in ("update", "map"))
    clusters = form_clusters(server, updates, maps, method.alpha, method.kappa, method.kappa_max)
    found = time.process_time() - cpu
    mean = RunningSum()
    for members in clusters:
        update = mean_update(updates[id] for id in members)
        for id in members:
            mean.add({name: starts[id][name] + update[name] for name in update}, 1.0)
    server.receive(mean.mean())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    assert clusters == [list(range(group, n, GROUPS)) for group in range(GROUPS)], "the planted groups"
    size = sum(nbytes(reply) for reply in replies.values())
    print(
        f"{n} updates of {arguments.model} ({sum(p.numel() for p in server.model.parameters()):,} parameters): "
        f"{cpu:.1f} CPU s ({wall:.1f} s), of which clusters {found:.1f} and means {cpu - found:.1f}; "
        f"replies {size / 1e9:.2f} GB, peak {before:.2f} GB before and {memory.peak:.2f} GB after; "
        f"silhouettes {server.figures['silhouettes']}"
    )


def made(server: Server, method: MuPFL, start: tree.Tree, n: int) -> dict[int, tree.Tree]:
    """Make the replies of n clients: start, update and map, similar within each group of clients.

    Client i belongs to group i % 4.
    """
    size = sum(layer.size for layer in layers_of(server.model))
    replies = {}
    store = ValueStore()
    for id in range(n):
        group, own = (torch.Generator().manual_seed(seed) for seed in (id % GROUPS, GROUPS + id))
        update = {
            name: 0.01 * (torch.randn(value.shape, generator=group) + torch.randn(value.shape, generator=own))
            if value.is_floating_point()
            else torch.ones_like(value)
            for name, value in start.items()
        }
        map = torch.rand(size, generator=group) + torch.rand(size, generator=own)
        parts = {"update": update, "start": own_entries(start, method.own_update_start), "map": map}
        replies[id] = store.keep(parts)
    return replies


class OwnMemory:
    """Records the peak resident memory of this process from now on, in GB, without file pages.

    It looks every 50 ms.
    """

    def __init__(self) -> None:
        self.peak = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._now())
            time.sleep(0.05)

    def _now(self) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


if __name__ == "__main__":
    main()
