"""Measurement of a method's costs in a tiny run: parts of replies, bytes, passes over samples, and the server's work.

A pass over the samples is a full forward pass of the encoder. A pass through some of its layers counts as their share
of the encoder's multiplications.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from raylt.config import Config
from raylt.contract.case import fitting, learning_part
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.method import Method
from raylt.core.round_stats import StageProgress, Timings
from raylt.core.server import Server
from raylt.core.setup import Setup
from raylt.data.label_maps import class_counts
from raylt.data.samples import Samples
from raylt.data.splits.split import Split
from raylt.data.task import Shard, Task
from raylt.methods import make_method
from raylt.models import MODELS, ModelFactory
from raylt.models.split import PixelModel, SplitModel, pass_zeros
from raylt.registry import resolve_setup
from raylt.seeds import seeded

CPU = torch.device("cpu")
IMAGES_PER_CLASS = 2  # At each client.
CLIENTS = 2
MISSING_CLASSES = 2  # Per client in `relative_cost`; with one missing class, methods would skip distillation on it.
# Fields that only set how long the server or a client computes on features, on which calls do not depend.
SHORT: dict[str, Any] = {"retrain_epochs": 1, "synthesis_steps": 1, "matching_steps": 1}
# Fields of methods that would download a teacher, or compute for seconds on features or at the server.
REPLACED: dict[str, dict[str, Any]] = {
    "fedsm": {"teacher": "none"},
    "clip2fl": {"kd": 0, "contrast": 0},
    "fedloge": {"steps": 1},
    "fedic": {"steps": 1},
    "mupfl": {"tau": 1},
}
# Fields that set how many steps the server's work takes, which are linear in each of them.
STEPS = ("retrain_epochs", "synthesis_steps", "matching_steps", "steps")
LOW_RATE = 1e-6  # Learning rate with which no run on random images diverges.
ROUNDS = 30  # Default number of rounds of the measured run.
TYPICAL_ROUND = 3  # Round whose calls are listed: FLea warms up in the first, FedALA in the second.


@dataclass
class CallCost:
    """The cost of one call of a client function.

    Attributes:
        when: "join", "round" or "finish".
        name: Name of the function.
        sends: Reduction of each part of the reply: mean, total or each.
        up: Bytes of the reply.
        down: Bytes of the message.
        trained: Passes over the client's samples, forward and backward through the encoder.
        read: Passes without a backward pass, or through frozen layers.
    """

    when: str
    name: str
    sends: dict[str, str] = field(default_factory=dict)
    up: float = 0.0
    down: float = 0.0
    trained: float = 0.0
    read: float = 0.0


def measure(
    method: Method, factory: ModelFactory, shape: tuple[int, int, int], classes: int, cut: bool = False
) -> list[CallCost]:
    """Measure the calls of a method at one client: before the first round, in the third of 30, and after the last.

    Args:
        method: The method. Fields in SHORT and REPLACED are replaced.
        factory: Factory of the model.
        shape: Height, width and channels of an image.
        classes: Number of classes, C.
        cut: Whether to end the last phase when the server starts a stage that it times, for a method that asks no
            client afterwards.
    """
    steps = _TinyRun(_quick(method), factory, shape, classes, cut=cut).steps(TYPICAL_ROUND)
    return [call for number, calls in steps if number in (0, TYPICAL_ROUND, ROUNDS + 1) for call in calls]


@dataclass(frozen=True)
class _TinyRun:
    """A tiny run of a method, whose calls are measured.

    Attributes:
        method: The method, with the fields with which it runs.
        factory, shape, classes, cut: As in `measure`.
        epochs: local.epochs of the run.
        steps_per_round: local.steps of the run, with batches of two; None for `epochs` with one batch per pass.
        finish: Whether to run the last phase too.
        lacking: Number of classes that each client does not have, at most half of all.
        rounds: federation.rounds of the run.
        timings: Called for the timings of each step.
    """

    method: Method
    factory: ModelFactory
    shape: tuple[int, int, int]
    classes: int
    cut: bool = False
    epochs: float = 1
    steps_per_round: int | None = None
    finish: bool = True
    lacking: int = 0
    rounds: int = ROUNDS
    timings: Callable[[], Timings] = Timings

    def steps(self, last_round: int) -> Iterator[tuple[int, list[CallCost]]]:
        """Yield the number and the calls of each step, from the start (step 0) to the finish.

        Args:
            last_round: The last round to run; later rounds are left out.
        """
        method = self.method
        task = _task(self.shape, self.classes, self.lacking)
        samples = IMAGES_PER_CLASS * self.classes  # of each client
        local = {"batch": samples, "epochs": self.epochs}
        if self.steps_per_round is not None:
            local = {"batch": 2, "steps": self.steps_per_round, "lr": LOW_RATE}
        config = Config.model_validate(
            {
                "method": {"name": method.name, **method.model_dump()},
                "trainable": learning_part(method),
                "local": local,
                "federation": {"rounds": self.rounds},
                "data": {"clients": CLIENTS},
            }
        )
        setup = Setup(config, method, fitting(self.factory, method), None)
        with _counted_passes() as passes:
            fleet = _Fleet(config, task, _Host(passes, setup, task.spec, task.test, CPU))
            model = setup.new_model(task.spec)
            auxiliary = Samples(task.test, task.spec, CPU)
            server = Server(config, task.spec, model, CPU, method.server_optimiser(), auxiliary)
            steps = [(0, "join", method.start)]
            steps += [(number, "round", method.round) for number in range(1, last_round + 1)]
            if method.finishes and self.finish:
                steps.append((self.rounds + 1, "finish", method.finish))
            for number, when, step in steps:
                server.round = number
                server.timings = _Cut() if when == "finish" and self.cut else self.timings()
                fleet.begin(number)
                passes.counts.clear()
                with suppress(_ServerOnly):
                    step(server, fleet)
                yield number, list(_calls(when, fleet, passes, samples))


def relative_cost(
    method: Method,
    factory: ModelFactory,
    shape: tuple[int, int, int],
    classes: int,
    epochs: float = 1,
    rounds: int = ROUNDS,
    asked: float | None = None,
) -> float:
    """Return a client's passes over its samples in a round, on average over a run, as a multiple of FedAvg's.

    A pass with a gradient counts three, one forward and two backward, and a pass without a gradient counts one. Passes
    of downloaded teachers and computation on the server do not count. With four or more classes, each client does not
    have two of them, because some methods do more work at such a client. All clients take part in each round of the
    measured run, so work in a client's first calls is averaged over all rounds.

    Args:
        method, factory, shape, classes: As in `measure`.
        epochs: local.epochs. The tiny run has one batch per pass, so the cost of a fraction is interpolated between
            whole numbers.
        rounds: federation.rounds.
        asked: Number of rounds in which a client is asked. If given, passes on joining and in the last phase count
            too, distributed over these rounds.
    """
    lacking = MISSING_CLASSES if classes >= 2 * MISSING_CLASSES else 0

    def cost(whole_epochs: int) -> float:
        finish = asked is not None
        run = _TinyRun(
            _quick(method), factory, shape, classes, epochs=whole_epochs, finish=finish, lacking=lacking, rounds=rounds
        )
        once = in_rounds = 0.0
        for number, calls in run.steps(rounds):
            passes = sum((3 * call.trained + call.read) / 3 for call in calls)
            if 1 <= number <= rounds:
                in_rounds += passes
            else:
                once += passes
        return in_rounds / rounds + (once / asked if asked else 0)

    below = max(1, int(epochs))
    if epochs == below:
        return cost(below) / epochs
    first = cost(below)
    return (first + (epochs - below) * (cost(below + 1) - first)) / epochs


def server_multiplications(
    method: Method, factory: ModelFactory, shape: tuple[int, int, int], classes: int, rounds: int
) -> int:
    """Return the multiplications of the server's own work in a run, in matrix products and convolutions.

    The work is that in the stages that the server times, such as SFD's synthesis. It is measured in a tiny run with two
    clients that train for one step in each round, as if all classes had the same size and the server one labelled image
    of each. Few steps of the server are run, from which the multiplications of all follow.

    Args:
        method, factory, shape, classes: As in `measure`; the fields in REPLACED are replaced, but those in STEPS count.
        rounds: federation.rounds.
    """
    given = {name: getattr(method, name) for name in STEPS if name in type(method).model_fields}
    long = {name: steps for name, steps in given.items() if steps > 2}
    replaced = type(method)(**method.model_dump() | REPLACED.get(method.name, {}) | given)

    def counted(**steps: int) -> int:
        counter = _Multiplications()
        short = type(method)(**replaced.model_dump() | dict.fromkeys(long, 1) | steps)
        run = _TinyRun(
            short,
            partial(_classifying, factory),
            shape,
            classes,
            steps_per_round=1,
            rounds=rounds,
            timings=lambda: counter,
        )
        for _ in run.steps(rounds):
            pass
        return counter.total

    of_one_step = counted()
    return of_one_step + sum((steps - 1) * (counted(**{name: 2}) - of_one_step) for name, steps in long.items())


def server_steps(config: Config, shape: tuple[int, int, int], classes: int) -> float:
    """Return the server's own work in a run as a number of FedAvg's steps, each on one full batch.

    A step counts three passes of the encoder over the batch. `server_multiplications` says what counts for the server.

    Args:
        config: Settings of the run.
        shape: Height, width and channels of an image.
        classes: Number of classes, C.
    """
    setup = resolve_setup(config)
    with seeded(config.seed, "model"):
        model = setup.model(classes, shape)
    key = json.dumps(
        [
            config.method["name"],
            _sized(setup.method),
            config.model,
            config.input,
            config.federation.rounds,
            shape,
            classes,
        ]
    )
    if key not in _SERVER:
        works = server_multiplications(setup.method, MODELS["small"], (8, 8, 1), 4, rounds=2)
        # most servers only aggregate, for which a large model need not run
        _SERVER[key] = works and server_multiplications(
            setup.method, setup.model, shape, classes, config.federation.rounds
        )
    return _SERVER[key] / (3 * config.local.batch * _count_layers(model, shape))


_SERVER: dict[str, int] = {}  # results of `server_multiplications`


def _sized(method: Method) -> dict[str, Any]:
    """Return the fields on which the size of the server's work depends.

    Of a fraction it only matters whether it is 0 or 1, which may switch a part of the method off.
    """
    return {
        name: value if not isinstance(value, float) or value in (0, 1) else None
        for name, value in method.model_dump(mode="json").items()
    }


def _classifying(factory: ModelFactory, classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """Return a model that classifies images by features as wide as those of the factory's model, with its encoder."""
    model = factory(classes, shape)
    if not isinstance(model, PixelModel):
        return model
    model.encoder.register_forward_hook(lambda module, inputs, features: features.mean((2, 3)))
    return SplitModel(model.encoder, model.dim, classes)


def passes_of_settings(method: Mapping[str, Any], epochs: float, rounds: int, asked: float | None = None) -> float:
    """Return the passes of a client in a round as a multiple of FedAvg's, measured on tiny images.

    Args:
        method: Name and fields of the method, as in the configuration.
        epochs, rounds, asked: As in `relative_cost`.
    """
    made = make_method(dict(method))
    return _passes(type(made), json.dumps(made.model_dump(mode="json"), sort_keys=True), epochs, rounds, asked)


@lru_cache(maxsize=256)
def _passes(kind: type[Method], fields: str, epochs: float, rounds: int, asked: float | None) -> float:
    method = kind(**json.loads(fields))
    return relative_cost(method, MODELS["small"], (8, 8, 1), 4, epochs, rounds, asked)


def _quick(method: Method) -> Method:
    """Return the method with fields with which its calls are the same and a run is quick, see SHORT and REPLACED."""
    short = {name: value for name, value in SHORT.items() if name in type(method).model_fields}
    return type(method)(**method.model_dump() | short | REPLACED.get(method.name, {}))


def _calls(when: str, fleet: "_Fleet", passes: "_Passes", samples: int) -> Iterator[CallCost]:
    """Yield the cost of each call of a client function in a step.

    Calls on joining that neither compute nor send anything are omitted.
    """
    for name, traffic in fleet.round_stats.traffic.items():
        trained, read = (float(count) / samples / traffic.replies for count in passes.counts.get(name, (0, 0)))
        if when != "join" or traffic.up or trained or read:
            yield CallCost(
                when,
                name,
                fleet.sends[name],
                traffic.up / traffic.replies,
                traffic.down / traffic.replies,
                trained,
                read,
            )


class _ServerOnly(Exception):
    """Raised when the server starts a stage that needs no clients."""


class _Cut(Timings):
    def time(self, name: str) -> Any:
        raise _ServerOnly


class _Multiplications(Timings):
    """Counter of the multiplications in the stages that a server times."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @contextmanager
    def time(self, name: str) -> Iterator[StageProgress]:
        with FlopCounterMode(display=False) as counter, super().time(name) as progress:
            yield progress
        self.total += counter.get_total_flops() // 2  # a multiplication and an addition are two operations


class _Passes:
    """Counter of the images that pass through a client's encoder, by client function.

    Copies of the encoder count too. An image that passes through one layer counts as that layer's share of the
    encoder's multiplications.
    """

    def __init__(self) -> None:
        self.counts: dict[
            str, tuple[Fraction, Fraction]
        ] = {}  # (trained, read), exact, because images move between them
        self.call: str | None = None

    def see(self, module: nn.Module, inputs: Any, output: Any) -> None:
        whole = getattr(module, "encoder_multiplications", None)
        if self.call is None or whole is None:
            return
        call, images = self.call, Fraction(multiplications(module, inputs[0], output), whole)
        self._add(call, Fraction(), images)
        if output.requires_grad and any(p.requires_grad for p in module.parameters()):
            # called if a gradient reaches the layer, which does not happen if only the classifier is trained
            output.register_hook(_once(lambda: self._add(call, images, -images)))

    def _add(self, call: str, trained: Fraction, read: Fraction) -> None:
        before = self.counts.get(call, (Fraction(), Fraction()))
        self.counts[call] = (before[0] + trained, before[1] + read)


def _once(act: Callable[[], None]) -> Callable[[Tensor], None]:
    """Return a tensor hook that calls `act` on the first gradient and does not change gradients."""
    acted = False

    def hook(gradient: Tensor) -> None:
        nonlocal acted
        if not acted:
            acted = True
            act()

    return hook


def multiplications(layer: nn.Module, x: Tensor, output: Tensor) -> int:
    """Return the number of multiplications of a layer for a batch [B, ...]; B for layers of other types.

    Args:
        layer: A convolution, a linear layer or any other layer.
        x: Input of the layer, [B, ...].
        output: Output of the layer, [B, ...].
    """
    if isinstance(layer, nn.Conv2d):
        return output.numel() * layer.weight[0].numel()
    if isinstance(layer, nn.Linear):
        return output.numel() * layer.in_features
    return len(x)


@contextmanager
def _counted_passes() -> Iterator[_Passes]:
    passes = _Passes()
    handle = register_module_forward_hook(passes.see)
    try:
        yield passes
    finally:
        handle.remove()


class _Host(ClientHost):
    def __init__(self, passes: _Passes, *args: Any):
        super().__init__(*args)
        self._passes = passes
        _count_layers(self.model, self.spec.shape)

    def run(self, fn: Any, message: Any, round: int, id: int, shard: Shard | None, private: Any) -> Any:
        self._passes.call = function_name(fn)
        try:
            return super().run(fn, message, round, id, shard, private)
        finally:
            self._passes.call = None


def _count_layers(model: SplitModel, shape: tuple[int, int, int]) -> int:
    """Store on each counted layer the encoder's multiplications for one image, and return them.

    The attribute marks the counted layers. Copies of the model have it too.
    """
    counted = [layer for layer in model.encoder.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    if not counted:  # a frozen encoder hides its layers
        counted = [model.encoder]
    total = 0

    def add(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal total
        total += multiplications(layer, inputs[0], output)

    handles = [layer.register_forward_hook(add) for layer in counted]
    pass_zeros(model, shape)
    for handle in handles:
        handle.remove()
    for layer in counted:
        layer.encoder_multiplications = total  # pyright: ignore[reportArgumentType]
    return total


class _Fleet(LocalFleet):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sends: dict[str, dict[str, str]] = {}  # client function: {part: reduction}

    def ask(self, fn: Any, cohort: Any, message: Any, weights: Any = None, /, **parts: Any) -> Any:
        self.sends[function_name(fn)] = {name: part.kind for name, part in parts.items()}
        return super().ask(fn, cohort, message, weights, **parts)


def _task(shape: tuple[int, int, int], classes: int, lacking: int) -> Task:
    """Return a tiny task in which each client has the same number of images, but not `lacking` of the classes."""
    rng = np.random.default_rng(0)

    def shard(each: int, first: int = 0, lacking: int = 0) -> Shard:
        owned = np.delete(np.arange(classes), range(first, first + lacking))
        y = np.sort(np.resize(owned, each * classes)).astype(np.int64)
        return Shard(rng.integers(0, 256, (len(y), *shape)).astype(np.uint8), y)

    shards = tuple(shard(IMAGES_PER_CLASS, k * lacking, lacking) for k in range(CLIENTS))
    rows = tuple(np.arange(len(shards[0])) + k * len(shards[0]) for k in range(CLIENTS))
    return Task(
        "tiny",
        tuple(map(str, range(classes))),
        shape,
        (0.5,) * shape[2],
        (0.25,) * shape[2],
        np.stack([class_counts(s.labels(), classes) for s in shards]),
        ("many",) * classes,
        shards,
        shard(1),
        Split(rows, "0" * 64, "tiny", 1.0, "by_hand", 1.0, 0),
    )
