"""Plans the number, resources and nodes of client actors.

`plan` counts what fits, node by node, before anything starts. One placement group then reserves the resources of all
client actors. When a node is lost, Ray moves its reservations to nodes with room, if there are any.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raylt.config import Config, ResourcesConfig
from raylt.errors import ConfigError, count_of

SERVER_GPUS = 0.05  # Share of a GPU for the server, for placement only; Ray does not limit memory.
USABLE = 0.9  # Share of the memory to plan with; the rest is for Ray, fragmentation and other programs.


# Measured on one H200 for rounds of FedAvg with ResNet-8 and of SFD with ResNet-18: benchmarks/results/gpu_h200.json.
PRECISION_COSTS = {
    "float32": "rounds took 2.0 to 2.3 times as long as with local.precision=tf32",
    "tf32": "rounds with float32 took 2.0 to 2.3 times as long",
    "bfloat16": "rounds with float32 took 2.3 to 2.7 times as long",
}


@dataclass(frozen=True)
class Node:
    """A group of equal nodes of a cluster.

    Args:
        cpus: CPUs of each node.
        gpus: GPUs of each node.
        memory: Memory of each node in bytes.
        role: Value of the node label `role`: server, client or None.
        count: Number of nodes in the group.
    """

    cpus: float
    gpus: float = 0
    memory: float = math.inf
    role: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Need:
    """The measured memory use of one client actor.

    Args:
        memory: Memory of its process in bytes.
        gpu_memory: Share of a GPU's memory.
    """

    memory: float = 0
    gpu_memory: float = 0


@dataclass(frozen=True)
class Placement:
    """The number of client actors, the resources of each actor, and the labels of nodes that may host them."""

    actors: int
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementPlan:
    """A placement of client actors, and the resources of the server.

    Attributes:
        reasons: One line that explains each decision, by the name of the decision.
    """

    placement: Placement
    server_gpus: float
    server_labels: Mapping[str, str]
    reasons: dict[str, str]


def plan(config: Config, clients: int, nodes: Sequence[Node], need: Need | None = None) -> PlacementPlan:
    """Plan the client actors and the server of a run on the given nodes.

    Every client gets its own actor if the nodes have enough slots. Otherwise the number of actors is the number that
    can work at the same time.

    Args:
        config: Configuration of the run.
        clients: Number of clients, K.
        nodes: The nodes.
        need: Measured memory use of one client actor; None if it was not measured.

    Raises:
        ConfigError: The settings ask for more resources than available.
    """
    wanted = config.resources
    federation = config.federation
    need = need or Need()
    on_gpus = wanted.gpu_share != 0
    homes, client_labels, where = _homes(nodes, on_gpus)
    active = min(clients, math.ceil(federation.participation * (1 + federation.over_select) * clients - 1e-9))
    limits = [_limits(wanted, node, need) for node in homes]
    hosts = where if where.startswith("all") else f"the {where}"
    slots = sum(node.count * min(each.values()) for node, each in zip(homes, limits, strict=True))
    if slots < 1:
        largest = max(homes, key=lambda node: (min(node.gpus, _share_of(wanted)), node.cpus))
        server = f" and the server {SERVER_GPUS:g} GPUs" if _share_of(wanted) > 1 else ""
        raise ConfigError(
            f"resources: a client actor needs {_size(wanted)}{server}, but the largest of {hosts} has "
            f"{_total([replace(largest, count=1)])}. Lower {_sizes(wanted)}.",
            code="cluster.too-small",
            slots=0,
        )
    have = f"{'the cluster has' if len(homes) == len(nodes) else f'{hosts} have'} {_total(homes)}"
    actors, why = _actors(wanted, clients, active, slots, have)
    share = 0.0
    if on_gpus and any(node.gpus for node in homes):
        share = _gpu_share(wanted, homes, limits, actors)
    server_gpus, server_labels, server_why = _server(nodes, on_gpus)
    if wanted.device == "cuda" and not (share and server_gpus):
        lacking = "the server" if share else "client actors"
        raise ConfigError(
            f"resources.device: is cuda, but {lacking} would be on nodes without GPUs (the cluster has "
            f"{_total(nodes)}). Add GPUs there, or set resources.device=auto.",
            code="device.not-found",
            key="resources.device",
            value="cuda",
        )
    clients_per_actor = math.ceil(clients / actors)
    bound = min(limits[0], key=lambda name: limits[0][name])
    reasons = {
        "nodes": f"{sum(node.count for node in nodes)}: {_total(nodes)}",
        "client actors": f"{actors} on {where}; {why}; {count_of(slots, 'slot')}, limited by {bound}",
        "clients per actor": f"{clients_per_actor}; "
        + ("each client has its own" if clients_per_actor == 1 else "an idle actor takes over a waiting client"),
        "each actor": f"{count_of(wanted.cpus_per_client, 'CPU')} and {count_of(share, 'GPU')}"
        + (f"; {math.floor(1 / share)} share a GPU with room for the server" if 0 < share < 1 else ""),
        "server": server_why,
    }
    if 0 < share <= 0.5:
        reasons["MPS"] = "start it: without MPS, kernels of processes that share a GPU take turns (docs/gpus.md)"
    if share > 0:
        precision = config.local.precision
        measured = "with ResNet-8 and ResNet-18 on images of 32x32 on an H200 (docs/gpus.md)"
        reasons["precision"] = f"{precision}: {PRECISION_COSTS[precision]}, {measured}"
    return PlacementPlan(
        Placement(actors, wanted.cpus_per_client, share, client_labels), server_gpus, server_labels, reasons
    )


def room(placement: Placement, nodes: Sequence[Node]) -> int:
    """Return the number of client actors of this placement's size that the nodes can hold."""
    total = 0
    for node in nodes:
        if not _selects(placement.labels.get("role", ""), node.role):
            continue
        count = math.floor(node.cpus / placement.cpus + 1e-9)
        if placement.gpus > 1:
            count = min(count, math.floor(node.gpus / placement.gpus))
        elif placement.gpus:
            count = min(count, int(node.gpus) * math.floor(1 / placement.gpus + 1e-9))
        total += count * node.count
    return total


def _selects(selector: str, role: str | None) -> bool:
    """Return whether a label selector (`client`, `!server` or none) matches a node with this role."""
    if selector.startswith("!"):
        return role != selector[1:]
    return not selector or role == selector


def nodes_of(listing: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return the living nodes among the entries of `ray.nodes()`."""
    return [
        Node(
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
            node["Resources"].get("memory", math.inf),
            node.get("Labels", {}).get("role"),
        )
        for node in listing
        if node["Alive"]
    ]


def parse_nodes(text: str) -> list[Node]:
    """Parse a description of nodes such as `4x4gpu16cpu` or `server:1x8cpu,client:2x4gpu48cpu`.

    Raises:
        ConfigError: The description is malformed.
    """
    nodes = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(server|client):)?(#)x(?:(#)gpu)?(#)cpu".replace("#", "[0-9]{1,9}"), part.strip())
        if match is None or int(match[2]) < 1:
            raise ConfigError(
                f"--nodes: is not a description of nodes ({part[:40]}). Use [ROLE:]COUNTx[GPUSgpu]CPUScpu with numbers "
                "below a billion, as in 4x4gpu16cpu or server:1x8cpu,client:2x4gpu48cpu.",
                code="config.malformed",
                key="--nodes",
                value=part[:40],
            )
        nodes.append(Node(float(match[4]), float(match[3] or 0), role=match[1], count=int(match[2])))
    return nodes


def reserve(placement: Placement, actors: int) -> Any:
    """Request a placement group for the client actors, spread evenly over the nodes if possible.

    Ray reserves the resources of all actors at once, or of none.
    """
    from ray.util.placement_group import placement_group  # Not at the top, because `raylt plan` does not import Ray.

    bundle = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus > 0 else {})
    return placement_group(
        [bundle] * actors, strategy="SPREAD", bundle_label_selector=[dict(placement.labels)] * actors
    )


def _homes(nodes: Sequence[Node], on_gpus: bool) -> tuple[list[Node], dict[str, str], str]:
    """Return the nodes that may run clients, their label selector, and a description of these nodes."""
    labels = {}
    where = "all nodes"
    homes = list(nodes)
    if any(node.role == "client" for node in nodes):
        labels = {"role": "client"}
        where = "nodes labelled role=client"
        homes = [node for node in nodes if node.role == "client"]
    elif any(node.role == "server" for node in nodes) and any(node.role != "server" for node in nodes):
        labels = {"role": "!server"}
        where = "nodes not labelled role=server"
        homes = [node for node in nodes if node.role != "server"]
    if on_gpus and any(node.gpus for node in homes):
        with_gpus = [node for node in homes if node.gpus]
        where = where if len(with_gpus) == len(homes) else f"{where} with GPUs"
        homes = with_gpus
    return homes, labels, where


def _limits(wanted: ResourcesConfig, node: Node, need: Need) -> dict[str, int]:
    """Return the number of client actors that a node can hold, for each limiting resource."""
    limits = {"CPUs": math.floor(node.cpus / wanted.cpus_per_client + 1e-9)}
    if wanted.gpu_share == "auto":
        if node.gpus and need.gpu_memory:
            limits["GPU memory"] = int(node.gpus) * max(1, math.floor(USABLE / need.gpu_memory))  # one actor did fit
    elif wanted.gpu_share > 0:
        limits["GPUs"] = _share(wanted.gpu_share, node.gpus)[0]
    if need.memory and node.memory < math.inf:
        limits["memory"] = math.floor(USABLE * node.memory / need.memory)
    return limits


def _actors(wanted: ResourcesConfig, clients: int, active: int, slots: int, have: str) -> tuple[int, str]:
    """Return the number of client actors, and the reason for this number.

    Args:
        wanted: The settings.
        clients: Number of clients, K.
        active: Number of clients that a round asks.
        slots: Number of client actors that fit.
        have: A clause with the resources of the nodes that may run clients, for the error.
    """
    if wanted.actors != "auto":
        actors = wanted.actors
        setting = f"actors = {wanted.actors}"
        remedy = f"Set resources.actors={slots}"
    elif wanted.clients_per_actor != "auto":
        actors = math.ceil(clients / wanted.clients_per_actor)
        setting = f"clients_per_actor = {wanted.clients_per_actor}"
        remedy = f"Set resources.clients_per_actor={math.ceil(clients / slots)}"
    elif clients <= slots:
        return clients, "one for each client"
    else:
        reason = f"a round asks {active} of {clients} clients"
        return min(slots, active), reason if active <= slots else f"{reason}, and {slots} work at the same time"
    actors = min(actors, clients)
    if actors > slots:
        raise ConfigError(
            f"resources.{setting}: {actors} client actors need {_size(wanted)} each, but {have}, enough for {slots}. "
            f"{remedy}, or lower {_sizes(wanted)}.",
            code="cluster.too-small",
            actors=actors,
            slots=slots,
        )
    return actors, f"resources.{setting}"


def _gpu_share(
    wanted: ResourcesConfig, homes: Sequence[Node], limits: Sequence[Mapping[str, int]], actors: int
) -> float:
    """Return the share of a GPU that each client actor gets."""
    if wanted.gpu_share != "auto":
        return _share(wanted.gpu_share, 1)[1]

    def fitting(per_gpu: int) -> int:
        """Return the number of actors that fit if at most `per_gpu` of them share a GPU."""
        return sum(
            node.count * min(*limit.values(), per_gpu * int(node.gpus))
            for node, limit in zip(homes, limits, strict=True)
        )

    fewest_per_gpu = next(per_gpu for per_gpu in range(1, actors + 1) if fitting(per_gpu) >= actors)
    return _rounded(1 - SERVER_GPUS, fewest_per_gpu)


def _server(nodes: Sequence[Node], on_gpus: bool) -> tuple[float, dict[str, str], str]:
    """Choose the server's GPU share and the labels of its node; return both with an explanation."""
    labelled = [node for node in nodes if node.role == "server"]
    labels = {"role": "server"} if labelled else {}
    where = "the node labelled role=server" if labelled else "any node"
    if not on_gpus:
        return 0.0, labels, f"{where}; on the CPU, as set in resources"
    if any(node.gpus for node in labelled or nodes):
        return SERVER_GPUS, labels, f"{where}{'' if labelled else ' with GPUs'}, on {SERVER_GPUS:g} of a GPU"
    missing = "the node has no GPU" if any(node.gpus for node in nodes) else "no node has a GPU"
    return 0.0, labels, f"{where}; {missing}, so the server computes on the CPU"


def _share(wanted: float, gpus: float) -> tuple[int, float]:
    """Return how many actors of `wanted` GPUs each fit next to the server, and the GPU share of each."""
    if wanted > 1:
        if wanted != int(wanted):
            raise ConfigError(
                f"resources.gpus_per_client: is above 1 and not a whole number ({wanted:g}). Give a whole number of "
                "GPUs, or a share of at most 1.",
                code="config.out-of-range",
                key="resources.gpus_per_client",
                value=wanted,
            )
        return max(0, math.floor((gpus - SERVER_GPUS) / wanted)), wanted
    per_gpu = math.floor(1 / wanted + 1e-9)
    return int(gpus) * per_gpu, min(wanted, _rounded(1 - SERVER_GPUS, per_gpu))


def _rounded(whole: float, parts: int) -> float:
    """Return `whole / parts`, rounded down to the smallest unit in which Ray counts resources."""
    return math.floor(whole / parts * 1e4 + 1e-6) / 1e4


def _share_of(wanted: ResourcesConfig) -> float:
    """Return the GPUs that the settings ask for each client actor; 0 for `auto`, which asks for no minimum."""
    return 0 if wanted.gpu_share == "auto" else wanted.gpu_share


def _size(wanted: ResourcesConfig) -> str:
    gpus = f" and {count_of(_share_of(wanted), 'GPU')}" if _share_of(wanted) else ""
    return count_of(wanted.cpus_per_client, "CPU") + gpus


def _sizes(wanted: ResourcesConfig) -> str:
    """Return the settings that make client actors smaller."""
    return "resources.cpus_per_client" + (" or resources.gpus_per_client" if _share_of(wanted) else "")


def _total(nodes: Sequence[Node]) -> str:
    cpus = sum(node.count * node.cpus for node in nodes)
    gpus = sum(node.count * node.gpus for node in nodes)
    return f"{count_of(cpus, 'CPU')} and {count_of(gpus, 'GPU')}"
