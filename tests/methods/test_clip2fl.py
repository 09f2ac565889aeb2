import naive
import numpy as np
import pytest
import teachers
import torch
from refusals import refused
from rounds import ask_only, run, start
from tiny import configure, fingerprint, make_setup, open_client
from torch.nn import functional as F

from raylt import tree
from raylt.errors import ConfigError
from raylt.methods.creff.clip2fl import CLIP2FL
from raylt.methods.creff.method import CReFF, new_classifier
from raylt.models import build_model
from raylt.models.split import linear
from raylt.models.trainable import limit

QUICK = {"per_class": 4, "matching_steps": 3, "retrain_epochs": 2, "retrain_batch": 3}


@pytest.fixture(scope="module")
def npz(tiny_task, tmp_path_factory) -> str:
    """Return a teacher whose texts have other lengths than 1."""
    text = teachers.feature_arrays(tiny_task)["text"] * np.array([[2.0], [0.5], [3.0], [1.0]], np.float32)
    return teachers.save_features(tmp_path_factory.mktemp("features") / "f.npz", tiny_task, text=text)


def unit(rows):
    return rows / rows.norm(dim=1, keepdim=True)


def test_a_teacher_of_none_is_answered_with_the_method_that_has_none():
    with refused("config.unknown-name", ConfigError, key="method.teacher", value="none") as caught:
        CLIP2FL(teacher="none")
    assert "npz:FILE; without a teacher it is method=creff" in str(caught.value)


def test_without_teacher_it_is_creff_to_the_bit(tiny_task, tmp_path):
    ends = [
        run(tiny_task, tmp_path, method)
        for method in (CReFF(**QUICK), CLIP2FL(kd=0, contrast=0, teacher="npz:/nowhere.npz", **QUICK))
    ]
    for what in (lambda server: server.model.state_dict(), lambda server: server.state):
        assert fingerprint(dict(what(ends[0].server))) == fingerprint(dict(what(ends[1].server)))


def test_contrast_alone_leaves_the_federated_model_as_it_is(tiny_task, tmp_path, npz):
    plain, drawn = (
        run(tiny_task, tmp_path, CLIP2FL(kd=0, contrast=contrast, teacher=npz, **QUICK)) for contrast in (0, 0.5)
    )
    assert fingerprint(plain.server.model.state_dict()) == fingerprint(drawn.server.model.state_dict())
    assert not torch.equal(plain.server.state["features"], drawn.server.state["features"])
    assert "text" not in drawn.method.message(drawn.server)  # clients have no use for the texts


def test_without_its_contrast_it_is_refused_where_the_encoder_learns_nothing(tiny_task, npz):
    frozen = limit(build_model("small", 4, (8, 8, 1)), "classifier")
    with refused("config.conflict", ConfigError, key="method.kd", value=1.0):
        CLIP2FL(teacher=npz, contrast=0).prepare(tiny_task, configure(), frozen)
    CLIP2FL(teacher=npz).prepare(tiny_task, configure(), frozen)


def test_objective_written_out(tiny_task, tmp_path, npz):
    method = CLIP2FL(teacher=npz, kd=0.7, temperature=2.0, scale=10.0)
    message = method.message(start(tiny_task, tmp_path, method).server)
    client = open_client(tiny_task, method, 1)
    client.model.eval()
    batch, arrays = client.samples.batch(torch.tensor([3, 0, 7])), teachers.feature_arrays(tiny_task)
    image = torch.tensor(arrays["image"].astype("float32"))[tiny_task.shards[1].ids[[3, 0, 7]]]
    with torch.no_grad():
        q = (10.0 * unit(image) @ unit(torch.tensor(arrays["text"])).T / 2.0).softmax(1)
        logits = client.model(batch.x)
        p = (logits / 2.0).softmax(1)
        expected = F.cross_entropy(logits, batch.y) + 0.7 * 4 * (q * (q / p).log()).sum(1).mean()
    assert method.objective(client, message)(batch).item() == pytest.approx(expected.item(), rel=2e-3)  # half precision


def test_round_is_that_of_naive_code(tiny_task, tmp_path, monkeypatch, npz):
    """Compare local training with the teacher, gradients by class, matching with the contrast, and re-training."""
    method, asked = CLIP2FL(teacher=npz, contrast=0.2, **QUICK), [0, 1, 3]
    ask_only(monkeypatch, method, asked)
    experiment = start(tiny_task, tmp_path, method)
    server, arrays = experiment.server, teachers.feature_arrays(tiny_task)
    text = unit(torch.tensor(arrays["text"]))
    h, classifier = server.state["features"].clone(), linear(**tree.snapshot(server.state["classifier"]))
    method.round(server, experiment.fleet)

    ends, weights, by_class = [], [], {}
    for id in asked:
        model, (x, y) = naive.new_model(tiny_task), naive.client_data(tiny_task, id)
        z = naive.features(model, x)
        for c in y.unique().tolist():
            loss = F.cross_entropy(classifier(z[y == c]), y[y == c])
            by_class.setdefault(c, []).append(torch.autograd.grad(loss, [classifier.weight, classifier.bias]))
        image = torch.tensor(arrays["image"].astype("float32"))[tiny_task.shards[id].ids]
        q = (100 * unit(image).half().float() @ text.T / 3).softmax(1)

        def loss_of(rows, model=model, x=x, y=y, q=q):
            logits = model(x[rows])
            log_p = (logits / 3).log_softmax(1)
            return F.cross_entropy(logits, y[rows]) + 9 * (q[rows] * (q[rows].log() - log_p)).sum(1).mean()

        naive.train(model, naive.epochs_of(len(y), naive.generator("order", "train", 1, id)), loss_of)
        ends.append(naive.entries(model))
        weights.append(len(y))
    assert naive.differences(naive.entries(server.model), naive.average(ends, weights), atol=2e-5) == {}

    for _ in range(3):
        h.requires_grad_()
        distance = 0.2 * F.cross_entropy(
            torch.cat([h[c] for c in range(4)]) @ text.T / 0.1, torch.arange(4).repeat_interleave(4)
        )
        for c, replies in by_class.items():
            loss = F.cross_entropy(classifier(h[c]), torch.full((4,), c))
            ours = torch.autograd.grad(loss, [classifier.weight, classifier.bias], create_graph=True)
            theirs = [sum(reply[i] for reply in replies) for i in range(2)]
            rows = [*zip(ours[0], theirs[0], strict=True), (ours[1], theirs[1])]
            distance = distance + sum(1 - F.cosine_similarity(a, b, dim=0) for a, b in rows)
        h = (h - 0.1 * torch.autograd.grad(distance, h)[0]).detach()
    assert torch.allclose(server.state["features"], h, atol=1e-5)

    head, z, labels = new_classifier(server), h.flatten(0, 1), torch.arange(4).repeat_interleave(4)
    order = torch.Generator().manual_seed(server.seed("retrain"))
    steps = [rows for _ in range(2) for rows in torch.randperm(16, generator=order).split(3)]
    naive.descend(
        list(head.parameters()),
        ((lambda rows=rows: F.cross_entropy(head(z[rows]), labels[rows])) for rows in steps),
        0.01,
    )
    assert torch.allclose(server.state["classifier"]["weight"], head.weight, atol=1e-5)


def test_features_are_drawn_to_their_own_text(tiny_task, tmp_path, npz):
    method = CLIP2FL(teacher=npz, contrast=1.0, **QUICK)
    server = start(tiny_task, tmp_path, method).server
    text, classes = server.state["text"], torch.tensor([2, 0])
    pull = method.prototype_contrast(server, classes)
    own, swapped = (text[rows][:, None].expand(2, 4, -1) for rows in ([2, 0], [0, 2]))
    assert pull(own).item() < 0.01 < pull(swapped).item()


def test_result_names_the_teacher_and_each_terms_share(tiny_task, tmp_path, npz):
    experiment = start(tiny_task, tmp_path, CLIP2FL(teacher=npz, **QUICK))
    experiment.method.round(experiment.server, experiment.fleet)
    assert "a stand-in" in experiment.server.figures["teacher"]
    assert experiment.server.figures["shares"].keys() == {"cross_entropy", "distillation"}


def test_features_and_texts_of_other_lengths_are_refused(tiny_task, npz):
    narrow = build_model("resnet8", 4, (8, 8, 1))
    config = make_setup(configure()).config
    with refused("model.wrong-width", ConfigError, key="model", dim=256, needed=64):
        CLIP2FL(teacher=npz).prepare(tiny_task, config, narrow)
    CLIP2FL(teacher=npz, contrast=0).prepare(tiny_task, config, narrow)
    CLIP2FL(teacher="npz:/nowhere.npz", contrast=0, kd=0).prepare(tiny_task, config, narrow)
    with pytest.raises(ConfigError, match=r"/nowhere\.npz"):
        CLIP2FL(teacher="npz:/nowhere.npz").prepare(tiny_task, config, narrow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "field", [{"kd": 0.3}, {"temperature": 1.0}, {"scale": 20.0}, {"contrast": 0.5}, {"contrast": 0.0}], ids=str
)
def test_every_field_of_its_own_changes_the_judged_model(tiny_task, tmp_path, npz, field):
    plain, other = (
        fingerprint(method.global_model(run(tiny_task, tmp_path, method, rounds=1).server).state_dict())
        for method in (CLIP2FL(teacher=npz, **QUICK), CLIP2FL(teacher=npz, **QUICK | field))
    )
    assert plain != other


def test_temperature_of_the_contrast_changes_the_features(tiny_task, tmp_path, npz):
    plain, other = (
        run(
            tiny_task, tmp_path, CLIP2FL(teacher=npz, contrast=0.5, contrast_temperature=t, **QUICK), rounds=1
        ).server.state["features"]
        for t in (0.1, 0.5)
    )
    assert not torch.equal(plain, other)
