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
[5] Two participants, or updates that are all equal, form one cluster; kappa is at most their number.
[6] An update starts from the model before it is tuned by Eq. 21, so it holds both.
[7] Eq. 20 is maximised, as its text says. A class that nobody owned keeps its features, and one that nobody ever owned
    tunes no classifier; "h = f(u)" needs data that a server lacks, so features start from N(0, 1) and go on from there.
[8] The gradients of Eq. 16 are of all samples of a client, not augmented.
[9] The next round starts from (u_glo, v_i), 3.5, where v_i is tuned at all: without PKCF from w_glo ("at m = 0 MuPFL
    defaults to FedAvg", 4.5). A client that never took part starts from, and is judged by, the global model.
[10] The paper does not say whose accuracy it reports. Eq. 15 undoes Eq. 14 where clients have equally many samples, so
    clusters can only act on personal models: a client keeps the encoder of its cluster and its own classifier.
[11] The step size for Eq. 20 is not stated. 100 steps of CReFF's 0.1 leave its cosine at 0.02 (d = 1024) to 0.08 (256),
    since CReFF sums over the rows of gradients; 100 steps of 100 bring it to 0.98.
[12] Where clients keep some classes of label maps and call the others background, a client is tuned on the features of
    a class as what that class is to it: Eq. 21 to the letter teaches a classifier what its client's maps contradict.
All three modules off is FedAvg to the bit, and with `judged=deploy` in every figure.
"""

from contextlib import suppress
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.cohort import Cohort
from raylt.core.features import features
from raylt.core.fitting import fit_classifier
from raylt.core.fleet import Fleet
from raylt.core.gathering import Replies
from raylt.core.method import Method
from raylt.core.reductions import Reduction, each, mean
from raylt.core.server import Server
from raylt.core.training import Objective, learning_rate
from raylt.data.samples import Batch
from raylt.data.sources import Kind
from raylt.data.task import Facts
from raylt.errors import TooFewReplies
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.mupfl.acmu import form_clusters
from raylt.methods.mupfl.bavd import add_bavd, layers_of, memory, recall
from raylt.methods.mupfl.clustering import mean_update
from raylt.models.split import Params, SplitModel, part
from raylt.ops.matching import class_gradients, match_features, mean_gradients
from raylt.seeds import seed_for
from raylt.tree import Fold, Tree


class MuPFL(Method):
    """Table 6: any of `bavd=false`, `acmu=false`, `pkcf=false`; Table 5: `kappa=2` to `kappa=6`; m = 0 in Fig. 7:
    `pkcf=false`."""

    name: ClassVar[str] = "mupfl"
    paper: ClassVar[str] = "Zhang et al., Multi-level Personalized FL"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    bavd: bool = hp(True, Choice(True, False), "biased activation value dropout, 3.3, Table 6")
    bavd_layers: Literal["last", "all"] | tuple[str, ...] = hp("last", Choice("last", "all"), "stages it is behind")
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
    gradients: Literal["local", "global"] = hp("local", Choice("local", "global"), "model of Eq. 16: the client's "
                                               "after training, or the one received, before it (CReFF)")
    distance: Literal["flat", "rows"] = hp("flat", Choice("flat", "rows"), "Eq. 20; or row by row (CReFF)")
    matching_steps: int = hp(100, Choice(50, 100, 300), "of SGD on Eq. 20; from CReFF's code", ge=0)
    matching_lr: float = hp(100.0, LogUniform(0.1, 1000), "of SGD on Eq. 20; not stated", gt=0)
    next_init: Literal["classifier", "cluster", "own", "global"] = hp(
        "classifier", Choice("classifier", "cluster", "own", "global"), "what the next round starts from: u_glo and "
        "own v_i, 3.5; w~_i, Eq. 14; w_i, Algorithm 1; w_glo")
    judged: Literal["cluster", "post_local", "deploy"] = hp(
        "cluster", Choice("cluster", "post_local", "deploy"), "a client's model: u of w~_i with own v_i; w_i after "
        "local training; or what its next round starts from")

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        if self.bavd:
            add_bavd(base, task.shape, self.bavd_layers, self.bavd_map, -1 if self.bavd_psi == "intended" else 1)  # [2]
        return base

    @property
    def own_start(self) -> str | None:
        """Prefix of the entries in which a client's start differs from the global model [9]."""
        if self.next_init in ("cluster", "own"):
            return ""
        return "classifier." if self.next_init == "classifier" and self.pkcf else None

    @property
    def kept_of_own(self) -> str | None:
        """Prefix of the entries of w_i that a client keeps."""
        if self.next_init == "own" or self.judged == "post_local":
            return ""
        return "classifier." if self.judged == "cluster" or self.own_start else None

    @property
    def kept_of_cluster(self) -> str | None:
        """Prefix of the entries of w~_i that a client keeps."""
        return "" if self.next_init == "cluster" else "encoder." if self.judged == "cluster" else None

    def remembered(self, client: Client) -> Params:
        """The entries of a client's next start that are its own; none of one that never took part [9]."""
        return part(client.state.get("cluster" if self.next_init == "cluster" else "own", {}), self.own_start)

    # at a client

    def train(self, client: Client, message: Message) -> Reply:
        start: Params = message["model"] | tree.to(self.remembered(client), client.device)         # w_i^(t-1) [6]
        parts: Tree = {}
        if self.pkcf and self.gradients == "global":
            client.receive(message["model"])
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)
        client.receive(start)
        if self.pkcf and message["known"].any():
            self.tune(client, message)
        layers = layers_of(client.model)
        recall(layers, tree.to(client.state.get("bavd", {}), client.device))
        reply = super().train(client, {"model": {}})            # nothing is left to receive
        if self.bavd_reset == "never":
            client.state["bavd"] = memory(layers)
        if self.pkcf and self.gradients == "local":
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)
        if self.acmu:
            parts["start"] = part(start, self.own_start)
            if layers:
                parts["map"] = torch.cat([layer.normalised() for layer in layers])
            client.state["start"] = tree.snapshot(part(start, self.kept_of_cluster))
        else:                                                   # w~_i = w_i
            client.state["cluster"] = tree.snapshot(part(reply.tree["model"], self.kept_of_cluster))
        client.state["own"] = tree.snapshot(part(reply.tree["model"], self.kept_of_own))
        return client.reply(**reply.tree, **parts)

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
        y = torch.nonzero(known).repeat(1, self.m).flatten()
        y = y if client.samples.view is None else client.samples.view[y]                            # [12]
        fit_classifier(client.model.classifier, message["features"][known].flatten(0, 1), y, epochs=self.tau,
                       batch=local.batch, lr=learning_rate(client), momentum=local.momentum,
                       weight_decay=local.weight_decay, schedule="constant",
                       seed=seed_for(client.config.seed, "tune", client.round, client.id))

    def keep(self, client: Client, message: Message) -> Reply:
        """w~_i, Eq. 14: where the client started, and the mean update of its cluster."""
        start: Params = client.state.pop("start")
        client.state["cluster"] = {name: start[name] + update.cpu() for name, update in message["update"].items()}
        return client.reply()

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        if self.pkcf:
            generator, model = torch.Generator().manual_seed(server.seed("features")), server.model
            server.state["features"] = torch.randn(model.classes, self.m, model.dim, generator=generator)   # [7]
            server.state["known"] = torch.zeros(model.classes, dtype=torch.bool)

    def message(self, server: Server) -> Message:
        knowledge = {name: server.state[name] for name in ("features", "known")} if self.pkcf else {}
        return super().message(server) | tree.snapshot(knowledge)

    def round(self, server: Server, fleet: Fleet) -> None:
        if not (self.acmu or self.pkcf):
            return super().round(server, fleet)
        message, model, cohort = self.message(server), server.model, self.sample(server, fleet)
        wanted: dict[str, Reduction] = {"loss": mean}
        if self.pkcf:
            gradient = torch.empty(model.classes, model.dim + 1, device="meta")
            wanted["gradients"] = each.within(dict.fromkeys(range(model.classes), gradient))
        if self.acmu:
            got = self.train_in_clusters(server, fleet, cohort, message, wanted)
        else:
            got = fleet.ask(self.train, cohort, message, model=mean.like(message["model"]), **wanted)
            server.step(got["model"])
        server.log(loss=got["loss"])
        if self.pkcf:
            with server.stages.time("matching"):
                self.match(server, list(got["gradients"].values()))

    def train_in_clusters(self, server: Server, fleet: Fleet, cohort: Cohort | list[int], message: Message,
                          wanted: dict[str, Reduction]) -> Replies:
        """ACMU: training, the mean update of each cluster, and the mean of where these lead to."""
        layers, whole = layers_of(server.model), message["model"]
        if layers:
            wanted = wanted | {"map": each.like(torch.empty(sum(layer.size for layer in layers), device="meta"))}
        got = fleet.ask(self.train, cohort, message, model=each.like(whole),
                        start=each.like(part(whole, self.own_start)), **wanted)
        starts: dict[int, Params] = {id: whole | start for id, start in got["start"].items()}
        with server.stages.time("clustering"):
            clusters = form_clusters(server, starts, got, self.alpha, self.kappa, self.kappa_max)
        average = Fold()
        for members in clusters:
            update = mean_update([got["model"][id] for id in members], [starts[id] for id in members])  # Eq. 14
            for id in members:                                  # Eq. 15
                average.add({name: starts[id][name] + update[name] for name in update}, got.weights[id])
            if kept := part(update, self.kept_of_cluster):
                with suppress(TooFewReplies):                   # who misses it keeps its last; the report names it
                    fleet.ask(self.keep, members, {"update": kept})
        server.step(average.mean())
        return got

    def match(self, server: Server, gradients: list[Tree]) -> None:
        """h_glo of the classes that a participant owns, Eq. 17-20 [7] [11]."""
        classes, targets = mean_gradients(gradients)            # Eq. 17
        start, device = server.state["features"][classes], server.device
        h, cosine = match_features(start.to(device), classes.to(device), targets.to(device), server.model.classifier,
                                   steps=self.matching_steps, lr=self.matching_lr, distance=self.distance)
        server.state["features"] = server.state["features"].index_copy(0, classes, h.cpu())
        server.state["known"] = server.state["known"].index_fill(0, classes, True)
        server.log(cosine=cosine.mean().item())

    # what is judged

    def client_model(self, client: Client) -> SplitModel:
        own, shared = (client.state.get(name, {}) for name in ("own", "cluster"))
        client.receive({"cluster": shared | part(own, "classifier."), "post_local": own,
                        "deploy": self.remembered(client)}[self.judged])                            # [10]
        return client.model
