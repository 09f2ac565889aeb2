"""Where the trials of a search go: the share of a cluster that each reserves, and how many fit."""

import copy
from collections.abc import Mapping, Sequence

from actors.placement import SERVER_GPUS, Placement
from raylt.config import Config
from raylt.errors import ConfigError

Bundle = dict[str, float]
PER_GPU = 8                     # trials at once on one GPU, when their shares are ours to choose


def place_trial(config: Config, clients: int, trials: float, have: Mapping[str, float]) -> Placement:
    """The client actors of one trial; with `auto`, so many that the trials to come share the cluster evenly.

    Args:
        clients: those that hold samples.
        trials: how many there will be at most.
        have: the cluster's resources.
    """
    wanted = config.resources
    cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
    slots = max(1, int(cpus / wanted.cpus_per_client + 1e-9))
    if wanted.gpus_per_client != "auto" and wanted.gpus_per_client > 0:
        slots = max(1, min(slots, int(gpus / wanted.gpus_per_client + 1e-9)))
    elif gpus and wanted.gpus_per_client == "auto":
        trials = min(trials, PER_GPU * gpus)
    at_once = max(1, int(min(trials, slots)))
    if wanted.actors != "auto":
        actors = wanted.actors
    elif wanted.clients_per_actor != "auto":
        actors = -(-clients // wanted.clients_per_actor)
    else:
        actors = max(1, slots // at_once)
    actors = min(actors, clients)
    if wanted.gpus_per_client != "auto":
        return Placement(actors, wanted.cpus_per_client, wanted.gpus_per_client)
    share = 0.0
    if gpus:
        at_once = max(1, min(at_once, slots // actors))
        servers, each = -(-at_once // int(gpus)), -(-at_once * actors // int(gpus))
        share = int((1 - SERVER_GPUS * servers) / each * 1e4) / 1e4
    return Placement(actors, wanted.cpus_per_client, share)


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
