"""Compares the CPU seconds of single pieces of raylt in two source trees, before and after a change.

    git worktree add /tmp/before COMMIT
    python benchmarks/cuts.py --before /tmp/before                      # every case
    python benchmarks/cuts.py --before /tmp/before "fit_classifier, d = 64" --turns 5

Each case runs in a process of its own with one thread, in turn with one tree and the other, `--turns` times. The figure
of a tree is the least of its turns, in CPU seconds where the case names no other unit; a ratio below 1 is a gain. The
results of each case are compared as well: "same" says that both trees computed the same bits. Figures go to
benchmarks/results/cuts.json, case by case, with the commit of the tree before and the processor.
"""
# pyright: reportPrivateImportUsage=false

import argparse
import contextlib
import hashlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).parent / "results" / "cuts.json"
Measured = tuple[float, Any]  # CPU seconds, or the figure that a case names, and what was computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {'; '.join(CASES)}")
    parser.add_argument("--before", type=Path, help="another checkout of raylt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if arguments.measure:
        seconds, value = CASES[arguments.cases[0]]()
        print(json.dumps({"seconds": seconds, "value": value}))
        return
    if arguments.before is None:
        parser.error("--before: no other tree to compare with")
    for case in arguments.cases or CASES:
        row = compared(case, arguments.before, arguments.turns)
        keep(case, row)
        print(f"{case:32} {row['before']:9.4g} -> {row['after']:9.4g}, {row['ratio']:.2f}, same: {row['same']}")


def compared(case: str, before: Path, turns: int) -> dict[str, Any]:
    """Run a case in both source trees alternately."""
    trees = {"before": before.resolve(), "after": ROOT}
    seconds: dict[str, list[float]] = {side: [] for side in trees}
    values = {}
    for _ in range(turns):
        for side, tree in trees.items():
            found = once(case, tree)
            seconds[side].append(found["seconds"])
            values[side] = found["value"]
    least = {side: min(of_side) for side, of_side in seconds.items()}
    return {
        "before": float(f"{least['before']:.4g}"),
        "after": float(f"{least['after']:.4g}"),
        "ratio": round(least["after"] / least["before"], 3),
        "turns": turns,
        "same": values["before"] == values["after"],
        "commit before": commit(before),
        "recorded": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
    }


def once(case: str, tree: Path) -> dict[str, Any]:
    """Run a case in a new process that imports raylt from the given source tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have byte code
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--measure", case]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case} in {tree}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def keep(case: str, row: dict[str, Any]) -> None:
    """Store the figures of a case."""
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows[case] = row
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")


def commit(tree: Path) -> str:
    """Return the short commit hash of a source tree."""
    done = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def processor() -> str:
    """Return the name of the processor, with the widest vector instructions that torch uses."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def digest(*tensors: Any) -> str:
    """Return a short hash of the bits of tensors."""
    content = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def least(work: Callable[[], object], repeats: int) -> float:
    """Return the fewest CPU seconds of several calls, after one warm-up call."""
    work()
    return min(seconds_of(work) for _ in range(repeats))


# the cases


def fit(dim: int, classes: int, steps: int) -> Measured:
    """Measure steps of `fit_classifier` in batches of 64."""
    import torch

    from raylt.core.training.fit_classifier import fit_classifier

    torch.manual_seed(0)
    z, y = torch.randn(64 * steps, dim).relu(), torch.randint(classes, (64 * steps,))
    classifier = torch.nn.Linear(dim, classes)
    start = {name: value.clone() for name, value in classifier.state_dict().items()}

    def work() -> None:
        classifier.load_state_dict(start)
        fit_classifier(classifier, z, y, epochs=1, batch=64, lr=0.01, momentum=0.9, weight_decay=1e-5, seed=0)

    return least(work, 5) / steps, digest(classifier.weight, classifier.bias)


def scaffold(steps: int = 20) -> Measured:
    """Measure a step of SCAFFOLD relative to a step of FedAvg, taken alternately: `cnn`, batches of five."""
    import numpy as np
    import torch

    from raylt import tree
    from raylt.config import Config
    from raylt.core.client import Client
    from raylt.core.evaluation.counts import EvaluationSet
    from raylt.core.training.sgd import sgd
    from raylt.data.samples import Samples
    from raylt.data.task import Shard, TaskSpec
    from raylt.registry import resolve

    rng, cpu = np.random.default_rng(0), torch.device("cpu")
    spec = TaskSpec("random", tuple("0123456789"), (28, 28, 1), (0.5,), (0.25,))
    shard = Shard(rng.integers(0, 256, (5 * steps, 28, 28, 1), dtype=np.uint8), np.arange(5 * steps) % 10)
    trainings = {}
    for name in ("fedavg", "scaffold"):
        settings = {"method": {"name": name}, "model": "cnn", "data": {"clients": 1}, "local": {"batch": 5}}
        config = Config.model_validate(settings | {"seed": 1})
        setup = resolve(config)
        client = Client(
            0, Samples(shard, spec, cpu), EvaluationSet(shard, spec, cpu), setup.new_model(spec), config, cpu
        )
        control = {key: torch.full_like(p, 1e-3) for key, p in client.model.named_parameters()}
        objective = setup.method.objective(client, {"control": tree.snapshot(control)})

        def train(client: Client = client, objective: Any = objective) -> None:
            client.begin("train", 1)
            sgd(client, objective, epochs=1)

        trainings[name] = train, client
        train()
    weights = digest(*trainings["scaffold"][1].model.parameters())
    ratios = [seconds_of(trainings["scaffold"][0]) / seconds_of(trainings["fedavg"][0]) for _ in range(9)]
    return statistics.median(ratios), weights


def calls(clients: int = 60, rounds: int = 8) -> Measured:
    """Measure calls to small clients in a run in one process, relative to a bare loop over the same steps.

    A client has ten images, in batches of five.

    The bare loop runs after each round in the same process, so that both meet the same load of the machine. The figure
    is the median of the rounds, without the first, in which clients are made, and the last, which is judged.
    """
    import numpy as np

    import raylt

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (12 * clients, 28, 28, 1), dtype=np.uint8)
    y = np.arange(12 * clients) % 10
    train, names = 10 * clients, np.array(list("0123456789"))
    np.savez("it.npz", x_train=x[:train], y_train=y[:train], x_test=x[train:], y_test=y[train:], class_names=names)
    bare, ratios, start = bare_calls(clients), [], 0.0

    class Ends(raylt.Callback):
        def on_step(self, report: Any) -> None:
            nonlocal start
            passed = time.process_time() - start
            ratios.append(passed / seconds_of(bare))
            start = time.process_time()

    run = raylt.run(
        "fedavg",
        data="npz:it.npz",
        fleet="local",
        out=".",
        quiet=True,
        callbacks=[Ends()],
        overrides={
            "data.partition": "iid",
            "data.clients": clients,
            "data.imbalance": 1,
            "model": "cnn",
            "federation.rounds": rounds,
            "federation.participation": 1,
            "local.epochs": 1,
            "local.batch": 5,
            "local.momentum": 0.0,
            "resources.device": "cpu",
            "evaluation.every": rounds,
            "output.checkpoint_every": rounds,
        },
    )
    return statistics.median(ratios[1:-1]), run.summary["model_sha256"]


def bare_calls(clients: int) -> Callable[[], None]:
    """Return a bare training loop over the same steps as `calls`."""
    import torch
    from torch.nn import functional as F

    from raylt.models.cnn import cnn

    net = cnn(10, (28, 28, 1)).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    params: list[torch.Tensor] = list(net.parameters())
    x = torch.randint(0, 256, (10, 28, 28, 1), dtype=torch.uint8)
    y = torch.arange(10)

    def work() -> None:
        for _ in range(clients):
            for rows in torch.randperm(10).split(5):
                images = x[rows].float().div_(255).sub_(0.5).div_(0.25).permute(0, 3, 1, 2)
                gradients = torch.autograd.grad(F.cross_entropy(net(images), y[rows]), params)
                with torch.no_grad():
                    torch._foreach_add_(params, gradients, alpha=-0.01)

    return work


def augmentation(name: str) -> Measured:
    """Measure an augmentation of 32 images of 32x32x3."""
    import torch

    from raylt.data.augment import AUGMENTATIONS

    augment, labels = AUGMENTATIONS[name], torch.arange(32)
    assert augment is not None
    x = torch.randint(0, 256, (32, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    seconds = least(lambda: augment(x, labels, generator), 20)
    return seconds, digest(augment(x, labels, torch.Generator().manual_seed(2))[0])


def digits() -> Measured:
    """Measure the loading of the digits data set from the start of Python. Most of it is imports, without torch."""
    import numpy as np

    from raylt.config import DataConfig
    from raylt.data.images.cache import load
    from raylt.data.sources.sources import open_source

    source = open_source(DataConfig())
    content = b"".join(np.asarray(values).tobytes() for values in (load(source.x_train), load(source.x_test)))
    return time.process_time(), hashlib.sha256(content).hexdigest()[:16]


# fields that only decide how long a method computes
SHORT: dict[str, dict[str, Any]] = {
    "sfd": {"rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 3, "retrain_epochs": 2},
    "ccvr": {"virtual": 20, "retrain_epochs": 2},
    "creff": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2},
    "rucr": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
    "mupfl": {"m": 5, "tau": 2, "matching_steps": 3},
    "bpfed": {},
    "fedsm": {"teacher": "none", "retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
    "scaffold": {},
    "fedavg": {},
}


def short_runs() -> Measured:
    """Run two rounds of some methods on the digits; return model hashes and accuracies for comparison."""
    import raylt

    found = {}
    for name, fields in SHORT.items():
        overrides = {"federation.rounds": 2, "local.epochs": 1, "data.clients": 5, "model": "small"}
        for field, value in fields.items():
            overrides[f"method.{field}"] = value
        run = raylt.run(name, data="digits", fleet="local", out=".", quiet=True, overrides=overrides)
        found[name] = [run.summary["model_sha256"], run.summary["accuracy"]]
    return time.process_time(), found


def demonstration() -> Measured:
    """Measure the demonstration run of `raylt run` in one process, from the start of Python to the summary."""
    with contextlib.redirect_stdout(io.StringIO()):
        import raylt

        run = raylt.run("recipe:demo", fleet="local", out=".", quiet=True)
    return time.process_time(), [run.summary["model_sha256"], run.summary["accuracy"]["last"]]


def cost_of_run(method: str, **settings: Any) -> tuple[float, str]:
    """Return the CPU seconds of a run on the digits and its model's hash; `__` in a setting stands for a dot."""
    import raylt

    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    start = time.process_time()
    run = raylt.run(method, data="digits", fleet="local", out=".", quiet=True, overrides=overrides)
    return time.process_time() - start, run.summary["model_sha256"]


def difference(method: str, longer: dict[str, Any], shorter: dict[str, Any], **settings: Any) -> Measured:
    """Measure what a longer run takes beyond a shorter one, after a first run that imports everything."""
    cost_of_run(method, **settings, **shorter)
    short, _ = cost_of_run(method, **settings, **shorter)
    long, model = cost_of_run(method, **settings, **longer)
    return long - short, model


def listing() -> Measured:
    """Measure `raylt ls` of one run, from the start of Python."""
    cost_of_run("fedavg", federation__rounds=1)

    def of_children() -> float:
        times = os.times()
        return times.children_user + times.children_system

    start = of_children()
    done = subprocess.run([sys.executable, "-m", "raylt", "ls", "."], check=True, capture_output=True, text=True)
    return of_children() - start, bool(done.stdout)


CASES: dict[str, Callable[[], Measured]] = {
    "fit_classifier, d = 64": lambda: fit(64, 10, 100),
    "fit_classifier, d = 512": lambda: fit(512, 100, 100),
    "digits, from the start": digits,
    "a call, in bare loops": calls,
    "SCAFFOLD, in steps of FedAvg": scaffold,
    "color_jitter": lambda: augmentation("color_jitter"),
    "rand_augment": lambda: augmentation("rand_augment"),
    "trivial_augment": lambda: augmentation("trivial_augment"),
    "auto_augment": lambda: augmentation("auto_augment"),
    "short runs of nine methods": short_runs,
    "demonstration": demonstration,
    "raylt ls": listing,
    "100 steps of SFD's synthesis": lambda: difference(
        "sfd",
        {"method__synthesis_steps": 110},
        {"method__synthesis_steps": 10},
        method__rf_dim=1000,
        federation__rounds=1,
        local__epochs=1,
    ),
    "SFD's training, ten rounds": lambda: difference(
        "sfd", {"federation__rounds": 11}, {"federation__rounds": 1}, method__safs=False, data__clients=5
    ),
    "judging 100 clients, ten rounds": lambda: difference(
        "fedavg",
        {"evaluation__every": 1},
        {"evaluation__every": 11},
        data__clients=100,
        federation__rounds=11,
        federation__participation=0.02,
    ),
}


if __name__ == "__main__":
    main()
