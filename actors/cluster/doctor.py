"""The checks of `raylt doctor`: versions, the token file, devices and the nodes of the cluster."""

import http.client
import json
import platform
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from actors.cluster.access import exposed, tls, token_file
from actors.cluster.session import session
from raylt.machine import cores

# Older versions have known vulnerabilities. The packages run code from elsewhere (ray, torch.load, filelock), read
# files from elsewhere (pillow, scikit-learn, pyyaml, protobuf), or serve Ray's network traffic (aiohttp, urllib3,
# requests, jinja2, setuptools).
MIN_VERSIONS = {
    "ray": "2.59",
    "torch": "2.10",
    "pillow": "12.1.1",
    "scikit-learn": "1.5",
    "pyyaml": "5.4",
    "protobuf": "6.33.5",
    "aiohttp": "3.13.3",
    "urllib3": "2.6.3",
    "requests": "2.32.4",
    "jinja2": "3.1.6",
    "filelock": "3.20.3",
    "setuptools": "78.1.1",
}
SHOWN = ("raylt", "ray", "torch", "torchvision", "open_clip_torch", "numpy", "scikit-learn", "pillow")
SAME_ON_ALL_NODES = ("python", "raylt", "ray", "torch", "torchvision", "numpy")
TIMEOUT_S = 60
MAX_ANSWER_BYTES = 65536

Diagnosis = dict[str, Any]


def examine(address: str | None) -> Diagnosis:
    """Examine this machine and the cluster that a run would use.

    Returns:
        Findings by name; `problems` lists faults, each with its remedy.

    Raises:
        ConfigError: The cluster cannot be joined.
    """
    from raylt.core.device import gpus

    findings: Diagnosis = {"python": platform.python_version()} | {name: _version(name) or "none" for name in SHOWN}
    problems = outdated(_version)
    findings |= {"CPUs": len(cores()), "GPUs (torch)": gpus()}
    token = token_file()
    exposure = exposed(token)  # before `session`, which corrects the mode
    findings["token file"] = f"{token}" if token.exists() else f"{token}, does not exist yet"
    if exposure:
        problems.append(
            f"the token file {token}: {exposure}; chmod 600 {token}, and create a new token if someone else has "
            "an account here"
        )
    with session(address) as cluster:
        import ray

        resources = ray.cluster_resources()
        board = ray.get_runtime_context().worker.node.webui_url or ""
        findings |= {
            "cluster": str(cluster),
            "nodes": len([n for n in ray.nodes() if n["Alive"]]),
            "CPUs (Ray)": resources.get("CPU", 0),
            "GPUs (Ray)": resources.get("GPU", 0),
            "dashboard": _dashboard(board) or "off",
            "authentication": "token" if cluster.token else "off",
            "TLS": "on" if tls() else "off",
        }
        if not cluster.token:
            problems.append(
                "authentication is off: anyone who reaches the cluster can run code on it; export "
                "RAY_AUTH_MODE=token before you start it"
            )
        if findings["dashboard"] != "off" and board.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            problems.append(f"the dashboard listens on {board}: start Ray with --dashboard-host=127.0.0.1")
        if not cluster.started:
            problems += _differing_nodes()
    return findings | {"problems": problems}


def outdated(version_of: Callable[[str], str | None]) -> list[str]:
    """Return a warning for each installed package that is older than its minimum version."""
    installed = {name: version_of(name) for name in MIN_VERSIONS}
    return [
        f"{name} {installed_version} is older than {MIN_VERSIONS[name]}, below which vulnerabilities are known: pip "
        f"install -U '{name}>={MIN_VERSIONS[name]}'"
        for name, installed_version in installed.items()
        if installed_version is not None and Version(installed_version) < Version(MIN_VERSIONS[name])
    ]


def differences(local: Mapping[str, str], nodes: Mapping[str, Mapping[str, str] | str]) -> list[str]:
    """Return a warning for each node whose versions differ from the versions in this process.

    Args:
        local: Versions in this process, by package.
        nodes: Versions by address of the node, or the reason why a node's versions are unknown.
    """
    lines = []
    for node, remote in nodes.items():
        if isinstance(remote, str):
            lines.append(f"node {node}: {remote}")
            continue
        differing = [
            f"{name} {remote.get(name, 'none')} instead of {version}"
            for name, version in local.items()
            if remote.get(name) != version
        ]
        if differing:
            lines.append(f"node {node}: {', '.join(differing)}; install the same versions on all nodes and here")
    return lines


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes. CPU and GPU builds count as equal."""
    return {
        name: platform.python_version() if name == "python" else (_version(name) or "none").partition("+")[0]
        for name in SAME_ON_ALL_NODES
    }


def _differing_nodes() -> list[str]:
    """Read the versions of each node by a Ray task, and return a warning for each node whose versions differ."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(versions)
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = ask.options(
                scheduling_strategy=strategy
            ).remote()
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=TIMEOUT_S)
    by_node: dict[str, Mapping[str, str] | str] = {}
    for node, answer in answers.items():
        if answer not in ready:
            by_node[node] = f"did not answer within {TIMEOUT_S} s; look at its logs, or restart it"
            continue
        try:
            by_node[node] = ray.get(answer)
        except Exception as error:  # for example, the node has no raylt, another Python or too little memory
            why = " ".join(str(error).split())[-200:]
            by_node[node] = f"could not return its versions ({why}); install raylt there"
    return differences(versions(), by_node)


def _dashboard(board: str) -> str | None:
    """Return the address of the dashboard, or None if it does not answer; some clusters have none."""
    if not board:
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{board}/api/authentication_mode", timeout=10) as answer:
            json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
        return None
    return f"http://{board}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
