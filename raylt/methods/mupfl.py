"""MuPFL: activation dropout at clients, clusters of their updates, classifiers tuned on shared knowledge.

Multi-level Personalized Federated Learning on Heterogeneous and Long-Tailed Data (Zhang et al.); equation, section and
algorithm numbers are the paper's. u is the encoder and v the classifier, as in 3.2; Eq. 21 swaps them. Departures from
the text, each marked at its line:
[1] BAVD's mask needs the loss of a step that it is part of: the map of the step before decides, the loss comes after.
[2] psi is positive where a step lowered the loss, as the text has it; `bavd_psi=equation` is Eq. 6 to the letter, which
    keeps the lowest activations once the loss has fallen by more than 1.
[3] M is over channels and places, its mean over the batch: a map over samples, as Eq. 6 indexes it, mixes samples.
[4] Eq. 8 is a similarity; 1 - Eq. 8 is the dissimilarity of Eq. 9-11, and k-means runs on points with these distances.
    Without BAVD there are no maps and Eq. 8 is over updates alone.
[5] Two participants, or updates that are all equal, form one cluster; kappa larger than their number is that number.
[6] An update starts from the model before it is tuned by Eq. 21, so it holds both.
[7] Eq. 20 is maximised, as its text says. A class that nobody owned keeps its features, and one that nobody ever owned
    tunes no classifier; "h = f(u)" needs data that a server lacks, so features start from N(0, 1) and go on from there.
[8] The gradients of Eq. 16 are of all samples of a client, not augmented.
[9] The next round starts from (u_glo, v_i), 3.5, where v_i is tuned at all: without PKCF from w_glo ("at m = 0 MuPFL
    defaults to FedAvg", 4.5). A client that never took part starts from, and is judged by, the global model.
[10] The paper does not say whose accuracy it reports. Eq. 15 undoes Eq. 14 where clients have equally many samples, so
    clusters can only act on personal models: a client keeps the encoder of its cluster and its own classifier.
All three modules off is FedAvg to the bit, and with `judged=deploy` in every figure.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.client import Client, Message, Reply
from raylt.data.samples import Batch
from raylt.data.task import Facts
from raylt.errors import TooFewReplies
from raylt.fleet import Fleet
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.local import Objective, features, fit_classifier, learning_rate
from raylt.method import Method
from raylt.models.bavd import add_bavd, layers_of
from raylt.models.split import Params, SplitModel
from raylt.ops.clustering import Clustering, cluster, cosines, update_gram
from raylt.ops.matching import class_gradients, match_features
from raylt.seeds import seed_for
from raylt.server import Server
from raylt.tree import Fold, Tree, nbytes

KEPT_ROUNDS = 5     # whose similarities stay in the server's state, for `raylt clusters`


class MuPFL(Method):
    """Table 6: any of `bavd=false`, `acmu=false`, `pkcf=false`; Table 5: `kappa=2` to `kappa=6`; m = 0 in Fig. 7:
    `pkcf=false`."""

    name: ClassVar[str] = "mupfl"
    paper: ClassVar[str] = "Zhang et al., Multi-level Personalized FL"
    personal: ClassVar[bool] = True

    bavd: bool = hp(True, Choice(True, False), "biased activation value dropout, 3.3, Table 6")
    bavd_layers: Literal["last", "all"] | tuple[str, ...] = hp("last", Choice("last", "all"), "stages that BAVD is "
                                                               "behind: last, all or names as in [stage1, stage2]")
    bavd_map: Literal["chw", "hw", "bchw"] = hp("chw", Choice("chw", "hw", "bchw"), "what M is over, Eq. 6")
    bavd_psi: Literal["intended", "equation"] = hp("intended", Choice("intended", "equation"), "sign of psi, Eq. 6")
    bavd_reset: Literal["round", "never"] = hp("round", Choice("round", "never"), "when M starts anew, Algorithm 1")
    acmu: bool = hp(True, Choice(True, False), "clusters, 3.4, Table 6")
    alpha: float = hp(0.5, Uniform(0.0, 1.0), "share of updates, not maps, in Eq. 8; not stated", ge=0, le=1)
    kappa: int | None = hp(None, Choice(None, 2, 3, 4, 5, 6), "fixed number of clusters, Table 5; None: Eq. 13", ge=1)
    kappa_max: int = hp(6, Choice(4, 6, 8), "most clusters, Eq. 13, Table 5", ge=2)
    pkcf: bool = hp(True, Choice(True, False), "classifiers tuned on federated features, 3.5, Table 6")
    m: int = hp(100, Choice(10, 50, 100, 150, 200), "federated features per class, Eq. 19, 4.1", ge=1)
    tau: int = hp(50, Choice(10, 50, 100), "epochs of tuning, Eq. 21, 4.1", ge=0)
    gradients: Literal["local", "global"] = hp("local", Choice("local", "global"), "model of Eq. 16: the client's after "
                                               "training, or the one received, before it (CReFF)")
    distance: Literal["flat", "rows"] = hp("flat", Choice("flat", "rows"), "cosine of Eq. 20 over a whole gradient, or "
                                           "row by row (CReFF)")
    matching_steps: int = hp(100, Choice(50, 100, 300), "of SGD on Eq. 20; from CReFF's code", ge=0)
    matching_lr: float = hp(0.1, LogUniform(0.01, 1000), "of SGD on Eq. 20; from CReFF's code", gt=0)
    next_init: Literal["classifier", "cluster", "own", "global"] = hp(
        "classifier", Choice("classifier", "cluster", "own", "global"), "what the next round starts from: u_glo and own "
        "v_i, 3.5; w~_i, Eq. 14; w_i, Algorithm 1; w_glo")
    judged: Literal["cluster", "post_local", "deploy"] = hp(
        "cluster", Choice("cluster", "post_local", "deploy"), "a client's model: u of w~_i and own v_i; w_i after local "
        "training; or what its next round starts from")

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        if self.bavd:
            add_bavd(base, task.shape, self.bavd_layers, self.bavd_map, -1 if self.bavd_psi == "intended" else 1)  # [2]
        return base

    # at a client

    def train(self, client: Client, message: Message) -> Reply:
        start: Params = message["model"] | tree.to(self.remembered(client), client.device)         # w_i^(t-1) [6]
        found: Tree = {}
        if self.pkcf and self.gradients == "global":
            client.receive(message["model"])
            found["gradients"] = gradients_of(client)
        client.receive(start)
        if self.pkcf and message["known"].any():
            self.tune(client, message)
        layers, before = layers_of(client.model), client.state.get("bavd", {})
        for i, layer in enumerate(layers):
            layer.reset(**tree.to(before.get(str(i), {}), client.device))
        reply = super().train(client, {"model": {}})            # nothing more to receive
        if self.bavd_reset == "never":
            client.state["bavd"] = {str(i): {"map": layer.map, "loss": layer.loss} for i, layer in enumerate(layers)
                                    if layer.map is not None}
        if self.pkcf and self.gradients == "local":
            found["gradients"] = gradients_of(client)
        if self.acmu:
            found["start"] = {name: start[name] for name in self.own_start(start)}
            if layers:
                found["map"] = torch.cat([layer.normalised() for layer in layers])
            client.state["start"] = tree.snapshot({name: start[name] for name in self.of_cluster(start)})
        mine: Params = tree.snapshot(reply.tree["model"])       # w_i
        client.state["own"] = {name: mine[name] for name in self.of_own(mine)}
        if not self.acmu:                                       # w~_i = w_i
            client.state["cluster"] = {name: mine[name] for name in self.of_cluster(mine)}
        return client.reply(**reply.tree, **found)

    def objective(self, client: Client, message: Message) -> Objective:
        """Eq. 2; each loss moves the maps of BAVD, Eq. 6 [1] [3]."""
        layers = layers_of(client.model)

        def loss(batch: Batch) -> Tensor:
            value = F.cross_entropy(client.model(batch.x), batch.y)
            for layer in layers:
                layer.learn(value)
            return value

        return loss

    def tune(self, client: Client, message: Message) -> None:
        """Eq. 21: tau epochs of the classifier on the features of the classes that somebody owned so far [7]."""
        local, known = client.config.local, message["known"]
        h = message["features"][known]                          # [K, m, d]
        y = torch.nonzero(known).repeat(1, self.m).flatten()
        fit_classifier(client.model.classifier, h.flatten(0, 1), y, epochs=self.tau, batch=local.batch,
                       lr=learning_rate(client), momentum=local.momentum, weight_decay=local.weight_decay,
                       schedule="constant", seed=seed_for(client.config.seed, "tune", client.round, client.id))

    def keep(self, client: Client, message: Message) -> Reply:
        """w~_i, Eq. 14: where the client started, and the mean update of its cluster."""
        start, update = client.state.pop("start"), tree.snapshot(message["update"])
        client.state["cluster"] = {name: start[name] + update[name] for name in update}
        return client.reply()

    def remembered(self, client: Client) -> Params:
        """The entries by which a client's start differs from the global model [9]."""
        own, shared = client.state.get("own", {}), client.state.get("cluster", {})
        return {name: value for name, value in (shared if self.next_init == "cluster" else own).items()
                if name in self.own_start(own | shared)}

    # which entries of the model are private in part: (all, classifier) by the settings

    def own_start(self, entries: Params) -> Params:
        """Those that a client's start has of its own."""
        if self.next_init in ("cluster", "own"):
            return entries
        return classifier(entries) if self.next_init == "classifier" and self.pkcf else {}

    def of_own(self, entries: Params) -> Params:
        """Those of w_i that the client keeps."""
        if self.next_init == "own" or self.judged == "post_local":
            return entries
        return classifier(entries) if self.judged == "cluster" or self.next_init == "classifier" else {}

    def of_cluster(self, entries: Params) -> Params:
        """Those of w~_i that the client keeps."""
        if self.next_init == "cluster":
            return entries
        return {name: entries[name] for name in entries.keys() - classifier(entries).keys()} \
            if self.judged == "cluster" else {}

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        if self.pkcf:
            generator = torch.Generator().manual_seed(server.seed("features"))
            classes = server.model.classes
            server.state["features"] = torch.randn(classes, self.m, server.model.dim, generator=generator)  # [7]
            server.state["known"] = torch.zeros(classes, dtype=torch.bool)

    def message(self, server: Server) -> Message:
        knowledge = {name: server.state[name] for name in ("features", "known")} if self.pkcf else {}
        return super().message(server) | tree.snapshot(knowledge)

    def round(self, server: Server, fleet: Fleet) -> None:
        if not (self.acmu or self.pkcf):
            super().round(server, fleet)
            return
        message = self.message(server)
        replies = fleet.call(self.train, self.sample(server, fleet), message)
        mean, total = Fold(), sum(fleet.sizes[id] for id in replies)
        if self.acmu:
            starts: dict[int, Params] = {id: message["model"] | reply["start"] for id, reply in replies.items()}
            found = self.cluster(server, list(starts.values()), list(replies.values()))
            server.log(participants=list(replies), clusters=found.labels)
            for label in range(found.kappa):
                members = [id for id, its in zip(replies, found.labels, strict=True) if its == label]
                update = mean_update([(replies[id]["model"], starts[id]) for id in members])        # Eq. 14
                for id in members:
                    mean.add({name: starts[id][name] + update[name] for name in update}, fleet.sizes[id])   # Eq. 15
                if kept := {name: update[name] for name in self.of_cluster(update)}:
                    with suppress(TooFewReplies):               # who misses it, as the report says, keeps the one before
                        fleet.call(self.keep, members, {"update": kept})
        else:
            for id, reply in replies.items():
                mean.add(reply["model"], fleet.sizes[id])
        server.receive(mean.mean())
        if self.pkcf:
            self.match(server, [reply["gradients"] for reply in replies.values()])
        server.log(loss=sum(fleet.sizes[id] * reply["loss"] for id, reply in replies.items()) / total)

    def cluster(self, server: Server, starts: list[Params], replies: list[Tree]) -> Clustering:
        """Eq. 7-13 [4]."""
        names = [name for name, p in server.model.named_parameters() if p.requires_grad]
        similarity = cosines(update_gram([reply["model"] for reply in replies], starts, names))
        if self.bavd:
            maps = torch.stack([reply["map"] for reply in replies]).double()
            similarity = self.alpha * similarity + (1 - self.alpha) * cosines(maps @ maps.T)       # Eq. 8
        n = len(replies)
        kappas = range(2, min(self.kappa_max, n - 1) + 1) if self.kappa is None else [min(self.kappa, n)]
        found = cluster(similarity, kappas if n > 2 else [], server.seed("acmu"))                   # [5]
        server.log(kappa=found.kappa, silhouettes={str(kappa): s for kappa, s in found.silhouettes.items()})
        kept = dict(list(server.state.get("similarity", {}).items())[1 - KEPT_ROUNDS:])
        server.state["similarity"] = kept | {str(server.round): similarity.float()}
        return found

    def match(self, server: Server, gradients: list[Tree]) -> None:
        """h_glo of the classes that a participant owns, Eq. 17-20 [7]."""
        owned = sorted({int(c) for of_client in gradients for c in of_client})
        targets = torch.stack([torch.stack([g[str(c)] for g in gradients if str(c) in g]).mean(0) for c in owned])
        classes, head, device = torch.tensor(owned), server.model.classifier, server.device
        assert isinstance(head, nn.Linear)
        h, cosine = match_features(
            server.state["features"][classes].to(device), classes.to(device), targets.to(device), head.weight.detach(),
            head.bias.detach(), steps=self.matching_steps, lr=self.matching_lr, distance=self.distance)
        server.state["features"] = server.state["features"].index_copy(0, classes, h.cpu())
        server.state["known"] = server.state["known"].index_fill(0, classes, True)
        server.log(cosine=cosine.mean().item())

    # what is judged and counted

    def personal_model(self, client: Client) -> nn.Module:
        own, shared = client.state.get("own", {}), client.state.get("cluster", {})
        client.receive({"cluster": shared | classifier(own), "post_local": own, "deploy": self.remembered(client)}
                       [self.judged])                           # [10]
        return client.model

    def traffic(self, model: SplitModel, counts: Sequence[int]) -> dict[str, tuple[int, int]]:
        shared, classes = self.shared(model), model.classes
        calls = super().traffic(model, counts)
        down, up = calls["train"]
        if self.pkcf:
            down += classes * (4 * self.m * model.dim + 1)      # 1: whether the class is known
            up += sum(n > 0 for n in counts) * 4 * classes * (model.dim + 1)
        if self.acmu:
            up += nbytes(self.own_start(shared)) + sum(4 * layer.size for layer in layers_of(model))
            if kept := self.of_cluster(shared):
                calls["keep"] = (nbytes(kept), 0)
        return calls | {"train": (down, up)}


def classifier(entries: Params) -> Params:
    """The entries of the classifier v; the others are the encoder u."""
    return {name: value for name, value in entries.items() if name.startswith("classifier.")}


def gradients_of(client: Client) -> Tree:
    """z_i^k of each class that the client owns, Eq. 16, by the class's number [8]."""
    head = client.model.classifier
    assert isinstance(head, nn.Linear)
    found = class_gradients(*features(client), head.weight.detach(), head.bias.detach())
    return {str(c): gradient for c, gradient in found.items()}


def mean_update(models: list[tuple[Params, Params]]) -> Params:
    """The mean of end minus start over the members of a cluster, each counting the same."""
    mean = Fold()
    for end, start in models:
        mean.add({name: end[name] - start[name] for name in end}, 1.0)
    return mean.mean()
