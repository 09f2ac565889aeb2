"""PKCF, 3.5: what classes look like, as features at the server, and classifiers tuned on them at the clients.

Departures [n] are listed in method.py.
"""

import torch
from torch import Tensor

from raylt.core.client import Client
from raylt.core.fitting import fit_classifier
from raylt.core.server import Server
from raylt.core.training import learning_rate
from raylt.ops.matching import Distance, match_features, mean_gradients
from raylt.seeds import seed_for
from raylt.tree import Tree


def first_features(server: Server, m: int) -> None:
    """h_glo as it is before any client has replied: noise, and no class is known [7]."""
    generator, model = torch.Generator().manual_seed(server.seed("features")), server.model
    server.state["features"] = torch.randn(model.classes, m, model.dim, generator=generator)
    server.state["known"] = torch.zeros(model.classes, dtype=torch.bool)


def tune(client: Client, features: Tensor, known: Tensor, epochs: int) -> None:
    """Eq. 21: the client's classifier, tuned on the features of the classes that somebody owned so far [7].

    Args:
        features: h_glo [C, m, d].
        known: bool [C].
        epochs: tau.
    """
    local = client.config.local
    y = torch.nonzero(known).repeat(1, features.shape[1]).flatten()
    y = y if client.samples.view is None else client.samples.view[y]                                # [12]
    fit_classifier(client.model.classifier, features[known].flatten(0, 1), y, epochs=epochs,
                   batch=local.batch, lr=learning_rate(client), momentum=local.momentum,
                   weight_decay=local.weight_decay, schedule="constant",
                   seed=seed_for(client.config.seed, "tune", client.round, client.id))


def match(server: Server, gradients: list[Tree], steps: int, lr: float, distance: Distance) -> None:
    """h_glo of the classes that a participant owns, Eq. 17-20 [7] [11].

    Args:
        gradients: of each participant, what `class_gradients` gives, Eq. 16.
    """
    classes, targets = mean_gradients(gradients)                                                    # Eq. 17
    start, device = server.state["features"][classes], server.device
    h, cosine = match_features(start.to(device), classes.to(device), targets.to(device), server.model.classifier,
                               steps=steps, lr=lr, distance=distance)
    server.state["features"] = server.state["features"].index_copy(0, classes, h.cpu())
    server.state["known"] = server.state["known"].index_fill(0, classes, True)
    server.log(cosine=cosine.mean().item())
