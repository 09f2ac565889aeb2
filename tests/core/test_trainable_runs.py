"""Runs that train a part of the model: what they send, keep, export and judge."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from small_runs import make_tiny_run
from tiny import tiny_pretrained
from torch import nn

import raylt
from raylt import metrics
from raylt.contract.case import Case
from raylt.contract.checks import CHECKS, fault_of
from raylt.data.images.cache import load
from raylt.errors import CheckpointError
from raylt.methods import METHODS
from raylt.models import build_model

TINY = "tiny_pretrained"
LIBRARY = "timm:test_efficientnet"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainable")


@pytest.fixture(autouse=True)
def registered():
    raylt.register(tiny_pretrained, TINY, kind="model")


@pytest.fixture(scope="module")
def runs(folder):
    raylt.register(tiny_pretrained, TINY, kind="model")
    return {
        part: make_tiny_run(folder, "fedavg", f"model={TINY}", f"trainable={part}", name=part.replace(":", "-"))
        for part in ("all", "classifier", "norm", "last:1", "lora:2")
    }


def bytes_down(run) -> int:
    return run.reports[0]["traffic"]["train"]["down"]


def test_bytes_are_those_of_what_learns(runs):
    sizes = {part: bytes_down(run) / 4 for part, run in runs.items()}  # of one client
    classifier = 4 * (5 * 4 + 4)
    assert sizes["classifier"] == classifier
    assert sizes["last:1"] == classifier + 4 * (6 * 5 + 5)
    assert sizes["lora:2"] == classifier + 4 * 2 * (4 + 6 + 6 + 5)
    assert sizes["norm"] == classifier + 4 * 4 * (4 + 6) + 2 * 8  # 8 bytes for each of two batch counters
    assert sizes["all"] == sizes["norm"] + 4 * (4 * 9 + 6 * 4 + 6 * 5 + 5)


@pytest.mark.parametrize("part", ["classifier", "norm", "last:1", "lora:2"])
def test_checkpoints_hold_what_learns_and_exports_hold_all(runs, part):
    run, whole = runs[part], runs["all"]
    saved = run.checkpoint().read("server")
    assert set(saved) == {"model", "state", "frozen"}
    size = sum(value.nbytes for value in saved["model"].values())
    assert size == bytes_down(run) / 4
    assert load_file(run.folder / "model.safetensors").keys() == load_file(whole.folder / "model.safetensors").keys()


@pytest.mark.parametrize("part", ["classifier", "norm", "last:1", "lora:2"])
def test_exported_models_give_what_was_judged(runs, part):
    run = runs[part]
    model = raylt.load_model(raylt.export(run))
    labels = model.predict(load(run.task.test.x)).labels
    counts = counts_of(run, labels)
    assert torch.equal(counts, run.matrices().shared)
    assert torch.equal(run.model().predict(load(run.task.test.x)).labels, labels)


def test_a_model_that_was_trained_with_noise_is_exported_as_it_was_judged(folder):
    noise = ("privacy.update_epsilon=100", "privacy.noise_multiplier=0.5", "federation.rounds=2")
    run = make_tiny_run(folder, "fedavg", f"model={TINY}", "trainable=lora:2", *noise, name="lora-noise")
    assert run.reports[-1]["figures"]["privacy"]
    labels = raylt.load_model(raylt.export(run)).predict(load(run.task.test.x)).labels
    assert torch.equal(counts_of(run, labels), run.matrices().shared)


def counts_of(run, labels: torch.Tensor) -> torch.Tensor:
    return metrics.confusion(labels, torch.from_numpy(np.asarray(run.task.test.y)), run.task.classes, None)


def test_personal_models_are_exported_whole(folder):
    run = make_tiny_run(folder, "ditto", f"model={TINY}", "trainable=lora:2", name="ditto-lora")
    file = raylt.export(run)
    images = load(run.task.test.x)
    own = run.matrices().clients
    for id in (0, 3):
        labels = raylt.load_model(file, id).predict(images).labels
        assert torch.equal(counts_of(run, labels), own[id])


@pytest.mark.slow
def test_a_run_does_not_continue_with_other_frozen_weights(folder):
    state = dict(build_model(LIBRARY, 4, (8, 8, 1)).encoder.get_submodule("body").state_dict())
    file = folder / "tiny.safetensors"
    save_file(state, file)
    run = make_tiny_run(folder, "fedavg", f"model={LIBRARY}", f"weights={file}", "trainable=classifier", name="begun")
    assert run.experiment() is not None
    first = min(state)
    save_file(state | {first: state[first] + 1}, file)
    with refused("model.weights-mismatch", CheckpointError, key="weights", value=str(file)):
        run.experiment()


@pytest.mark.parametrize("fault", ["missing", "shape", "additional"])
def test_weights_of_another_model_are_refused_by_their_first_entry(tmp_path, fault):
    state = build_model(LIBRARY, 4, (8, 8, 1)).encoder.get_submodule("body").state_dict()
    names = {"missing": "blocks.0.0.conv.weight", "shape": "conv_stem.weight", "additional": "zzz"}
    name = names[fault]
    if fault == "missing":
        del state[name]
    else:
        state[name] = torch.zeros(3)
    file = tmp_path / "other.safetensors"
    save_file(state, file)
    with refused("model.weights-mismatch", key="weights", value=str(file), entry=name):
        build_model(LIBRARY, 4, (8, 8, 1), str(file))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello world", "neither torch.save nor safetensors wrote it"),
        (b"", "neither torch.save nor safetensors wrote it"),
        ([1, 2], "it is not a state dict"),
        ({"layer": Path("x")}, r"it holds pathlib\.[\w.]+, and only tensors are loaded"),
    ],
    ids=["text", "empty", "list", "object"],
)
def test_files_without_weights_say_what_they_are(tmp_path, content, reason):
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with refused("model.weights-mismatch", key="weights", value=str(file)) as caught:
        build_model(LIBRARY, 4, (8, 8, 1), str(file))
    assert re.search(reason, str(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("name", [LIBRARY, "torchvision:resnet18"])
def test_weights_inside_a_checkpoint_or_under_a_prefix_are_refused_with_the_remedy(tmp_path, name):
    state = build_model(name, 4, (32, 32, 3)).encoder.get_submodule("body").state_dict()
    file = tmp_path / "training.pt"
    torch.save({"epoch": 3, "state_dict": state}, file)
    with refused("model.weights-mismatch", key="weights", value=str(file), entry="state_dict") as caught:
        build_model(name, 4, (32, 32, 3), str(file))
    assert 'torch.save(torch.load(\'training.pt\')["state_dict"], "weights.pt")' in str(caught.value)
    torch.save({f"module.{entry}": value for entry, value in state.items()}, file)
    with refused("model.weights-mismatch", key="weights", value=str(file)) as caught:
        build_model(name, 4, (32, 32, 3), str(file))
    assert "all names in it begin with module., which must be removed" in str(caught.value)


QUICK = ("resumed_after_every_step", "keeps_private_entries", "predicts_what_was_judged")
CONTRACT = [
    pytest.param(name, part, check, id=f"{name}-{part}-{check.__name__}", marks=[] if quick else pytest.mark.slow)
    for name, part in [("fedavg", "classifier"), ("ditto", "last:1"), ("scaffold", "norm"), ("fedetf", "classifier")]
    for check in CHECKS
    for quick in [check.__name__ in QUICK]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part", "check"), CONTRACT)
def test_methods_keep_their_contract(tmp_path, name, part, check):
    fields = {"turns": 1, "turn_epochs": 1} if name == "fedetf" else {}
    assert fault_of(check, Case(METHODS[name](**fields), "classification", tmp_path, part)) is None


def test_an_encoder_resizes_and_normalises_images_itself(folder):
    settings = (f"model={LIBRARY}", "input=12", "trainable=classifier", f"data.root={folder}")
    run = make_tiny_run(folder, "fed3r", *settings, "federation.rounds=0", name="resized")
    assert run.task.mean == (0.0,)
    encoder = run.experiment().server.model.encoder.get_submodule("body")
    body = encoder.get_submodule("body")
    pixels = torch.from_numpy(load(run.task.test.x)[:3]).permute(0, 3, 1, 2) / 255
    resized = nn.functional.interpolate(pixels, (12, 12), mode="bilinear", align_corners=False)
    mean = (0.485 + 0.456 + 0.406) / 3  # a grey image is normalised with the mean over the colours
    expected = body((resized - mean) / ((0.229 + 0.224 + 0.225) / 3)).flatten(1)
    assert torch.allclose(encoder(pixels), expected, atol=1e-6)
    labels = raylt.load_model(raylt.export(run)).predict(load(run.task.test.x)).labels
    shared = run.matrices().shared
    assert shared is not None
    assert torch.equal(counts_of(run, labels), shared)


def test_input_is_refused_where_no_encoder_resizes_or_the_data_are_normalised_too(folder):
    with refused("config.conflict", key="input", value=12):
        make_tiny_run(folder, "fedavg", "model=small", "input=12")
    with refused("config.conflict", key="input", excludes="data.normalise"):
        make_tiny_run(folder, "fedavg", f"model={LIBRARY}", "input=12", "data.normalise=true")
