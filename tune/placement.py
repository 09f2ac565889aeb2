"""Plans the resources of a search: client actors per trial, and the number of parallel trials on a cluster.

If processes share a GPU, `need_of` measures the memory use of one process before the first trial.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from actors.capacity import SERVER_GPUS, USABLE, Need, Placement
from actors.probe import probe
from raylt.config import Config
from raylt.errors import ConfigError, count_of
from raylt.registry import resolve
from tune.loop import completed_for, task_of
from tune.plan import SearchPlan
from tune.space import Space, configure, probes

Bundle = dict[str, float]
TRIALS_PER_GPU = 8  # Parallel trials on one GPU, unless `resources.gpus_per_client` is set.
MEMORY_SETTINGS = ("local.batch", "evaluation.batch", "method.retrain_batch")  # Larger values need more memory.


def most_on_gpu(nodes: Sequence[Mapping[str, float]], need: Need) -> float:
    """Return how many processes fit on one GPU, limited by its memory and by its share of the node's memory."""
    bounds = [math.floor(USABLE / need.gpu_memory)] if need.gpu_memory else []
    if need.memory:
        bounds += [
            int(USABLE * node.get("memory", math.inf) / need.memory / node["GPU"])
            for node in nodes
            if node.get("GPU") and "memory" in node
        ]
    return min(bounds, default=math.inf)


def place_trial(
    config: Config, clients: int, trials: float, resources: Mapping[str, float], most: float = math.inf
) -> Placement:
    """Plan the client actors of one trial. With `auto`, all trials share the cluster evenly.

    Args:
        config: Settings of the trial.
        clients: Number of clients that have samples.
        trials: Maximum number of parallel trials.
        resources: Resources of the cluster.
        most: Maximum number of processes (client actors and servers of trials) that share a GPU, if it was measured.

    Raises:
        ConfigError: The settings ask for GPUs and there are none, or for more actors than fit into GPU memory.
    """
    wanted = config.resources
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    if wanted.device == "cuda" and not gpus:
        raise ConfigError(
            "resources.device: is cuda, but the cluster has no GPU. Join a cluster with GPUs, or set "
            "resources.device=auto.",
            code="device.not-found",
            key="resources.device",
            value="cuda",
        )
    slots = max(1, int(cpus / wanted.cpus_per_client + 1e-9))
    if wanted.gpu_share != "auto" and wanted.gpu_share > 0:
        slots = max(1, min(slots, int(gpus / wanted.gpu_share + 1e-9)))
    elif gpus and wanted.gpu_share == "auto":
        trials = min(trials, TRIALS_PER_GPU * gpus)

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
        raise ConfigError(
            f"resources: a trial's server and client actors do not fit into GPU memory ({actors} actors; {gpus:g} "
            f"GPUs for {most:g} processes each). Lower resources.actors, or use a smaller model or local.batch.",
            code="cluster.too-small",
            actors=actors,
            gpus=gpus,
            per_gpu=most,
        )
    if wanted.gpu_share != "auto":
        return Placement(actors, wanted.cpus_per_client, _share_with_servers(wanted.gpu_share))
    share = 0.0
    if gpus:
        at_once = _largest(min(at_once, slots // actors), lambda count: fit(count, actors))
        servers, actors_per_gpu = _on_gpu(at_once, actors, gpus)
        share = int((1 - SERVER_GPUS * servers) / actors_per_gpu * 1e4) / 1e4
    return Placement(actors, wanted.cpus_per_client, share)


def _share_with_servers(share: float) -> float:
    """Return a client actor's share of a GPU, reduced if the trials' servers need room on the same GPU.

    This assumes that a GPU holds as many trials with one client actor each as `share` allows.
    """
    per_gpu = math.floor(1 / share + 1e-9) if 0 < share <= 1 else 0
    room = 1 - SERVER_GPUS * per_gpu
    return min(share, int(room / per_gpu * 1e4) / 1e4) if per_gpu and room > 0 else share


def _on_gpu(trials: int, actors: int, gpus: float) -> tuple[int, int]:
    """Return the numbers of servers and client actors per GPU if both are distributed evenly."""
    return -(-trials // int(gpus)), -(-trials * actors // int(gpus))


def _largest(count: int, fit: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `count` that fits, or 1 if none fits."""
    while count > 1 and not fit(count):
        count -= 1
    return max(1, count)


def bundles_of(placement: Placement) -> list[Bundle]:
    """Return the resources that a trial reserves: one bundle for the server and one per client actor."""
    client = {"CPU": placement.cpus} | ({"GPU": placement.gpus} if placement.gpus else {})
    return [{"GPU": SERVER_GPUS} if placement.gpus else {}, *(dict(client) for _ in range(placement.actors))]


def fitting(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """Return the number of parallel trials that the nodes can hold, up to `most`.

    Each bundle goes to the first node with room.
    """
    left = [dict(node) for node in nodes]
    largest_first = sorted(bundles, key=lambda b: (-b.get("GPU", 0), -b.get("CPU", 0)))
    for count in range(most):
        for bundle in largest_first:
            room = next((node for node in left if all(node.get(k, 0) + 1e-6 >= v for k, v in bundle.items())), None)
            if room is None:
                return count
            for key, amount in bundle.items():
                room[key] -= amount
    return most


def check_fit(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]], most: int) -> int:
    """Return the number of parallel trials that the nodes can hold, at least one.

    Args:
        bundles: Resources of a trial.
        nodes: Resources of each node.
        most: Maximum number of parallel trials.

    Raises:
        ConfigError: The nodes have no room for a trial.
    """
    count = fitting(bundles, nodes, most)
    if count:
        return count
    clients = bundles[1:]
    asked = {key: sum(bundle.get(key, 0) for bundle in bundles) for key in ("CPU", "GPU")}
    available = {key: sum(node.get(key, 0) for node in nodes) for key in ("CPU", "GPU")}
    largest_node = {"CPU": 0.0, "GPU": 0.0}
    if nodes:
        cpus, gpus = max((node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
        largest_node = {"CPU": cpus, "GPU": gpus}
    raise ConfigError(
        f"resources: the cluster is too small for a trial of {len(clients)} client actors "
        f"({count_of(asked['CPU'], 'CPU')} and {count_of(asked['GPU'], 'GPU')}). "
        f"Each actor takes {count_of(clients[0].get('CPU', 0), 'CPU')} and "
        f"{count_of(clients[0].get('GPU', 0), 'GPU')}. The cluster has {count_of(available['CPU'], 'CPU')} and "
        f"{count_of(available['GPU'], 'GPU')}; "
        f"its largest node has {largest_node['CPU']:g} and {largest_node['GPU']:g}. "
        "Lower resources.actors, resources.cpus_per_client or resources.gpus_per_client.",
        code="cluster.too-small",
        trial=asked,
        cluster=available,
        largest_node=largest_node,
    )


def need_of(plan: SearchPlan) -> Need | None:
    """Measure the largest memory need of a search in short runs of its methods.

    The runs use each model and the largest batches of the search.

    Returns:
        The need; None if nothing could be measured.
    """
    needs = []
    for method, space in plan.spaces.items():
        for config in largest(plan.base, method, space):
            task = task_of(config)
            need = probe(resolve(completed_for(config, task)), task, 1)
            needs += [] if need is None else [need]
    if not needs:
        return None
    return Need(max(need.memory for need in needs), max(need.gpu_memory for need in needs))


def largest(base: Config, method: str, space: Space) -> list[Config]:
    """Return the configurations of a method that may need the most memory, one for each model of the search."""
    sizes = {key: max(probes(space[key])) for key in MEMORY_SETTINGS if key in space}
    models = [{"model": name} for name in probes(space["model"])] if "model" in space else [{}]
    return [configure(base, method, sizes | model) for model in models]
