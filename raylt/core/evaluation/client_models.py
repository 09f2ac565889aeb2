"""The client functions that evaluate clients' models, and the reductions that check the clients' counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.evaluation.counts import NO_CLIENT, Counts, cell_type, cells_of
from raylt.core.fleet.reductions import Reduction, each
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.setup import check_model
from raylt.core.training.sgd import take_statistics
from raylt.data.label_maps import class_counts
from raylt.data.task import Shard
from raylt.models.split import SplitModel, StateDict, load_entries, with_classifier

TRIED = 2  # samples on which a client's models are tried


@dataclass(frozen=True)
class Judge:
    """The client function that evaluates a client's model on the test set.

    Attributes:
        method: The method whose models are evaluated.
        other: One of its `other_models`; None for the model that clients use.
    """

    method: Method
    other: str | None = None

    def judge(self, client: Client, message: Message) -> Reply:
        """Count the pairs (true class, predicted class) of this client's model on the test set.

        The reply has the nonzero cells of these counts. If the message names the owners of the test images, each cell
        also has the count on the client's own test images. The reply also has the number of NaN predictions.
        """
        model = judged_model(self.method, client, message["model"], self.other)
        owners = message.get("owners")
        if owners is not None:
            owners = owners.where(owners == client.id, NO_CLIENT)
        counts = client.test.counts(model, self.method.predict, client.config.evaluation.batch, owners)
        cells = cells_of(counts.all) if owners is None else cells_with_own(counts, client.id)
        # records of runs name this entry where they say why a reply was rejected
        return client.reply(confusion=cells, not_numbers=int(counts.nan_predictions))


@dataclass(frozen=True)
class ModelTrial:
    """The client function that tries the evaluation of a client's models before it is due.

    Attributes:
        method: The method whose models are tried.
    """

    method: Method

    @torch.no_grad()
    def try_models(self, client: Client, message: Message) -> Reply:
        """Let each of the client's models predict a few of its own samples; reply with the number of NaN predictions.

        Raises:
            ConfigError: A function of the method does not return a model, or predictions have another shape.
        """
        counts = Counts(client.model.classes, client.device)
        batch = next(client.samples.in_order(TRIED))
        for other in (None, *self.method.other_models):
            model = judged_model(self.method, client, message["model"], other).eval()
            counts.add(self.method.predict(model, batch.x), batch)
        return client.reply(not_numbers=int(counts.nan_predictions))


@dataclass(frozen=True)
class NewClient:
    """The client function that prepares a client that joins after training.

    Attributes:
        method: The method whose `settle` prepares the client.
    """

    method: Method

    def settle(self, client: Client, message: Message) -> Reply:
        """Call the method's `settle`, which prepares a new client for its evaluation."""
        self.method.settle(client, message)
        return client.reply()


def judged_entries(server: Server, method: Method) -> StateDict:
    """Return the state-dict entries of the server's model that clients need for an evaluation.

    For a personal method these are the entries that clients share. For other methods they are all entries of the global
    model, without the running statistics if federation.batchnorm = local keeps them at the clients.
    """
    if method.personal:
        return tree.snapshot(method.shared(server.model))
    model = method.global_model(server)
    return tree.snapshot(
        {name: value for name, value in model.state_dict().items() if name not in server.model.local_buffers}
    )


@torch.no_grad()
def judged_model(method: Method, client: Client, entries: StateDict, other: str | None = None) -> SplitModel:
    """Return the client's own model, or the global model with the client's running statistics, for an evaluation.

    A client that was never asked takes its statistics now.

    Args:
        method: The method whose models are evaluated.
        client: The client that evaluates.
        entries: The result of `judged_entries`.
        other: The name of one of the method's `other_models`, which is returned instead.
    """
    if method.personal:
        client.receive(entries)
        take_statistics(client)
        if other is None:
            return check_model(method, "client_model", method.client_model(client), "client.model")
        return check_model(method, "other_model", method.other_model(client, other), "client.model")
    classifier = {
        name.removeprefix("classifier."): value for name, value in entries.items() if name.startswith("classifier.")
    }
    model = client.model
    if classifier.keys() != model.classifier.state_dict().keys():
        # the global model has another linear classifier than the one that clients train
        own = {name: value.clone() for name, value in classifier.items()}  # entries are loaded into it below
        model = with_classifier(model, own["weight"], own.get("bias"), own.get("longest"))
    names = model.state_dict().keys()
    load_entries(model, {name: value for name, value in entries.items() if name in names})
    take_statistics(client)
    return model


def cells_with_own(counts: Counts, id: int) -> Tensor:
    """Return the nonzero confusion counts of a model on all images and on one client's images, [m, 3]."""
    return cells_of(counts.all, counts.own.get(id, torch.zeros_like(counts.all)))


def counts_on(shard: Shard, classes: int) -> Reduction:
    """Return the reduction that checks and collects confusion counts on a test set, [m, 2]; see `cells_of`.

    It rejects negative counts and rows whose sums differ from the number of samples or labelled pixels of the class.
    """
    expected = totals(shard, classes)
    return _cells_like(expected, 2).where(partial(_count_fault, expected=expected))


def counts_on_own(shard: Shard, classes: int, own: Mapping[int, Tensor]) -> Reduction:
    """Return the reduction that checks confusion counts on a test set and on the client's own images, [m, 3].

    Args:
        shard: The test set.
        classes: Number of classes, C.
        own: Samples per class, int64 [C], for each client that has test images.
    """
    on_all = totals(shard, classes)
    return _cells_like(on_all, 3).where_of(partial(_own_fault, on_all=on_all, own=own))


def nan_predictions_on(shard: Shard) -> Reduction:
    """Return the reduction that checks the number of NaN predictions on a test set."""
    most = shard.labels().size
    return each.like(0).where(lambda count: f"is more than the {most} labels" if count > most else None)


def totals(shard: Shard, classes: int) -> Tensor:
    """Return the samples or labelled pixels of each class in a test set, int64 [C]."""
    return torch.from_numpy(class_counts(shard.labels(), classes))


def totals_of_each(shard: Shard, classes: int, rows: Mapping[int, np.ndarray]) -> dict[int, Tensor]:
    """Count the samples or labelled pixels of each class over the rows of each client.

    Args:
        shard: The test set.
        classes: Number of classes, C.
        rows: Rows of the test set by client id.

    Returns:
        Counts by client id, int64 [C].
    """
    labels = shard.labels()
    return {id: torch.from_numpy(class_counts(labels[own], classes)) for id, own in rows.items()}


def _cells_like(expected: Tensor, columns: int) -> Reduction:
    """Return the reduction for nonzero confusion counts, with a limit on the number of rows that a client may send."""
    classes, labels = len(expected), int(expected.sum())
    most = min(classes**2, labels)
    return each.like(torch.empty(most, columns, dtype=cell_type(classes, labels), device="meta")).or_shorter()


def _count_fault(cells: Tensor, expected: Tensor, what: str = "the test set") -> str | None:
    """Return the reason why confusion counts [m, 2] cannot come from a test set, or None if they can."""
    places, counts = cells.long().unbind(1)
    classes = len(expected)
    if len(places) and (places[0] < 0 or places[-1] >= classes**2 or (places.diff() <= 0).any()):
        return "has cells that are not ascending or outside the matrix"
    if (counts < 0).any():
        return "has negative counts"
    rows = torch.zeros_like(expected).index_add_(0, places // classes, counts)
    return None if torch.equal(rows, expected) else f"does not have the number of samples of each class in {what}"


def _own_fault(id: int, cells: Tensor, on_all: Tensor, own: Mapping[int, Tensor]) -> str | None:
    if fault := _count_fault(cells[:, :2], on_all):
        return fault
    owned = own.get(id, torch.zeros_like(on_all))
    if fault := _count_fault(cells[:, ::2], owned, "the client's own test images"):
        return fault
    if (cells[:, 2] > cells[:, 1]).any():
        return "has more counts on the client's own test images than on all"
    return None
