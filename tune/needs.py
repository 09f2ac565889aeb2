"""What a process of a search's trials needs, measured before the first of them: it decides how many share a GPU."""

from actors.guests import send_by_value
from actors.placement import Need
from actors.probe import probe
from raylt.config import Config
from raylt.registry import Guest, resolve
from tune.axes import probes
from tune.desk import task_of
from tune.plan import Plan
from tune.space import Space, configure

SIZES = ("local.batch", "evaluation.batch", "method.batch")     # settings whose largest value takes the most memory


def need_of(plan: Plan, guests: tuple[Guest, ...]) -> Need | None:
    """The most that a short run of any method takes, of each model and of the largest batches that are searched; None
    where nothing could be measured, and Ray's shares alone decide."""
    send_by_value(guests)
    needs = []
    for method, space in plan.spaces.items():
        for config in largest(plan.base, method, space):
            need = probe(resolve(config), task_of(config), 1)
            needs += [] if need is None else [need]
    if not needs:
        return None
    return Need(max(need.memory for need in needs), max(need.gpu_memory for need in needs))


def largest(base: Config, method: str, space: Space) -> list[Config]:
    """Of a method the configurations of a search that may take the most memory: one for each model that it tries."""
    sizes = {key: max(probes(space[key])) for key in SIZES if key in space}
    models = [{"model": name} for name in probes(space["model"])] if "model" in space else [{}]
    return [configure(base, method, sizes | model) for model in models]
