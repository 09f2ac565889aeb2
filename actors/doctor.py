"""What `raylt doctor` looks at: versions and their floors, the token's file, what torch and Ray see, every node."""

import http.client
import json
import os
import platform
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from actors.access import exposed, tls, token_file
from actors.cluster import session

# Below these lie known holes: of what runs code sent to it (ray, torch.load, filelock), reads files of others (pillow,
# scikit-learn, pyyaml, protobuf) or speaks on the network for Ray (aiohttp, urllib3, requests, jinja2, setuptools).
FLOORS = {"ray": "2.59", "torch": "2.10", "pillow": "12.1.1", "scikit-learn": "1.5", "pyyaml": "5.4",
          "protobuf": "6.33.5", "aiohttp": "3.13.3", "urllib3": "2.6.3", "requests": "2.32.4", "jinja2": "3.1.6",
          "filelock": "3.20.3", "setuptools": "78.1.1"}
SHOWN = ("raylt", "ray", "torch", "torchvision", "open_clip_torch", "numpy", "scikit-learn", "pillow")
ALIKE = ("python", "raylt", "ray", "torch", "torchvision", "numpy")     # must be the same on every node
PATIENCE_S = 60
ANSWER_BYTES = 65536

Report = dict[str, Any]


def examine(address: str | None) -> Report:
    """Findings by name; `problems` lists what should be mended, each with its remedy.

    Raises:
        ConfigError: no cluster could be joined there.
    """
    from raylt.core.device import gpus

    findings: Report = {"python": platform.python_version()} | {name: _version(name) or "none" for name in SHOWN}
    problems = outdated(_version)
    findings |= {"CPUs": len(os.sched_getaffinity(0)), "GPUs (torch)": gpus()}
    token, who = token_file(), exposed(token_file())        # before the session, which mends it
    findings["token file"] = f"{token}" if token.exists() else f"{token}, not there yet"
    if who:
        problems.append(f"the token file {token}: {who}; chmod 600 {token}, and make a new token if someone else has "
                        "an account here")
    with session(address) as cluster:
        import ray

        have, board = ray.cluster_resources(), ray.get_runtime_context().worker.node.webui_url or ""
        findings |= {"cluster": str(cluster), "nodes": len([n for n in ray.nodes() if n["Alive"]]),
                     "CPUs (Ray)": have.get("CPU", 0), "GPUs (Ray)": have.get("GPU", 0),
                     "dashboard": _dashboard(board) or "off", "authentication": "token" if cluster.token else "off",
                     "TLS": "on" if tls() else "off"}
        if not cluster.token:
            problems.append("authentication is off: anyone who reaches the cluster runs code; export "
                            "RAY_AUTH_MODE=token where it is started")
        if findings["dashboard"] != "off" and board.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            problems.append(f"the dashboard listens on {board}: start Ray with --dashboard-host=127.0.0.1")
        if not cluster.started:
            problems += _unlike_here()
    return findings | {"problems": problems}


def outdated(version_of: Callable[[str], str | None]) -> list[str]:
    """What is installed and older than its floor, a line each."""
    installed = {name: version_of(name) for name in FLOORS}
    return [f"{name} {has} is older than {FLOORS[name]}, below which holes are known: pip install -U "
            f"'{name}>={FLOORS[name]}'" for name, has in installed.items()
            if has is not None and Version(has) < Version(FLOORS[name])]


def differences(here: Mapping[str, str], nodes: Mapping[str, Mapping[str, str] | str]) -> list[str]:
    """How the nodes' versions differ from those here, a line for each node that does.

    Args:
        nodes: versions by address, or why a node did not say them.
    """
    lines = []
    for node, there in nodes.items():
        if isinstance(there, str):
            lines.append(f"node {node}: {there}")
        elif unlike := [f"{name} {there.get(name, 'none')} instead of {here[name]}"
                        for name in here if there.get(name) != here[name]]:
            lines.append(f"node {node}: {', '.join(unlike)}; install the same versions on all nodes and here")
    return lines


def versions() -> dict[str, str]:
    """Of this process, what must be alike on all nodes; builds for CPU and GPU of the same version are."""
    return {name: platform.python_version() if name == "python" else (_version(name) or "none").partition("+")[0]
            for name in ALIKE}


def _unlike_here() -> list[str]:
    """Each node says its versions in a task of its own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(versions)
    answers = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = ask.options(
                scheduling_strategy=place).remote()
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=PATIENCE_S)
    told: dict[str, Mapping[str, str] | str] = {}
    for node, answer in answers.items():
        if answer not in ready:
            told[node] = f"did not answer within {PATIENCE_S} s; look at its logs, or start it again"
            continue
        try:
            told[node] = ray.get(answer)
        except Exception as error:      # any: the node has no raylt, another Python, no room for a process
            why = " ".join(str(error).split())[-200:]
            told[node] = f"could not say its versions ({why}); install raylt there"
    return differences(versions(), told)


def _dashboard(board: str) -> str | None:
    """Its address, if it answers; a cluster may have been started without."""
    if not board:
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{board}/api/authentication_mode", timeout=10) as answer:
            json.loads(answer.read(ANSWER_BYTES))
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
        return None
    return f"http://{board}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
