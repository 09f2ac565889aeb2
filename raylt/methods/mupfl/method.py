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
[6] The text does not say whether an update holds Eq. 21's tuning too: it starts from the model that a client received,
    before it is tuned, or, with `updates=tuned`, after it.
[7] Eq. 20 is maximised, as its text says. A class that nobody owned keeps its features, and one that nobody ever owned
    tunes no classifier; "h = f(u)" needs data that a server lacks, so features start from N(0, 1) and go on from there.
[8] The gradients of Eq. 16 are of all samples of a client, not augmented.
[9] The next round starts from (u_glo, v_i), 3.5, where v_i is tuned at all: without PKCF from w_glo ("at m = 0 MuPFL
    defaults to FedAvg", 4.5). A client that never took part starts from, and is judged by, the global model.
[10] The paper does not say whose accuracy it reports. Eq. 15 undoes Eq. 14 where clients have equally many samples, so
    clusters can only act on personal models: a client is judged by the encoder of its cluster with its own classifier,
    and after the last step by each of MODELS as well. Of one that is sampled rarely all but w_glo are rounds old;
    `last_update` trains everybody once more, which leaves the global model as it is.
[11] The step size for Eq. 20 is not stated. 100 steps of CReFF's 0.1 leave its cosine at 0.02 (d = 1024) to 0.08 (256),
    since CReFF sums over the rows of gradients; 100 steps of 100 bring it to 0.98.
[12] Where clients keep some classes of label maps and call the others background, a client is tuned on the features of
    a class as what that class is to it: Eq. 21 to the letter teaches a classifier what its client's maps contradict.
[13] 3.3 counts the iterations "for each batch within a given local epoch", so M starts anew in each; 3.6 compares it
    "per slice" H x W, so with its mean over each channel. Whether what is dropped stays dropped when a client is judged
    is not stated: not as a rule, since dropout is not either.
[14] Table 5 has six clusters of four participants: with `clustered=all` the last updates of all clients form them.
All three modules off is FedAvg to the bit, and with `judged=global` in every figure.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.cohort import Cohort
from raylt.core.features import features
from raylt.core.fleet import Fleet
from raylt.core.gathering import Replies
from raylt.core.reductions import Reduction, each, mean
from raylt.core.server import Server
from raylt.core.training import Objective, sgd
from raylt.data.sources import Kind
from raylt.data.task import Facts
from raylt.errors import ClientLost, TooFewReplies
from raylt.methods.mupfl.acmu import form_clusters, last_of_all
from raylt.methods.mupfl.bavd import WithMaps, add_bavd, layers_of, memory, recall
from raylt.methods.mupfl.clustering import mean_update
from raylt.methods.mupfl.fields import MODELS, Fields, Model
from raylt.methods.mupfl.pkcf import first_features, match, tune
from raylt.models.split import Params, SplitModel, part
from raylt.ops.matching import class_gradients
from raylt.tree import Fold, Tree


class MuPFL(Fields):
    """Table 6: any of `bavd=false`, `acmu=false`, `pkcf=false`; Table 5: `kappa=2` to `kappa=6`; m = 0 in Fig. 7:
    `pkcf=false`."""

    name: ClassVar[str] = "mupfl"
    paper: ClassVar[str] = "Zhang et al., Multi-level Personalized FL"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("last_update",), "judging": ("judged",)}

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        if self.bavd:
            add_bavd(base, task.shape, self.bavd_layers, self.bavd_map, -1 if self.bavd_psi == "intended" else 1,  # [2]
                     self.bavd_threshold, self.bavd_judged)                                         # [13]
        return base

    @property
    def sees_each(self) -> tuple[str, ...]:
        parts = {"gradients": self.pkcf, "update": self.acmu, "start": self.acmu, "map": self.acmu and self.bavd}
        return tuple(name for name, seen in parts.items() if seen)

    def shared(self, model: SplitModel) -> Params:
        """All but the masks of BAVD."""
        return {name: value for name, value in model.entries().items() if not name.endswith(".mask")}

    @property
    def own_start(self) -> str | None:
        """Prefix of the entries in which a client's start differs from the global model [9]."""
        if self.next_init in ("cluster", "own"):
            return ""
        return "classifier." if self.next_init == "classifier" and self.pkcf else None

    @property
    def own_update_start(self) -> str | None:
        """Prefix of the entries in which what an update starts from differs from the global model [6]."""
        return "classifier." if self.own_start is None and self.pkcf and self.updates == "tuned" else self.own_start

    def remembered(self, client: Client) -> Params:
        """The entries of a client's next start that are its own; none of one that never took part [9]."""
        own: Params = client.state.get("own", {})
        return part(client.state.get("cluster", own) if self.next_init == "cluster" else own, self.own_start)

    # at a client

    def train(self, client: Client, message: Message) -> Reply:
        start: Params = message["model"] | tree.to(self.remembered(client), client.device)         # w_i^(t-1) [6]
        parts: Tree = {}
        if self.pkcf and self.gradients == "global":
            client.receive(message["model"])
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)
        client.receive(start)
        if self.pkcf and message["known"].any():
            tune(client, message["features"], message["known"], self.tau)
            if self.updates == "tuned":
                start = start | tree.map_tensors(torch.clone, client.model.entries("classifier."))
        layers = layers_of(client.model)
        recall(layers, tree.to(client.state.get("bavd", {}), client.device))
        parts["loss"] = sgd(client, self.objective(client, message))
        end = self.shared(client.model)
        for layer in layers if self.bavd_judged else []:
            layer.keep()
        if self.bavd_reset == "never":
            client.state["bavd"] = memory(layers)
        if self.pkcf and self.gradients == "local":
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)
        client.state["own"] = tree.snapshot(end)                # w_i
        if self.acmu:
            parts["update"] = {name: end[name] - start[name] for name in end}                       # Eq. 7
            parts["start"] = tree.snapshot(part(start, self.own_update_start))
            client.state["start"] = tree.snapshot(start)
            if layers:
                parts["map"] = torch.cat([layer.normalised() for layer in layers])
        else:
            parts["model"] = end                                # w~_i = w_i
        return client.reply(**parts)

    def objective(self, client: Client, message: Message) -> Objective:
        """Eq. 2; each loss moves the maps of BAVD, Eq. 6 [1] [3]."""
        return WithMaps(client, layers_of(client.model), self.bavd_reset == "epoch")                # [13]

    def keep(self, client: Client, message: Message) -> Reply:
        """w~_i, Eq. 14: where the client's last update started, and the mean update of its cluster."""
        start: Params = client.state["start"] if self.clustered == "all" else client.state.pop("start")
        updates = tree.to(message["update"], torch.device("cpu"))
        client.state["cluster"] = {name: start[name] + update for name, update in updates.items()}
        return client.reply()

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        super().start(server, fleet)
        if self.pkcf:
            first_features(server, self.m)

    def message(self, server: Server) -> Message:
        knowledge = {name: server.state[name] for name in ("features", "known")} if self.pkcf else {}
        return super().message(server) | tree.snapshot(knowledge)

    def round(self, server: Server, fleet: Fleet) -> None:
        model, got = self.train_all(server, fleet, self.sample(server, fleet))
        server.step(model)
        if self.pkcf:
            with server.stages.time("matching"):
                match(server, list(got["gradients"].values()), self.matching_steps, self.matching_lr, self.distance)

    @property
    def finishes(self) -> bool:
        return self.last_update

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Everybody's last local update, with its clusters; the global model and h_glo stay [10]."""
        self.train_all(server, fleet, fleet.everyone)

    def train_all(self, server: Server, fleet: Fleet, cohort: Cohort | list[int]) -> tuple[Params, Replies]:
        """Local training of a cohort: the mean of where it leads to, by clusters with ACMU, and the replies."""
        message, wanted = self.message(server), dict[str, Reduction](loss=mean.like(0.0))
        whole, layers = message["model"], layers_of(server.model)
        if self.pkcf:
            gradient = torch.empty(server.model.classes, server.model.dim + 1, device="meta")
            wanted["gradients"] = each.within(dict.fromkeys(range(server.model.classes), gradient))
        if self.acmu:
            # believed as far as a model is, since both become parts of one
            wanted |= {"update": each.like(whole).up_to(1e6),
                       "start": each.like(part(whole, self.own_update_start)).up_to(1e6)}
            if layers:
                wanted["map"] = each.like(torch.empty(sum(layer.size for layer in layers), device="meta"))
        else:
            wanted["model"] = mean.like(whole)
        got = fleet.ask(self.train, cohort, message, **wanted)
        server.log(loss=got["loss"])
        return (self.by_clusters(server, fleet, whole, got) if self.acmu else got["model"]), got

    def by_clusters(self, server: Server, fleet: Fleet, whole: Params, got: Replies) -> Params:
        """ACMU: w~_i for the members of each cluster, and the mean of those of this round, Eq. 15."""
        updates, maps = got["update"], got.get("map", {})
        if self.clustered == "all":
            updates, maps = last_of_all(server, updates, maps)                                      # [14]
        with server.stages.time("clustering"):
            clusters = form_clusters(server, updates, maps, self.alpha, self.kappa, self.kappa_max)
        average = Fold()
        for members in clusters:
            update = mean_update(updates[id] for id in members)                                     # Eq. 14
            for id in (id for id in members if id in got.weights):
                start: Params = whole | got["start"][id]
                average.add({name: start[name] + update[name] for name in update}, got.weights[id])
            try:
                # whoever it reaches: nobody takes part in a round by being told
                fleet.ask(self.keep, Cohort(members, everyone=True), {"update": update})
            except TooFewReplies as error:
                if not isinstance(error.__cause__, ClientLost):
                    raise
                # who is lost keeps what it has; the report names it
        return average.mean()

    def settle(self, client: Client, message: Message) -> None:
        self.train(client, message)             # from the global model; it is of no cluster

    # what is judged

    @property
    def other_models(self) -> tuple[Model, ...]:
        return MODELS

    def client_model(self, client: Client) -> SplitModel:
        return self.other_model(client, self.judged)

    def other_model(self, client: Client, name: str) -> SplitModel:
        """One of MODELS; w_glo of a client that never took part [10]."""
        own: Params = client.state.get("own", {})
        cluster: Params = client.state.get("cluster", own)      # w~_i = w_i without ACMU
        client.receive({"cluster": cluster | part(own, "classifier."), "post_local": own, "whole": cluster,
                        "deploy": part(own, "classifier."), "global": {}}[name])
        for layer in layers_of(client.model) if self.bavd_judged and name == "global" else []:
            layer.mask.fill_(True)
        return client.model
