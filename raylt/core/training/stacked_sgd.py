"""Local training of several small clients at once (`local.stacked`), as one `StackedModel`.

Each client keeps everything that determines its result: the order of its batches, the draws of its augmentation, its
objective and its BatchNorm statistics. `ClientStack.train` computes what `Method.train` computes at each client, up to
rounding.

Batches of different lengths cannot be computed together, and the last batch of a pass may be shorter. So clients may be
at different steps of their training. As many clients as possible take each step together if their next batches are
equally long, until all clients are done. Clients in neighbouring slots are computed in place, other clients in copies.
A client that would be alone is computed in a stack of two, together with a copy of itself.

torch.func.vmap could train several clients without code for each layer. But it leaves the channels-last layout, and is
half as fast as a stack.
"""
# pyright: reportPrivateImportUsage=false

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.loss_terms import Terms, joint_norm, shares_part, total_loss
from raylt.core.training.sgd import autocast, learning_rate
from raylt.core.training.stacked_optimisers import make_stacked_optimiser
from raylt.data.augment import is_own
from raylt.data.samples import Augmentation
from raylt.data.task import TaskSpec
from raylt.models.split import SplitModel, StateDict
from raylt.models.stacked import (
    StackedModel,
    as_rows,
    computes_as_alone,
    side_by_side,
    unstackable_layer,
    without_frozen_encoder,
)
from raylt.models.trainable import FrozenEncoder
from raylt.tree import nbytes

MIN_TASK_CLIENTS = 8  # clients per task up to which larger tasks pay, even if each process gets fewer tasks
MAX_STACKED_SAMPLES = 128  # maximum number of samples of a client that trains in a stack
MAX_WORK = 40e6  # multiplications of a client's forward pass beyond which a stack is not faster than single clients
MAX_WEIGHTS = 100_000  # trained numbers of a client beyond which memory bounds a step, not the number of calls
MAX_CLIENTS = 32  # clients that are computed together
MAX_SLOTS = 64  # clients in a stack, which wait for each other
MAX_OUTPUT_BYTES = 8 * 2**20  # for the outputs of a stack's layers, which must fit into the processor cache
MAX_WEIGHT_BYTES = 256 * 2**20  # for the weights of a stack


@dataclass(frozen=True)
class Workload:
    """The work and the memory of a step of one client.

    Attributes:
        multiplications: Number of multiplications of convolutions and linear layers in the forward pass.
        outputs: Size of the outputs of all layers in bytes.
    """

    multiplications: float
    outputs: float

    @classmethod
    def of(cls, model: SplitModel, spec: TaskSpec, batch: int) -> "Workload":
        """Measure a step with a batch of this size on a copy of the model."""
        height, width, channels = spec.shape
        trained = without_frozen_encoder(model)
        copied = copy.deepcopy(trained).cpu().eval()
        multiplications = outputs = 0.0

        def count(layer: nn.Module, _: Any, output: Any) -> None:
            nonlocal multiplications, outputs
            if isinstance(layer, nn.Conv2d | nn.Linear):
                multiplications += output.numel() * layer.weight[0].numel()
            if not list(layer.children()):
                outputs += output.nbytes

        for layer in copied.modules():
            layer.register_forward_hook(count)
        with torch.no_grad():
            copied(torch.zeros(1, channels, height, width) if trained is model else torch.zeros(1, model.dim))
        return cls(batch * multiplications, batch * outputs)


def why_alone(
    config: Config,
    method: Method,
    model: SplitModel,
    spec: TaskSpec,
    augment: Augmentation | None,
    device: torch.device,
    any_processor: bool = False,
) -> str | None:
    """Return the reason why each client of a run trains alone, as a text; None if small clients train in stacks.

    The reason depends only on the run and the kind of processor, so that all processes agree.

    Args:
        config: The run's configuration.
        method: The method.
        model: A new model of the run.
        spec: Properties of the task that a method may know.
        augment: Augmentation of training images, or None.
        device: The clients' device.
        any_processor: Whether to use stacks even on processors where the bits of one client depend on the others.
    """
    local, federation = config.local, config.federation
    if local.stacked == "off":
        return "local.stacked = off"
    if not is_stackable(method):
        return f"method = {method.name} is not stackable"
    if federation.over_select or federation.deadline_s is not None:
        return "a round does not wait for every client"
    if not is_own(augment):
        return f"augment = {config.augment} is not built into raylt"
    if device.type != "cpu":
        return f"the clients' device is {device.type}"
    if not (any_processor or has_avx512()):
        return "the processor has no AVX-512, and a client's bits would depend on the number of clients in its stack"
    if (layer := unstackable_layer(model)) is not None:
        return f"the model has a layer that cannot be stacked, {layer}"
    work = Workload.of(model, spec, local.batch).multiplications
    if work > MAX_WORK:
        return f"a step takes {work / 1e6:.0f} million multiplications, and stacks pay up to {MAX_WORK / 1e6:.0f}"
    # an optimiser with two moments reads and writes twice as much as SGD
    weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
    limit = MAX_WEIGHTS if local.optimiser == "sgd" else MAX_WEIGHTS // 2
    if weights > limit:
        return f"the model has {weights:,} trained weights, and stacks pay up to {limit:,} with {local.optimiser}"
    if not computes_as_alone(model, spec.shape):
        return "a stack computes other outputs than the model, which has a layer in an unusual position"
    return None


def has_avx512() -> bool:
    """Return whether the processor has AVX-512.

    Without it, torch's grouped convolutions choose kernels by the number of groups, so a client's last bits would
    depend on the other clients of its stack.
    """
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def is_stackable(method: Method) -> bool:
    """Return whether a method declares that its clients can train in stacks.

    The declaration holds for the class that makes it, and for subclasses that override neither `train` nor `objective`.
    """
    kinds = type(method).__mro__
    declared = next(number for number, kind in enumerate(kinds) if "stackable" in vars(kind))
    changed = next(number for number, kind in enumerate(kinds) if "objective" in vars(kind))
    return method.stackable and declared <= changed and type(method).train is Method.train


class ClientStack:
    """Trains the clients of a stack on copies of one process's model.

    Args:
        model: A model without an `unstackable_layer`.
        spec: Properties of the task that a method may know.
        batch: Number of samples in a batch.

    Attributes:
        slots: Maximum number of clients.
        together: Maximum number of clients that take a step together.
    """

    def __init__(self, model: SplitModel, spec: TaskSpec, batch: int):
        outputs, weights = Workload.of(model, spec, batch).outputs, nbytes(dict(model.state_dict()))
        self.slots = max(2, min(int(MAX_WEIGHT_BYTES / weights), MAX_SLOTS))
        self.together = max(2, min(int(MAX_OUTPUT_BYTES / outputs), self.slots, MAX_CLIENTS))
        self._model = model
        self._stack = StackedModel(model, self.slots)
        self._copies = StackedModel(model, self.together)

    @property
    def first(self) -> StateDict:
        """Return the entries of the first client, which share the stack's memory."""
        return self._stack.slot(0)

    def train(
        self, method: Method, clients: Sequence[Client], private: Sequence[StateDict], message: Message
    ) -> list[tuple[Reply, StateDict]]:
        """Do what `Method.train` does at each client.

        Args:
            method: A stackable method.
            clients: At most `slots` clients, in descending order of their numbers of samples.
            private: Each client's private entries.
            message: The message of the round.

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
            training = _Training(self._model, stack, self._copies, views, clients, method, message)
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
                **shares_part(training.objectives[slot], method.terms),
            )
            results.append((reply, {name: value for name, value in entries.items() if name not in shared}))
        return results


class SlotModel:
    """The model of one client in a stack, as the client's objective sees it.

    It returns the client's part of the stack's results on the current batch, and computes nothing itself.

    Attributes:
        classes, dim: The same as the model's.
        leaves: The client's trained parameters, if its objective asked for them.
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
        """Set the current batch, with its features and logits."""
        self._x, self._z, self._logits = x, z, logits

    def __call__(self, x: Tensor) -> Tensor:
        return self._own(x is self._x, self._logits, "the model to its batch")

    def encoder(self, x: Tensor) -> Tensor:
        """Return the features of the current batch."""
        return self._own(x is self._x, self._z, "the encoder to its batch")

    def classifier(self, z: Tensor) -> Tensor:
        """Return the logits of the current batch."""
        return self._own(z is self._z, self._logits, "the classifier to the features of its batch")

    @staticmethod
    def _own(same: bool, values: Tensor | None, what: str) -> Tensor:
        if not same or values is None:
            raise RuntimeError(f"a stackable objective applies {what} alone")
        return values

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
        model: SplitModel,
        stack: StackedModel,
        copies: StackedModel,
        views: Sequence[SlotModel],
        clients: Sequence[Client],
        method: Method,
        message: Message,
    ):
        self._model = model
        self._stack, self._copies = stack, copies
        self._views = views
        self._clients = clients
        self.objectives: list[Any] = [method.objective(client, message) for client in clients]
        local = clients[0].config.local
        self._optimiser = make_stacked_optimiser(local, learning_rate(clients[0]))
        self._state, self._copied_state = self._optimiser.new_state(stack), self._optimiser.new_state(copies)
        self._totals = torch.zeros(len(clients), device=clients[0].device)  # sum of losses by client
        self._seen = [0] * len(clients)

    def mean_loss(self, slot: int) -> float:
        """Return a client's mean loss per sample."""
        return self._totals[slot].item() / max(self._seen[slot], 1)

    def run(self) -> None:
        """Take all steps of all clients."""
        batch = self._clients[0].config.local.batch
        left = [client.steps() for client in self._clients]
        batches = [client.rows(None, batch) for client in self._clients]
        rows = {slot: next(batches[slot]) for slot, steps in enumerate(left) if steps}
        while rows:
            slots = self._companions({slot: len(of_client) for slot, of_client in rows.items()})
            self._step(slots, rows, [slot for slot in slots if left[slot] == 1])
            for slot in slots:
                left[slot] -= 1
                self._seen[slot] += len(rows.pop(slot))
                if left[slot]:
                    rows[slot] = next(batches[slot])

    def _companions(self, lengths: dict[int, int]) -> list[int]:
        """Return the slots, ascending, of the clients that take the next step.

        They belong to the largest group with equally long batches, and are neighbours if possible.

        Args:
            lengths: Length of each client's next batch, by slot.
        """
        together = self._copies.slots
        groups: dict[int, list[int]] = {}
        for slot in sorted(lengths):
            groups.setdefault(lengths[slot], []).append(slot)
        group = max(groups.values(), key=len)
        block = group[0] // together
        neighbours = [slot for slot in group if slot // together == block]
        return neighbours if len(neighbours) > 1 else group[:together]

    def _step(self, slots: list[int], rows: Mapping[int, Tensor], last: Sequence[int]) -> None:
        """Take a step with some clients, whose batches are equally long.

        Args:
            slots: Slots of these clients, ascending.
            rows: Each client's sample indices, by slot.
            last: Slots of the clients that take their last step.
        """
        batches = [self._clients[slot].batch(rows[slot]) for slot in slots]
        objectives = [self.objectives[slot] for slot in slots]
        views = [self._views[slot] for slot in slots]
        start, stop = slots[0], slots[-1] + 1
        in_place = 1 < len(slots) == stop - start
        network, state, images = self._stack, self._state, [batch.x for batch in batches]
        if not in_place:
            pair = slots if len(slots) > 1 else slots * 2
            self._copy(pair)
            start, stop = 0, len(pair)
            network, state, images = self._copies, self._copied_state, images * (len(pair) // len(slots))
        terms: list[dict[str, Tensor]] = []
        with autocast(self._clients[0]):
            z, logits = network(start, stop, side_by_side(self._inputs(images)))
            for view, x, own_z, own_logits in zip(views, images, z.unbind(), logits.unbind(), strict=False):
                view.show(x, own_z, own_logits)
            if last and isinstance(objectives[0], Terms):
                terms = [objective.split(batch) for objective, batch in zip(objectives, batches, strict=True)]
                losses = torch.stack([total_loss(of_client) for of_client in terms])
            else:
                losses = torch.stack([fn(batch) for fn, batch in zip(objectives, batches, strict=True)])
        params = network.parameters(start, stop)
        if terms:
            self._measure(terms, params, slots, last)
        gradients = self._gradients(losses.sum(), params, views)
        with torch.no_grad():
            self._optimiser.move(network, gradients, state, start, start + len(slots))
            if not in_place:
                self._copy_back(slots)
            self._totals[slots] += losses.detach() * len(rows[slots[0]])

    @torch.no_grad()
    def _copy(self, slots: list[int]) -> None:
        """Copy the entries and the optimiser's state of some slots into the first slots of the copies."""
        chosen = torch.tensor(slots, device=self._totals.device)
        for values, copied in self._rows_and_copies():
            torch.index_select(values, 0, chosen, out=copied[: len(slots)])

    def _copy_back(self, slots: list[int]) -> None:
        chosen = torch.tensor(slots, device=self._totals.device)
        for values, copied in self._rows_and_copies():
            values.index_copy_(0, chosen, copied[: len(slots)])

    def _inputs(self, images: list[Tensor]) -> list[Tensor]:
        """Return the inputs of the stack: images, or the features of a frozen encoder.

        The encoder returns precomputed features unchanged.
        """
        encoder = self._model.encoder
        return [encoder(x) for x in images] if isinstance(encoder, FrozenEncoder) else images

    def _rows_and_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each entry and state of the stack, as rows, with its counterpart among the copies."""
        for name, values in self._stack.entries.items():
            yield as_rows(values), as_rows(self._copies.entries[name])
        for values, copied in zip(self._state, self._copied_state, strict=True):
            yield as_rows(values), as_rows(copied)

    def _gradients(
        self, loss: Tensor, params: list[Tensor], views: Sequence[SlotModel], retain: bool = False
    ) -> list[Tensor | None]:
        """Return the gradients of a loss by the clients' parameters; None for a parameter that is not in the loss.

        Args:
            loss: The sum of the clients' losses.
            params: Parameters of the clients, or of a single client twice.
            views: Models of the clients.
            retain: Whether to retain the graph.
        """
        leaves = [leaf for view in views for leaf in view.leaves]
        all_gradients = torch.autograd.grad(loss, [*params, *leaves], retain_graph=retain, allow_unused=True)
        gradients: list[Tensor | None] = []
        for number, name in enumerate(self._stack.trained):
            gradient = all_gradients[number]
            if gradient is not None and len(views) == 1:  # drop the gradient of the client's second copy
                gradient = gradient[: len(gradient) // 2]
            of_leaves = all_gradients[len(params) + number :: len(params)]
            if any(part is not None for part in of_leaves):
                direct = self._stack.flat(name, torch.stack(list(of_leaves)))
                gradient = direct if gradient is None else gradient + direct
            gradients.append(gradient)
        return gradients

    def _measure(
        self, terms: list[dict[str, Tensor]], params: list[Tensor], slots: list[int], last: Sequence[int]
    ) -> None:
        """Set the norms of the terms' gradients for the clients in the slots `last`.

        Args:
            terms: Loss terms of each client in `slots`.
            params: Parameters of the clients.
            slots: Slots of the clients that took the step.
            last: Slots of the clients that take their last step.
        """
        clients = len(terms)
        for name in terms[0]:
            loss = torch.stack([of_client[name] for of_client in terms]).sum()
            gradients = []
            if loss.requires_grad:
                gradients = self._gradients(loss, params, [self._views[slot] for slot in slots], retain=True)
            parts = [gradient.reshape(clients, -1) for gradient in gradients if gradient is not None]
            # compute norms client by client: norms of all rows at once round the last rows differently
            for slot in last:
                self.objectives[slot].norms[name] = joint_norm([part[slots.index(slot)] for part in parts])
