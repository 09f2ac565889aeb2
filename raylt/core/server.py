"""`Server`, the global model and the server's memory, and `ServerOptimiser`, the rule of the server's step.

The rules follow adaptive federated optimisation (Reddi et al., ICLR 2021). They use the clients' mean minus the global
model, Delta, as a negative gradient. Entries that are not trained (BatchNorm's running statistics and counters) are
always the clients' mean.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.config import Config
from raylt.core.round_stats import Timings
from raylt.core.training.schedules import Schedule
from raylt.data.samples import Samples
from raylt.data.task import TaskSpec
from raylt.errors import ConfigError, type_name
from raylt.models.split import SplitModel, StateDict, has_no_negative_features, load_entries, trained_names
from raylt.seeds import seed_for
from raylt.tree import Tree


class ServerOptimiser(Protocol):
    """A rule that turns the clients' mean change into the server's step."""

    def step(self, state: StateDict, delta: StateDict) -> StateDict:
        """Return the change of each trained entry of the global model.

        Args:
            state: Memory of the rule, float64 by name; empty before the first step, and changed in place.
            delta: The clients' mean minus the global model, float64.
        """
        ...


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM, momentum as the server's optimiser (Hsu et al., 2019).

    v <- beta v + Delta; w <- w + lr v.

    Delta is the clients' mean minus the global model w.
    """

    beta: float = 0.9
    lr: float = 1.0

    def step(self, state: StateDict, delta: StateDict) -> StateDict:
        if self.beta == 0:  # v is only Delta, so nothing must be remembered
            return {name: self.lr * change for name, change in delta.items()}
        for name, change in delta.items():
            state[name] = change.clone() if name not in state else self.beta * state[name] + change
        return {name: self.lr * state[name] for name in delta}


@dataclass(frozen=True)
class ServerAdam:
    """FedAdam, Adam as the server's optimiser (Reddi et al., ICLR 2021, Algorithm 2).

    m <- beta1 m + (1 - beta1) Delta; v <- beta2 v + (1 - beta2) Delta^2; w <- w + lr m / (sqrt(v) + tau), where Delta
    is the clients' mean minus the global model w.

    As in the paper, m starts at 0, v at tau^2, and there is no bias correction.
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, state: StateDict, delta: StateDict) -> StateDict:
        steps: StateDict = {}
        for name, change in delta.items():
            m = state.get(f"m.{name}", torch.zeros_like(change))
            v = state.get(f"v.{name}", torch.full_like(change, self.tau**2))
            m = self.beta1 * m + (1 - self.beta1) * change
            v = self.second(v, change.square())
            state[f"m.{name}"] = m
            state[f"v.{name}"] = v
            steps[name] = self.lr * m / (v.sqrt() + self.tau)
        return steps

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the updated second moment, computed from the square of the clients' mean change."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class ServerYogi(ServerAdam):
    """FedYogi, Yogi as the server's optimiser (Reddi et al., ICLR 2021, Algorithm 2).

    As FedAdam, except for v <- v - (1 - beta2) Delta^2 sign(v - Delta^2).
    """

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


ENDED_EARLY = "rounds ended"  # figure in the last steps of a run that federation.patience stopped early
EVALUATED = ("validation", "new_clients", "predictions")  # figures that the evaluation of a step logs
OWN_FIGURES = (*EVALUATED, "zero_shot", "privacy", ENDED_EARLY)


class Server:
    """The server side of an experiment, as a method sees it.

    Attributes:
        model: The global model.
        spec: Properties of the task that a method may know.
        state: Anything else the server must remember between rounds; a tree of CPU tensors, numbers and strings,
            part of every checkpoint. It includes the optimiser's memory, as "server_optimiser".
        schedule: The clients' learning rate over the rounds; None for the schedule that `local.schedule` names.
        optimiser: The rule of `step`; None: the clients' mean is the new model.
        round: Number of the round, from 1; 0 before the first.
        rounds: The number of rounds, R.
        figures: The method's report of this round, in addition to the framework's own figures.
        timings: Seconds of the server's own work in this round; `with server.timings.time("synthesis"): ...`. Budgets
            in passes count the work of these stages. The stages "evaluation" and "checkpoint" are raylt's own.
        auxiliary: The server's own images, on its device; None unless `data.auxiliary` is set. A usual federation has
            none, so a method that needs them declares it.
    """

    def __init__(
        self,
        config: Config,
        spec: TaskSpec,
        model: SplitModel,
        device: torch.device,
        optimiser: ServerOptimiser | None = None,
        auxiliary: Samples | None = None,
        schedule: Schedule | None = None,
    ):
        self.config = config
        self.spec = spec
        self.model = model
        self.device = device
        self.auxiliary = auxiliary
        self.optimiser = optimiser
        self.schedule = schedule
        self.state: Tree = {}
        self.round = 0
        self.rounds = config.federation.rounds
        self.figures: dict[str, Any] = {}
        self.timings = Timings()

    def seed(self, purpose: str) -> int:
        """Return the seed for a purpose in this round."""
        return seed_for(self.config.seed, "server", purpose, self.round)

    def for_trial_round(self) -> "Server":
        """Return a copy of the server for one more round, in which every client takes part.

        The round changes the copy's model, state and figures, not those of this server.
        """
        other = copy.copy(self)
        federation = self.config.federation.model_copy(update={"participation": 1.0})
        other.config = self.config.model_copy(update={"federation": federation})
        other.model, other.state = copy.deepcopy(self.model), copy.deepcopy(self.state)
        other.round, other.figures, other.timings = self.round + 1, {}, Timings()
        return other

    def receive(self, params: StateDict) -> None:
        """Load entries into the global model; its other entries do not change.

        Raises:
            ConfigError: These are not entries of the model.
        """
        self._check_entries("receive", params)
        load_entries(self.model, tree.to(params, self.device))

    @torch.no_grad()
    def step(self, mean: StateDict) -> None:
        """Move the global model towards the clients' mean with the method's server optimiser.

        Args:
            mean: Entries of the model; entries that are not trained are loaded as they are.

        Raises:
            ConfigError: These are not entries of the model.
        """
        self._check_entries("step", mean)
        if self.optimiser is None:
            self.receive(mean)
            return
        trained = trained_names(self.model) & mean.keys()
        entries = self.model.state_dict()
        current = {name: entries[name] for name in mean if name in trained}
        on_cpu = tree.to({"current": current, "mean": mean}, torch.device("cpu"))
        before = {name: value.double() for name, value in on_cpu["current"].items()}
        mean = on_cpu["mean"]
        memory = dict(self.state.get("server_optimiser", {}))
        steps = self.optimiser.step(memory, {name: mean[name].double() - old for name, old in before.items()})
        missing = before.keys() - steps.keys() if isinstance(steps, Mapping) else before.keys()
        if missing:
            raise ConfigError(
                f"server_optimiser: step returned no change of {min(missing)}. Return a dict with the change of each "
                "entry of delta.",
                code="method.wrong-argument",
                key="server_optimiser",
                value=min(missing),
            )
        self.state["server_optimiser"] = memory
        self.receive(mean | {name: old + steps[name] for name, old in before.items()})

    @property
    def feature_limits(self) -> dict[str, Any]:
        """Return the limits of clients' features, as keyword arguments for the checks of feature sums.

        Returns:
            "longest", the length to which features are clipped, or None; "negative", False if the encoder ends in a
            ReLU.
        """
        return {
            "longest": self.config.privacy.longest,
            "negative": not has_no_negative_features(self.model.encoder),
        }

    def log(self, **figures: Any) -> None:
        """Add figures (numbers, strings, lists and dicts of them) to this round's line in metrics.jsonl.

        A tensor or an array with one element is logged as a number.

        Raises:
            ConfigError: A figure is of another type, or has the name of a figure of raylt's own (`OWN_FIGURES`).
        """
        taken = next((name for name in figures if name in OWN_FIGURES), None)
        if taken is not None:
            raise ConfigError(
                f"server.log: raylt itself logs a figure named {taken}. Give the method's figure another name.",
                code="method.wrong-argument",
                key="server.log",
                value=taken,
            )
        self.figures |= {name: _figure(name, value) for name, value in figures.items()}

    def _check_entries(self, function: str, params: Any) -> None:
        """Raise ConfigError if the argument of `receive` or `step` is not a dict of the global model's entries."""
        fault = _entries_fault(self.model.state_dict(), params)
        if fault is not None:
            raise ConfigError(
                f"round {self.round}: server.{function} got {fault}. Give entries of the global model by name, such as "
                "a mean that fleet.ask returned.",
                code="method.wrong-argument",
                round=self.round,
                function=f"server.{function}",
            )

    def check_state(self) -> None:
        """Check that `state` can be saved.

        Raises:
            ConfigError: The state has another value than tensors, numbers, strings, None and dicts of them.
        """
        fault = _state_fault(self.state)
        if fault is not None:
            raise ConfigError(
                f"server.state: {fault}. Keep tensors, numbers, strings, None, and dicts of them by name.",
                code="method.wrong-argument",
                key="server.state",
            )


def _entries_fault(entries: StateDict, params: Any) -> str | None:
    """Return why these are not entries of a model, as a text, or None."""
    if not isinstance(params, Mapping):
        return type_name(params)
    for name, value in params.items():
        if name not in entries:
            return f"{name!r}, which the model does not have"
        if not isinstance(value, Tensor):
            return f"{type_name(value)} as {name}"
        if value.shape != entries[name].shape:
            return f"{name} of shape {list(value.shape)}, which is {list(entries[name].shape)} in the model"
    return None


def _state_fault(state: Tree, path: str = "") -> str | None:
    """Return the first value or name in the server's state that cannot be saved, as a text, or None."""
    for key, value in state.items():
        place = f"{path}.{key}" if path else str(key)
        if not isinstance(key, str):
            return f"the name of {place} is {type_name(key)}"
        if isinstance(value, dict):
            fault = _state_fault(value, place)
            if fault is not None:
                return fault
        elif not isinstance(value, Tensor | str | int | float | None):
            return f"{place} is {type_name(value)}"
    return None


def _figure(name: str, value: Any) -> Any:
    """Return a figure of a method in types that JSON has."""
    if isinstance(value, Mapping) and all(isinstance(key, str | int | float | None) for key in value):
        return {key: _figure(f"{name}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_figure(f"{name}[{number}]", inner) for number, inner in enumerate(value)]
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, str | int | float | None):
        return value
    raise ConfigError(
        f"server.log: {name} is {type_name(value)}. Log numbers, strings, and lists and dicts of them; a tensor as "
        "value.tolist().",
        code="method.wrong-argument",
        key="server.log",
        value=name,
    )
