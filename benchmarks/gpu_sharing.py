"""Parts of benchmarks/gpu.py that measure several processes, client actors or two CUDA streams on one GPU.

Started by itself it is one of those processes: it trains whenever it is told to on its standard input.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
import psutil
import torch
from gpu_tasks import Finding, config_of, open_training, until
from torch import Tensor

from raylt.core.device import describe
from raylt.core.training import cuda_graphs
from raylt.core.training.sgd import sgd

COUNTS = (1, 2, 4, 8)
GRAPHS = ("auto", "off")
CONTROL = "nvidia-cuda-mps-control"
CONTROL_S = 20.0  # for the daemon to start, or to end
ROOT = Path(__file__).resolve().parents[1]
SHARED = (
    "model=resnet8",
    "local.precision=tf32",
    "local.epochs=5",
    "data.clients=16",
    "data.partition=iid",
    "data.imbalance=1",
    "federation.rounds=4",
    "evaluation.every=1000",
    "evaluation.personal=0",
)
Environment = dict[str, str]


def processes(
    seconds: float,
    counts: tuple[int, ...] = COUNTS,
    device: str = "cuda",
    model: str = "resnet8",
    samples: int = 320,
    epochs: int = 60,
) -> Iterator[Finding]:
    """Measure the seconds and steps per second of several processes that train at the same time.

    Each process trains a model of its own.
    """
    end = time.monotonic() + seconds
    for served in (False, True):
        with tempfile.TemporaryDirectory() as folder, mps(Path(folder), served) as (environment, problem):
            if problem is not None:
                yield {"mps": "not started", "problem": problem}
                continue
            for count in until(end - time.monotonic(), counts):
                command = [sys.executable, __file__, device, model, str(samples), str(epochs)]
                yield from together(command, count, environment, end - time.monotonic())


@contextmanager
def mps(folder: Path, served: bool = True) -> Iterator[tuple[Environment, str | None]]:
    """Start NVIDIA's MPS daemon for the block; yield the environment for its clients.

    The second value is the reason why the daemon does not run, or None if it runs.

    Args:
        served: False for an environment in which clients find no daemon, whatever runs on this machine.
    """
    pipes, logs, control = folder / "pipes", folder / "logs", shutil.which(CONTROL)
    pipes.mkdir()
    logs.mkdir()
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    if not served or control is None:
        yield environment, f"{CONTROL} is not on the PATH of this machine" if served else None
        return
    started = _tell_daemon([control, "-d"], environment, logs / "start")
    try:
        yield environment, started
    finally:
        if started is None:
            _tell_daemon([control], environment, logs / "end", "quit\n")


def _tell_daemon(command: list[str], environment: Environment, log: Path, text: str = "") -> str | None:
    """Run a command of the MPS daemon; return a line about its failure, or None."""
    with log.open("w") as stream:  # no pipe: the daemon would hold its end for good
        try:
            done = subprocess.run(
                command,
                input=text,
                env=environment,
                stdout=stream,
                stderr=stream,
                text=True,
                timeout=CONTROL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{CONTROL}: {error}"
    last_lines = log.read_text().strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"{CONTROL}: {last_lines[0]}" if done.returncode else None


def together(command: list[str], count: int, environment: Environment, seconds: float) -> Iterator[Finding]:
    """Measure the time that `count` processes need for the same training at the same time.

    It counts from the signal to all of them until the last has finished.
    """
    with ExitStack() as files:
        # one file for each: lines of several processes in one file would mix
        errors = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        started = [
            subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True
            )
            for stream in errors
        ]
        watch = threading.Timer(max(seconds, 0), lambda: [process.kill() for process in started])
        watch.start()
        try:
            for recorded in GRAPHS:
                ready = [_line_of(process) for process in started]
                start = time.perf_counter()
                for process in started:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                    process.stdin.flush()
                steps = sum(_line_of(process)["steps"] for process in started)
                took = time.perf_counter() - start
                yield {
                    "processes": count,
                    "mps": ready[0]["mps"],
                    "graphs": recorded,
                    "seconds": took,
                    "steps_per_second": steps / took,
                }
        except (BrokenPipeError, EOFError):
            last_lines = [line for stream in errors for line in _last_line(stream)]
            yield {"processes": count, "problem": [*last_lines, "ended, or was ended for want of time"][0]}
        finally:
            watch.cancel()
            for process in started:
                process.kill()
                process.communicate()


def _last_line(stream: IO[str]) -> list[str]:
    stream.seek(0)
    return stream.read().strip().splitlines()[-1:]


def _line_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def work(device: str, model: str, samples: int, epochs: int) -> None:
    """Train once with CUDA graphs and once without, each time after a signal on standard input."""
    for recorded in GRAPHS:
        client, objective = open_training(_config(device, model, recorded), samples)
        sgd(client, objective, epochs=1)  # holds first-time costs
        print(json.dumps({"mps": describe(client.device)["mps"] or "none"}), flush=True)
        if not sys.stdin.readline():  # nobody is there any more
            return
        sgd(client, objective, epochs=epochs)  # reads its loss at the end, so all is done then
        print(json.dumps({"steps": client.steps(epochs)}), flush=True)


def actors(
    seconds: float,
    ways: tuple[str, ...] = ("local", "2", "4", "8", "1", "auto"),
    settings: tuple[str, ...] = SHARED,
    samples: int = 12_288,
    gpus: int = 1,
) -> Iterator[Finding]:
    """Measure the seconds of a round of `raylt run`, in one process and by client actors on Ray that share a GPU.

    Each finding has the seconds that the clients of a round train (the median without the first round), the seconds of
    the whole command, and a hash of the model. With `resources.deterministic` the hash must be the same in one process
    and on Ray; without it a GPU need not repeat its bits.

    Args:
        ways: `local` for one process, numbers of actors, or `auto` where raylt decides. The first two also run once
            with `resources.deterministic`.
        gpus: GPUs that the actors share; 0 on a machine without one.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _random_images(folder / "random.npz", samples)
        base = [f"data.source=npz:{folder / 'random.npz'}", "method=fedavg", *settings]
        for served in (True, False):
            pipes = folder / f"mps-{served}"
            pipes.mkdir()
            with mps(pipes, served) as (environment, problem):
                if problem is not None:
                    yield {"mps": "not started", "problem": problem}
                    continue
                cases = [(way, False) for way in ways]
                if served:
                    cases = [*((way, True) for way in ways[:2]), *cases]
                for way, strict in until(end - time.monotonic(), cases):
                    given = [*base, *_share(way, gpus), f"resources.deterministic={str(strict).lower()}"]
                    out = folder / f"{served}-{way}-{strict}"
                    measured = _run(
                        given, "local" if way == "local" else "ray", out, environment, end - time.monotonic()
                    )
                    yield {"actors": way, "deterministic": strict, **measured}


def _share(way: str, gpus: int) -> list[str]:
    """Return the settings that give each actor its part of the GPUs."""
    return [f"resources.actors={way}", f"resources.gpus_per_client={gpus / int(way):g}"] if way.isdigit() else []


def _random_images(file: Path, samples: int) -> None:
    rng = np.random.default_rng(0)
    test = samples // 10
    np.savez(
        file,
        x_train=rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8),
        y_train=np.arange(samples) % 10,
        x_test=rng.integers(0, 256, (test, 32, 32, 3), dtype=np.uint8),
        y_test=np.arange(test) % 10,
        class_names=np.array(list("0123456789")),
    )


def _run(settings: list[str], fleet: str, out: Path, environment: Environment, limit: float) -> Finding:
    """Run `raylt run` and return what it measured, or its problem."""
    command = [sys.executable, "-m", "raylt", "run", *settings, "--fleet", fleet, "--out", str(out), "--name", "run"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment | {"PYTHONPATH": paths}, stdout=log, stderr=log, start_new_session=True
        )
        most, late = 0, False
        while process.poll() is None:
            most = max(most, _count_actors(process.pid))
            time.sleep(0.1)
            if time.perf_counter() - start > limit and not late:
                late = True
                process.terminate()
        if process.returncode:
            return {"problem": (_last_line(log) or [f"exit code {process.returncode}"])[0]}
    took = time.perf_counter() - start
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "run" / "summary.json").read_text())
    return {
        "processes": most,
        "mps": summary["made"]["mps"] or "none",
        "device": summary["made"]["device"],
        "train_s": median(line["stages"]["train"] for line in lines[1:]),
        "command_s": took,
        "model": summary["model_sha256"],
    }


def _count_actors(driver: int) -> int:
    """Count the client actors below a process; Ray names a worker's process after the actor's class."""
    names = []
    with suppress(psutil.NoSuchProcess):  # the driver ended in between
        for process in psutil.Process(driver).children(recursive=True):
            with suppress(psutil.Error):  # this one did
                names.append(" ".join(process.cmdline()))
    return sum(name.startswith("ray::ClientActor") for name in names)


def streams(
    seconds: float, device: str = "cuda", model: str = "resnet8", samples: int = 320, epochs: int = 60
) -> Iterator[Finding]:
    """Compare the seconds of two trainings one after the other with those of alternating steps on two CUDA streams."""
    for recorded in until(seconds, GRAPHS):
        config = _config(device, model, recorded)
        took, losses = {}, {}
        for way in ("in_turn", "streams"):
            trainings = [Training(*open_training(config, samples, id), epochs) for id in (0, 1)]
            for one in trainings:
                sgd(one.client, one.objective, epochs=1)
                one.client.begin("train", 2)
            start = time.perf_counter()
            losses[way] = [one.run() for one in trainings] if way == "in_turn" else by_steps(trainings)
            took[way] = time.perf_counter() - start
        yield {
            "models": 2,
            "graphs": recorded,
            "in_turn_s": took["in_turn"],
            "streams_s": took["streams"],
            "same_loss": losses["in_turn"] == losses["streams"],
        }


class Training:
    """A training that can pause between its steps."""

    def __init__(self, client: Any, objective: Any, epochs: int):
        self.client, self.objective, self.epochs = client, objective, epochs

    def rows(self) -> Iterator[Tensor]:
        return self.client.rows(self.epochs, self.client.config.local.batch)

    def run(self, rows: Iterator[Tensor] | None = None) -> float:
        return sgd(self.client, self.objective, epochs=self.epochs, rows=self.rows() if rows is None else rows)


def by_steps(trainings: list[Training]) -> list[float]:
    """Run trainings in alternating steps, each in a thread with its own CUDA stream; return their losses.

    Only the thread whose turn it is launches kernels, so that none does while another records a graph.
    """
    turns = Turns(len(trainings))
    gpu = trainings[0].client.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()

    def run(number: int) -> float:
        with turns.held_by(number), torch.cuda.stream(torch.cuda.Stream()) if gpu else nullcontext():
            if gpu and trainings[number].client.config.resources.graphs == "auto":
                # graphs of one recorder share a memory pool, so graphs replayed at the same time need two recorders
                cuda_graphs.set_recorder("cuda", cuda_graphs.CudaRecorder())
            return trainings[number].run(turns.between(number, trainings[number].rows()))

    with ThreadPoolExecutor(len(trainings)) as threads:
        return list(threads.map(run, range(len(trainings))))


class Turns:
    """Lets threads take turns in rotation, without the threads that have finished."""

    def __init__(self, count: int):
        self._changed, self._waiting = threading.Condition(), list(range(count))

    @contextmanager
    def held_by(self, number: int) -> Iterator[None]:
        """Wait for the first turn of a thread. The thread leaves the rotation at the end of the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == number)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.remove(number)
                self._changed.notify_all()

    def between(self, number: int, rows: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the rows of one thread, and let each other thread take a turn before every row but the first."""
        for place, batch in enumerate(rows):
            if place:
                with self._changed:
                    self._waiting.append(self._waiting.pop(0))
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._waiting[0] == number)
            yield batch


def _config(device: str, model: str, recorded: str) -> Any:
    return config_of("fedavg", f"resources.device={device}", f"model={model}", f"resources.graphs={recorded}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("model")
    parser.add_argument("samples", type=int)
    parser.add_argument("epochs", type=int)
    arguments = parser.parse_args()
    work(arguments.device, arguments.model, arguments.samples, arguments.epochs)
