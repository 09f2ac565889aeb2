"""ACMU at the server, 3.4: clients in clusters by what they reply. Departures [n] are listed in method.py."""

from collections.abc import Mapping

import torch
from torch import Tensor

from raylt import tree
from raylt.core.server import Server
from raylt.methods.mupfl.clustering import cluster, cosines, update_gram
from raylt.models.split import Params

KEPT_ROUNDS = 5     # whose similarities stay in the server's state, for `raylt clusters`


def last_of_all(server: Server, updates: Mapping[int, Params], maps: Mapping[int, Tensor]) -> tuple[
        dict[int, Params], dict[int, Tensor]]:
    """The last update and map of every client that ever took part, by id, ascending: those of this round, and, from
    the server's state, which keeps them all, those of the others [14]."""
    last = server.state.get("last_updates", {}) | {str(id): {"update": tree.snapshot(update)}
                                                   | ({"map": maps[id]} if id in maps else {})
                                                   for id, update in updates.items()}
    server.state["last_updates"] = last
    ids = sorted(int(id) for id in last)
    return ({id: last[str(id)]["update"] for id in ids},
            {id: last[str(id)]["map"] for id in ids if "map" in last[str(id)]})


def form_clusters(server: Server, updates: Mapping[int, Params], maps: Mapping[int, Tensor], alpha: float,
                  kappa: int | None, kappa_max: int) -> list[list[int]]:
    """The ids of each cluster's members, Eq. 7-13 [4]. Logged; the similarities are remembered for KEPT_ROUNDS rounds.

    Args:
        updates: of each client, where its training led less where it started, by id, ascending, Eq. 7.
        maps: with BAVD, the map M of each of them, float32 [size]; else none.
        alpha: share of updates, not maps, in Eq. 8.
        kappa: fixed number of clusters; None: 2 to `kappa_max`, whatever fits best, Eq. 13.
    """
    names = [name for name, p in server.model.named_parameters() if p.requires_grad]
    similarity, n = cosines(update_gram(list(updates.values()), names)), len(updates)
    if maps:
        stacked = torch.stack(list(maps.values())).double()
        similarity = alpha * similarity + (1 - alpha) * cosines(stacked @ stacked.T)               # Eq. 8
    kappas = range(2, min(kappa_max, n - 1) + 1) if kappa is None else [min(kappa, n)]
    best = cluster(similarity, kappas if n > 2 else [], server.seed("acmu"))                        # [5]
    server.log(kappa=best.kappa, silhouettes={str(kappa): value for kappa, value in best.silhouettes.items()},
               clusters=best.labels, clustered=list(updates))
    kept = list(server.state.get("similarities", {}).values())[1 - KEPT_ROUNDS:]
    kept.append({"round": server.round, "matrix": similarity.float()})
    server.state["similarities"] = {str(place): entry for place, entry in enumerate(kept)}
    return [[id for id, label in zip(updates, best.labels, strict=True) if label == c] for c in range(best.kappa)]
