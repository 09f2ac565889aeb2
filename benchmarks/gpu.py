"""What raylt does on this machine's GPU, in ten minutes: bits, seconds per step, memory, seconds for a round.

    python benchmarks/gpu.py [--out gpu.json] [--seconds 570]

It needs a GPU, torch and what raylt imports with it, no Ray, no open_clip, no data sets: images are random, of
CIFAR-10's size. The parts are processes of their own with limits of their own, so one that crashes or hangs costs
itself alone; what each has measured until then is kept. OUT gets everything as JSON; a table is printed.

    bits      a client's training three times, with resources.deterministic and without: whether the bits are the same,
              and whether they are those of steps that are not replayed as graphs
    steps     milliseconds of one step of each method's local training (ResNet-8), as graphs and without, and of some in
              tf32 and bfloat16
    memory    bytes that a process takes of the device at its peak, beside what raylt estimates before a run
    rounds    seconds of one round of the recipes' protocols in one process, and of all their rounds
    processes seconds and steps per second of 1, 2 and 4 processes that train at the same time, without NVIDIA's
              Multi-Process Service (MPS) and with it, where this machine has nvidia-cuda-mps-control: it is started in
              folders of its own for that, and ended
    streams   seconds of the steps of two models in one process, on a CUDA stream each and one after the other

It ran on no GPU yet: its parts are tested on a CPU, in their smallest settings.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # where raylt is not installed

import torch
from gpu_sharing import processes, streams
from gpu_tasks import Finding, config_of, open_experiment, protocol, until

from raylt.core.checkpoint import hash_tensors
from raylt.core.device import describe, open_device
from raylt.errors import ConfigError
from raylt.methods import METHODS

SAMPLES = 12_406                # CIFAR-10-LT of imbalance factor 100
SAME = ("fedavg", "fedprox", "sfd", "mupfl", "bpfed", "fedsm")
PROTOCOLS = ("fedsm/cifar10_if100_alpha0.5_k20", "sfd/cifar10_if100_alpha0.2_k10",
             "mupfl/cifar10_if100_alpha0.5_k50", "bpfed/cifar10_if100_alpha0.5_k20")
CONTEXT = 600 * 2**20           # what actors/probe.py takes a CUDA context for
LIMITS = {"bits": 75, "steps": 190, "memory": 45, "rounds": 130, "processes": 100, "streams": 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        device = open_device(config_of("fedavg", "resources.device=cuda"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if arguments.part:
        for finding in PARTS[arguments.part](arguments.seconds):
            print(json.dumps(finding), flush=True)
        return
    findings = [{"part": "machine", **describe(device)}, *in_turn(arguments.seconds)]
    arguments.out.write_text(json.dumps(findings, indent=1) + "\n")
    print(table(findings))


def in_turn(seconds: float) -> Iterator[Finding]:
    """What the parts find, each within its limit and all within so many seconds."""
    end = time.monotonic() + seconds
    for part, limit in LIMITS.items():
        limit = min(limit, end - time.monotonic())
        if limit < 10:
            yield {"part": part, "problem": "no time was left"}
            continue
        command = [sys.executable, __file__, "--part", part, "--seconds", f"{limit - 5:.0f}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
            said, problem = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired as late:
            said, problem = (late.stdout or b"").decode(), [f"not done after {limit:.0f} s"]
        yield from ({"part": part, **json.loads(line)} for line in said.splitlines() if line.startswith("{"))
        yield from ({"part": part, "problem": line} for line in problem)


# the parts: generators of findings, that stop when their seconds are over

def bits(seconds: float, methods: tuple[str, ...] = SAME, device: str = "cuda", model: str = "resnet8",
         samples: int = 256) -> Iterator[Finding]:
    """Whether the same round has the same bits twice, and without graphs."""
    for name, deterministic in until(seconds, [(name, strict) for name in methods for strict in (False, True)]):
        hashes = []
        for recorded in ("auto", "auto", "off"):
            config = config_of(name, f"resources.device={device}", f"model={model}", f"resources.graphs={recorded}",
                               f"resources.deterministic={str(deterministic).lower()}")
            experiment = open_experiment(config, samples)
            experiment.step()
            state = {key: value.cpu() for key, value in experiment.server.model.state_dict().items()}
            hashes.append(hash_tensors(state))
        yield {"method": name, "deterministic": deterministic, "same": hashes[0] == hashes[1],
               "same_without_graphs": hashes[0] == hashes[2]}


def steps(seconds: float, methods: tuple[str, ...] = tuple(METHODS), device: str = "cuda",
          model: str = "resnet8", samples: int = 320, epochs: tuple[int, int] = (1, 6)) -> Iterator[Finding]:
    """Milliseconds of a step: those of a round of many epochs less those of a round of few, over the steps between."""
    there = [name for name in methods if "classification" in METHODS[name].problems]
    cases = [(name, "float32", recorded) for name in there for recorded in ("auto", "off")]
    cases += [(name, precision, "auto") for name in methods[:1] for precision in ("tf32", "bfloat16")]
    for name, precision, recorded in until(seconds, cases):
        took, taken = [], []
        for passes in epochs:
            config = config_of(name, f"resources.device={device}", f"model={model}", f"local.epochs={passes}",
                               f"local.precision={precision}", f"resources.graphs={recorded}", "federation.rounds=3")
            experiment = open_experiment(config, samples)
            experiment.step()                           # holds first-time costs
            report = experiment.step()
            took.append(report.seconds)
            taken.append(2 * config.local.steps(samples))        # of two clients
        yield {"method": name, "precision": precision, "graphs": recorded,
               "ms": 1e3 * (took[1] - took[0]) / (taken[1] - taken[0])}


def memory(seconds: float, protocols: tuple[str, ...] = PROTOCOLS) -> Iterator[Finding]:
    """Peak of a round of the whole largest client, beside the estimate of two of its batches."""
    for name in until(seconds, protocols):
        config = protocol(name)
        assert config.data.clients is not None
        most = SAMPLES // config.data.clients * 3
        used = []
        for samples in (2 * config.local.batch, most):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            open_experiment(config, samples).step()
            used.append(torch.cuda.max_memory_reserved())
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        yield {"protocol": name, "estimated": used[0] + CONTEXT + most * 32 * 32 * 3, "used": used[1] + context,
               "context": context}


def rounds(seconds: float, protocols: tuple[str, ...] = PROTOCOLS, device: str = "cuda",
           overrides: tuple[str, ...] = (), samples: int = SAMPLES) -> Iterator[Finding]:
    """Seconds of the second round in one process, and what all rounds would take."""
    for name in until(seconds, protocols):
        config = protocol(name, f"resources.device={device}", *overrides)
        assert config.data.clients is not None
        experiment = open_experiment(config, samples // config.data.clients, config.data.clients)
        experiment.step()
        report = experiment.step()
        yield {"protocol": name, "seconds": report.seconds, "stages": report.stages,
               "all_seconds": report.seconds * config.federation.rounds}


PARTS: dict[str, Callable[[float], Iterator[Finding]]] = {
    "bits": bits, "steps": steps, "memory": memory, "rounds": rounds, "processes": processes, "streams": streams}


def table(findings: list[Finding]) -> str:
    """A line for each finding."""
    lines = []
    for finding in findings:
        rest = {key: value for key, value in finding.items() if key not in ("part", "stages")}
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in rest.items()]
        lines.append(f"{finding['part']:10}{'  '.join(cells)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
