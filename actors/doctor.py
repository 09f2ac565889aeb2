"""What `raylt doctor` looks at: versions and their floors, and what torch and Ray see."""

import json
import os
import platform
import urllib.request
from importlib.metadata import version
from typing import Any

import ray
import torch
from packaging.version import Version

from actors.cluster import connect

# below these lie known faults: remote code execution through an open dashboard, and unsafe torch.load
FLOORS = {"ray": "2.59", "torch": "2.10"}
SHOWN = ("raylt", "ray", "torch", "torchvision", "open_clip_torch", "numpy", "scikit-learn")


def examine(address: str | None) -> dict[str, Any]:
    """Findings by name; `problems` lists what should be mended, each with its remedy."""
    findings: dict[str, Any] = {"python": platform.python_version()} | {name: version(name) for name in SHOWN}
    problems = [f"{name} {findings[name]} is older than {floor}: pip install -U '{name}>={floor}'"
                for name, floor in FLOORS.items() if Version(findings[name]) < Version(floor)]
    findings |= {"CPUs": len(os.sched_getaffinity(0)), "GPUs (torch)": torch.cuda.device_count()}
    connect(address)
    try:
        have = ray.cluster_resources()
        dashboard = ray.get_runtime_context().worker.node.webui_url
        open_to_all = dashboard is not None and _authentication(dashboard) != "token"
        findings |= {"CPUs (Ray)": have.get("CPU", 0), "GPUs (Ray)": have.get("GPU", 0),
                     "dashboard": f"http://{dashboard}" if dashboard else "off",
                     "authentication": "off" if open_to_all else "token"}
    finally:
        ray.shutdown()
    if open_to_all:
        problems.append("authentication is off: anyone who reaches the cluster runs code; export RAY_AUTH_MODE=token")
    if dashboard and dashboard.split(":")[0] not in ("127.0.0.1", "localhost"):
        problems.append(f"the dashboard listens on {dashboard}: start Ray with --dashboard-host=127.0.0.1")
    return findings | {"problems": problems}


def _authentication(dashboard: str) -> str:
    """The cluster's own word: what this process has set says nothing of a cluster that it joined."""
    with urllib.request.urlopen(f"http://{dashboard}/api/authentication_mode", timeout=10) as answer:
        return json.load(answer)["authentication_mode"]
