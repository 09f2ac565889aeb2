"""Who runs where: from the nodes of a cluster and what a client needs, how many client actors and what each takes.

What fits is counted here, node by node, before anything starts; then one placement group holds the places of all
client actors. Ray moves the places of a node that is gone to nodes with room, when there is some.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raylt.config import Config, ResourcesConfig
from raylt.errors import ConfigError

SERVER_GPUS = 0.05      # its share of a GPU: Ray does not bound memory, so this only places it
USABLE = 0.9            # of a memory: the rest is for Ray, fragments and what else runs


@dataclass(frozen=True)
class Node:
    """Machines of a cluster, `count` of them alike. Memory in bytes; `role` is the label: server, client or none."""

    cpus: float
    gpus: float = 0
    memory: float = math.inf
    role: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Need:
    """What one client actor was seen to use: bytes of its process, and share of a GPU's memory."""

    memory: float = 0
    gpu_memory: float = 0


@dataclass(frozen=True)
class Placement:
    """How many client actors there are, what each takes, and the labels of the nodes that may hold them."""

    actors: int
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


def reserve(placement: Placement, actors: int) -> Any:
    """A place for each of the client actors: all of them, or none yet. Evenly over the nodes where that is possible."""
    from ray.util.placement_group import placement_group  # `raylt plan` does without Ray
    each = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus > 0 else {})
    return placement_group([each] * actors, strategy="SPREAD",
                           bundle_label_selector=[dict(placement.labels)] * actors)


@dataclass(frozen=True)
class Plan:
    """A placement, the server's place, and why: one line for each decision."""

    placement: Placement
    server_gpus: float
    server_labels: Mapping[str, str]
    reasons: dict[str, str]


def place(config: Config, clients: int, have: Mapping[str, float]) -> Placement:
    """`plan` for a cluster of one node, or for what all nodes have together.

    Args:
        have: as `ray.cluster_resources()`.
    """
    return plan(config, clients, [Node(have.get("CPU", 0.0), have.get("GPU", 0.0))]).placement


def plan(config: Config, clients: int, nodes: Sequence[Node], need: Need | None = None) -> Plan:
    """How many client actors to start, what each takes, and where the server goes.

    One actor per client where the nodes have the slots; else as many as can be at work at once.

    Args:
        clients: K.
        need: what one client actor was seen to use, where that was measured.

    Raises:
        ConfigError: the settings ask for more than there is.
    """
    wanted, federation, need = config.resources, config.federation, need or Need()
    on_gpus = wanted.gpu_share != 0
    homes, client_labels, where = _homes(nodes, on_gpus)
    active = min(clients, math.ceil(federation.participation * (1 + federation.over_select) * clients - 1e-9))
    limits = [_limits(wanted, node, need) for node in homes]
    slots = sum(node.count * min(each.values()) for node, each in zip(homes, limits, strict=True))
    if slots < 1:
        raise ConfigError(f"resources: a client actor takes {_size(wanted)}, the cluster has {_total(homes)}, not "
                          f"enough for one; lower resources.cpus_per_client or resources.gpus_per_client")
    actors, why = _actors(wanted, clients, active, slots, homes)
    share = 0.0
    if on_gpus and any(node.gpus for node in homes):
        share = _gpu_share(wanted, homes, limits, actors)
    server_gpus, server_labels, server_why = _server(nodes, on_gpus)
    if wanted.device == "cuda" and not (share and server_gpus):
        who = "the server" if share else "client actors"
        raise ConfigError(f"resources.device = cuda: {who} would be on nodes without GPUs, the cluster has "
                          f"{_total(nodes)}; add GPUs there, or set resources.device=auto")
    each = math.ceil(clients / actors)
    bound = min(limits[0], key=lambda name: limits[0][name])
    reasons = {
        "nodes": f"{sum(node.count for node in nodes)}: {_total(nodes)}",
        "client actors": f"{actors} on {where}; {why}; {slots} slots, bound by {bound}",
        "clients per actor": f"{each}; " + ("each client has its own" if each == 1 else "an idle actor takes "
                                            "over a waiting client"),
        "each actor": f"{wanted.cpus_per_client:g} CPUs and {share:g} GPUs" + (
            f"; {math.floor(1 / share)} share a GPU with room for the server" if 0 < share < 1 else ""),
        "server": server_why}
    if 0 < share <= 0.5:
        reasons["MPS"] = ("worth starting: without it the kernels of processes that share a GPU take turns "
                          "(docs/deployment.md)")
    return Plan(Placement(actors, wanted.cpus_per_client, share, client_labels), server_gpus, server_labels, reasons)


def room(placement: Placement, nodes: Sequence[Node]) -> int:
    """How many client actors of this size the nodes hold."""
    names = placement.labels.get("role", "")
    fits = [node for node in nodes
            if (node.role == names or not names or (names[0] == "!" and node.role != names[1:]))]
    total = 0
    for node in fits:
        count = math.floor(node.cpus / placement.cpus + 1e-9)
        if placement.gpus > 1:
            count = min(count, math.floor(node.gpus / placement.gpus))
        elif placement.gpus:
            count = min(count, int(node.gpus) * math.floor(1 / placement.gpus + 1e-9))
        total += count * node.count
    return total


def nodes_of(listing: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The living nodes of `ray.nodes()`."""
    return [Node(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0),
                 node["Resources"].get("memory", math.inf), node.get("Labels", {}).get("role"))
            for node in listing if node["Alive"]]


def parse_nodes(text: str) -> list[Node]:
    """Nodes from a description: `4x4gpu16cpu`, or `server:1x8cpu,client:2x4gpu48cpu`."""
    kinds = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(server|client):)?(#)x(?:(#)gpu)?(#)cpu".replace("#", "[0-9]{1,9}"), part.strip())
        if match is None or int(match[2]) < 1:
            raise ConfigError(f"--nodes {part[:40]}: must be [ROLE:]COUNTx[GPUSgpu]CPUScpu, as in 4x4gpu16cpu or "
                              "server:1x8cpu,client:2x4gpu48cpu, numbers below a billion")
        kinds.append(Node(float(match[4]), float(match[3] or 0), role=match[1], count=int(match[2])))
    return kinds


def _homes(nodes: Sequence[Node], on_gpus: bool) -> tuple[list[Node], dict[str, str], str]:
    """The nodes that clients may go to, the label selector for them, and their name."""
    labels, where = {}, "all nodes"
    homes = list(nodes)
    if any(node.role == "client" for node in nodes):
        labels, where = {"role": "client"}, "nodes labelled role=client"
        homes = [node for node in nodes if node.role == "client"]
    elif any(node.role == "server" for node in nodes) and any(node.role != "server" for node in nodes):
        labels, where = {"role": "!server"}, "nodes not labelled role=server"
        homes = [node for node in nodes if node.role != "server"]
    if on_gpus and any(node.gpus for node in homes):
        with_gpus = [node for node in homes if node.gpus]
        where = where if len(with_gpus) == len(homes) else f"{where} with GPUs"
        homes = with_gpus
    return homes, labels, where


def _limits(wanted: ResourcesConfig, node: Node, need: Need) -> dict[str, int]:
    """How many client actors a node holds, by what bounds it."""
    limits = {"CPUs": math.floor(node.cpus / wanted.cpus_per_client + 1e-9)}
    if wanted.gpu_share == "auto":
        if node.gpus and need.gpu_memory:
            limits["GPU memory"] = int(node.gpus) * max(1, math.floor(USABLE / need.gpu_memory))    # one was measured
    elif wanted.gpu_share > 0:
        limits["GPUs"] = _share(wanted.gpu_share, node.gpus)[0]
    if need.memory and node.memory < math.inf:
        limits["memory"] = math.floor(USABLE * node.memory / need.memory)
    return limits


def _actors(wanted: ResourcesConfig, clients: int, active: int, slots: int, homes: Sequence[Node]) -> tuple[int, str]:
    """The number of client actors, and why."""
    if wanted.actors != "auto":
        actors, setting, remedy = wanted.actors, f"actors = {wanted.actors}", f"set resources.actors={slots}"
    elif wanted.clients_per_actor != "auto":
        actors = math.ceil(clients / wanted.clients_per_actor)
        setting = f"clients_per_actor = {wanted.clients_per_actor}"
        remedy = f"set resources.clients_per_actor={math.ceil(clients / slots)}"
    elif clients <= slots:
        return clients, "one for each client"
    else:
        return min(slots, active), f"{clients} clients are more than slots, {active} are at work at once"
    actors = min(actors, clients)
    if actors > slots:
        raise ConfigError(f"resources.{setting}: {actors} client actors of {_size(wanted)}, the cluster has "
                          f"{_total(homes)}, enough for {slots}; {remedy}, or lower resources.cpus_per_client or "
                          "resources.gpus_per_client")
    return actors, f"resources.{setting}"


def _gpu_share(wanted: ResourcesConfig, homes: Sequence[Node], limits: Sequence[Mapping[str, int]],
               actors: int) -> float:
    if wanted.gpu_share != "auto":
        return _share(wanted.gpu_share, 1)[1]
    # the fewest on a GPU with which all actors, and the server, fit
    each = next(each for each in range(1, actors + 1) if actors <= sum(
        node.count * min(*limit.values(), each * int(node.gpus)) for node, limit in zip(homes, limits, strict=True)))
    return _rounded(1 - SERVER_GPUS, each)


def _server(nodes: Sequence[Node], on_gpus: bool) -> tuple[float, dict[str, str], str]:
    """The server's share of a GPU, its label selector, and why."""
    labelled = [node for node in nodes if node.role == "server"]
    labels, where = ({"role": "server"}, "the node labelled role=server") if labelled else ({}, "any node")
    if not on_gpus:
        return 0.0, labels, f"{where}; on the CPU, as resources says"
    if any(node.gpus for node in labelled or nodes):
        return SERVER_GPUS, labels, f"{where}{'' if labelled else ' with GPUs'}, on {SERVER_GPUS:g} of a GPU"
    none = "no GPU there" if any(node.gpus for node in nodes) else "no GPU"
    return 0.0, labels, f"{where}; {none}, so it computes on the CPU"


def _share(wanted: float, gpus: float) -> tuple[int, float]:
    """How many actors of `wanted` GPUs fit, and what each takes so that the server finds its place beside them."""
    if wanted > 1:
        if wanted != int(wanted):
            raise ConfigError(f"resources.gpus_per_client = {wanted:g}: must be a whole number when above 1")
        return max(0, math.floor((gpus - SERVER_GPUS) / wanted)), wanted
    each = math.floor(1 / wanted + 1e-9)
    return int(gpus) * each, min(wanted, _rounded(1 - SERVER_GPUS, each))


def _rounded(whole: float, parts: int) -> float:
    """`whole / parts`, down to the step that Ray counts in."""
    return math.floor(whole / parts * 1e4 + 1e-6) / 1e4


def _size(wanted: ResourcesConfig) -> str:
    return f"{wanted.cpus_per_client:g} CPUs and {wanted.gpu_share} GPUs"


def _total(nodes: Sequence[Node]) -> str:
    return (f"{sum(node.count * node.cpus for node in nodes):.15g} CPUs and "
            f"{sum(node.count * node.gpus for node in nodes):.15g} GPUs")
