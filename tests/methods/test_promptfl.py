"""PromptFL against a second implementation, with the text tower of a small random model of open_clip."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import naive
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from small_runs import make_tiny_run, with_texts
from teachers import CLIP, save_clip
from tiny import CPU, configure, make_setup

import raylt
from raylt import tree
from raylt.core.encoding import encode
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.data.images.cache import load
from raylt.errors import ConfigError
from raylt.methods.promptfl import PromptFL
from raylt.models import build_model
from raylt.models.prompts import _ends
from raylt.models.trainable import frozen_entries
from raylt.seeds import seeded

WIDTH = CLIP["text_cfg"]["width"]
NAMES = ("a", "grey_fire_engine", "low left", "d")


@pytest.fixture
def task(tiny_task):
    """Return the tiny task with class names of one token and of more."""
    return replace(tiny_task, class_names=NAMES)


def setup_of(name, method, folder, **parts):
    data = {"clients": 6, "root": str(folder)}
    return make_setup(configure(model=name, trainable="classifier", data=data, **parts), method)


def run(name, task, folder, method, rounds):
    """Return an experiment on the features of the image tower after some rounds."""
    setup, task = encode(setup_of(name, method, folder, federation={"rounds": rounds}), task)
    host = ClientHost(setup, task.spec, task.test, CPU)
    experiment = Experiment(setup, task, LocalFleet(setup.config, task, host), CPU, folder)
    while not experiment.done:
        experiment.step()
    return experiment


def texts_of(network, context):
    """Return the unit texts of the prompts, [C, d], from all 77 positions, as CoOp's code computes them."""
    from open_clip import tokenize

    count = context.shape[-2]
    tokens = tokenize([" ".join(["x"] * count + [label.replace("_", " ")]) for label in NAMES])
    embedded = network.token_embedding(tokens)
    own = context.expand(len(NAMES), -1, -1)
    x = torch.cat([embedded[:, :1], own, embedded[:, 1 + count :]], 1) + network.positional_embedding
    x = network.ln_final(network.transformer(x, attn_mask=network.attn_mask))
    return F.normalize(x[torch.arange(len(x)), tokens.argmax(1)] @ network.text_projection, dim=1)


@pytest.mark.parametrize("context", ["unified", "specific"])
def test_the_logits_are_those_of_coops_code(clip_name, clip_network, task, tmp_path, context):
    model = setup_of(clip_name, PromptFL(length=5, context=context), tmp_path).new_model(task.spec)
    own = model.classifier.context
    assert own.shape == ((5, WIDTH) if context == "unified" else (4, 5, WIDTH))
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        z = F.normalize(model.encoder(x), dim=1)
        expected = clip_network.logit_scale.exp() * z @ texts_of(clip_network, own).T
        assert torch.allclose(model(x), expected, atol=1e-4)


@pytest.mark.parametrize("context", ["unified", "specific"])
def test_two_rounds_equal_naive_code(clip_name, clip_network, task, tmp_path, context):
    with seeded(0, "model"):
        encoder = build_model(clip_name, 4, (8, 8, 1)).encoder.eval()
        own = torch.randn((3, WIDTH) if context == "unified" else (4, 3, WIDTH)) * 0.02
    length = math.sqrt(clip_network.logit_scale.exp())
    for t in (1, 2):
        models, sizes = [], []
        for id in naive.clients_of(task):
            x, y = naive.client_data(task, id)
            with torch.no_grad():
                z = encoder(x)
            local = own.clone().requires_grad_()

            def loss(rows, local=local, z=z, y=y):
                logits = length * z[rows] @ texts_of(clip_network, local).T
                return -logits.log_softmax(1)[torch.arange(len(rows)), y[rows]].mean()

            batches = naive.epochs_of(len(y), naive.generator("order", "train", t, id))
            naive.descend([local], (lambda rows=rows: loss(rows) for rows in batches), naive.LR, naive.MOMENTUM)
            models.append({"context": local.detach()})
            sizes.append(len(y))
        own = naive.average(models, sizes)["context"]
    experiment = run(clip_name, task, tmp_path, PromptFL(length=3, context=context), 2)
    assert torch.allclose(experiment.server.model.classifier.context, own, atol=1e-5)


def test_only_the_vectors_travel_and_learn(clip_name, task, tmp_path):
    method = PromptFL()
    experiment = run(clip_name, task, tmp_path, method, 1)
    model = experiment.server.model
    sent = method.message(experiment.server)["model"]
    assert {entry: value.shape for entry, value in sent.items()} == {"classifier.context": (16, WIDTH)}
    assert [entry for entry, _ in model.named_parameters()] == ["classifier.context"]
    assert tree.nbytes(dict(method.shared(model))) == 4 * 16 * WIDTH
    tower = model.classifier.prompts.body
    assert not any(value.requires_grad for value in tower.parameters())
    assert "classifier.prompts.body.projection" in frozen_entries(model)  # the run's hash of frozen entries covers it


def test_a_text_ends_where_open_clip_reads_it():
    tokens = torch.tensor([[1, 9, 2, 0], [1, 5, 9, 2]])
    assert _ends(SimpleNamespace(pool_type="argmax"), tokens).tolist() == [1, 2]
    assert _ends(SimpleNamespace(pool_type="eos", eos_id=2), tokens).tolist() == [2, 3]
    assert _ends(SimpleNamespace(text_pool_type="eos", text_eos_id=2), tokens).tolist() == [2, 3]


def test_words_start_as_the_zero_shot_model(clip_name, task, tmp_path):
    zero_shot = setup_of(clip_name, PromptFL(length=4), tmp_path, classifier="text").zero_shot_model(task.spec)
    x = torch.rand(3, 1, 8, 8)
    for length, close in ((4, True), (6, False)):
        model = setup_of(clip_name, PromptFL(length=length, initial="words"), tmp_path).new_model(task.spec)
        with torch.no_grad():
            assert torch.allclose(model(x), zero_shot(x), atol=1e-4) == close


def test_words_are_the_last_vectors():
    words = torch.arange(6.0).reshape(2, 3)
    for context in ("unified", "specific"):
        own = PromptFL(length=3, context=context, initial="words").first_context(words, 2)
        assert (own[..., 1:, :] == words).all()
        assert (own[..., 0, :].abs() < 0.2).all()
    with refused("config.conflict", ConfigError, key="method.length", value=1):
        PromptFL(length=1, initial="words").first_context(words, 2)


@pytest.mark.slow
def test_the_exported_model_has_the_texts_as_classifier(tmp_path, clip_name):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "local.lr=0.5")
    run = make_tiny_run(tmp_path, "promptfl", *settings, "federation.rounds=4", "classifier=text")
    model = raylt.load_model(raylt.export(run))
    right = (model.predict(load(run.task.test.x)).labels == torch.as_tensor(run.task.test.y)).float().mean().item()
    assert right == pytest.approx(run.summary["accuracy"]["last"])
    assert set(run.summary["figures"]["zero_shot"]) >= {"accuracy", "many"}
    losses = [report["figures"]["loss"] for report in run.reports]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model=small"], "model"),
        (["model={name}", "trainable=all"], "trainable"),
        (["model={name}", "trainable=lora:2"], "trainable"),
    ],
)
def test_other_models_are_refused(tmp_path, clip_name, settings, key):
    with refused("config.conflict", ConfigError, key=key):
        make_tiny_run(tmp_path, "promptfl", *(setting.format(name=clip_name) for setting in settings))


def test_more_vectors_than_the_tower_takes_are_refused(clip_name, task, tmp_path):
    # 77 positions: start, "grey fire engine", end; so 72 are left
    setup_of(clip_name, PromptFL(length=72), tmp_path).new_model(task.spec)
    with refused("config.out-of-range", ConfigError, key="method.length", value=73, most=72):
        setup_of(clip_name, PromptFL(length=73), tmp_path).new_model(task.spec)


def test_a_tower_that_reads_in_both_directions_is_refused(tmp_path, task):
    save_clip(tmp_path)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["no_causal_mask"] = True
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    name = f"clip:local-dir:{tmp_path}"
    with refused("config.conflict", ConfigError, key="model", value=name):
        setup_of(name, PromptFL(), tmp_path).new_model(task.spec)


def test_a_model_of_ones_own_may_have_a_text_tower(tmp_path):
    run = make_tiny_run(tmp_path, "promptfl")
    assert run.config.model == "with_texts"
    assert with_texts(4, (8, 8, 1)).prompts is not None
