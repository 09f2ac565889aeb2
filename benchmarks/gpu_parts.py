"""Parts of benchmarks/gpu.py that need no federation: the GPU's peak rates, and single functions of raylt."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where raylt is not installed

import torch
from gpu_tasks import Finding, config_of, open_training, random_task, until
from torch import nn

from raylt import tree
from raylt.core.evaluation.counts import counts_of
from raylt.core.fleet.client_host import ClientCall, ClientHost
from raylt.core.training.cuda_graphs import CudaRecorder
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.optimisers import make_optimiser
from raylt.data.samples import Samples
from raylt.methods.sfd.fourier import draw_frequencies, fourier_sum
from raylt.methods.sfd.synthesis import Parts, Target, cholesky, synthesise
from raylt.registry import resolve

MODELS = ("resnet8", "resnet18")
DIMENSIONS = (64, 512)
STACKED = (("small", 5, 10), ("small", 32, 64), ("cnn", 5, 10), ("resnet8", 32, 64))  # models, batches, samples


def seconds_of(fn: Callable[[], object], device: str, repeats: int) -> float:
    """Return the mean seconds of `repeats` calls after one warm-up call, synchronised with the device."""
    fn()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        fn()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(seconds: float, device: str = "cuda", side: int = 8192, repeats: int = 10) -> Iterator[Finding]:
    """Measure TFLOP/s of a matrix product in each precision, and TB/s of a copy (read and write)."""
    left, right = torch.randn(2, side, side, device=device)
    for precision in until(seconds, ("float32", "tf32", "bfloat16")):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        a, b = left.to(kind), right.to(kind)
        took = seconds_of(lambda a=a, b=b: a @ b, device, repeats)
        yield {"what": "matrices", "precision": precision, "tflops": 2 * side**3 / took / 1e12}
    torch.backends.cuda.matmul.allow_tf32 = False
    source = torch.randn(16 * side * side, device=device)
    target = torch.empty_like(source)
    took = seconds_of(lambda: target.copy_(source), device, repeats)
    yield {"what": "copy", "tbytes": 2 * source.nbytes / took / 1e12}


def capture(seconds: float, models: tuple[str, ...] = MODELS, repeats: int = 20) -> Iterator[Finding]:
    """Measure the milliseconds to record FedAvg's step as a CUDA graph, by raylt's recorder and by torch.cuda.graph."""
    recorder = CudaRecorder()
    for name in until(seconds, models):
        client, objective = open_training(config_of("fedavg", "resources.device=cuda", f"model={name}"), 64)
        client.model.train()
        optimiser = make_optimiser(client.config.local, client.model.parameters(), 0.1)
        rows = torch.arange(32, device=client.device)

        def step(client=client, objective=objective, optimiser=optimiser, rows=rows) -> None:
            optimiser.step(objective(client.batch(rows)))

        for _ in range(3):
            recorder.warm_up(step)
        ours = seconds_of(lambda step=step, noise=client.noise: recorder.record(step, noise), "cuda", repeats)
        theirs = seconds_of(lambda step=step, noise=client.noise: torch_records(step, noise), "cuda", repeats)
        yield {"model": name, "raylt_ms": 1e3 * ours, "torch_cuda_graph_ms": 1e3 * theirs}


def torch_records(fn: Callable[[], None], generator: torch.Generator | None) -> torch.cuda.CUDAGraph:
    """Record a function as a CUDA graph with torch's context manager."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        fn()
    return graph


def judging(
    seconds: float,
    models: tuple[str, ...] = MODELS,
    device: str = "cuda",
    samples: int = 10_000,
    sizes: tuple[int, ...] = (256, 1024),
) -> Iterator[Finding]:
    """Measure the seconds to count a model's predictions on a test set."""
    for name, size in until(seconds, [(name, size) for name in models for size in sizes]):
        config = config_of("fedavg", f"resources.device={device}", f"model={name}")
        task = random_task(samples, 1)
        model = resolve(config).new_model(task.spec).to(device).eval()
        test = Samples(task.test, task.spec, torch.device(device))

        def judge(model=model, test=test, size=size) -> None:
            counts_of(model, test, 10, size)

        yield {"model": name, "images": samples, "batch": size, "seconds": seconds_of(judge, device, 3)}


def classifier(
    seconds: float, dimensions: tuple[int, ...] = DIMENSIONS, device: str = "cuda", samples: int = 13_000
) -> Iterator[Finding]:
    """Measure the microseconds of a step of `fit_classifier`: ten classes, batches of 64, ten epochs."""
    for dim in until(seconds, dimensions):
        z = torch.randn(samples, dim, device=device)
        y = torch.arange(samples, device=device) % 10
        for schedule in ("constant", "epoch"):
            took = seconds_of(
                lambda z=z, y=y, dim=dim, schedule=schedule: fit_classifier(
                    nn.Linear(dim, 10).to(device),
                    z,
                    y,
                    epochs=10,
                    batch=64,
                    lr=0.01,
                    momentum=0.9,
                    weight_decay=0.0,
                    seed=0,
                    schedule=schedule,
                ),
                device,
                2,
            )
            yield {"d": dim, "schedule": schedule, "step_us": 1e6 * took / (10 * -(-samples // 64))}


def synthesis(
    seconds: float,
    dimensions: tuple[int, ...] = DIMENSIONS,
    device: str = "cuda",
    frequencies: int = 5000,
    size: int = 1300,
    steps: int = 100,
) -> Iterator[Finding]:
    """Measure the seconds of SFD's synthesis of one class."""
    for dim in until(seconds, dimensions):
        real = torch.randn(4 * size, dim).relu()
        omega = draw_frequencies(dim, frequencies, 1.0, "orf", 0)
        factor, _ = cholesky(torch.cov(real.T.double()), 1e-5)
        phi = fourier_sum(real, omega) / len(real)
        target = Target(*(part.to(device) for part in (real.mean(0).double(), factor, phi, omega)))

        def make(target=target) -> None:
            synthesise(target, size, Parts(), steps, 1.0, 0.9, torch.Generator().manual_seed(0))

        yield {"d": dim, "size": size, "steps": steps, "seconds": seconds_of(make, device, 1)}


def stacks(
    seconds: float,
    cases: tuple[tuple[str, int, int], ...] = STACKED,
    device: str = "cuda",
    clients: int = 32,
    repeats: int = 5,
) -> Iterator[Finding]:
    """Measure the milliseconds of small clients' steps in stacks and alone, each with all that a call costs.

    A finding says whether the first client's bits are the same in a stack of two and in one of all clients. A run may
    train in stacks on a GPU only if they are; so far it never does.

    Args:
        cases: models, batches and samples of a client.
    """
    for name, batch, samples in until(seconds, cases):
        config = config_of("fedavg", f"resources.device={device}", f"model={name}", f"local.batch={batch}")
        task = random_task(samples, clients)
        host = ClientHost(resolve(config), task.spec, task.test, torch.device(device))
        method = host.setup.method
        message = {"model": tree.snapshot(method.shared(host.model))}
        calls = [ClientCall(id, shard, None) for id, shard in enumerate(task.shards)]

        def alone(host=host, method=method, message=message, calls=calls) -> None:
            for call in calls:
                host.run(method.train, message, 1, call.id, call.shard, None)

        def together(count: int = clients, host=host, method=method, message=message, calls=calls) -> Any:
            return host.run_stacks(method.train, message, 1, calls[:count])

        alone_s = seconds_of(alone, device, repeats)
        host.why_alone = None  # the reasons that a run has are not asked
        stacked_s = seconds_of(together, device, repeats)
        first = [together(count)[0][0].tree["model"] for count in (2, clients)]
        steps = clients * config.local.step_count(samples)
        yield {
            "model": name,
            "batch": batch,
            "alone_ms": 1e3 * alone_s / steps,
            "stacked_ms": 1e3 * stacked_s / steps,
            "same_in_any_stack": all(torch.equal(value, first[1][key]) for key, value in first[0].items()),
        }


def refusal(_: float) -> Iterator[Finding]:
    """Record the error of a CUDA graph whose step reads a device value on the host, and test the device afterwards."""
    number = torch.ones(1, device="cuda")
    recorder = CudaRecorder()
    try:
        recorder.record(lambda: print(number.item()), None)
    except RuntimeError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__[:-2]]
        yield {
            "error": kinds,
            "code": getattr(error, "error_code", None),
            "says": str(error).splitlines()[0],
            "caused_by": None if error.__context__ is None else str(error.__context__).splitlines()[0],
        }

    def add_one() -> None:
        number.add_(1)

    replay = recorder.record(add_one, None)
    replay()
    yield {"goes_on": number.item() == 2}
