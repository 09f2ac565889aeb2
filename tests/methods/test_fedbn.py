import naive
import torch
from refusals import refused
from rounds import run, start
from tiny import configure, make_experiment, open_client, private_states
from torch import nn
from torch.nn import functional as F

from raylt import tree
from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedbn import FedBN, batchnorm_entries

# entries of `small`: two layers with scale, shift, mean, variance and counter
BATCHNORM = {
    f"encoder.stage{stage}.1.{name}"
    for stage in (1, 2)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}


def test_all_of_batchnorm_stays_and_nothing_else(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedBN())
    model = experiment.server.model
    assert batchnorm_entries(model) == BATCHNORM
    assert FedBN().shared(model).keys() == model.state_dict().keys() - BATCHNORM
    message = experiment.method.message(experiment.server)
    assert not {path for path, _ in tree.leaves(message["model"])} & BATCHNORM


def test_batchnorm_of_vectors_and_of_volumes_stays_too():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2))
    assert batchnorm_entries(model) == {name for name in model.state_dict() if name.startswith(("0.", "1.", "2."))}


def test_two_rounds_equal_naive_code(tiny_task, tmp_path):
    kept = {id: {} for id in naive.clients_of(tiny_task)}
    model = naive.new_model(tiny_task)
    for t in (1, 2):
        models, sizes = [], []
        for id in kept:
            x, y = naive.client_data(tiny_task, id)
            local = naive.new_model(tiny_task)
            local.load_state_dict(naive.entries(model) | kept[id])

            def loss(rows, local=local, x=x, y=y):
                return F.cross_entropy(local(x[rows]), y[rows])

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            kept[id] = {name: value for name, value in naive.entries(local).items() if name in BATCHNORM}
            models.append(naive.entries(local))
            sizes.append(len(y))
        mean = naive.average(models, sizes)
        model.load_state_dict(naive.entries(model) | {k: v for k, v in mean.items() if k not in BATCHNORM})
    experiment = run(tiny_task, tmp_path, FedBN(), rounds=2)
    assert not naive.differences(dict(experiment.server.model.state_dict()), naive.entries(model), 1e-4)
    states = private_states(experiment)
    for id, own in kept.items():
        ours = states[id]["model"]
        assert ours.keys() == BATCHNORM
        assert not naive.differences(dict(ours), own, 1e-4), id


def test_first_rounds_weights_are_fedavgs(tiny_task, tmp_path):
    averaged, ours = (run(tiny_task, tmp_path, m, rounds=1).server.model.state_dict() for m in (FedAvg(), FedBN()))
    for name in averaged.keys() - BATCHNORM:
        assert torch.equal(averaged[name], ours[name]), name


def test_a_client_that_never_took_part_takes_statistics_before_it_is_judged(tiny_task):
    client = open_client(tiny_task, FedBN(), 0)
    assert not client.model.state_dict()["encoder.stage1.1.running_mean"].any()
    judged = FedBN().client_model(client)
    x, _ = naive.client_data(tiny_task, 0)
    with torch.no_grad():
        first = client.model.encoder.stage1[0](x)
    assert judged.state_dict()["encoder.stage1.1.num_batches_tracked"] == 6  # two epochs of three batches
    mean = judged.state_dict()["encoder.stage1.1.running_mean"]
    # after six steps with momentum 0.1 the mean points in the direction of the mean over all images
    assert F.cosine_similarity(mean, first.mean((0, 2, 3)), dim=0) > 0.99
    before = mean.clone()
    FedBN().client_model(client)
    assert torch.equal(before, mean)  # the statistics are taken once


def test_a_model_without_batchnorm_is_refused(tiny_task, tmp_path):
    with refused("model.lacks-layer", ConfigError, key="model", value="cnn"):
        FedBN().prepare(tiny_task, configure(model="cnn"), naive_cnn())


def naive_cnn():
    from raylt.models import build_model

    return build_model("cnn", 4, (28, 28, 1))


def test_a_new_client_trains_its_batchnorm_alone(tiny_task, tmp_path):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedBN())
    client = open_client(tiny_task, FedBN(), 0)
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    client.begin("settle", 1)
    FedBN().settle(client, FedBN().message(experiment.server))
    moved = {name for name, value in client.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == BATCHNORM
