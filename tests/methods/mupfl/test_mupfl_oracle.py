"""Whole rounds of MuPFL against code that follows the paper's equations from pooled data (methods.md, section 4)."""

import itertools

import naive
import pytest
import torch
from tiny import configure, make_experiment, private_states
from torch import Tensor
from torch.nn import functional as F

from raylt.methods.mupfl.method import MuPFL
from raylt.models.split import SplitModel

ROUNDS = 2
QUICK = {"m": 5, "tau": 2, "matching_steps": 3, "alpha": 0.3}
Known = dict  # entries that a client keeps from one round to the next


def rate(local: dict, t: int) -> float:
    """Return the learning rate of round t, which falls by a share every few rounds (section 4.1)."""
    return naive.LR * (1 - local.get("lr_decay", 0.0)) ** ((t - 1) // local.get("lr_decay_every", 1))


def tuned(method: MuPFL, model: SplitModel, h: Tensor, known: Tensor, lr: float, t: int, id: int) -> None:
    """Train the classifier for tau epochs on the features of known classes, Eq. 21."""
    z = torch.cat([h[c] for c in range(4) if known[c]])
    y = torch.tensor([c for c in range(4) if known[c] for _ in range(method.m)])
    order = naive.generator("tune", t, id)
    batches = [rows for _ in range(method.tau) for rows in torch.randperm(len(y), generator=order).split(naive.BATCH)]
    losses = ((lambda rows=rows: F.cross_entropy(model.classifier(z[rows]), y[rows])) for rows in batches)
    naive.descend(list(model.classifier.parameters()), losses, lr, naive.MOMENTUM)


def trained(method: MuPFL, model: SplitModel, x: Tensor, y: Tensor, memory: tuple, lr: float, t: int, id: int) -> tuple:
    """Train with BAVD behind the last stage, Eq. 2 and 6; return the map and the last loss."""
    m, before = memory if method.bavd_reset == "never" else (None, None)
    seen: list[Tensor] = []
    in_an_epoch = sum(len(rows) > 1 for rows in torch.arange(len(y)).split(naive.BATCH))

    def loss(rows: Tensor) -> Tensor:
        nonlocal m, before
        if method.bavd_reset == "epoch" and len(seen) % in_an_epoch == 0:
            m, before = None, None
        h = model.encoder.stage2(model.encoder.stage1(x[rows]))
        bar = {"chw": h.mean(0), "hw": h.mean((0, 1)), "bchw": h}[method.bavd_map].detach()
        fits = m is None or m.shape == bar.shape
        if method.bavd and m is not None and fits:
            # the threshold is taken in each slice H x W (section 3.6), whatever dimensions M has
            low = m.mean() if method.bavd_threshold == "whole" else m.mean((-2, -1), keepdim=True)
            h = h * (m >= low).float()
        value = F.cross_entropy(model.classifier(model.encoder.pool(h)), y[rows])
        if m is None:
            m, before = bar, value.item()
        elif fits:
            psi = (before - value.item()) if method.bavd_psi == "intended" else (value.item() - before)
            m, before = m + psi * bar, value.item()
        seen.append(value.detach())
        return value

    naive.train(model, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss, lr)
    return m, before


def gradients(model: SplitModel, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """Compute Eq. 16 by autograd, with the gradient of the bias as the last column."""
    z, head, found = naive.features(model, x), model.classifier, {}
    for c in y.unique().tolist():
        weight, bias = torch.autograd.grad(F.cross_entropy(head(z[y == c]), y[y == c]), [head.weight, head.bias])
        found[c] = torch.cat([weight, bias[:, None]], 1).double()
    return found


def matched(method: MuPFL, h: Tensor, targets: dict[int, Tensor], head) -> Tensor:
    """Compute Eq. 19 and 20 by autograd, through the gradient of the classifier."""
    h, weight, bias = h.double(), head.weight.detach().double(), head.bias.detach().double()
    for c, target in targets.items():
        own = h[c].clone().requires_grad_()
        for _ in range(method.matching_steps):
            error = (own @ weight.T + bias).softmax(1) - torch.eye(4)[c]
            gradient = torch.cat([error.T @ own, error.sum(0)[:, None]], 1) / method.m
            if method.distance == "flat":
                loss = 1 - F.cosine_similarity(gradient.flatten(), target.flatten(), dim=0)
            else:
                loss = (
                    (1 - F.cosine_similarity(gradient[:, :-1], target[:, :-1], dim=1)).sum()
                    + 1
                    - F.cosine_similarity(gradient[:, -1], target[:, -1], dim=0)
                )
            own = (own - method.matching_lr * torch.autograd.grad(loss, own)[0]).detach().requires_grad_()
        h[c] = own.detach()
    return h.float()


def cosines(vectors: list[Tensor]) -> Tensor:
    found = torch.eye(len(vectors), dtype=torch.float64)
    for i, j in itertools.permutations(range(len(vectors)), 2):
        a, b = vectors[i].double(), vectors[j].double()
        found[i, j] = a @ b / (a.norm() * b.norm()) if a.norm() > 0 and b.norm() > 0 else 0.0
    return found


def groups(similarity: Tensor, kappas) -> list[list[int]]:
    """Solve Eq. 9-13: the least-squares partition for each number of clusters, then the one with the largest
    silhouette."""
    n, best, scores = len(similarity), {}, {}
    for labels in itertools.product(range(n), repeat=n):
        if list(dict.fromkeys(labels)) != list(range(len(set(labels)))) or len(set(labels)) not in kappas:
            continue  # skips a partition that was seen with other labels
        parts = [[i for i in range(n) if labels[i] == c] for c in range(len(set(labels)))]
        spread = sum((1 - similarity[i, j]).item() / len(part) for part in parts for i in part for j in part)
        if spread < best.get(len(parts), (float("inf"), None))[0] - 1e-12:
            best[len(parts)] = spread, parts
    for kappa, (_, parts) in best.items():
        distance, total = 1 - similarity, 0.0
        for part in parts:
            for i in part if 1 < len(part) < n else []:
                a = sum(distance[i, j].item() for j in part) / (len(part) - 1)
                b = min(sum(distance[i, j].item() for j in other) / len(other) for other in parts if other != part)
                total += (b - a) / max(a, b)
        scores[kappa] = round(total / n, 9)
    kappa = max(scores, key=lambda kappa: (scores[kappa], -kappa)) if scores else None
    return [list(range(n))] if kappa is None else best[kappa][1]


def normalised(m: Tensor | None, like: int) -> Tensor:
    if m is None:
        return torch.zeros(like)
    m = (m.mean(0) if m.ndim == 4 else m).flatten()
    return (m - m.min()) / (m.max() - m.min())


def only(values: naive.Entries, prefix: str | None) -> naive.Entries:
    return {} if prefix is None else {name: value for name, value in values.items() if name.startswith(prefix)}


def after_round(
    method: MuPFL, model: SplitModel, task, h, known, kept: dict[int, Known], ids: list[int], local: dict, t: int
) -> tuple[naive.Entries, Tensor | None, dict[int, Known], Tensor | None]:
    """Return the global model, h_glo, each participant's w_i, w~_i and map, and the similarities of Eq. 8."""
    whole, lr, sizes = naive.entries(model), rate(local, t), [len(task.shards[id]) for id in ids]
    starts, ends, maps, found = [], [], {}, []
    for id in ids:
        x, y = naive.client_data(task, id)
        own = {
            "classifier": only(kept[id].get("own", {}), "classifier." if method.pkcf else None),
            "cluster": kept[id].get("cluster", {}),
            "own": kept[id].get("own", {}),
            "encoder": only(kept[id].get("own", {}), "encoder."),
            "global": {},
        }[method.next_init]
        model.load_state_dict(whole)
        if method.gradients == "global":
            found.append(gradients(model, x, y))
        starts.append(whole | own)
        model.load_state_dict(starts[-1])
        if method.pkcf and known.any():
            tuned(method, model, h, known, lr, t, id)
            if method.updates == "tuned":
                starts[-1] = naive.entries(model)
        maps[id] = trained(method, model, x, y, kept[id].get("map", (None, None)), lr, t, id)
        ends.append(naive.entries(model))
        if method.gradients == "local":
            found.append(gradients(model, x, y))
    updates = [{name: end[name] - start[name] for name in end} for end, start in zip(ends, starts, strict=True)]
    parts, similarity = [[i] for i in range(len(ids))], None
    if method.acmu:
        names = [name for name, _ in model.named_parameters()]
        similarity = cosines([torch.cat([update[name].flatten() for name in names]) for update in updates])
        if method.bavd:
            size = 16 if method.bavd_map == "hw" else 64 * 16
            similarity = method.alpha * similarity + (1 - method.alpha) * cosines(
                [normalised(maps[id][0], size) for id in ids]
            )  # Eq. 8
        kappas = range(2, min(method.kappa_max, len(ids) - 1) + 1) if method.kappa is None else [method.kappa]
        parts = groups(similarity, kappas)
    clusters: list[naive.Entries] = [{} for _ in ids]
    for part in parts:
        for i in part:  # Eq. 14
            mean = naive.average([updates[j] for j in part], [1.0] * len(part))
            clusters[i] = {name: starts[i][name] + mean[name] for name in mean}
    end = naive.average(clusters, sizes)  # Eq. 15
    model.load_state_dict(end)
    if method.pkcf:
        owners = {c: [of[c] for of in found if c in of] for c in range(4)}
        h = matched(method, h, {c: torch.stack(of).mean(0) for c, of in owners.items() if of}, model.classifier)
    kept = {id: {"own": ends[i], "cluster": clusters[i], "map": maps[id]} for i, id in enumerate(ids)}
    return end, h, kept, similarity


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, {}),
        ({}, {"local": {"lr_decay": 0.3}}),
        ({}, {"federation": {"participation": 0.5}}),
        ({"bavd": False}, {}),
        ({"acmu": False}, {}),
        ({"pkcf": False}, {}),
        ({"pkcf": False, "bavd": False}, {}),
        ({"bavd_threshold": "whole"}, {}),
        ({"bavd_reset": "round"}, {}),
        ({"updates": "tuned"}, {}),
        ({"updates": "tuned", "next_init": "global"}, {}),
        ({"bavd_map": "hw"}, {}),
        ({"bavd_map": "bchw"}, {}),
        ({"bavd_psi": "equation"}, {}),
        ({"bavd_reset": "never"}, {}),
        ({"kappa": 3}, {}),
        ({"distance": "rows", "matching_lr": 5.0}, {}),
        ({"gradients": "global"}, {}),
        ({"next_init": "cluster"}, {}),
        ({"next_init": "cluster", "acmu": False}, {}),
        ({"next_init": "own"}, {}),
        ({"next_init": "encoder"}, {}),
        ({"next_init": "encoder", "updates": "tuned"}, {"federation": {"participation": 0.5}}),
        ({"next_init": "global"}, {}),
    ],
    ids=str,
)
def test_rounds_are_those_of_equations_2_to_21_written_out(tiny_task, tmp_path, fields, parts):
    # clients keep all of w_i and w~_i, whichever of them is judged
    method = MuPFL(**QUICK | fields)
    experiment = make_experiment(configure(**parts), tiny_task, tmp_path, method)
    server, model = experiment.server, naive.new_model(tiny_task)
    h = torch.randn(4, method.m, 64, generator=naive.generator("server", "features", 0)) if method.pkcf else None
    known, kept = torch.zeros(4, dtype=torch.bool), {id: {} for id in naive.clients_of(tiny_task)}
    for t in range(1, ROUNDS + 1):
        report = experiment.step()
        ids = report.participants
        end, h, new, similarity = after_round(method, model, tiny_task, h, known, kept, ids, parts.get("local", {}), t)
        assert naive.differences(server.model.state_dict(), end, 1e-3) == {}
        model.load_state_dict(server.model.state_dict())
        if similarity is not None:
            last = list(server.state["similarities"].values())[-1]
            assert last["round"] == t
            assert torch.allclose(last["matrix"].double(), similarity, atol=1e-3)
        if method.pkcf:
            known = known | (torch.from_numpy(tiny_task.client_counts[ids]).sum(0) > 0)
            assert server.state["known"].tolist() == known.tolist()
            assert torch.allclose(server.state["features"], h, atol=1e-3)
            h = server.state["features"]
        states = private_states(experiment)
        for id in ids:
            state = states[id]["state"]
            for name in ("own", "cluster") if method.acmu else ("own",):
                assert naive.differences(state[name], new[id][name], 1e-3) == {}, (id, name)
            kept[id] |= {"own": state["own"], "cluster": state["cluster"] if method.acmu else state["own"]}
            if method.bavd_reset == "never":
                kept[id]["map"] = new[id]["map"]
