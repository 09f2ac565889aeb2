"""`Client`: one participant, all that a client function may see; `Host`: the clients that one process runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raylt import tree
from raylt.config import Config
from raylt.data.augment import AUGMENTATIONS
from raylt.data.samples import Batch, Samples
from raylt.data.task import Facts, Shard
from raylt.models.split import Params, SplitModel, load_entries
from raylt.seeds import seed_for, seeded
from raylt.tree import Tree

if TYPE_CHECKING:
    from raylt.method import Method

Message = Tree


@dataclass(frozen=True)
class Reply:
    """What one client sends back once: its weight (its number of samples) and a tree of CPU tensors."""

    weight: float
    tree: Tree


ClientFunction = Callable[["Client", Message], Reply]


class EvaluationSet:
    """The test set of one process, in memory from when it is first asked for."""

    def __init__(self, shard: Shard, facts: Facts, device: torch.device):
        self._shard, self._facts, self._device = shard, facts, device
        self._encoder: Params = {}
        self._features = torch.empty(0)

    @cached_property
    def samples(self) -> Samples:
        return Samples(self._shard, self._facts, self._device)

    @torch.no_grad()
    def features(self, encoder: nn.Module, size: int) -> Tensor:
        """The features of all samples, in their order, `size` at a time; kept until an encoder comes that differs."""
        entries = encoder.eval().state_dict()
        known = self._encoder
        if known.keys() != entries.keys() or not all(map(torch.equal, entries.values(), known.values())):
            self._features = torch.cat([encoder(batch.x) for batch in self.samples.in_order(size)])
            self._encoder = {name: value.clone() for name, value in entries.items()}
        return self._features


class Client:
    """One participant: its data, its model and its private state.

    Attributes:
        samples: its images and labels, on its device.
        counts: samples, or pixels, per class, int64 [C], on its device.
        model: weights are what the call's message brought (`receive`) and, for the entries that a method does not
            share, what this client's last call left.
        state: anything else it must remember; a tree of CPU tensors, part of every checkpoint.
        cache: what can be computed again from its data (a teacher's features); never in a checkpoint.
        round: number of the round, from 1; 0 before the first.
    """

    def __init__(self, id: int, samples: Samples, test: EvaluationSet, model: SplitModel, config: Config,
                 device: torch.device):
        self.id, self.samples, self.model, self.config, self.device = id, samples, model, config, device
        self.counts = samples.counts(model.classes)
        self.state: Tree = {}
        self.cache: dict[str, Any] = {}
        self.round = 0
        self._test = test

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def test(self) -> Samples:
        """The balanced test set of the experiment; for judging personal models, never for training."""
        return self._test.samples

    def test_features(self) -> Tensor:
        """The test set's features under this client's encoder, [N, d]; clients of one process that have the same
        encoder share them."""
        return self._test.features(self.model.encoder, self.config.evaluation.batch)

    def receive(self, params: Params) -> None:
        """Takes over the entries that came with a message; the others stay as they are."""
        load_entries(self.model, params)

    def reply(self, **parts: Any) -> Reply:
        """A reply weighted by this client's number of samples."""
        return Reply(float(len(self)), parts)

    def batches(self, epochs: int, size: int) -> Iterator[Batch]:
        """Shuffled, augmented batches of [2, size] samples; the order depends on (seed, function, round, client)."""
        return (self.batch(rows) for rows in self.rows(epochs, size))

    def rows(self, epochs: int, size: int) -> Iterator[Tensor]:
        """The places of the samples of each batch, int64 [2..size]."""
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=self.order)
            yield from (rows for rows in order.to(self.device).split(size) if len(rows) > 1)

    def batch(self, rows: Tensor) -> Batch:
        """The samples at `rows`, augmented as `augment` says."""
        return self.samples.batch(rows, AUGMENTATIONS[self.config.augment], self.noise)

    def begin(self, purpose: str, round: int) -> None:
        """Sets the round and the generators of one call."""
        self.round = round
        self.order = torch.Generator().manual_seed(seed_for(self.config.seed, "order", purpose, round, self.id))
        self.noise = torch.Generator(self.device).manual_seed(
            seed_for(self.config.seed, "noise", purpose, round, self.id))


class Host:
    """The clients of one process.

    They share one model object: what is private to a client is put into it before the client's call and taken out
    afterwards. So a process with a hundred clients holds one model, and a call's result depends on (private state,
    message, seed) alone, whichever process runs it.
    """

    def __init__(self, config: Config, method: Method, facts: Facts, test: Shard, device: torch.device):
        self.config, self.method, self.facts, self.device = config, method, facts, device
        self.model = method.new_model(facts, config).to(device)
        self.clients: dict[int, Client] = {}
        self._initial = tree.snapshot(method.private(self.model))
        self._test = EvaluationSet(test, facts, device)
        self._threads = max(1, int(config.resources.cpus_per_client))

    def run(self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None,
            private: Tree | None) -> tuple[Reply, Tree]:
        """Runs one client's function once.

        Args:
            shard: the client's data; needed the first time only.
            private: what the client's last call returned, or None before its first.

        Returns:
            The reply and the client's private state, both on the CPU.
        """
        client = self.clients.get(id)
        if client is None:
            assert shard is not None, f"client {id} is not here and came without its data"
            samples = Samples(shard, self.facts, self.device)
            client = self.clients[id] = Client(id, samples, self._test, self.model, self.config, self.device)
        entries, client.state = (self._initial, {}) if private is None else (private["model"], private["state"])
        client.receive(entries)
        self.model.train()              # whoever ran before: a call starts from the same mode
        name = getattr(fn, "__name__", "call")
        client.begin(name, round)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)        # the same everywhere: it decides the order of some sums
        try:
            with seeded(self.config.seed, name, round, id, device=self.device):
                reply = fn(client, tree.to(message, self.device))
        finally:
            torch.set_num_threads(threads)
        after = {"model": self.method.private(self.model), "state": client.state}
        return Reply(reply.weight, _outgoing(reply.tree)), _outgoing(after)


def _outgoing(parts: Tree) -> Tree:
    """On the CPU and contiguous: other layouts cannot be sent without a copy. Shares memory where it can."""
    return tree.map_tensors(lambda t: t.detach().cpu().contiguous(), parts)

