"""Local training of several small clients at once (`local.stacked`), as one `StackedModel`.

Each client keeps what decides its result: its order of batches, its augmentation's draws, its objective and its
BatchNorm statistics. `ClientStack.train` computes what `Method.train` computes at each client, up to rounding.

The clients are sorted, those with most samples first. A step is taken by every client that has a batch left, and these
are always the first slots of the stack. Batches of one step may differ in length, because the last batch of a pass is
shorter. Neighbours with equally long batches are computed together. A client without such a neighbour is computed in a
stack of two, with itself.

torch.func.vmap would train several clients without a line for each layer. It leaves the channels-last layout, and is
half as fast as a stack.
"""
# pyright: reportPrivateImportUsage=false

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms, added, length, reply_of
from raylt.core.training.optimisers import SGD
from raylt.core.training.sgd import autocast, learning_rate
from raylt.data.augment import is_own
from raylt.data.samples import Augmentation
from raylt.data.task import TaskSpec
from raylt.models.split import Params, SplitModel
from raylt.models.stacked import StackedModel, unstackable_layer
from raylt.tree import nbytes

FEW = 8  # clients of one task that are worth fewer tasks for each process, where they train in stacks
SAMPLES = 32  # of the largest client that trains in a stack
MOST_WORK = 40e6  # multiplications of a client's forward step, beyond which a stack is not faster than single clients
MOST_CLIENTS = 32
CACHE = 8 * 2**20  # bytes that the outputs of a stack's layers may take, so that they stay in the processor's cache
WEIGHTS = 256 * 2**20  # bytes that the weights of a stack may take


@dataclass(frozen=True)
class Workload:
    """The work and the memory of a step of one client.

    Attributes:
        multiplications: of convolutions and linear layers in the forward pass.
        outputs: bytes of the outputs of all layers.
    """

    multiplications: float
    outputs: float

    @classmethod
    def of(cls, model: SplitModel, spec: TaskSpec, batch: int) -> "Workload":
        """Measure a step with a batch of this size on a copy of the model."""
        height, width, channels = spec.shape
        copied = copy.deepcopy(model).cpu().eval()
        multiplications = outputs = 0.0

        def see(layer: nn.Module, _: Any, output: Any) -> None:
            nonlocal multiplications, outputs
            if isinstance(layer, nn.Conv2d | nn.Linear):
                multiplications += output.numel() * layer.weight[0].numel()
            if not list(layer.children()):
                outputs += output.nbytes

        for layer in copied.modules():
            layer.register_forward_hook(see)
        with torch.no_grad():
            copied(torch.zeros(1, channels, height, width))
        return cls(batch * multiplications, batch * outputs)


def why_alone(
    config: Config,
    method: Method,
    model: SplitModel,
    spec: TaskSpec,
    augment: Augmentation | None,
    device: torch.device,
) -> str | None:
    """Return the reason why each client of a run trains alone, in words; None if small clients train in stacks.

    The reason depends on nothing but the run, so that all processes agree.
    """
    local, federation = config.local, config.federation
    if local.stacked == "off":
        return "local.stacked = off"
    if not is_stackable(method):
        return f"method = {method.name} is not stackable"
    if local.optimiser != "sgd":
        return f"local.optimiser = {local.optimiser}"
    if federation.over_select or federation.deadline_s is not None:
        return "a round does not wait for every client"
    if not is_own(augment):
        return f"augment = {config.augment} is not raylt's own"
    if device.type != "cpu":
        return f"the clients' device is {device.type}"
    if (layer := unstackable_layer(model)) is not None:
        return f"the model has a layer that cannot be stacked, {layer}"
    work = Workload.of(model, spec, local.batch).multiplications
    if work > MOST_WORK:
        return f"a step takes {work / 1e6:.0f} million multiplications, and stacks pay up to {MOST_WORK / 1e6:.0f}"
    return None


def is_stackable(method: Method) -> bool:
    """Return whether a method declares that its clients can train in stacks.

    The declaration holds for the class that makes it, and for subclasses that change neither `train` nor `objective`.
    """
    kinds = type(method).__mro__
    declared = next(number for number, kind in enumerate(kinds) if "stackable" in vars(kind))
    changed = next(number for number, kind in enumerate(kinds) if "objective" in vars(kind))
    return method.stackable and declared <= changed and type(method).train is Method.train


class ClientStack:
    """Trains the clients of a stack on copies of one process's model.

    Args:
        model: a model without an `unstackable_layer`.

    Attributes:
        slots: the largest number of clients.
    """

    def __init__(self, model: SplitModel, spec: TaskSpec, batch: int):
        outputs, weights = Workload.of(model, spec, batch).outputs, nbytes(dict(model.state_dict()))
        self.slots = max(2, min(int(CACHE / outputs), int(WEIGHTS / weights), MOST_CLIENTS))
        self._model = model
        self._stack = StackedModel(model, self.slots)
        self._pair = StackedModel(model, 2)

    @property
    def first(self) -> Params:
        """Return the entries of the first client, which share the stack's memory."""
        return self._stack.slot(0)

    def train(
        self, method: Method, clients: Sequence[Client], private: Sequence[Params], message: Message
    ) -> list[tuple[Reply, Params]]:
        """Do what `Method.train` does at each client.

        Args:
            method: a stackable method.
            clients: at most `slots`, those with most samples first.
            private: each client's private entries.

        Returns:
            Each client's reply and its private entries after the call. They share the stack's memory.
        """
        stack = self._stack
        for slot, entries in enumerate(private):
            stack.load(slice(slot, slot + 1), entries)
        stack.load(slice(0, len(clients)), message["model"])
        views = [SlotModel(stack, slot, self._model) for slot in range(len(clients))]
        try:
            for client, view in zip(clients, views, strict=True):
                client.model = cast(SplitModel, view)
            training = _Training(stack, self._pair, views, clients, method, message)
            training.run()
        finally:
            for client in clients:
                client.model = self._model
        shared = method.shared(self._model).keys()
        results = []
        for slot, client in enumerate(clients):
            entries = stack.slot(slot)
            reply = client.reply(
                model={name: entries[name] for name in shared},
                loss=training.mean_loss(slot),
                **reply_of(training.objectives[slot], method.terms),
            )
            results.append((reply, {name: value for name, value in entries.items() if name not in shared}))
        return results


class SlotModel:
    """The model of one client in a stack, as the client's objective sees it.

    It hands out the client's part of what the stack computed on the batch under way, and computes nothing itself.

    Attributes:
        classes, dim: as of the model.
        leaves: the client's trained parameters, if its objective asked for them.
    """

    def __init__(self, stack: StackedModel, slot: int, model: SplitModel):
        self.classes, self.dim = model.classes, model.dim
        self.leaves: list[nn.Parameter] = []
        self._stack = stack
        self._slot = slot
        self._x: Tensor | None = None
        self._z: Tensor | None = None
        self._logits: Tensor | None = None

    def show(self, x: Tensor, z: Tensor, logits: Tensor) -> None:
        """Set the batch under way, with its features and logits."""
        self._x, self._z, self._logits = x, z, logits

    def __call__(self, x: Tensor) -> Tensor:
        assert x is self._x, "a stackable objective applies the model to its batch alone"
        assert self._logits is not None
        return self._logits

    def encoder(self, x: Tensor) -> Tensor:
        """Return the features of the batch under way."""
        assert x is self._x, "a stackable objective applies the encoder to its batch alone"
        assert self._z is not None
        return self._z

    def classifier(self, z: Tensor) -> Tensor:
        """Return the logits of the batch under way."""
        assert z is self._z, "a stackable objective applies the classifier to the features of its batch alone"
        assert self._logits is not None
        return self._logits

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, which share the stack's memory and have gradients of their own."""
        if not self.leaves:
            entries = self._stack.slot(self._slot)
            self.leaves = [nn.Parameter(entries[name]) for name in self._stack.trained]
        return self.leaves


class _Training:
    """The local training of the clients of a stack, which are in its first slots."""

    def __init__(
        self,
        stack: StackedModel,
        pair: StackedModel,
        views: Sequence[SlotModel],
        clients: Sequence[Client],
        method: Method,
        message: Message,
    ):
        self._stack, self._pair = stack, pair
        self._views = views
        self._clients = clients
        self.objectives: list[Any] = [method.objective(client, message) for client in clients]
        local = clients[0].config.local
        self._optimiser = SGD([], learning_rate(clients[0]), local.momentum, local.weight_decay)
        trained = [stack.entries[name] for name in stack.trained]
        self._velocity = [torch.zeros_like(values) for values in trained] if local.momentum else []
        self._totals = torch.zeros(len(clients), device=clients[0].device)  # of each client, the sum of its losses
        self._seen = [0] * len(clients)

    def mean_loss(self, slot: int) -> float:
        """Return a client's mean loss of a sample."""
        return self._totals[slot].item() / max(self._seen[slot], 1)

    def run(self) -> None:
        """Take all steps of all clients."""
        batch = self._clients[0].config.local.batch
        left = [client.steps() for client in self._clients]
        batches = [client.rows(None, batch) for client in self._clients]
        while left[0]:
            active = sum(1 for steps in left if steps)
            rows = [next(batches[slot]) for slot in range(active)]
            for _, group in groupby(range(active), key=lambda slot: len(rows[slot])):
                slots = list(group)
                last = [slot for slot in slots if left[slot] == 1]
                self._step(slots[0], slots[-1] + 1, rows, last)
            for slot in range(active):
                left[slot] -= 1
                self._seen[slot] += len(rows[slot])

    def _step(self, start: int, stop: int, rows: Sequence[Tensor], last: Sequence[int]) -> None:
        """Take a step of the clients in neighbouring slots, whose batches are equally long.

        Args:
            rows: each client's sample indices.
            last: slots of the clients that take their last step.
        """
        batches = [self._clients[slot].batch(rows[slot]) for slot in range(start, stop)]
        objectives = self.objectives[start:stop]
        terms: list[dict[str, Tensor]] = []
        with autocast(self._clients[0]):
            params = self._compute(start, stop, [batch.x for batch in batches])
            if last and isinstance(objectives[0], Terms):
                terms = [objective.split(batch) for objective, batch in zip(objectives, batches, strict=True)]
                losses = torch.stack([added(of_client) for of_client in terms])
            else:
                losses = torch.stack([fn(batch) for fn, batch in zip(objectives, batches, strict=True)])
        if terms:
            self._measure(terms, params, start, last)
        gradients = self._gradients(losses.sum(), params, start, stop)
        with torch.no_grad():
            self._move(gradients, start, stop)
            self._totals[start:stop] += losses.detach() * len(rows[start])

    def _compute(self, start: int, stop: int, images: list[Tensor]) -> list[Tensor]:
        """Compute the clients' features and logits, and show each client its own.

        Args:
            images: each client's batch, [B, C, H, W].

        Returns:
            The parameters that were computed with: of these clients or, for a single client, of a pair.
        """
        if stop - start > 1:
            z, logits = self._stack(start, stop, side_by_side(images))
            params = self._stack.parameters(start, stop)
        else:
            self._pair.load(slice(0, 2), self._stack.slot(start))
            z, logits = self._pair(0, 2, side_by_side(images * 2))
            with torch.no_grad():
                for name in self._stack.untrained:
                    self._stack.entries[name][start].copy_(self._pair.entries[name][0])
            params = self._pair.parameters(0, 2)
        for slot, x, own_z, own_logits in zip(range(start, stop), images, z.unbind(), logits.unbind(), strict=False):
            self._views[slot].show(x, own_z, own_logits)
        return params

    def _gradients(
        self, loss: Tensor, params: list[Tensor], start: int, stop: int, retain: bool = False
    ) -> list[Tensor | None]:
        """Return the gradients of a loss by the clients' parameters; None for a parameter that is not in the loss."""
        leaves = [leaf for view in self._views[start:stop] for leaf in view.leaves]
        all_gradients = torch.autograd.grad(loss, [*params, *leaves], retain_graph=retain, allow_unused=True)
        gradients: list[Tensor | None] = []
        for number, name in enumerate(self._stack.trained):
            gradient = all_gradients[number]
            if gradient is not None:  # without that of a pair's second copy
                gradient = gradient[: len(gradient) * (stop - start) // max(stop - start, 2)]
            of_leaves = all_gradients[len(params) + number :: len(params)]
            if any(part is not None for part in of_leaves):
                direct = self._stack.flat(name, torch.stack(list(of_leaves)))
                gradient = direct if gradient is None else gradient + direct
            gradients.append(gradient)
        return gradients

    def _move(self, gradients: list[Tensor | None], start: int, stop: int) -> None:
        """Move the clients' parameters along their gradients."""
        params = self._stack.parameters(start, stop)
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        velocity = []
        if self._velocity:
            velocity = [self._stack.flat(self._stack.trained[i], self._velocity[i][start:stop]) for i in used]
        self._optimiser.move(
            [params[i] for i in used], [gradient for gradient in gradients if gradient is not None], velocity
        )

    def _measure(self, terms: list[dict[str, Tensor]], params: list[Tensor], start: int, last: Sequence[int]) -> None:
        """Set the norms of the terms' gradients for the clients in the slots `last`.

        Args:
            terms: of the clients in the slots from `start` on.
        """
        clients = len(terms)
        norms: dict[str, list[float]] = {}
        for name in terms[0]:
            loss = torch.stack([of_client[name] for of_client in terms]).sum()
            gradients = []
            if loss.requires_grad:
                gradients = self._gradients(loss, params, start, start + clients, retain=True)
            parts = [gradient.reshape(clients, -1) for gradient in gradients if gradient is not None]
            # client by client: norms of all rows at once round in another way for the last ones
            norms[name] = [length([part[number] for part in parts]) for number in range(clients)]
        for slot in last:
            self.objectives[slot].norms = {name: of_term[slot - start] for name, of_term in norms.items()}


def side_by_side(images: list[Tensor]) -> Tensor:
    """Return the batches of n clients, [B, C, H, W] each, as one batch [B, n * C, H, W], channels-last."""
    return torch.stack([x.permute(0, 2, 3, 1) for x in images], dim=3).flatten(3).permute(0, 3, 1, 2)
