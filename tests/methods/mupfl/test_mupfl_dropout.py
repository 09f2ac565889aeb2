import math

import pytest
import torch
from mupfl_runs import OFF, QUICK, open_client, run
from refusals import refused
from tiny import configure, make_setup, private_states
from torch.nn import functional as F

from raylt import tree
from raylt.contract.trace import fingerprint
from raylt.core.training.optimisers import SGD
from raylt.errors import ConfigError
from raylt.methods.mupfl.bavd import BAVD, layers_of
from raylt.methods.mupfl.method import MuPFL

# dropout


def test_local_training_with_dropout_is_that_of_the_equations_written_out(tiny_task):
    method = MuPFL(**OFF | {"bavd": True})
    client, plain = open_client(tiny_task, method=method), open_client(tiny_task, method=MuPFL(**OFF))
    reply = method.train(client, {"model": tree.snapshot(method.shared(client.model))})
    stage, optimiser = plain.model.encoder, SGD(plain.model.parameters(), 0.05, 0.9)
    plain.model.train()
    m = before = None
    for step, batch in enumerate(plain.batches(2, 8)):
        if step == plain.steps(epochs=1):  # section 3.3: a second epoch begins
            m = before = None
        h = stage.stage2(stage.stage1(batch.x))
        bar = h.detach().mean(0)
        if m is not None:
            h = h * (m >= m.mean((1, 2), keepdim=True)).float()
        loss = F.cross_entropy(plain.model.classifier(stage.pool(h)), batch.y)
        m = bar if m is None else m - (loss.item() - before) * bar
        before = loss.item()
        optimiser.step(loss)
    for name, value in plain.model.state_dict().items():
        assert torch.allclose(reply.tree["model"][name], value, atol=1e-5), name
    (layer,) = layers_of(client.model)
    assert torch.allclose(layer.map[0], m, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reset", ["epoch", "round", "never"])
def test_map_is_reset_in_every_epoch_every_round_or_never(tiny_task, tmp_path, reset, monkeypatch):
    plain, begun = BAVD.reset, []

    def watched(layer, map=None, loss=None):
        begun.append(map is not None)
        plain(layer, map, loss)

    monkeypatch.setattr(BAVD, "reset", watched)
    experiment, _ = run(tiny_task, tmp_path, MuPFL(**QUICK, bavd_reset=reset), until=1)
    begun.clear()
    experiment.step()
    kept = [state["state"].get("bavd") for _, state in sorted(private_states(experiment).items())]
    if reset != "never":
        # two epochs for each client, except for the client with one sample, which has no batch
        assert begun == [False] * (5 if reset == "round" else 5 + 2 * 4)
        assert kept == [None] * 5
    else:
        assert begun == [True, True, True, False, True]  # the client with one sample has no map
        assert [k["0"]["map"] is None for k in kept] == [False, False, False, True, False]


def test_nothing_waits_for_the_device_in_a_batch(tiny_task, monkeypatch):
    method = MuPFL(**QUICK)
    client = open_client(tiny_task, method=method)
    objective, batch = method.objective(client, {}), next(iter(client.batches(1, 8)))
    client.model.train()

    def refuse(*_):
        raise AssertionError("reads a value from the device")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    values = [objective(batch) for _ in range(3)]
    monkeypatch.undo()
    assert all(math.isfinite(value.item()) for value in values)


def test_standard_dropout_acts_at_the_layers_of_bavd(tiny_task):
    """Without BAVD the text leaves standard dropout, at the same layers."""

    def dropouts(layers) -> int:
        method = MuPFL(bavd=False, dropout=0.5, bavd_layers=layers)
        model = make_setup(configure(), method).new_model(tiny_task.spec)
        return sum(type(module).__name__.startswith("Dropout") for module in model.modules())

    assert 1 <= dropouts("last") < dropouts("all")


def test_stage_that_is_not_there_is_refused_before_anything_runs(tiny_task):
    with refused("model.lacks-layer", ConfigError, key="method.bavd_layers", value=("stage7",)):
        make_setup(configure(), MuPFL(bavd_layers=("stage7",))).new_model(tiny_task.spec)


def test_what_a_client_dropped_last_is_dropped_when_it_is_judged(tiny_task, tmp_path):
    method = MuPFL(**QUICK, bavd_judged=True)
    experiment, _ = run(tiny_task, tmp_path, method, federation={"participation": 0.5})
    states = private_states(experiment)
    names = {name for name in experiment.server.model.state_dict() if name.endswith(".mask")}
    assert len(names) == 1
    for id, state in states.items():
        mask = state["model"][names.copy().pop()]
        took_part = "own" in state["state"]
        assert mask.all() != took_part or int(tiny_task.client_counts[id].sum()) == 1, id
        client = open_client(tiny_task, id, method)
        client.receive(state["model"])
        client.state = state["state"]
        x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        judged = method.client_model(client).eval()
        with torch.no_grad():
            h = judged.encoder.stage2(judged.encoder.stage1(x))
            assert (h[:, ~mask[0]] == 0).all()
        # the server has no map, so the global model drops nothing
        assert layers_of(method.other_model(client, "global"))[0].mask.all()
    assert all(not name.endswith(".mask") for name in method.shared(experiment.server.model))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [({}, []), ({"dropout": 0.5}, [torch.nn.Dropout]), ({"bavd": True, "dropout": 0.5}, [BAVD])],
    ids=str,
)
def test_standard_dropout_is_used_if_bavd_is_off(tiny_task, fields, layers):
    model = open_client(tiny_task, method=MuPFL(**OFF | fields)).model
    dropouts = [type(layer) for layer in model.encoder.stage2 if isinstance(layer, torch.nn.Dropout | BAVD)]
    assert dropouts == layers


def test_standard_dropout_acts_in_training_alone_and_by_the_seed(tiny_task, tmp_path):
    rates = (0.0, 0.5, 0.5)
    ends = [run(tiny_task, tmp_path / str(i), MuPFL(**OFF | {"dropout": p}), until=1)[0] for i, p in enumerate(rates)]
    plain, dropped, again = (fingerprint(dict(end.server.model.state_dict())) for end in ends)
    assert dropped == again != plain
