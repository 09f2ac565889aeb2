"""Measures the cost of many small clients: runs on Ray with ten samples per client, against a plain training loop.

A round asks a hundred clients.

    python benchmarks/scale.py [--clients 1000 10000 100000] [--asked 100] [--actors 2] [--rounds 6] [--method fedavg] \
        [--record]

Each run is started as a user would, by `raylt run`, and watched from outside. Seconds to the end of round 1 count from
the command: the start of Python, of Ray and of the actors with them; the CPU seconds of all processes up to there stand
beside them, since a busy machine stretches the first alone. A round is the median of the later ones, by the clock. The
milliseconds of a client call are CPU time of all processes, Ray's daemons with them, in rounds 2 to R - 1, and of the
server's process alone, which the system counts in hundredths of a second, so that few rounds are a coarse measure;
those of the bare loop are CPU time of one process that trains the same model on such batches with nothing around it,
and the difference is what the framework adds. Memory is the largest proportional share (PSS) of the server actor, of
the driver, and of both at the same time. `--record` keeps the figures in benchmarks/results/scale.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import recorded
import torch
from cuts import processor
from torch.nn import functional as F

from raylt.config import Config, load
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training.optimisers import SGD
from raylt.data.samples import Samples
from raylt.data.task import build_task
from raylt.models.split import load_entries
from raylt.registry import resolve
from raylt.tree import RunningSum, snapshot

NAME = "scale"
SAMPLES, ASKED = 10, 100  # samples per client; clients per round, also in the bare loop


class Row(NamedTuple):
    """One row of the table of measurements."""

    clients: int
    first_s: float
    first_cpu_s: float
    round_s: float
    call_ms: float
    server_ms: float
    bare_ms: float
    server_mb: float
    driver_mb: float
    together_mb: float
    wall_s: float
    model: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--asked", type=int, default=ASKED, help="clients of a round")
    parser.add_argument("--rounds", type=int, default=6, help="at least 3: the first and the last are not counted")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    if arguments.rounds < 3 or min(arguments.clients) < max(ASKED, arguments.asked):
        parser.error(f"at least 3 rounds, {ASKED} clients, and as many as are asked")
    print(
        "clients  asked  end of round 1, s  CPU s  a round, s  CPU ms a call  server   bare  beyond  server MB  "
        "driver MB  together MB  whole run, s  model"
    )
    for clients in arguments.clients:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(Path(folder), clients, arguments.asked, arguments.rounds, arguments.actors, arguments.method)
        print(
            f"{row.clients:7d}  {arguments.asked:5d}  {row.first_s:17.1f}  {row.first_cpu_s:5.1f}  "
            f"{row.round_s:10.2f}  {row.call_ms:13.2f}  {row.server_ms:6.2f}  {row.bare_ms:5.2f}  "
            f"{row.call_ms - row.bare_ms:6.2f}  {row.server_mb:9.0f}  {row.driver_mb:9.0f}  "
            f"{row.together_mb:11.0f}  {row.wall_s:12.1f}  {row.model[:8]}",
            flush=True,
        )
        if arguments.record:
            keep(row, arguments)


def keep(row: Row, arguments: argparse.Namespace) -> None:
    """Store the figures of a run beside those of other numbers of clients, methods and asked clients."""
    earlier = recorded.kept(NAME) if (recorded.HERE / "results" / f"{NAME}.json").exists() else {}
    case = f"{row.clients} clients, {arguments.asked} asked, {arguments.method}"
    settings = {
        "rounds": arguments.rounds,
        "actors": arguments.actors,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "recorded": f"{date.today()}",
        "processor": processor(),
    }
    figures = {name: round(value, 2) if isinstance(value, float) else value for name, value in row._asdict().items()}
    recorded.keep(NAME, earlier | {case: settings | figures})


def measure(folder: Path, clients: int, asked: int, rounds: int, actors: int, method: str) -> Row:
    """Measure one run from the start of its command to its end."""
    source = folder / "images.npz"
    make_source(source, clients)
    settings = [
        f"data.source=npz:{source}",
        f"data.clients={clients}",
        "data.partition=iid",
        "data.imbalance=1",
        f"federation.participation={asked / clients}",
        f"federation.rounds={rounds}",
        f"method={method}",
        "model=small",
        "local.epochs=1",
        f"local.batch={SAMPLES}",
        "local.lr=0.1",
        "evaluation.every=1000",
        f"resources.actors={actors}",
    ]
    bare = bare_ms(load(None, settings))
    lines = folder / "out/run/metrics.jsonl"
    log = folder / "log.txt"
    start = time.perf_counter()
    with log.open("w") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "raylt", "run", *settings, "--out", str(folder / "out"), "--name", "run"],
            stdout=out,
            stderr=out,
        )
        memory: defaultdict[str, float] = defaultdict(float)
        first, cpu, servers = 0.0, {}, set[int]()
        while run.poll() is None:
            count = lines.read_bytes().count(b"\n") if lines.exists() else 0
            if count and not first:
                first = time.perf_counter() - start
            if 0 < count < rounds and count not in cpu:
                cpu[count] = cpu_seconds(run.pid)
                servers |= {process.pid for process, kind in kinds(run.pid).items() if kind == "server"}
            shares = memory_mb(run.pid)
            for kind, share in [*shares.items(), ("together", sum(shares.values()))]:
                memory[kind] = max(memory[kind], share)
            time.sleep(0.05 if count else 0.2)
        wall = time.perf_counter() - start
    if run.returncode:
        raise SystemExit(log.read_text())
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    if len(cpu) < 2:
        raise SystemExit(f"{rounds} rounds went by between two looks at the processes; take more (--rounds)")
    begin, *_, end = cpu  # a look may miss a round that is over in no time
    a_call = 1e3 / (asked * (end - begin))
    spent = {pid: seconds - cpu[begin].get(pid, 0.0) for pid, seconds in cpu[end].items()}
    at_server = sum(spent[pid] for pid in servers & spent.keys())
    summary = json.loads((folder / "out/run/summary.json").read_text())
    return Row(
        clients,
        first,
        sum(cpu[begin].values()),
        statistics.median(report["seconds"] for report in reports[1:]),
        a_call * sum(spent.values()),
        a_call * at_server,
        bare,
        memory["server"],
        memory["driver"],
        memory["together"],
        wall,
        summary["model_sha256"],
    )


def make_source(path: Path, clients: int) -> None:
    """Write ten random 8x8 images for each client. The content does not matter for speed."""
    rng = np.random.default_rng(0)
    n = clients * SAMPLES
    np.savez(
        path,
        x_train=rng.integers(0, 256, (n, 8, 8, 1), dtype=np.uint8),
        y_train=rng.integers(0, 10, n),
        x_test=rng.integers(0, 256, (500, 8, 8, 1), dtype=np.uint8),
        y_test=rng.integers(0, 10, 500),
        class_names=np.array(list("0123456789")),
    )


def bare_ms(config: Config) -> float:
    """Return the CPU milliseconds per client of a loop that only trains and sums: the median of ten rounds."""
    torch.set_num_threads(1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"clients": ASKED})})
    setup, cpu = resolve(config), torch.device("cpu")
    task = build_task(config.data)
    model = setup.new_model(task.spec).train()
    test = EvaluationSet(task.test, task.spec, cpu)
    parts = len(task.shards[0]) // SAMPLES
    shards = [np.arange(SAMPLES) + k % parts * SAMPLES for k in range(ASKED)]
    whole = Samples(task.shards[0], task.spec, cpu)
    clients = [Client(k, whole, test, model, config, cpu) for k in range(ASKED)]
    seconds = []
    for number in range(1, 11):
        start, fold, before = time.process_time(), RunningSum(), snapshot(model.state_dict())
        for client, rows in zip(clients, shards, strict=True):
            load_entries(model, before)
            client.begin("train", number)
            optimiser = SGD(list(model.parameters()), config.local.lr)
            order = torch.randperm(SAMPLES, generator=client.order)
            for part in torch.from_numpy(rows)[order].split(config.local.batch):
                batch = whole.batch(part)
                optimiser.step(F.cross_entropy(model(batch.x), batch.y))
            fold.add(snapshot(model.state_dict()), float(SAMPLES))
        load_entries(model, fold.mean())
        seconds.append(time.process_time() - start)
    return 1e3 * statistics.median(seconds[1:]) / ASKED


def kinds(pid: int) -> dict[psutil.Process, str]:
    """Return the processes of a run with their kinds: driver, server, client actor, or another process of Ray."""
    driver = psutil.Process(pid)
    named = {driver: "driver"}
    for process in driver.children(recursive=True):
        try:
            name = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        named[process] = (
            "server" if "ServerActor" in name or "server · " in name else "clients" if "ClientActor" in name else "Ray"
        )
    return named


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a run so far, by process."""
    spent = {}
    for process in kinds(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[process.pid] = times.user + times.system
    return spent


def memory_mb(pid: int) -> dict[str, float]:
    """Return the proportional memory (PSS) of server and driver, in MB."""
    shares: defaultdict[str, float] = defaultdict(float)
    try:
        for process, kind in kinds(pid).items():
            if kind in ("server", "driver"):
                shares[kind] += process.memory_full_info().pss / 1e6
    except psutil.NoSuchProcess:
        pass
    return shares


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Ray's processes would compile what they import anew
    main()
