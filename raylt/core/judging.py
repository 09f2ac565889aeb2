"""How clients are judged: by the framework, from what a method says its models are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.evaluation import NOBODY
from raylt.core.method import Method
from raylt.core.reductions import Reduction, each
from raylt.core.server import Server
from raylt.core.training import take_statistics
from raylt.data.maps import class_counts
from raylt.data.task import Shard
from raylt.models.split import Params, SplitModel, load_entries, with_classifier


def judged_entries(server: Server, method: Method) -> Params:
    """What clients need of the server to be judged: of a personal method the entries that it shares, else those of the
    global model that may travel (federation.batchnorm = local keeps running statistics at the clients)."""
    if method.personal:
        return tree.snapshot(method.shared(server.model))
    model = method.global_model(server)
    return tree.snapshot({name: value for name, value in model.state_dict().items() if name not in server.model.stays})


@torch.no_grad()
def judged_model(method: Method, client: Client, entries: Params, other: str | None = None) -> SplitModel:
    """The model that a client uses: its own, or the global one with the statistics that it keeps for itself. One that
    was never asked takes these now.

    Args:
        entries: from `judged_entries`.
        other: one of the method's `other_models` instead.
    """
    if method.personal:
        client.receive(entries)
        take_statistics(client)
        return method.client_model(client) if other is None else method.other_model(client, other)
    classifier = {name.removeprefix("classifier."): value for name, value in entries.items()
                  if name.startswith("classifier.")}
    model = client.model
    if classifier.keys() != model.classifier.state_dict().keys():
        # the global model has another linear classifier than the one that clients train
        model = with_classifier(model, classifier["weight"], classifier.get("bias"), classifier.get("longest"))
    names = model.state_dict().keys()
    load_entries(model, {name: value for name, value in entries.items() if name in names})
    take_statistics(client)
    return model


@dataclass(frozen=True)
class Newcomer:
    """The client function of one that joins after training.

    Attributes:
        method: says what such a client does.
    """

    method: Method

    def settle(self, client: Client, message: Message) -> Reply:
        """What is to be done before it is judged."""
        self.method.settle(client, message)
        return client.reply()


@dataclass(frozen=True)
class Judge:
    """The client function of a judgement.

    Attributes:
        method: whose models are judged.
        other: which of its `other_models`; None: those that clients use.
    """

    method: Method
    other: str | None = None

    def judge(self, client: Client, message: Message) -> Reply:
        """Counts [C, C] of (true, predicted) classes of this client's model on the test set; where the message says
        whose each test image is, [2, C, C]: on all of it, and on the client's own."""
        model, owners = judged_model(self.method, client, message["model"], self.other), message.get("owners")
        if owners is not None:
            owners = owners.where(owners == client.id, NOBODY)
        counts = client.test.counts(model, self.method.predict, client.config.evaluation.batch, owners)
        if owners is None:
            return client.reply(confusion=counts.all)
        own = counts.own.get(client.id, torch.zeros_like(counts.all))
        return client.reply(confusion=torch.stack([counts.all, own]))


def counts_on(shard: Shard, classes: int) -> Reduction:
    """What judgements on a test set look like: counts [C, C], none negative, in whose rows are as many as each class
    has samples, or labelled pixels, there."""
    like = torch.empty(classes, classes, dtype=torch.int64, device="meta")
    return each.like(like).where(partial(_count_fault, expected=totals(shard, classes)))


def counts_on_own(shard: Shard, classes: int, own: Mapping[int, Tensor]) -> Reduction:
    """The same of judgements that tell the client's own test images apart: [2, C, C], of all and of its own.

    Args:
        own: samples per class, int64 [C], of each client that has test images.
    """
    like = torch.empty(2, classes, classes, dtype=torch.int64, device="meta")
    condition = partial(_own_fault, everybody=totals(shard, classes), own=own)
    return each.like(like).where_of(condition)


def totals(shard: Shard, classes: int, rows: np.ndarray | None = None) -> Tensor:
    """Samples, or labelled pixels, per class of a test set, or of some of its rows, int64 [C]."""
    labels = shard.labels()
    return torch.from_numpy(class_counts(labels if rows is None else labels[rows], classes))


def _count_fault(counts: Tensor, expected: Tensor, what: str = "the test set") -> str | None:
    if (counts < 0).any():
        return "has negative counts"
    return None if torch.equal(counts.sum(1), expected) else f"has not as many counts of each class as {what}"


def _own_fault(id: int, counts: Tensor, everybody: Tensor, own: Mapping[int, Tensor]) -> str | None:
    everywhere, here = counts
    if fault := _count_fault(everywhere, everybody):
        return fault
    if fault := _count_fault(here, own.get(id, torch.zeros_like(everybody)), "the client's own test images"):
        return fault
    return "has more counts on the client's own test images than on all" if (here > everywhere).any() else None
