"""MuPFL: activation dropout at clients, clusters of their updates, classifiers tuned on shared knowledge (Zhang et al.,
Multi-level Personalized Federated Learning on Heterogeneous and Long-Tailed Data).

Equation, section and algorithm numbers are the paper's. u is the encoder and v the classifier, as in 3.2; Eq. 21 swaps
them. Departures from the text, each marked at its line:
[1] BAVD's mask would need the loss of the step in which it is used: the map of the previous step decides, and the loss
    follows.
[2] psi is positive if a step lowered the loss, as in the text. `bavd_psi=equation` is Eq. 6 literally, which keeps the
    lowest activations once the loss has fallen by more than 1.
[3] M is over channels and positions, and its mean is over the batch: a map over samples, as indexed in Eq. 6, mixes
    samples.
[4] Eq. 8 is a similarity. 1 - Eq. 8 is the dissimilarity of Eq. 9-11, and k-means runs on points with these distances.
    Without BAVD there are no maps and Eq. 8 is over updates alone.
[5] Two participants, or updates that are all equal, form one cluster; kappa is at most their number.
[6] The text does not say whether an update includes Eq. 21's tuning. Here it starts from the model that a client
    received, before tuning, or, with `updates=tuned`, after it.
[7] Eq. 20 is maximised, as its text says. A class that no participant owns keeps its features, and a class that no
    participant so far owns is not used to tune classifiers. "h = f(u)" needs data that a server does not have, so
    features start from N(0, 1) and are continued from round to round.
[8] The gradients of Eq. 16 are of all samples of a client, without augmentation.
[9] The next round starts from (u_glo, v_i), 3.5, if v_i is tuned; without PKCF, it starts from w_glo ("at m = 0 MuPFL
    defaults to FedAvg", 4.5). A client that never took part starts from, and is evaluated with, the global model.
[10] The paper does not say whose accuracy it reports. If clients have equal numbers of samples, Eq. 15 undoes Eq. 14,
    so clusters can only act on personal models. A client is evaluated with the encoder of its cluster and its own
    classifier, and after the last step with each of MODELS as well. For a client that is rarely sampled, all but w_glo
    are rounds old. `last_update` trains all clients once more, which does not change the global model.
[11] The step size for Eq. 20 is not stated. 100 steps of CReFF's 0.1 leave its cosine at 0.02 (d = 1024) to 0.08 (256),
    because CReFF sums over the rows of gradients; 100 steps of 100 bring it to 0.98.
[12] If clients keep some classes of label maps and call the others background, a client's classifier is tuned on the
    features of a class with the label that the class has at this client. Eq. 21 taken literally teaches a classifier
    labels that contradict its client's maps.
[13] 3.3 counts the iterations "for each batch within a given local epoch", so M is reset in each epoch. The first step
    of an epoch then drops nothing, and BAVD has no effect at a client with one batch; `bavd_reset=round` masks it from
    its second epoch on. 3.6 compares M "per slice" H x W, so with its mean over each channel. The paper does not say
    whether dropped activations stay dropped when a client is evaluated; by default they do not, as with dropout. BAVD
    "substitutes the standard dropout layer", 3.3, whose rate the paper does not state: if BAVD is off, there is no
    dropout unless `dropout` sets a rate.
[14] Table 5 has six clusters of four participants: with `clustered=all` the last updates of all clients form them.
With all three modules off this equals FedAvg bit by bit, and with `judged=global` in every metric.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.aggregation import Replies
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, each, mean
from raylt.core.fleet.schema import VARIANCE
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.core.method import Method, check_last_rate
from raylt.core.server import Server
from raylt.core.training.features import features
from raylt.core.training.sgd import Objective, sgd
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task, TaskSpec
from raylt.errors import ClientLost, TooFewReplies
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.methods.mupfl.bavd import WithMaps, add_bavd, add_dropout, layers_of, memory, recall
from raylt.methods.mupfl.clustering import check_last_updates, form_clusters, last_of_all, mean_update
from raylt.methods.mupfl.pkcf import first_features, match, pkcf_work, tune
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, StateDict, part
from raylt.ops.matching import class_gradients, gradient_like, gradients_fault
from raylt.tree import RunningSum, Tree

# A client's models, in the order of the names:
# - cluster: the encoder u of w~_i with the client's own classifier v_i;
# - post_local: w_i after local training;
# - whole: w~_i of Eq. 14;
# - deploy: u_glo with its own v_i, 3.5;
# - swapped: its own u_i with v_glo, 3.5 with Eq. 21 taken literally;
# - global: w_glo.
Model = Literal["cluster", "post_local", "whole", "deploy", "swapped", "global"]
MODELS: tuple[Model, ...] = ("cluster", "post_local", "whole", "deploy", "swapped", "global")


Own = Literal["nothing", "classifier", "encoder", "model"]  # The part of the model that a client keeps as its own.


class MuPFL(Method):
    """FedAvg with activation dropout (BAVD), client clusters (ACMU) and fine-tuned classifiers (PKCF).

    Table 6: any of `bavd=false`, `acmu=false`, `pkcf=false`. Table 5: `kappa=2` to `kappa=6`. m = 0 in Fig. 7:
    `pkcf=false`.
    """

    name: ClassVar[str] = "mupfl"
    paper: ClassVar[str] = "Zhang et al., Multi-level Personalized FL"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2405.06413"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("last_update",), "judging": ("judged",)}
    other_models: ClassVar[tuple[str, ...]] = MODELS

    bavd: bool = hp(True, Choice(True, False), "biased activation value dropout, 3.3, Table 6")
    bavd_layers: Literal["last", "all"] | tuple[str, ...] = hp(
        "last", Choice("last", "all"), "stages that BAVD follows"
    )
    bavd_map: Literal["chw", "hw", "bchw"] = hp("chw", Choice("chw", "hw", "bchw"), "dimensions of M, Eq. 6")
    bavd_psi: Literal["intended", "equation"] = hp("intended", Choice("intended", "equation"), "sign of psi, Eq. 6")
    bavd_threshold: Literal["channel", "whole"] = hp(
        "channel", Choice("channel", "whole"), "mean of M with which its values are compared, 3.6"
    )
    bavd_reset: Literal["epoch", "round", "never"] = hp(
        "epoch", Choice("epoch", "round", "never"), "times at which M is reset, 3.3"
    )
    bavd_judged: bool = hp(False, Choice(False, True), "dropping the same activations in evaluation; not stated")
    dropout: float = hp(
        0.0, Uniform(0.0, 0.5), "rate of plain dropout after bavd_layers if BAVD is off, 3.3; not stated", ge=0, lt=1
    )
    acmu: bool = hp(True, Choice(True, False), "client clusters, 3.4, Table 6")
    alpha: float = hp(0.5, Uniform(0.0, 1.0), "share of updates, not maps, in Eq. 8; not stated", ge=0, le=1)
    kappa: int | None = hp(None, Choice(None, 2, 3, 4, 5, 6), "fixed number of clusters, Table 5; None: Eq. 13", ge=1)
    kappa_max: int = hp(6, Choice(4, 6, 8), "maximum number of clusters, Eq. 13, Table 5", ge=2)
    clustered: Literal["participants", "all"] = hp(
        "participants", Choice("participants", "all"), "clients whose last updates form clusters, Table 5"
    )
    updates: Literal["received", "tuned"] = hp(
        "received",
        Choice("received", "tuned"),
        "start of an update: the received model, or that model with the tuned classifier, Eq. 7",
    )
    pkcf: bool = hp(True, Choice(True, False), "classifiers tuned on federated features, 3.5, Table 6")
    m: int = hp(100, Choice(10, 50, 100, 150, 200), "federated features per class, Eq. 19, 4.1", ge=1)
    tau: int = hp(50, Choice(10, 50, 100), "tuning epochs, Eq. 21, 4.1", ge=0)
    gradients: Literal["local", "global"] = hp(
        "local",
        Choice("local", "global"),
        "model of Eq. 16: the client's model after training, or the received model (CReFF)",
    )
    distance: Literal["flat", "rows"] = hp(
        "flat", Choice("flat", "rows"), "gradient distance: Eq. 20, or row by row (CReFF)"
    )
    matching_steps: int = hp(100, Choice(50, 100, 300), "SGD steps on Eq. 20; from CReFF's code", ge=0)
    matching_lr: float = hp(100.0, LogUniform(0.1, 1000), "learning rate of SGD on Eq. 20; not stated", gt=0)
    next_init: Literal["classifier", "encoder", "cluster", "own", "global"] = hp(
        "classifier",
        Choice("classifier", "encoder", "cluster", "own", "global"),
        "start of the next round: u_glo and own v_i, 3.5; own u_i and v_glo, 3.5 if Eq. 21 is taken literally; "
        "w~_i, Eq. 14; w_i, Algorithm 1; w_glo",
    )
    last_update: bool = hp(False, Choice(False, True), "one more training of all clients before the final evaluation")
    judged: Model = hp(
        "cluster",
        Choice(*MODELS),
        "client model to evaluate: u of w~_i with own v_i; w_i after local training; Eq. 14's w~_i; u_glo with "
        "own v_i, 3.5; own u_i with v_glo; w_glo",
    )

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        if self.bavd:
            add_bavd(
                base,
                spec.shape,
                self.bavd_layers,
                self.bavd_map,
                -1 if self.bavd_psi == "intended" else 1,  # [2]
                self.bavd_threshold,
                self.bavd_judged,
            )  # [13]
        elif self.dropout > 0:
            add_dropout(base, self.bavd_layers, self.dropout)
        return base

    @property
    def sees_each(self) -> tuple[str, ...]:
        parts = {"gradients": self.pkcf, "update": self.acmu, "start": self.acmu, "map": self.acmu and self.bavd}
        return tuple(name for name, seen in parts.items() if seen)

    def shared(self, model: SplitModel) -> StateDict:
        """Return all entries of the model except BAVD's masks."""
        return {name: value for name, value in model.entries().items() if not name.endswith(".mask")}

    @property
    def own_start(self) -> Own:
        """Return the model part that a client initialises with its own values instead of the global values [9]."""
        if self.next_init in ("cluster", "own"):
            return "model"
        if self.next_init == "encoder":
            return "encoder"
        return "classifier" if self.next_init == "classifier" and self.pkcf else "nothing"

    @property
    def own_update_start(self) -> Own:
        """Return the model part whose updates start from the client's own values [6]."""
        if not (self.pkcf and self.updates == "tuned"):
            return self.own_start
        return "classifier" if self.own_start in ("nothing", "classifier") else "model"

    def remembered(self, client: Client) -> StateDict:
        """Return the model entries that a client keeps for its next training; empty before its first training [9]."""
        own: StateDict = client.state.get("own", {})
        entries: StateDict = client.state.get("cluster", own) if self.next_init == "cluster" else own
        return own_entries(entries, self.own_start)

    # at a client

    def train(self, client: Client, message: Message) -> Reply:
        start: StateDict = message["model"] | tree.to(self.remembered(client), client.device)  # w_i^(t-1) [6]
        parts: Tree = {}
        if self.pkcf and self.gradients == "global":
            client.receive(message["model"])
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)  # [8]
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
            parts["gradients"] = class_gradients(*features(client), client.model.classifier)  # [8]
        client.state["own"] = tree.snapshot(end)  # w_i
        if self.acmu:
            parts["update"] = {name: end[name] - start[name] for name in end}  # Eq. 7
            parts["start"] = tree.snapshot(own_entries(start, self.own_update_start))
            client.state["start"] = tree.snapshot(start)
            if layers:
                parts["map"] = torch.cat([layer.normalised() for layer in layers])
        else:
            parts["model"] = end  # w~_i = w_i
        return client.reply(**parts)

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the loss of Eq. 2. Each call also updates the maps of BAVD, Eq. 6 [1] [3]."""
        return WithMaps(client, layers_of(client.model), reset_each_epoch=self.bavd_reset == "epoch")  # [13]

    def keep(self, client: Client, message: Message) -> Reply:
        """Store the client's cluster model w~_i, Eq. 14.

        It is the start of the client's last update plus the cluster's mean update.
        """
        start: StateDict = client.state["start"] if self.clustered == "all" else client.state.pop("start")
        updates = tree.to(message["update"], torch.device("cpu"))
        client.state["cluster"] = {name: start[name] + update for name, update in updates.items()}
        return client.reply()

    # at the server

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_last_rate(self, config, "method.last_update=false")
        if self.pkcf:
            check_linear_classifier(self.name, config, model)
            of_class = {"gradient": gradient_like(model.classes, model.dim)}
            models = (2 if self.acmu else 1) * tree.nbytes(self.shared(model))  # the update and its start
            check_class_uploads(task, model, of_class, "gradients", models)
        if self.acmu and self.clustered == "all":
            maps = 4 * sum(layer.size for layer in layers_of(model))
            check_last_updates(sum(size > 0 for size in task.sizes), tree.nbytes(self.shared(model)) + maps)

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
            with server.timings.time("matching") as progress:
                gradients = list(got["gradients"].values())
                match(server, gradients, self.matching_steps, self.matching_lr, self.distance, progress)

    @property
    def finishes(self) -> bool:
        return self.last_update

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Run a last local update and clustering of all clients [10].

        The global model and the server's features h_glo do not change.
        """
        self.train_all(server, fleet, fleet.everyone)

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        return pkcf_work(spec, model, self.m, self.matching_steps, self.distance) if self.pkcf else ""

    def train_all(self, server: Server, fleet: Fleet, cohort: Cohort | list[int]) -> tuple[StateDict, Replies]:
        """Train a cohort; return the mean model, and the replies of the clients.

        With ACMU the mean is taken by clusters.
        """
        message = self.message(server)
        wanted: dict[str, Reduction] = {"loss": mean.like(0.0)}
        whole = message["model"]
        layers = layers_of(server.model)
        if self.pkcf:
            gradient = gradient_like(server.model.classes, server.model.dim)
            height, width, _ = server.spec.shape
            labels = height * width if server.spec.kind == "segmentation" else 1
            of_classes = dict.fromkeys(range(server.model.classes), gradient)
            wanted["gradients"] = each.within(of_classes).over_samples(partial(gradients_fault, labels=labels))
        if self.acmu:
            # the same limit as for a model, because both become parts of a model
            ends = partial(end_fault, whole=whole)
            wanted |= {
                "update": each.like(tree.without_values(whole)).up_to(1e6).over_samples(ends),
                "start": each.like(own_entries(whole, self.own_update_start)).up_to(1e6),
            }
            if layers:
                wanted["map"] = each.like(torch.empty(sum(layer.size for layer in layers), device="meta"))
        else:
            wanted["model"] = mean.like(whole)
        got = fleet.ask(self.train, cohort, message, **wanted)
        server.log(loss=got["loss"])
        return (self.by_clusters(server, fleet, whole, got) if self.acmu else got["model"]), got

    def by_clusters(self, server: Server, fleet: Fleet, whole: StateDict, got: Replies) -> StateDict:
        """Form clusters (ACMU), send each cluster's mean update to its members, and return the mean model, Eq. 15.

        The mean runs over the clients of this round.

        Args:
            server: The server.
            fleet: The clients.
            whole: The global model that the clients received.
            got: Replies of the clients that trained.
        """
        updates = got["update"]
        maps = got.get("map", {})
        if self.clustered == "all":
            updates, maps = last_of_all(server, updates, maps)  # [14]
        with server.timings.time("clustering"):
            clusters = form_clusters(server, updates, maps, self.alpha, self.kappa, self.kappa_max)
        average = RunningSum()
        for members in clusters:
            update = mean_update(updates[id] for id in members)  # Eq. 14
            for id in (id for id in members if id in got.weights):
                start: StateDict = whole | got["start"][id]
                average.add({name: start[name] + update[name] for name in update}, got.weights[id])
            try:
                # All reachable clients receive it; this does not count as taking part in a round.
                fleet.ask(self.keep, Cohort(members, everyone=True), {"update": update})
            except TooFewReplies as error:
                if not isinstance(error.__cause__, ClientLost):
                    raise
                # a lost client keeps its current model, and the report names it
        return average.mean()

    def settle(self, client: Client, message: Message) -> None:
        self.train(client, message)  # from the global model, because the client is in no cluster

    # evaluated models

    def client_model(self, client: Client) -> SplitModel:
        return self.other_model(client, self.judged)

    def other_model(self, client: Client, name: str) -> SplitModel:
        """Return the client's model that `name` selects from MODELS.

        For a client that never took part, it is the global model [10].
        """
        own: StateDict = client.state.get("own", {})
        cluster: StateDict = client.state.get("cluster", own)  # w~_i = w_i without ACMU
        entries: dict[str, StateDict] = {
            "cluster": cluster | part(own, "classifier."),
            "post_local": own,
            "whole": cluster,
            "deploy": part(own, "classifier."),
            "swapped": part(own, "encoder."),
            "global": {},
        }
        client.receive(entries[name])
        for layer in layers_of(client.model) if self.bavd_judged and name == "global" else []:
            layer.mask.fill_(True)
        return client.model


def end_fault(n: int, parts: Tree, whole: StateDict) -> str | None:
    """Return the reason why a client's start and update do not form a valid model, or None if they do.

    Args:
        n: Number of the client's samples.
        parts: All parts of its reply.
        whole: The model that was sent.
    """
    start: StateDict = whole | parts["start"]
    for name, update in parts["update"].items():
        if not name.endswith(VARIANCE):
            continue
        rounding = 1e-6 * start[name].clamp(min=1)
        if (start[name] + update < -rounding).any():
            return f"makes the variance {name} negative"
    return None


def own_entries(entries: StateDict, own: Own) -> StateDict:
    """Return the entries of the model part that `own` names: nothing, encoder, classifier or the whole model."""
    if own == "nothing":
        return {}
    return entries if own == "model" else part(entries, f"{own}.")
