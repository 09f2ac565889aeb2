"""Measures `raylt serve` under requests from several connections: latency, rate, and correctness of answers.

    python benchmarks/serving.py [--requests 1000] [--connections 8] [--replicas 1] [--record]

It trains FedAvg on the digits for a few rounds, serves the exported model with Ray Serve, and sends the test images as
PNG files. Each connection is a process-wide thread that waits for its answer before it sends the next image. Answers
are held against those of the same file in this process, as `raylt predict` gives them. `--record` keeps the figures in
benchmarks/results/serving.json.
"""

import argparse
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import recorded
from PIL import Image

import raylt
from raylt.data.images.cache import load

NAME = "serving"
WARM = 50  # requests before the clock starts
PORT = 8766


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = raylt.run("fedavg", data="digits", rounds=3, fleet="local", quiet=True, out=folder, name="digits")
        file = raylt.export(run, folder / "digits.safetensors")
        pixels = load(run.task.test.x)[: arguments.requests]
        images = [_png(image) for image in pixels]
        model = raylt.load_model(file)
        expected = [model.predict(image[None]).shares[0] for image in pixels]
        server = _serve(file, arguments.replicas)
        try:
            figures = measure(images, expected, arguments.requests, arguments.connections)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    # load of the last minute; it exceeds the number of cores if other programs were running
    figures |= {"replicas": arguments.replicas, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(figures, indent=1))
    if arguments.record:
        recorded.keep(NAME, figures | {"recorded": str(date.today())})


def measure(images: list[bytes], expected: list[dict[str, float]], requests: int, connections: int) -> dict[str, Any]:
    """Send `requests` requests, distributed over the connections, and return the measured figures."""

    def converse(first: int, numbers: range) -> list[tuple[int, float, int, dict[str, Any]]]:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        answers = []
        for number in numbers:
            start = time.perf_counter()
            connection.request("POST", "/predict", images[number % len(images)])
            answer = connection.getresponse()
            content = answer.read()
            answers.append((number, time.perf_counter() - start, answer.status, json.loads(content)))
        return answers

    converse(0, range(WARM))
    start = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        parts = threads.map(lambda first: converse(first, range(first, requests, connections)), range(connections))
        answers = [answer for part in parts for answer in part]
    seconds = time.perf_counter() - start
    latencies = [1000 * answer[1] for answer in answers]
    errors = sum(status != 200 for _, _, status, _ in answers)
    other_class = 0
    largest = 0.0
    for number, _, status, answer in answers:
        if status == 200:
            shares = expected[number % len(images)]
            other_class += answer["class"] != max(shares, key=shares.__getitem__)
            largest = max(largest, *(abs(answer["shares"][key] - share) for key, share in shares.items()))
    return {
        "requests": requests,
        "connections": connections,
        "errors": errors,
        "other_class": other_class,
        "largest_difference_of_a_share": largest,
        "median_ms": round(float(np.median(latencies)), 1),
        "p99_ms": round(float(np.percentile(latencies, 99)), 1),
        "requests_per_s": round(requests / seconds, 1),
    }


def _serve(file: Path, replicas: int) -> subprocess.Popen[bytes]:
    """Start `raylt serve` and wait until it answers."""
    command = [sys.executable, "-m", "raylt", "serve", str(file), "--port", str(PORT), "--replicas", str(replicas)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    line = server.stdout.readline()
    assert b"http://" in line, line
    return server


def _png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(content, "PNG")
    return content.getvalue()


if __name__ == "__main__":
    main()
