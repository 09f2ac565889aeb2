"""What Prometheus reads of a run, and the dashboard that draws it."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from actors.figures import Figures
from raylt.core.report import Report

REPORT = Report(3, "round", 1.5, 0.5, 0.75, 0.75, {"many": 0.9, "medium": None, "few": 0.25}, None,
                {"train": {"down": 1000, "up": 500, "replies": 2}}, lost=[4], retried=[4, 4], rejected={1: "nan"},
                figures={"clusters": 3, "names": ["a"]}, stages={"train": 1.5, "evaluation": 0.5})


@pytest.mark.slow
def test_prometheus_reads_the_figures_of_a_run(ray_session):
    figures = Figures("run-of-figures")
    port = next(node["MetricsExportPort"] for node in ray.nodes() if node["Alive"])
    end = time.monotonic() + 60
    found = {}
    figures.show(REPORT, {0: 0.25, 4: 1.25})
    while len(found) < 14 and time.monotonic() < end:
        time.sleep(1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = read(answer.read().decode())
    assert found == {
        ("round", ""): 3, ("accuracy", "all"): 0.75, ("accuracy", "many"): 0.9, ("accuracy", "few"): 0.25,
        ("server_seconds", "train"): 1.5, ("server_seconds", "evaluation"): 0.5, ("client_seconds", "0"): 0.25,
        ("client_seconds", "4"): 1.25, ("figure", "clusters"): 3, ("bytes_total", "train down"): 1000,
        ("bytes_total", "train up"): 500, ("troubles_total", "retried"): 2, ("troubles_total", "lost"): 1,
        ("troubles_total", "rejected"): 1}


def read(text):
    """By name and by the tags that are ours, in the order of their names."""
    found = {}
    for line in text.splitlines():
        match = re.fullmatch(r"ray_raylt_(\w+)\{(.*)\} (\S+)", line)
        tags = dict(re.findall(r'(\w+)="([^"]*)"', match[2])) if match else {}
        if match and tags.get("run") == "run-of-figures":
            ours = " ".join(tags[key] for key in ("group", "client", "stage", "figure", "kind", "call", "direction")
                            if key in tags)
            found[match[1], ours] = float(match[3])
    return found


@pytest.mark.parametrize("file", ["docs/grafana.json"])
def test_the_dashboard_draws_every_figure(file):
    text = (Path(__file__).parents[2] / file).read_text()
    drawn = set(re.findall(r"ray_raylt_(\w+?)(?:_total)?\{", json.dumps(json.loads(text))))
    figures = Path(__file__).parents[2] / "actors/figures.py"
    assert drawn == set(re.findall(r'self\._(?:gauge|counter)\("(\w+)"', figures.read_text()))
