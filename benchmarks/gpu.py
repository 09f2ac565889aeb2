"""Measures raylt on this machine's GPU in one call: speed of rounds and of their parts, reproducibility, sharing,
memory.

    python benchmarks/gpu.py [--out gpu.json] [--seconds 570] [--parts rounds,bits]

It needs a GPU. A machine without Ray will do for all parts but `actors`: carry the tree and, where they are missing,
the packages pydantic, cryptography and psutil; it imports no open_clip and no data set. Images are random, of
CIFAR-10's size. The parts stand in order of worth. Each is a process of its own with a limit of its own, so one that
crashes or hangs costs itself alone. OUT is written again after each finding, so what was measured is kept; a table is
printed at the end.

    rates      TFLOP/s of a product of matrices in each precision, TB/s of a copy: the ceilings
    rounds     seconds of the second round of FedAvg (BPFed's recipe), FedSM and SFD, in each precision, as graphs and
               without, and what all of their rounds would take
    capture    milliseconds to record a step as a graph, beside torch.cuda.graph, which empties caches first
    judging    seconds to judge a model on 10,000 images
    classifier microseconds of a step of `fit_classifier`
    synthesis  seconds of SFD's synthesis of a class
    processes  steps per second of 1, 2, 4 and 8 processes that train at the same time, without NVIDIA's Multi-Process
               Service (MPS) and with it, where this machine has nvidia-cuda-mps-control: it is started in folders of
               its own for that, and ended
    actors     seconds of a round of `raylt run`, in one process and by 1, 2, 4 and 8 client actors on Ray that share
               the GPU, with MPS and without it; and whether both give the same bits with resources.deterministic
    streams    seconds of the steps of two models in one process, on a CUDA stream each and one after the other
    stacks     milliseconds of small clients' steps in stacks and alone, and whether a stack's size changes bits
    bits       a client's training three times, with resources.deterministic and without: whether the bits are the same,
               and whether they are those of steps that are not replayed as graphs
    memory     bytes that a process takes of the device at its peak, beside what raylt estimates before a run
    refusal    the error of a recording that cannot be made
    steps      milliseconds of one step of each method's local training, as graphs and without
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where raylt is not installed

import torch
from gpu_parts import capture, classifier, judging, rates, refusal, stacks, synthesis
from gpu_sharing import actors, processes, streams
from gpu_tasks import Finding, config_of, open_experiment, protocol, until

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.device import describe, open_device
from raylt.errors import ConfigError, RayltError, one_line
from raylt.methods import METHODS

SAMPLES = 12_406  # CIFAR-10-LT of imbalance factor 100
SAME = ("fedavg", "fedprox", "sfd", "mupfl", "bpfed", "fedsm")
FEDSM = "fedsm/cifar10_if100_alpha0.5_k20"
PROTOCOLS = (
    FEDSM,
    "sfd/cifar10_if100_alpha0.2_k10",
    "mupfl/cifar10_if100_alpha0.5_k50",
    "bpfed/cifar10_if100_alpha0.5_k20",
)
ROUNDS = (
    ("fedavg", "bpfed/cifar10_if100_alpha0.5_k20", ("method=fedavg",)),
    ("fedsm", FEDSM, ()),
    ("sfd", "sfd/cifar10_if100_alpha0.2_k10", ()),
)
WAYS = tuple((precision, graphs) for graphs in ("auto", "off") for precision in ("float32", "tf32", "bfloat16"))
CONTEXT = 1600 * 2**20  # bytes that actors/probe.py assumes for a CUDA context
LIMITS = {
    "rates": 20,
    "rounds": 170,
    "capture": 20,
    "judging": 20,
    "classifier": 20,
    "synthesis": 20,
    "processes": 120,
    "actors": 200,
    "streams": 40,
    "stacks": 40,
    "bits": 60,
    "memory": 30,
    "refusal": 15,
    "steps": 150,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=570, help="for all parts together")
    parser.add_argument("--parts", default=",".join(LIMITS), help="some of the parts, in this order")
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
    findings: list[Finding] = [{"part": "machine", **describe(device)}]
    for finding in in_turn(arguments.parts.split(","), arguments.seconds):
        findings.append(finding)
        arguments.out.write_text(json.dumps(findings, indent=1) + "\n")
    print(table(findings))


def in_turn(parts: list[str], seconds: float) -> Iterator[Finding]:
    """Run the parts one after another and yield their findings, within a time limit per part and in total."""
    end = time.monotonic() + seconds
    for part in parts:
        limit = min(LIMITS[part], end - time.monotonic())
        if limit < 10:
            yield {"part": part, "problem": "no time was left"}
            continue
        command = [sys.executable, __file__, "--part", part, "--seconds", f"{limit - 5:.0f}"]
        yield from ({"part": part, **finding} for finding in findings_of(command, limit))


def findings_of(command: list[str], limit: float) -> Iterator[Finding]:
    """Yield the findings that a process prints as they come, and finally its problem if it had one."""
    late = threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end() -> None:
        late.set()
        process.kill()

    watch = threading.Timer(limit, end)
    watch.start()
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
    finally:
        watch.cancel()
        process.kill()
    reader.join()
    if late.is_set():
        yield {"problem": f"not done after {limit:.0f} s"}
    elif code:
        yield {"problem": errors[-1].strip() if errors else f"exit code {code}"}


# the parts: generators of findings, that stop when their seconds are over


def rounds(
    seconds: float,
    cases: tuple[tuple[str, str, tuple[str, ...]], ...] = ROUNDS,
    ways: tuple[tuple[str, str], ...] = WAYS,
    device: str = "cuda",
    overrides: tuple[str, ...] = (),
    samples: int = SAMPLES,
) -> Iterator[Finding]:
    """Measure the seconds of the second round in one process, and estimate the time of all rounds."""
    for (name, recipe, settings), (precision, graphs) in until(
        seconds, [(case, way) for way in ways for case in cases]
    ):
        config = protocol(
            recipe,
            f"resources.device={device}",
            f"resources.graphs={graphs}",
            f"local.precision={precision}",
            *settings,
            *overrides,
        )
        assert config.data.clients is not None
        experiment = open_experiment(config, samples // config.data.clients, config.data.clients)
        experiment.step()
        report = experiment.step()
        yield {
            "method": name,
            "precision": precision,
            "graphs": graphs,
            "seconds": report.seconds,
            "all_seconds": report.seconds * config.federation.rounds,
            "stages": report.timings,
        }


def bits(
    seconds: float, methods: tuple[str, ...] = SAME, device: str = "cuda", model: str = "resnet8", samples: int = 256
) -> Iterator[Finding]:
    """Check whether the same round gives the same bits twice, and without CUDA graphs."""
    for name, deterministic in until(seconds, [(name, strict) for name in methods for strict in (False, True)]):
        hashes = []
        for recorded in ("auto", "auto", "off"):
            config = config_of(
                name,
                f"resources.device={device}",
                f"model={model}",
                f"resources.graphs={recorded}",
                f"resources.deterministic={str(deterministic).lower()}",
            )
            experiment = open_experiment(config, samples)
            experiment.step()
            state = {key: value.cpu() for key, value in experiment.server.model.state_dict().items()}
            hashes.append(hash_tensors(state))
        yield {
            "method": name,
            "deterministic": deterministic,
            "same": hashes[0] == hashes[1],
            "same_without_graphs": hashes[0] == hashes[2],
        }


def steps(
    seconds: float,
    methods: tuple[str, ...] = tuple(METHODS),
    device: str = "cuda",
    model: str = "resnet8",
    samples: int = 320,
    epochs: tuple[int, int] = (1, 6),
) -> Iterator[Finding]:
    """Measure the milliseconds of a training step, from the difference between rounds of many and of few epochs."""
    classifying = [name for name in methods if "classification" in METHODS[name].problems]
    for name, recorded in until(seconds, [(name, recorded) for recorded in ("auto", "off") for name in classifying]):
        settings = (f"resources.device={device}", f"model={model}", f"resources.graphs={recorded}")
        try:
            ms = step_ms(name, settings, samples, epochs)
        except (RayltError, RuntimeError) as error:
            yield {"method": name, "graphs": recorded, "problem": one_line(error)}
        else:
            yield {"method": name, "graphs": recorded, "ms": ms}


def step_ms(method: str, settings: tuple[str, ...], samples: int, epochs: tuple[int, int]) -> float:
    """Return the milliseconds of a training step in the second round of two clients."""
    took, taken = [], []
    for passes in epochs:
        config = config_of(method, *settings, f"local.epochs={passes}", "federation.rounds=3")
        experiment = open_experiment(config, samples)
        experiment.step()  # holds first-time costs
        report = experiment.step()
        took.append(report.seconds)
        taken.append(2 * config.local.step_count(samples))
    return 1e3 * (took[1] - took[0]) / (taken[1] - taken[0])


def memory(seconds: float, protocols: tuple[str, ...] = PROTOCOLS) -> Iterator[Finding]:
    """Measure the peak memory of a round of the largest client, next to an estimate from two of its batches."""
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
        yield {
            "protocol": name,
            "estimated": used[0] + CONTEXT + most * 32 * 32 * 3,
            "used": used[1] + context,
            "context": context,
        }


PARTS: dict[str, Callable[[float], Iterator[Finding]]] = {
    "rates": rates,
    "rounds": rounds,
    "capture": capture,
    "judging": judging,
    "classifier": classifier,
    "synthesis": synthesis,
    "processes": processes,
    "actors": actors,
    "streams": streams,
    "stacks": stacks,
    "bits": bits,
    "memory": memory,
    "refusal": refusal,
    "steps": steps,
}


def table(findings: list[Finding]) -> str:
    """Format the findings as text, one line for each."""
    lines = []
    for finding in findings:
        rest = {key: value for key, value in finding.items() if key not in ("part", "stages")}
        cells = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in rest.items()]
        lines.append(f"{finding['part']:11}{'  '.join(cells)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
