"""`Server`: the global model and what the server remembers."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.server_optimisers import ServerOptimiser
from raylt.data.samples import Samples
from raylt.data.task import Facts
from raylt.models.split import Params, SplitModel, load_entries, trained_names
from raylt.seeds import seed_for
from raylt.tree import Tree

Watch = Callable[[str, int, int], None]     # is told what goes on, and how many of how many clients are done


class Stages(dict[str, float]):
    """Seconds that each stage of a step took, by name.

    Args:
        watch: is told of each stage that begins.
    """

    def __init__(self, *seconds: Mapping[str, float], watch: Watch | None = None):
        super().__init__(*seconds)
        self._watch = watch

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the seconds inside the block to a stage."""
        if self._watch is not None:
            self._watch(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds to stages."""
        for name, more in seconds.items():
            self[name] = self.get(name, 0.0) + more


class Server:
    """What a method sees on its server side.

    Attributes:
        model: the global model.
        state: anything else the server must remember between rounds; a tree of CPU tensors, numbers and strings,
            part of every checkpoint. What the optimiser remembers is in it too, as "server_optimiser".
        optimiser: the rule of `step`; None: the clients' mean is the new model.
        round: number of the round, from 1; 0 before the first.
        rounds: R.
        figures: what the method reports of this round, on top of the framework's own figures.
        stages: seconds of the server's own work in this round; `with server.stages.time("synthesis"): ...`.
        auxiliary: images of its own, on its device; None unless `data.auxiliary` asks for them. No federation has them:
            a method that needs some says so.
    """

    def __init__(self, config: Config, facts: Facts, model: SplitModel, device: torch.device,
                 optimiser: ServerOptimiser | None = None, auxiliary: Samples | None = None):
        self.config, self.facts, self.model, self.device = config, facts, model, device
        self.auxiliary = auxiliary
        self.optimiser = optimiser
        self.state: Tree = {}
        self.round, self.rounds = 0, config.federation.rounds
        self.figures: dict[str, Any] = {}
        self.stages = Stages()

    def seed(self, purpose: str) -> int:
        """The seed of this purpose in this round."""
        return seed_for(self.config.seed, "server", purpose, self.round)

    def receive(self, params: Params) -> None:
        """Takes over the entries of the global model that clients agreed on; the others stay as they are."""
        load_entries(self.model, tree.to(params, self.device))

    @torch.no_grad()
    def step(self, mean: Params) -> None:
        """Moves the global model towards the clients' mean, as the method's server optimiser says.

        Args:
            mean: entries of the model; those that are not trained are taken over whatever the optimiser.
        """
        if self.optimiser is None:
            self.receive(mean)
            return
        trained = trained_names(self.model) & mean.keys()
        entries = self.model.state_dict()
        now = {name: entries[name] for name in mean if name in trained}
        here = tree.to({"now": now, "mean": mean}, torch.device("cpu"))
        before, mean = {name: value.double() for name, value in here["now"].items()}, here["mean"]
        remembered = dict(self.state.get("server_optimiser", {}))
        steps = self.optimiser.step(remembered, {name: mean[name].double() - old for name, old in before.items()})
        self.state["server_optimiser"] = remembered
        self.receive(mean | {name: old + steps[name] for name, old in before.items()})

    def log(self, **figures: Any) -> None:
        """Adds figures (numbers, strings, lists and dicts of them) to this round's line in metrics.jsonl."""
        self.figures |= figures
