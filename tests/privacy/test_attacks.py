"""Attacks succeed where they must, and fail with shuffled pairs or another client's update."""

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from small_runs import make_run, make_tiny_run
from torch import nn, tensor

from raylt.config import load
from raylt.core.fleet.schema import Schema
from raylt.data.samples import Samples
from raylt.data.task import build_task
from raylt.errors import ConfigError
from raylt.methods import METHODS
from raylt.methods.creff.method import CReFF
from raylt.methods.fedavg import FedAvg
from raylt.methods.la import LogitAdjustment
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.sfd.method import SFD
from raylt.models import build_model
from raylt.models.split import clipped
from raylt.ops.matching import class_gradients
from raylt.privacy import gradient_inversion
from raylt.privacy.attack import _Attacker, attack
from raylt.privacy.attacker_view import (
    NOT_ATTACKED,
    Images,
    encode_images,
    not_attacked,
    outside_images,
    private_images,
    uploaded_gradients,
    uploaded_sums,
    uploads_of,
)
from raylt.privacy.feature_inversion import Decoder, Inverter, mean_features, shuffled
from raylt.privacy.gradient_inversion import gradient_of, invert_gradient, label_of, total_variation
from raylt.privacy.picture import draw
from raylt.privacy.reconstruction import check_measures, nearness
from raylt.registry import resolve

pytest.importorskip("torchmetrics")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def fresh():
    """Return an encoder with random weights, and its features of two halves of the digits."""
    setup = resolve(load(None, ["method=fedavg", "data.imbalance=1", "data.clients=2", "data.partition=iid"]))
    task = build_task(setup.config.data)
    server = SimpleNamespace(model=setup.new_model(task.spec).eval(), device=CPU)
    experiment = SimpleNamespace(server=server, task=task, config=setup.config)
    return SimpleNamespace(
        experiment=experiment,
        task=task,
        model=server.model,
        outside=encode_images(experiment, task.shards[0], 0),
        private=encode_images(experiment, task.shards[1], 1).at(torch.arange(200)),
    )


@pytest.fixture(scope="module")
def inverters(fresh):
    """Return a decoder that learned from the other half, and the control."""
    x, z = fresh.outside.x, fresh.outside.z
    return Inverter(z, x, epochs=25), Inverter(z, shuffled(x, 0), epochs=25)


def reached(fresh, images):
    private = fresh.private
    return nearness(images, private.x, private.x, private.y, private.y)


@pytest.mark.slow
def test_features_of_a_fresh_encoder_are_inverted_and_shuffled_pairs_are_not(fresh, inverters):
    good, control = (reached(fresh, inverter(fresh.private.z)) for inverter in inverters)
    assert good.ssim > 0.6
    assert good.identified > 0.3
    assert control.ssim < good.ssim - 0.2
    assert control.identified < 0.15
    assert control.psnr < good.psnr - 3


def test_a_class_average_is_seen_to_be_none_of_its_images(fresh):
    averages = torch.stack([fresh.outside.x[fresh.outside.y == c].mean(0) for c in range(10)])
    assert reached(fresh, averages[fresh.private.y]).identified < 0.15


@pytest.fixture
def sorted_by_class(tmp_path):
    """Save a source with dark images of class 0 followed by light images of class 1."""
    x = np.repeat(np.array([20, 200], dtype=np.uint8), 50)[:, None, None] * np.ones((8, 8), dtype=np.uint8)
    y = np.repeat([0, 1], 50)
    np.savez(
        tmp_path / "sorted.npz", x_train=x, y_train=y, x_test=x[::10], y_test=y[::10], class_names=["dark", "light"]
    )
    return f"npz:{tmp_path / 'sorted.npz'}"


def test_outside_images_are_of_all_classes_of_a_source(fresh, sorted_by_class):
    few = outside_images(fresh.experiment, sorted_by_class, most=20)
    assert (few.x.shape, set(few.y.tolist()), set(few.client.tolist())) == ((20, 1, 8, 8), {0, 1}, {-1})
    assert [(255 * few.x[few.y == c]).unique().round().tolist() for c in (0, 1)] == [[20], [200]]
    assert torch.equal(few.x, outside_images(fresh.experiment, sorted_by_class, most=20).x)


def test_mean_image_of_a_class_without_outside_images_is_that_of_all(fresh, sorted_by_class):
    without_class = fresh.task.test.y != 3
    test = replace(fresh.task.test, x=fresh.task.test.x[without_class], y=fresh.task.test.y[without_class])
    task = replace(fresh.task, test=test)
    experiment = SimpleNamespace(server=fresh.experiment.server, task=task, config=fresh.experiment.config)
    averages, seen = _Attacker(experiment, None, 1).averages, outside_images(experiment, None)
    for c in range(10):
        own = seen.x if c == 3 else seen.x[seen.y == c]
        torch.testing.assert_close(averages[c], own.mean(0))
    # another source has other labels
    averages = _Attacker(experiment, sorted_by_class, 1).averages
    torch.testing.assert_close(averages, torch.full_like(averages, 110 / 255))


@pytest.mark.slow
def test_a_one_sample_gradient_is_inverted_and_anothers_is_not(fresh):
    samples = Samples(fresh.task.shards[1], fresh.task.spec, CPU)
    x, y, _ = samples.batch(tensor([3]))
    gradient = gradient_of(fresh.model, x, y)
    assert label_of(gradient).tolist() == y.tolist()
    mean, std = tensor(fresh.task.mean), tensor(fresh.task.std)
    made = invert_gradient(fresh.model, gradient, fresh.task.shape, mean, std)
    assert nearness(made, fresh.private.x[3:4]).ssim > 0.9
    assert nearness(made, fresh.private.x[40:41]).ssim < 0.6


def test_a_reconstruction_stays_within_the_range_of_pixels(fresh):
    x, y = fresh.private.x[3:4], fresh.private.y[3:4]
    mean, std = tensor(fresh.task.mean), tensor(fresh.task.std)
    gradient = gradient_of(fresh.model, (x - mean[:, None, None]) / std[:, None, None], y)
    made = invert_gradient(fresh.model, gradient, fresh.task.shape, mean, std, steps=10, tries=1)
    assert 0 <= made.min().item() < 0.01
    assert 0.99 < made.max().item() <= 1


def test_of_several_starts_the_one_with_the_nearest_gradient_is_kept(monkeypatch):
    distances = iter([0.9, 0.5, 0.7])  # of the three ends; the starts have no steps
    monkeypatch.setattr(gradient_inversion, "_cosine_distance", lambda *_: torch.tensor(next(distances)))
    monkeypatch.setattr(gradient_inversion, "gradient_of", lambda *_: [])
    monkeypatch.setattr(gradient_inversion, "label_of", lambda _: tensor([0]))
    image = invert_gradient(nn.Identity(), [], (4, 4, 1), torch.zeros(1), torch.ones(1), steps=0, tries=3)
    second = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(image, second)


def test_heads_that_take_no_part_in_a_prediction_are_left_out_of_its_gradient(fresh):
    setup = resolve(load(None, ["method=sfd"]))
    model = setup.new_model(fresh.task.spec).eval()
    assert hasattr(model, "projector")
    x, y, _ = Samples(fresh.task.shards[1], fresh.task.spec, CPU).batch(tensor([3]))
    assert label_of(gradient_of(model, x, y)).tolist() == y.tolist()


def test_the_feature_of_one_image_can_be_read_from_its_class_gradient(fresh):
    z, y = fresh.private.z[:1], fresh.private.y[:1]
    gradient = class_gradients(z, y, fresh.model.classifier)[y.item()]
    assert torch.allclose(mean_features(gradient), z[0], atol=1e-4)


def test_a_mean_feature_is_read_from_the_row_of_the_largest_gradient_of_a_bias():
    gradients = tensor([[1.0, 2.0, 0.1], [-4.0, -8.0, -2.0]])  # the true class's row is the negative one
    assert mean_features(gradients).tolist() == [2.0, 4.0]


def test_gradients_are_compared_by_direction_alone():
    one, other = [tensor([3.0, 0.0]), tensor([[4.0]])], [tensor([0.0, 5.0]), tensor([[0.0]])]
    distances = [gradient_inversion._cosine_distance(one, [scale * x for x in one]) for scale in (7.0, -0.2)]
    distances.append(gradient_inversion._cosine_distance(one, other))
    assert torch.stack(distances).tolist() == pytest.approx([0, 2, 1], abs=1e-6)


def test_variation_is_that_of_rows_and_columns():
    stripes = tensor([[[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]]])
    assert total_variation(stripes).item() == total_variation(stripes.mT).item() == 1


def test_an_attacker_sees_features_as_they_are_uploaded(fresh):
    model = copy.deepcopy(fresh.model).train()
    config = load(None, ["method=fedncm", "privacy.epsilon=1", "privacy.clip=0.5"])
    server = SimpleNamespace(model=model, device=CPU)
    shard = fresh.task.shards[0]
    plain, cut = (
        encode_images(SimpleNamespace(server=server, task=fresh.task, config=config), shard, 0)
        for config in (fresh.experiment.config, config)
    )
    assert torch.equal(plain.z, fresh.outside.z)  # in evaluation mode
    assert plain.z.norm(dim=1).max() > 0.5
    assert torch.allclose(cut.z, clipped(plain.z, 0.5))
    assert 0.5 < plain.x.max() <= 1


def test_equal_images_are_as_near_as_can_be():
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    same = nearness(x, x, x, tensor([0, 0, 1, 1]), tensor([0, 0, 1, 1]))
    assert (round(same.ssim, 6), same.mae, same.identified) == (1.0, 0.0, 1.0)
    # an error of 0.1 everywhere: 10 log10(1 / 0.01) = 20 dB
    grey = torch.full_like(x, 0.5)
    far = nearness(grey + 0.1, grey)
    assert far.psnr == pytest.approx(20, abs=1e-3)
    assert far.mae == pytest.approx(0.1)
    assert nearness(torch.full_like(x, 1.5), torch.ones_like(x)).mae == 0.0  # no pixel is brighter than white
    assert nearness(torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)).ssim < 0.1


def test_an_image_is_identified_among_the_candidates_of_its_class_alone():
    made, candidates = torch.full((1, 1, 8, 8), 0.5), torch.stack([torch.full((1, 8, 8), x) for x in (0.6, 0.5)])
    assert nearness(made, candidates[:1], candidates, tensor([0]), tensor([0, 1])).identified == 1.0
    assert nearness(made, candidates[:1], candidates, tensor([0]), tensor([0, 0])).identified == 0.0


def test_the_average_that_needs_no_upload_is_that_of_the_true_class():
    levels = torch.stack([torch.full((1, 8, 8), level) for level in (0.2, 0.8)])
    attacker = object.__new__(_Attacker)
    attacker.averages = levels
    attacker.private = Images(levels, tensor([0, 1]), torch.zeros(2, 1), tensor([0, 0]))
    finding = attacker._finding("means", "it", levels.flip(0), attacker.private, levels.flip(0))
    assert [each.mae for each in (finding.reached, finding.control, finding.average)] == pytest.approx([0.6, 0.6, 0.0])


def test_the_control_of_an_attack_is_the_decoder_that_learnt_from_wrong_pairs(monkeypatch):
    levels = torch.stack([torch.full((1, 8, 8), level) for level in (0.2, 0.8)])
    attacker = object.__new__(_Attacker)
    attacker.averages, attacker.outside = levels, SimpleNamespace(z=torch.zeros(2, 1))
    attacker.private = Images(levels, tensor([0, 1]), torch.zeros(2, 1), tensor([0, 0]))
    monkeypatch.setattr(attacker, "_some", torch.arange)
    monkeypatch.setattr(attacker, "_decoder", lambda name, z, paired: lambda z: levels if paired else levels.flip(0))
    finding = attacker._inverted("means", "it", torch.zeros(2, 1), attacker.private)
    assert [each.mae for each in (finding.reached, finding.control)] == pytest.approx([0.0, 0.6])


def test_an_update_is_that_of_the_normalised_image_and_the_control_has_another_s(monkeypatch):
    levels = torch.stack([torch.full((1, 8, 8), level) for level in (0.2, 0.8)])
    model = build_model("small", 2, (8, 8, 1))
    spec = SimpleNamespace(mean=(0.3,), std=(0.5,), shape=(8, 8, 1))
    attacker = object.__new__(_Attacker)
    attacker.config = SimpleNamespace(federation=SimpleNamespace(secure=False))
    attacker.experiment = SimpleNamespace(
        server=SimpleNamespace(model=model),
        method=SimpleNamespace(shared=lambda model: model.state_dict()),
        task=SimpleNamespace(spec=spec),
    )
    attacker.averages = levels
    attacker.private = Images(levels, tensor([0, 1]), torch.zeros(2, 1), tensor([0, 0]))
    monkeypatch.setattr(attacker, "_some", torch.arange)
    # gradients that are the images, which a perfect attack reads
    monkeypatch.setattr("raylt.privacy.attack.gradient_of", lambda model, x, y: [x])
    monkeypatch.setattr(
        "raylt.privacy.attack.invert_gradient", lambda model, upload, shape, mean, std: upload[0] * std + mean
    )
    (finding,) = attacker.update()
    assert [each.mae for each in (finding.reached, finding.control)] == pytest.approx([0.0, 0.6], abs=1e-6)


def test_a_decoder_gets_each_dimension_of_the_features_at_its_own_scale():
    z = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)) * tensor([1.0, 100.0])
    scale = Inverter(z, torch.rand(400, 1, 8, 8), epochs=0).std
    assert scale.tolist() == pytest.approx([1.0, 100.0], rel=0.1)


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (30, 45, 3)])
def test_a_decoder_makes_images_of_the_shape(shape):
    images = Decoder(16, shape)(torch.randn(2, 16))
    assert images.shape == (2, shape[2], *shape[:2])
    assert images.min() >= 0
    assert images.max() <= 1


def test_without_torchmetrics_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused("config.missing-package", ConfigError, name="torchmetrics"):
        check_measures()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "run", "method=fedncm")


@pytest.mark.slow
def test_every_upload_of_a_run_is_attacked(ended, tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.privacy.attack.MAX_UPDATES", 2)
    monkeypatch.setattr("raylt.privacy.attack.invert_gradient", partial(invert_gradient, steps=150, tries=1))
    findings = attack(ended, epochs=1)
    assert [finding.upload for finding in findings][:2] == ["features", "update"]
    assert {finding.upload for finding in findings} == {"features", "update", "means", "counts"}
    by_name = {finding.upload: finding for finding in findings}
    assert by_name["counts"].guessed == 1.0  # counts reveal the classes directly
    assert by_name["update"].reached.ssim > by_name["update"].control.ssim
    assert draw(by_name["features"], tmp_path / "grid.png").stat().st_size > 1000


def test_what_a_method_does_not_send_is_refused_by_name(ended):
    with refused("config.unknown-name", ConfigError, key="--upload", value="gradients") as caught:
        attack(ended, "gradients")
    assert {"means", "counts"} < set(caught.value.details["choices"])
    with refused("data.wrong-shape", ConfigError, key="--outside", value="shapes"):
        attack(ended, "features", outside="shapes")
    assert uploads_of(CReFF()) == ("update", "gradients")
    assert uploads_of(LogitAdjustment(prior="global")) == ("update", "counts")
    assert uploads_of(LogitAdjustment()) == ("update",)
    assert uploads_of(SFD(safs=False)) == uploads_of(MuPFL(pkcf=False)) == ("update",)


def test_statistics_that_only_clients_have_are_not_attacked(tmp_path):
    with refused("privacy.nothing-to-attack", ConfigError, key="federation.batchnorm"):
        attack(make_run(tmp_path, "run", "method=fedncm", "federation.batchnorm=local"))


def test_runs_on_features_of_a_frozen_encoder_are_not_attacked(tmp_path):
    with refused("privacy.nothing-to-attack", ConfigError, key="trainable", value="classifier"):
        attack(make_run(tmp_path, "run", "method=fedavg", "trainable=classifier"))


def test_class_gradients_in_a_secure_sum_hide_each_client_s(ended):
    experiment = ended.experiment()
    images = [encode_images(experiment, ended.task.shards[k], k) for k in (0, 1)]
    both = Images(*(torch.cat([getattr(part, name) for part in images]) for name in ("x", "y", "z", "client")))
    classifier = experiment.server.model.classifier
    plain = uploaded_gradients(load(None, ["method=creff"]), both, classifier)
    secure = uploaded_gradients(load(None, ["method=creff", "federation.secure=true"]), both, classifier)
    assert (list(plain), list(secure)) == ([0, 1], [-1])
    assert secure[-1].keys() == plain[0].keys() | plain[1].keys()
    for c, gradient in secure[-1].items():
        assert torch.allclose(gradient, sum(plain[k][c] for k in (0, 1) if c in plain[k]))


def test_counts_of_a_secure_sum_or_under_noise_tell_less(ended):
    experiment = ended.experiment()
    images = encode_images(experiment, ended.task.shards[0], 0)
    plain, secure, noisy = (
        dict(uploaded_sums(load(None, ["method=fedncm", *more]), images, 10))
        for more in ([], ["federation.secure=true"], ["privacy.epsilon=1"])
    )
    counts = {c: s["n"] for c, s in plain[0].items()}
    assert counts == {c: n for c, n in enumerate(images.y.bincount(minlength=10).tolist()) if n}
    assert list(secure) == [-1]
    assert len(noisy[0]) == 10  # includes classes that the client does not hold
    assert all(noisy[0][c]["n"] != n for c, n in counts.items())


def test_the_noise_of_a_secure_sum_is_that_of_all_shares_together(ended, monkeypatch):
    monkeypatch.setattr("secrets.randbits", lambda bits: 7)
    images = encode_images(ended.experiment(), ended.task.shards[0], 0)
    images = replace(images, client=torch.arange(len(images)) % 6)  # of six clients four must survive
    sums = [
        dict(uploaded_sums(load(None, ["method=fedncm", *more]), part, 10))
        for part in (images, replace(images, client=torch.zeros_like(images.client)))
        for more in (["federation.secure=true"], ["federation.secure=true", "privacy.epsilon=1"], ["privacy.epsilon=1"])
    ]
    noise = [sums[i][client][3]["z"] - sums[0][-1][3]["z"] for i, client in ((1, -1), (5, 0))]
    torch.testing.assert_close(noise[0], 1.5**0.5 * noise[1])


def test_clients_that_join_later_send_nothing_to_attack(tmp_path):
    run = make_run(tmp_path, "run", "method=fedncm", "data.new_clients=1")
    late = run.task.new_clients
    assert set(private_images(run.experiment(clients=False)).client.tolist()) == {0, 1, 2} - set(late)


def test_holders_of_the_rarest_third_are_guessed_from_numbers_of_samples():
    held = np.array(
        [[9, 9, 9, 9, 9, 1, 0], [9, 9, 9, 9, 9, 1, 0]]
    )  # of seven classes the last two are the rarest third
    attacker = object.__new__(_Attacker)
    attacker.experiment = SimpleNamespace(task=SimpleNamespace(counts=held.sum(0), classes=7, client_counts=held))
    attacker.private = SimpleNamespace(client=tensor([0, 0, 1]))
    [finding] = attacker._holders("counts", {id: {5: {"n": 1}} for id in (0, 1)})
    assert finding.guessed == 1
    assert "the rarest 2," in finding.what
    # each client's part of the sum is 1 and 0.4 samples
    [summed] = attacker._holders("counts", {-1: {5: {"n": 2}, 6: {"n": 0.8}}})
    assert summed.guessed == 1


@pytest.mark.parametrize(("method", "unit"), [("rucr", True), ("fedsm", True), ("fedncm", False)])
def test_means_are_attacked_as_they_are_sent(ended, method, unit):
    experiment, norm = ended.experiment(), ["method.norm=l2"] if method == "fedsm" else []
    images = [encode_images(experiment, ended.task.shards[k], k) for k in (0, 1)]
    both = Images(*(torch.cat([getattr(part, name) for part in images]) for name in ("x", "y", "z", "client")))
    uploads = dict(uploaded_sums(load(None, [f"method={method}", *norm]), both, 10))
    for client, own in enumerate(images):
        for c, sums in uploads[client].items():
            mean = own.z[own.y == c].double().mean(0)
            wanted = torch.nn.functional.normalize(mean, dim=0) if unit else mean
            torch.testing.assert_close(sums["z"].double() / sums["n"], wanted, rtol=1e-5, atol=1e-6)
    ((_, added),) = uploaded_sums(load(None, [f"method={method}", *norm, "federation.secure=true"]), both, 10)
    for c, sums in added.items():
        parts = [uploads[k][c] for k in (0, 1) if c in uploads[k]]
        assert sums["n"] == sum(part["n"] for part in parts)
        torch.testing.assert_close(sums["z"].double(), sum(part["z"].double() for part in parts))


def test_update_is_not_attacked_where_the_classifier_stays_at_home(tmp_path):
    assert attack(make_tiny_run(tmp_path, "fedper"), "update", epochs=1) == []


# parts of replies that are covered by attacks, by the attacked upload
PARTS = {
    "update": ("model", "direction", "rest", "delta", "update"),
    "means": ("classes.z",),
    "counts": ("counts",),
    "gradients": ("gradients",),
    "activations": ("samples",),
    "effective": ("effective",),
}


def arrays(value, path=""):
    """Return the names of the arrays in a reply, without names of classes and of model entries."""
    if not isinstance(value, dict):
        return {path} if torch.is_tensor(value) and value.ndim else set()
    names = {name: isinstance(name, str) and "." not in name for name in value}
    return set().union(
        *(arrays(inner, f"{path}.{name}".strip(".") if names[name] else path) for name, inner in value.items())
    )


@pytest.fixture
def sent(monkeypatch):
    """Return a set that collects the names of the arrays that clients send from here on."""
    names, fault = set(), Schema.fault
    # the check before a run tries replies that no client sends
    monkeypatch.setattr("raylt.runs.start.check_exchange", lambda *_: None)
    monkeypatch.setattr(
        Schema, "fault", lambda schema, id, reply: names.update(arrays(reply.tree)) or fault(schema, id, reply)
    )
    return names


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_attacked_of_a_method_is_named(tmp_path, sent, method):
    run = make_tiny_run(tmp_path, method)
    own = NOT_ATTACKED.get(method, ())
    covered = [
        *own,
        "confusion",
        *(part for upload in uploads_of(run.method) for part in PARTS.get(upload, ())),
        *(PARTS["means"] if method == "oracle" else ()),
    ]  # covered through the reference method
    assert [name for name in sent if not any(f"{name}.".startswith(f"{part}.") for part in covered)] == []
    assert all(any(f"{name}.".startswith(f"{part}.") for name in sent) for part in own)
    assert set(own) <= set(not_attacked(method))


def test_of_a_method_that_raylt_does_not_have_a_model_alone_is_attacked():
    class OnesOwn(FedAvg):
        name = "ones_own"

    assert uploads_of(OnesOwn()) == ("update",)
    assert not_attacked("ones_own")[0] == "any upload besides a model"


@pytest.mark.slow
def test_synthetic_features_are_compared_with_features_of_unseen_images(tmp_path):
    run = make_tiny_run(tmp_path, "sfd")
    (alone,) = attack(run, "synthetic", epochs=1)
    synthetic, unseen = attack(run, "synthetic", outside=f"npz:{tmp_path / 'pictures.npz'}", epochs=1)
    assert alone.what == synthetic.what
    assert (unseen.what.partition(",")[0], unseen.count) == ("for comparison: features of test images", 42)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_upload_of_every_method_is_attacked_or_refused_in_a_line(tmp_path, monkeypatch, method):
    monkeypatch.setattr("raylt.privacy.attack.MAX_UPDATES", 2)
    monkeypatch.setattr("raylt.privacy.attack.invert_gradient", partial(invert_gradient, steps=2, tries=1))
    run = make_tiny_run(tmp_path, method)
    if run.config.trainable == "classifier":
        with refused("privacy.nothing-to-attack", ConfigError, key="trainable", value="classifier"):
            attack(run)
        return
    for upload in ("features", *uploads_of(run.method)):
        for finding in attack(run, upload, epochs=1):
            assert finding.upload == upload
            assert (finding.guessed is None) == (finding.reached is not None)
    for upload in {"means", "gradients", "activations", "effective"} - set(uploads_of(run.method)):
        with refused("config.unknown-name", ConfigError, key="--upload", value=upload):
            attack(run, upload)


@pytest.mark.slow
def test_activations_give_away_more_than_features(tmp_path):
    run = make_run(tmp_path, "run", "method=flea")
    (behind,), (features,) = (attack(run, upload, epochs=10) for upload in ("activations", "features"))
    assert behind.reached.ssim > features.reached.ssim + 0.1
    assert behind.reached.identified > features.reached.identified + 0.1
    assert behind.control.identified < 0.2


@pytest.mark.slow
def test_effective_samples_say_who_holds_a_rare_class(tmp_path):
    (finding,) = attack(make_run(tmp_path, "run", "method=fedyoyo"), "effective")
    assert finding.guessed == 1.0
