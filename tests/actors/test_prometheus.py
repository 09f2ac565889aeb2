"""The metrics that Prometheus reads from a run, and the dashboard that draws them."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest
import ray

from actors.prometheus import RunMetrics, _tags
from raylt.core.experiment import RoundReport

REPORT = RoundReport(
    step=3,
    phase="round",
    seconds=1.5,
    evaluation_seconds=0.5,
    accuracy=0.75,
    global_accuracy=0.75,
    groups={"many": 0.9, "medium": None, "few": 0.25},
    traffic={"train": {"down": 1000, "up": 500, "replies": 2}},
    lost=[4],
    retried=[4, 4],
    rejected={1: "nan"},
    figures={"clusters": 3, "names": ["a"]},
    timings={"train": 1.5, "evaluation": 0.5},
)


def test_tags_are_ascii():
    assert _tags(run="läden", call="train") == {"run": "l\\xe4den", "call": "train"}


@pytest.mark.slow
def test_prometheus_reads_the_figures_of_a_run(ray_session):
    metrics = RunMetrics("läden")
    port = next(node["MetricsExportPort"] for node in ray.nodes() if node["Alive"])
    end = time.monotonic() + 60
    found = {}
    metrics.show(REPORT, {0: 0.25, 4: 1.25})
    metrics.show_progress("train", 3, 4)
    metrics.show_progress("evaluation", 0, 0)
    metrics.show_progress("train", 1, 4)
    while len(found) < 16 and time.monotonic() < end:
        time.sleep(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = read(answer.read().decode())
    assert found == {
        ("round", ""): 3,
        ("accuracy", "all"): 0.75,
        ("accuracy", "many"): 0.9,
        ("accuracy", "few"): 0.25,
        ("server_seconds", "train"): 1.5,
        ("server_seconds", "evaluation"): 0.5,
        ("client_seconds", "0"): 0.25,
        ("client_seconds", "4"): 1.25,
        ("figure", "clusters"): 3,
        ("progress", "train"): 0.25,
        ("progress", "evaluation"): 0,
        ("bytes_total", "train down"): 1000,
        ("bytes_total", "train up"): 500,
        ("troubles_total", "retried"): 2,
        ("troubles_total", "lost"): 1,
        ("troubles_total", "rejected"): 1,
    }


def read(text):
    """Return the values by metric name and by raylt's own tags, sorted by name."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"ray_raylt_(\w+)\{(.*)\} (\S+)", line)
        tags = dict(re.findall(r'(\w+)="([^"]*)"', match[2])) if match else {}
        if match and tags.get("run") == "l\\\\xe4den":
            ours = " ".join(
                tags[key] for key in ("group", "client", "stage", "figure", "kind", "call", "direction") if key in tags
            )
            found[match[1], ours] = float(match[3])
    return found


@pytest.mark.parametrize("file", ["docs/grafana.json"])
def test_the_dashboard_draws_every_figure(file):
    text = (Path(__file__).parents[2] / file).read_text()
    drawn = set(re.findall(r"ray_raylt_(\w+?)(?:_total)?\{", json.dumps(json.loads(text))))
    figures = Path(__file__).parents[2] / "actors/prometheus.py"
    assert drawn == set(re.findall(r'self\._(?:gauge|counter)\(\s*"(\w+)"', figures.read_text()))


SLOWLY = '''
import time
from dataclasses import replace
from typing import ClassVar

from raylt import Method


class Slowly(Method):
    """FedAvg that takes its time, and whose client 1 is refused."""

    name: ClassVar[str] = "slowly"
    paper: ClassVar[str] = "none"

    def train(self, client, message):
        time.sleep(0.3)  # so that the progress of a round is seen between two rounds
        reply = super().train(client, message)
        return replace(reply, weight=1e9) if client.id == 1 else reply
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)")
def test_every_query_of_the_dashboard_returns_data_of_a_run(tmp_path):
    """Prometheus finds the run by the file that Ray writes, as docs/deployment.md describes."""
    dashboard = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
    queries = {
        target["expr"].replace("$run", "watched")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    (tmp_path / "slowly.py").write_text(SLOWLY)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "raylt",
            "run",
            "--plugin",
            "slowly.py",
            "method=slowly",
            "federation.rounds=400",
            "federation.quorum=0.5",
            "data.clients=3",
            "local.epochs=1",
            "--out",
            "runs",
            "--name",
            "watched",
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "err.txt").open("w"),
        env=environment | {"TMPDIR": str(tmp_path), "RAY_AUTH_MODE": "disabled"},
    )
    server = None
    try:
        found = wait_for(lambda: discovered(run.pid), run, tmp_path / "err.txt", 120)
        (tmp_path / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s"},
                    "scrape_configs": [
                        {"job_name": "ray", "file_sd_configs": [{"files": [str(found)], "refresh_interval": "1s"}]}
                    ],
                }
            )
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/series",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        empty = set(queries)
        wait_for(
            lambda: not empty.difference_update({q for q in empty if answered(port, q)}) and not empty,
            run,
            tmp_path / "err.txt",
            100,
            lambda: f"no data of {empty}",
        )
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130
        assert "stopped; continue with raylt resume" in (tmp_path / "err.txt").read_text()
    finally:
        for process in (run, server):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def discovered(pid: int) -> Path | None:
    """Return Ray's service-discovery file for Prometheus, of the Ray that the given process started."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for word in process.cmdline():
                file = Path(word.partition("=")[2]) / "prom_metrics_service_discovery.json"
                if word.startswith("--temp-dir=") and file.is_file() and json.loads(file.read_text()):
                    return file
    return None


def answered(port: int, query: str) -> bool:
    address = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=10) as answer:
        return bool(json.loads(answer.read())["data"]["result"])
    return False


def wait_for(claim, process, errors, seconds, otherwise=lambda: ""):
    end = time.monotonic() + seconds
    while not (value := claim()):
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < end, f"{otherwise()}: {errors.read_text()[-2000:]}"
        time.sleep(0.5)
    return value
