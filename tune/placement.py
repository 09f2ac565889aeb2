"""Where the trials of a search go: the share of a cluster that each reserves, and how many fit."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence

from actors.placement import SERVER_GPUS, USABLE, Need, Placement
from raylt.config import Config
from raylt.errors import ConfigError

Bundle = dict[str, float]
PER_GPU = 8                     # trials at once on one GPU, when their shares are ours to choose


def most_on_gpu(nodes: Sequence[Mapping[str, float]], need: Need) -> float:
    """How many processes of this size share a GPU at most: by its memory, and by that of the machine that it is in."""
    bounds = [math.floor(USABLE / need.gpu_memory)] if need.gpu_memory else []
    if need.memory:
        bounds += [int(USABLE * node.get("memory", math.inf) / need.memory / node["GPU"]) for node in nodes
                   if node.get("GPU") and "memory" in node]
    return min(bounds, default=math.inf)


def place_trial(config: Config, clients: int, trials: float, have: Mapping[str, float],
                most: float = math.inf) -> Placement:
    """The client actors of one trial; with `auto`, so many that the trials to come share the cluster evenly.

    Args:
        clients: those that hold samples.
        trials: how many there will be at most.
        have: the cluster's resources.
        most: processes that share a GPU at most, where that was measured: client actors and each trial's server.

    Raises:
        ConfigError: GPUs are asked for, and there are none; or the actors that are asked for do not fit into their
            memory.
    """
    wanted = config.resources
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    if wanted.device == "cuda" and not gpus:
        raise ConfigError("resources.device = cuda: the cluster has no GPU; join one that has, or set "
                          "resources.device=auto")
    slots = max(1, int(cpus / wanted.cpus_per_client + 1e-9))
    if wanted.gpu_share != "auto" and wanted.gpu_share > 0:
        slots = max(1, min(slots, int(gpus / wanted.gpu_share + 1e-9)))
    elif gpus and wanted.gpu_share == "auto":
        trials = min(trials, PER_GPU * gpus)

    def fit(trials: int, actors: int) -> bool:
        return not gpus or sum(_on_gpu(trials, actors, gpus)) <= most

    at_once = _largest(int(min(trials, slots)), lambda count: fit(count, 1))
    if wanted.actors != "auto":
        actors = wanted.actors
    elif wanted.clients_per_actor != "auto":
        actors = -(-clients // wanted.clients_per_actor)
    else:
        actors = _largest(slots // at_once, lambda count: fit(at_once, count))
    actors = min(actors, clients)
    if actors > 1 and not fit(1, actors):
        raise ConfigError(f"resources: {actors} client actors of a trial and its server do not fit into the memory of "
                          f"{gpus:g} GPUs, each of which holds {most:g} such processes; lower resources.actors, or take"
                          " a smaller model or local.batch")
    if wanted.gpu_share != "auto":
        return Placement(actors, wanted.cpus_per_client, _beside_servers(wanted.gpu_share))
    share = 0.0
    if gpus:
        at_once = _largest(min(at_once, slots // actors), lambda count: fit(count, actors))
        servers, each = _on_gpu(at_once, actors, gpus)
        share = int((1 - SERVER_GPUS * servers) / each * 1e4) / 1e4
    return Placement(actors, wanted.cpus_per_client, share)


def _beside_servers(share: float) -> float:
    """What a client actor takes of a GPU, `share` at most, so that as many trials of one actor as this would fill a GPU
    with leave their servers a place."""
    each = math.floor(1 / share + 1e-9) if 0 < share <= 1 else 0
    room = 1 - SERVER_GPUS * each
    return min(share, int(room / each * 1e4) / 1e4) if each and room > 0 else share


def _on_gpu(trials: int, actors: int, gpus: float) -> tuple[int, int]:
    """Servers and client actors on a GPU, spread evenly."""
    return -(-trials // int(gpus)), -(-trials * actors // int(gpus))


def _largest(count: int, fit: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, at least one."""
    while count > 1 and not fit(count):
        count -= 1
    return max(1, count)


def bundles_of(placement: Placement) -> list[Bundle]:
    """What a trial reserves: first its own process, which is the server, then its client actors."""
    client = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})
    return [{"GPU": SERVER_GPUS} if placement.gpus else {}, *(dict(client) for _ in range(placement.actors))]


def fitting(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """How many trials the nodes hold at once, up to `most`, each bundle on the first node with room."""
    left = [dict(node) for node in nodes]
    for count in range(most):
        before = copy.deepcopy(left)
        for bundle in sorted(bundles, key=lambda b: (-b.get("GPU", 0), -b.get("CPU", 0))):
            room = next((node for node in left if all(node.get(k, 0) + 1e-6 >= v for k, v in bundle.items())), None)
            if room is None:
                left = before
                return count
            for key, amount in bundle.items():
                room[key] -= amount
    return most


def check_fit(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """`fitting`, at least one.

    Raises:
        ConfigError: not one fits; says what is asked for, what there is and what to do.
    """
    found = fitting(bundles, nodes, most)
    if found:
        return found
    clients = bundles[1:]
    asked = {key: sum(bundle.get(key, 0) for bundle in bundles) for key in ("CPU", "GPU")}
    have = {key: sum(node.get(key, 0) for node in nodes) for key in ("CPU", "GPU")}
    largest = max((node.get("CPU", 0), node.get("GPU", 0)) for node in nodes) if nodes else (0, 0)
    raise ConfigError(
        f"resources: a trial takes {asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs ({len(clients)} client actors of "
        f"{clients[0].get('CPU', 0):g} CPUs and {clients[0].get('GPU', 0):g} GPUs), the cluster has {have['CPU']:g} "
        f"CPUs and {have['GPU']:g} GPUs, its largest node {largest[0]:g} and {largest[1]:g}: not enough for one; lower "
        "resources.actors, resources.cpus_per_client or resources.gpus_per_client")
