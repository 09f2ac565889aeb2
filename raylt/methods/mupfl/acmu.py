"""ACMU at the server, 3.4: participants in clusters by what they reply. Departures [n] are listed in method.py."""

from collections.abc import Mapping

import torch

from raylt.core.gathering import Replies
from raylt.core.server import Server
from raylt.methods.mupfl.clustering import cluster, cosines, update_gram
from raylt.models.split import Params

KEPT_ROUNDS = 5     # whose similarities stay in the server's state, for `raylt clusters`


def form_clusters(server: Server, starts: Mapping[int, Params], got: Replies, alpha: float, kappa: int | None,
                  kappa_max: int) -> list[list[int]]:
    """The ids of each cluster's members, Eq. 7-13 [4]. Logged; the similarities are remembered for KEPT_ROUNDS rounds.

    Args:
        starts: the model that each participant started from, by id, ascending.
        got: each participant's "model" and, with BAVD, its "map".
        alpha: share of updates, not maps, in Eq. 8.
        kappa: fixed number of clusters; None: 2 to `kappa_max`, whatever fits best, Eq. 13.
    """
    names = [name for name, p in server.model.named_parameters() if p.requires_grad]
    ends: list[Params] = list(got["model"].values())
    similarity, n = cosines(update_gram(ends, list(starts.values()), names)), len(starts)
    if "map" in got:
        maps = torch.stack(list(got["map"].values())).double()
        similarity = alpha * similarity + (1 - alpha) * cosines(maps @ maps.T)                     # Eq. 8
    kappas = range(2, min(kappa_max, n - 1) + 1) if kappa is None else [min(kappa, n)]
    best = cluster(similarity, kappas if n > 2 else [], server.seed("acmu"))                        # [5]
    server.log(kappa=best.kappa, silhouettes={str(kappa): value for kappa, value in best.silhouettes.items()},
               clusters=best.labels)
    kept = list(server.state.get("similarities", {}).values())[1 - KEPT_ROUNDS:]
    kept.append({"round": server.round, "matrix": similarity.float()})
    server.state["similarities"] = {str(place): entry for place, entry in enumerate(kept)}
    return [[id for id, label in zip(starts, best.labels, strict=True) if label == c] for c in range(best.kappa)]
