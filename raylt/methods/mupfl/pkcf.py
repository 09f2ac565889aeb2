"""PKCF of MuPFL (3.5): features at the server that represent all classes, on which clients tune their classifiers.

Departures [n] are listed in method.py.
"""

import time

import torch
from torch import Tensor, nn

from raylt.core.client import Client
from raylt.core.round_stats import StageProgress
from raylt.core.server import Server
from raylt.core.training.estimates import about
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.sgd import learning_rate
from raylt.data.task import TaskSpec
from raylt.models.split import SplitModel
from raylt.ops.matching import Distance, match_features, mean_gradients
from raylt.seeds import seed_for
from raylt.tree import Tree


def first_features(server: Server, m: int) -> None:
    """Initialise the server's features h_glo with noise, and mark all classes as unknown [7]."""
    generator = torch.Generator().manual_seed(server.seed("features"))
    model = server.model
    server.state["features"] = torch.randn(model.classes, m, model.dim, generator=generator)
    server.state["known"] = torch.zeros(model.classes, dtype=torch.bool)


def tune(client: Client, features: Tensor, owned: Tensor, epochs: int) -> None:
    """Train the client's classifier on the server's features of all known classes, Eq. 21 [7].

    Args:
        client: The client.
        features: Server's features h_glo, [C, m, d].
        owned: True for classes that a participant so far owned, bool [C].
        epochs: Number of epochs, tau.
    """
    local = client.config.local
    y = torch.nonzero(owned).repeat(1, features.shape[1]).flatten()
    y = y if client.samples.view is None else client.samples.view[y]  # [12]
    fit_classifier(
        client.model.classifier,
        features[owned].flatten(0, 1),
        y,
        epochs=epochs,
        batch=local.batch,
        lr=learning_rate(client),
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        schedule="constant",
        seed=seed_for(client.config.seed, "tune", client.round, client.id),
    )


def pkcf_work(spec: TaskSpec, model: SplitModel, m: int, steps: int, distance: Distance) -> str:
    """Describe the server's feature matching for the plan of a run, with its duration estimated from one timed step.

    Args:
        spec: Specification of the task.
        model: The global model.
        m: Number of features per class.
        steps: Number of matching steps per round.
        distance: Distance of the gradients that are matched.
    """
    h = torch.ones(spec.classes, m, model.dim)
    targets = torch.ones(spec.classes, spec.classes, model.dim + 1)
    classifier = nn.Linear(model.dim, spec.classes)

    def timed() -> float:
        start = time.perf_counter()
        match_features(h, torch.arange(spec.classes), targets, classifier, steps=1, lr=0.0, distance=distance)
        return time.perf_counter() - start

    timed()  # the first step is slower
    return f"PKCF in every round: {steps} steps on {m * spec.classes} features at the server, {about(timed() * steps)}"


def match(
    server: Server,
    gradients: list[Tree],
    steps: int,
    lr: float,
    distance: Distance,
    progress: StageProgress | None = None,
) -> None:
    """Update the server's features h_glo for the classes that any participant has, Eq. 17-20 [7] [11].

    Args:
        server: The server.
        gradients: Result of `class_gradients` at each participant, Eq. 16.
        steps: Number of SGD steps.
        lr: Learning rate.
        distance: Measure by which gradients are compared.
        progress: Function that is called with the progress.
    """
    classes, targets = mean_gradients(gradients)  # Eq. 17
    start, device = server.state["features"][classes], server.device
    h, cosine = match_features(
        start.to(device),
        classes.to(device),
        targets.to(device),
        server.model.classifier,
        steps=steps,
        lr=lr,
        distance=distance,
        progress=progress,
    )
    server.state["features"] = server.state["features"].index_copy(0, classes, h.cpu())
    server.state["known"] = server.state["known"].index_fill(0, classes, True)
    server.log(cosine=cosine.mean().item())
