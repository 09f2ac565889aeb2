"""Measures the speed table: the same rounds of FedAvg in raylt, in other frameworks and in a bare PyTorch loop.

    python benchmarks/speed.py [--scales resnet8 thousand ten_thousand] [--turns 3] [--only NAME ...]
    python benchmarks/speed.py --table          # writes the table of docs/speed.md again, measures nothing

Images are made here from a fixed seed, as are the lists of who holds which; network, first weights, batch size, local
epochs, optimiser and clients a round are the same for all (`peers/workload.py`). Each framework has an environment of
its own in `peers/.env`, with the same version of torch, and a script of its own, `peers/run_NAME.py`, which says how it
is set up; every process computes on one thread, every system may use two. They run one after the other, in turns, from
the command to its end, and are judged by the loss of the model that they end with: who learned less than the others did
less. The record goes to `speed.json`, its table to docs/speed.md. With `--only`, it keeps the figures that the other
systems had on the same machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from peers.measure import Measured, measure
from peers.table import RECORD, show, write_table
from peers.workload import Scale, Work
from safetensors.torch import load_file

from raylt.config import load
from raylt.core.training.stacked_sgd import why_alone
from raylt.data.sources.arrays import channel_statistics
from raylt.data.task import TaskSpec, build_task
from raylt.registry import resolve

HERE = Path(__file__).parent
PEERS = HERE / "peers"
SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "resnet8", "resnet8", clients=20, per_round=5, samples=64, batch=32, rounds=4, lr=0.02, side=32, channels=3
        ),
        Scale(
            "thousand", "cnn", clients=1000, per_round=100, samples=10, batch=5, rounds=5, lr=0.05, side=28, channels=1
        ),
        Scale(
            "ten_thousand",
            "cnn",
            clients=10_000,
            per_round=100,
            samples=10,
            batch=5,
            rounds=5,
            lr=0.05,
            side=28,
            channels=1,
        ),
    )
}
PACKAGES = {
    "flower": "flwr[simulation]>=1.20,<2",
    "pfl": "pfl[pytorch]>=0.4,<1",
    "flgo": "flgo>=0.4,<1",
    "blazefl": "blazefl[contrib,reproducibility]>=2,<4",
}
PYTHONS = {"blazefl": ">=3.12"}  # where a framework needs a newer Python than raylt does
MISSING = dict.fromkeys(
    ("PFLlib", "FedLTLib"),
    "no package on the registry: a folder of scripts, whose loop is not copied here",
)
SYSTEMS = (
    "bare",
    "raylt-ray",
    "raylt-ray-stacked",
    "raylt-local",
    "raylt-local-stacked",
    "raylt-processes",
    "raylt-processes-stacked",
    *PACKAGES,
)
LEFT_OUT = "left out of this run"
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483648",
    "MALLOC_TOP_PAD_": "67108864",
}  # variables of raylt's client processes, which the bare loop gets too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", choices=SCALES, default=list(SCALES))
    parser.add_argument(
        "--turns", type=int, default=3, help="how often each runs; a system that takes more than a minute runs once"
    )
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--limit", type=float, default=300, help="CPU seconds after which a run is stopped; a bare loop takes ten"
    )
    parser.add_argument("--shared", action="store_true", help="records that others worked on the machine meanwhile")
    parser.add_argument("--table", action="store_true", help="only writes the table from the record")
    arguments = parser.parse_args()
    if not arguments.table:
        refused = dict.fromkeys((name for name in SYSTEMS if name not in arguments.only), LEFT_OUT) | MISSING
        refused |= {name: why for name in PACKAGES if name not in refused and (why := install(name))}
        record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"scales": {}, "versions": {}}
        earlier = record["scales"] if record.get("machine") == machine() else {}
        record |= {"date": date.today().isoformat(), "machine": machine(), "shared": arguments.shared}
        record["versions"] |= {name: versions(name) for name in ["raylt", *PACKAGES] if name not in refused}
        code, systems = commit(), [system for system in arguments.only if system not in refused]
        for name in arguments.scales:
            alone = {system for system in SYSTEMS if system.endswith("-stacked") and not stacks(SCALES[name])}
            chosen = [system for system in systems if system not in alone]
            missing = {system: why for system, why in refused.items() if system not in alone}
            taken = compare(SCALES[name], chosen, arguments.turns, arguments.limit, missing)
            record["scales"][name] = joined(earlier.get(name), {"commit": code} | taken)
            record["left_out"] = [name for name in SCALES if name not in record["scales"]]
            RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_table()
    print(show(json.loads(RECORD.read_text())))


def install(name: str) -> str:
    """Install a framework into its own environment if it is missing; return the reason if that fails, otherwise ""."""
    folder = PEERS / ".env" / name
    uv, python = shutil.which("uv"), folder / "bin" / "python"
    if (folder / "ready").exists():
        return ""
    wanted = PYTHONS.get(name, sys.executable) if uv else sys.executable
    venv = [uv, "venv", "--quiet", "--clear", "--python", wanted] if uv else [sys.executable, "-m", "venv"]
    pip = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
    for command in (
        [*venv, folder],
        [*pip, "--quiet", PACKAGES[name], f"torch=={torch.__version__.partition('+')[0]}"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            return "cannot be installed: " + (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
    subprocess.run([python, "-m", "compileall", "-q", folder / "lib"], stdout=subprocess.DEVNULL)
    (folder / "ready").touch()
    return ""


def stacks(scale: Scale) -> bool:
    """Return whether `local.stacked=auto` trains the scale's clients in stacks on this processor."""
    config = load(None, ["method=fedavg", f"model={scale.model}", f"local.batch={scale.batch}", "local.stacked=auto"])
    shape = (scale.side, scale.side, scale.channels)
    spec = TaskSpec("", tuple("0123456789"), shape, (0.5,) * scale.channels, (0.25,) * scale.channels)
    setup = resolve(config)
    return why_alone(config, setup.method, setup.new_model(spec), spec, setup.augment, torch.device("cpu")) is None


def compare(scale: Scale, systems: list[str], turns: int, limit: float, refused: dict[str, str]) -> dict:
    """Run all systems alternately; return their medians, the reasons for missing systems, and the losses reached."""
    taken: dict[str, list[Measured]] = {system: [] for system in systems}
    losses: dict[str, list[float]] = {system: [] for system in systems}
    failed = dict(refused)
    for turn in range(turns):
        for system in systems:
            if system in failed or (turn and max(one.wall for one in taken[system]) > 60):
                continue
            with tempfile.TemporaryDirectory() as folder:
                prepare(scale, Path(folder))
                try:
                    taken[system].append(run(system, Path(folder), limit))
                    losses[system].append(loss(system, Path(folder)))
                except RuntimeError as problem:
                    failed[system] = str(problem)
                    continue
            print(f"{scale.name} {turn + 1} {system}: {taken[system][-1]}, loss {losses[system][-1]:.3f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        prepare(scale, Path(folder))
        start = loss("initial", Path(folder))
    learned = {system: start - statistics.median(values) for system, values in losses.items() if values}
    for system, value in learned.items():
        if "bare" in learned and not 0.5 < value / learned["bare"] < 2:
            failed[system] = (
                f"its loss fell by {value:.2f}, the bare loop's by {learned['bare']:.2f}: not the same work"
            )
    return {
        "settings": asdict(scale),
        "missing": failed,
        "loss": {"start": start} | losses,
        "turns": {system: len(values) for system, values in taken.items()},
        "systems": {
            system: {
                field.name: statistics.median(getattr(one, field.name) for one in values) for field in fields(Measured)
            }
            for system, values in taken.items()
            if values and system not in failed
        },
    }


def joined(earlier: dict | None, taken: dict) -> dict:
    """Return the record of a scale, with the earlier figures of the systems that were left out of this run."""
    left_out = [system for system, why in taken["missing"].items() if why == LEFT_OUT]
    kept = [system for system in left_out if earlier and system in earlier["systems"]]
    if earlier is None or not kept:
        return taken
    missing = {system: why for system, why in taken["missing"].items() if system not in kept}
    figures = {
        part: {system: earlier[part][system] for system in kept} | taken[part] for part in ("loss", "turns", "systems")
    }
    return taken | figures | {"commit": f"{earlier['commit']}, {taken['commit']}", "missing": missing}


def run(system: str, folder: Path, limit: float) -> Measured:
    """Run a system once and measure it from the start of its command to its end."""
    name, _, fleet = system.partition("-")
    python = PEERS / ".env" / name / "bin" / "python" if name in PACKAGES else sys.executable
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{PEERS}{os.pathsep}{HERE.parent}",
    }
    if name == "bare":
        env |= MALLOC
    return measure(
        [python, PEERS / f"run_{name}.py", folder, *([fleet] if fleet else [])], env, folder / "errors", limit
    )


def prepare(scale: Scale, folder: Path) -> None:
    """Write the workload folder that `Work` reads.

    An image is a pattern of its class under noise. A client draws its classes from Dir(0.5), and its images are
    anywhere in the file.
    """
    rng = np.random.default_rng(0)
    mixes = rng.dirichlet([0.5] * 10, scale.clients)
    labels = np.concatenate([rng.choice(10, scale.samples, p=mix) for mix in mixes])
    order = rng.permutation(len(labels))
    test = np.arange(100) % 10
    coarse = rng.integers(0, 64, (10, scale.side // 4, scale.side // 4, scale.channels)).repeat(4, 1).repeat(4, 2)
    patterns = (40 + 12 * np.arange(10)[:, None, None, None] + coarse).astype(np.int16)

    def draw(y: np.ndarray) -> np.ndarray:
        noise = rng.integers(-48, 48, (len(y), *patterns.shape[1:]), dtype=np.int16)
        return (patterns[y] + noise).clip(0, 255).astype(np.uint8)

    x, y = draw(labels[order]), labels[order]
    np.savez(
        folder / "data.npz",
        x_train=x,
        y_train=y,
        x_test=draw(test),
        y_test=test,
        id_train=np.repeat(np.arange(scale.clients), scale.samples)[order],
        class_names=np.array([f"class {c}" for c in range(10)]),
    )
    mean, std = channel_statistics(x)
    (folder / "scale.json").write_text(json.dumps(asdict(scale) | {"mean": mean, "std": std}))
    config = load(
        None,
        [
            "method=fedavg",
            f"model={scale.model}",
            f"data.source=npz:{folder / 'data.npz'}",
            "data.partition=by_id",
            "data.imbalance=1",
        ],
    )
    torch.save(resolve(config).new_model(build_task(config.data).spec).state_dict(), folder / "initial.pt")


def loss(system: str, folder: Path) -> float:
    """Return the cross-entropy of a system's final model on 1,000 training images.

    BatchNorm takes the batch's statistics, because not all systems send its buffers.
    """
    work = Work(folder)
    net = work.model().train()
    saved = folder / "runs" / system / "model.safetensors"
    net.load_state_dict(load_file(saved) if saved.exists() else torch.load(folder / f"{system}.pt"))
    with torch.no_grad():
        x, y = work.images(torch.arange(1000))
        return F.cross_entropy(net(x), y).item()


def machine() -> str:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {cpu}, {psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}"


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", HERE, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True
    )
    return done.stdout.strip()


def versions(name: str) -> dict[str, str]:
    """Return the versions of a framework, of its main dependencies and of Python, in the framework's environment."""
    packages = {"raylt": ["raylt", "torch", "ray"], "flower": ["flwr", "torch", "ray"]}.get(name, [name, "torch"])
    code = (
        f"from importlib.metadata import version as v; import platform, sysconfig; print(*map(v, {packages}), "
        "platform.python_version() + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
    )
    python = sys.executable if name == "raylt" else PEERS / ".env" / name / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip([*packages, "python"], done.stdout.split(), strict=True))


if __name__ == "__main__":
    main()
