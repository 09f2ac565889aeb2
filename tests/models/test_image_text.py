"""`clip:` models: the image tower with its own preprocessing, and a classifier that starts from texts."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from small_runs import make_tiny_run
from teachers import DIM, PREPROCESS, save_clip
from tiny import configure, make_setup, open_client

import raylt
from raylt.config.paths import located
from raylt.core.encoding import encode
from raylt.core.training.features import teacher_features
from raylt.data.images.cache import load
from raylt.errors import CheckpointError, ConfigError
from raylt.methods import METHODS
from raylt.models import build_model, image_text
from raylt.models.clip import TowerDescription, open_teacher
from raylt.models.image_text import ImageTower
from raylt.models.split import CosineClassifier
from raylt.models.trainable import FrozenEncoder, blocks_of
from raylt.runs.export import artefact

# methods, and fields of others, that compute with the weight and bias of a linear classifier
LINEAR = ("bpfed", "ccvr", "fedloge", "fednpc", "fedrod", "noisymeans", "oracle", "posthoc", "rucr", "sfd")
MODULES = {"fedsm": {"teacher": "none", "retrain": "after"}}
NAMES = ("up left", "up right", "low left", "low right")


def test_features_are_those_of_the_image_tower(clip_name, clip_network):
    model = build_model(clip_name, 4, (32, 32, 3)).eval()
    x = torch.rand(5, 3, 32, 32)
    mean, std = (torch.tensor(PREPROCESS[key])[:, None, None] for key in ("mean", "std"))
    expected = F.normalize(clip_network.encode_image((x - mean) / std), dim=1)
    with torch.no_grad():
        z = model.encoder(x)
    assert model.dim == DIM
    assert torch.allclose(F.normalize(z, dim=1), expected, atol=1e-6)
    # features and texts of the length sqrt(s) have inner products s cos(z, t)
    assert torch.allclose(z.norm(dim=1).square(), clip_network.logit_scale.exp().expand(5), rtol=1e-5)


def test_models_of_one_name_share_no_weights_and_can_be_trained(clip_name):
    one, other = (build_model(clip_name, 4, (32, 32, 3)) for _ in range(2))
    assert {value.data_ptr() for value in one.parameters()}.isdisjoint(value.data_ptr() for value in other.parameters())
    assert all(value.requires_grad for value in one.parameters())
    assert all(module.training for module in one.modules())


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (37, 64), (64, 37), (27, 40)])
@pytest.mark.parametrize("target", [24, (24, 32)])
def test_images_of_any_size_are_prepared_as_open_clip_prepares_them(size, target):
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from PIL import Image

    settings = {"size": target, **PREPROCESS, "interpolation": "bicubic", "resize_mode": "shortest"}
    transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
    pixels = torch.randint(0, 256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    smooth = F.avg_pool2d(pixels.permute(2, 0, 1).float(), 5, 1, 2).round().to(torch.uint8)
    about = TowerDescription(dim=DIM, vision={}, quick_gelu=False, preprocessing=settings, length=1.0)
    tower = ImageTower(torch.nn.Flatten(), about)
    given = (tower._resized(smooth[None] / 255) - tower.mean) / tower.std
    expected = transform(Image.fromarray(smooth.permute(1, 2, 0).numpy()))
    assert given.shape[2:] == ((24, 24) if target == 24 else target)
    assert torch.allclose(given[0], torch.as_tensor(expected), atol=0.02)  # open_clip rounds to 8 bits after resizing


def test_pixels_of_an_enlarged_image_stay_between_black_and_white():
    """Bicubic interpolation overshoots at edges, and images of 8 bits cut that off."""
    from PIL import Image

    stripes = (torch.arange(8) % 2 * 255).repeat(8, 1)
    settings = {"size": 32, **PREPROCESS, "interpolation": "bicubic", "resize_mode": "squash"}
    about = TowerDescription(dim=DIM, vision={}, quick_gelu=False, preprocessing=settings, length=1.0)
    resized = ImageTower(torch.nn.Flatten(), about)._resized((stripes / 255).expand(1, 3, 8, 8))
    enlarged = Image.fromarray(stripes.to(torch.uint8).numpy()).resize((32, 32), Image.Resampling.BICUBIC)
    expected = torch.as_tensor(np.array(enlarged)) / 255
    assert (resized.min(), resized.max()) == (0, 1)
    assert torch.allclose(resized, expected.expand(1, 3, 32, 32), atol=1 / 255)


def test_grey_images_count_as_three_equal_colours(clip_name):
    model = build_model(clip_name, 4, (8, 8, 1)).eval()
    grey = torch.rand(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model.encoder(grey), model.encoder(grey.repeat(1, 3, 1, 1)))


@pytest.mark.parametrize("classifier", ["text", "text_cosine"])
@pytest.mark.parametrize("trainable", ["classifier", "last:1", "norm", "lora:2", "all"])
def test_a_classifier_from_texts_gives_the_models_own_logits(clip_name, clip_network, tiny_task, trainable, classifier):
    setup = make_setup(configure(model=clip_name, classifier=classifier, trainable=trainable))
    model = setup.new_model(tiny_task.spec).eval()
    x = torch.rand(5, tiny_task.spec.shape[2], *tiny_task.spec.shape[:2])
    texts = open_teacher(clip_name.removeprefix("clip:")).text(tiny_task.class_names, "phrase", torch.device("cpu"))
    inner = model.encoder.body if isinstance(model.encoder, FrozenEncoder) else model.encoder
    assert isinstance(inner, ImageTower)
    with torch.no_grad():
        pixels = (inner._resized(x.expand(-1, 3, -1, -1)) - inner.mean) / inner.std
        images = F.normalize(clip_network.encode_image(pixels))
        expected = clip_network.logit_scale.exp() * images @ F.normalize(texts, dim=1).T
        assert torch.allclose(model(x), expected, atol=1e-4)


def test_logits_of_a_cosine_classifier_are_a_learned_scale_times_cosines():
    rows, z = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[5.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    classifier = CosineClassifier(rows, torch.tensor(7.0).log())
    expected = torch.tensor([[7 * 0.6, 0.0], [7 * -0.8, -7.0], [0.0, 0.0]])
    assert torch.allclose(classifier(z), expected)
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (classifier(z) * weights).sum().backward()
    # the derivative of a logit by the logarithm of the scale is the logit; rows have no derivative along themselves
    assert classifier.log_scale.grad == pytest.approx((expected * weights).sum().item())
    assert classifier.weight.grad.norm() > 0.1
    assert torch.allclose((classifier.weight.grad * rows).sum(1), torch.zeros(2), atol=1e-6)


def test_a_run_learns_the_scale_of_its_cosine_classifier(tmp_path, clip_name, clip_network):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "local.lr=0.05")
    linear, cosine = (
        make_tiny_run(tmp_path, "fedavg", *settings, f"classifier={kind}", name=kind)
        for kind in ("text", "text_cosine")
    )
    assert cosine.summary["figures"]["zero_shot"] == linear.summary["figures"]["zero_shot"]
    entries = cosine.model().network.classifier.state_dict()
    assert entries["weight"].shape == (4, DIM)
    assert entries["log_scale"].shape == ()
    assert 1e-4 < abs(entries["log_scale"] - clip_network.logit_scale) < 1
    assert cosine.summary["model_sha256"] != linear.summary["model_sha256"]


@pytest.mark.parametrize(
    "settings", [["federation.robust=median"], ["privacy.update_epsilon=500", "privacy.delta=1e-3"]], ids=str
)
def test_the_scale_is_protected_like_other_entries(tmp_path, clip_name, settings):
    base = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "classifier=text_cosine")
    plain = make_tiny_run(tmp_path, "fedavg", *base, "local.lr=0.05", name="plain")
    run = make_tiny_run(tmp_path, "fedavg", *base, "local.lr=0.05", *settings, name="changed")
    scales = [each.model().network.state_dict()["classifier.log_scale"] for each in (plain, run)]
    assert scales[0] != scales[1]
    assert all(scale.isfinite() for scale in scales)


@pytest.mark.parametrize(("method", "fields"), [*((name, {}) for name in LINEAR), *MODULES.items()])
def test_methods_that_need_a_linear_classifier_say_which_one_to_set(clip_name, tiny_task, method, fields):
    made = METHODS[method](**fields)
    config = configure(model=clip_name, classifier="text_cosine")
    model = make_setup(config, made).new_model(tiny_task.spec)
    with refused("model.wrong-classifier", ConfigError, key="classifier", value="text_cosine", method=method):
        made.prepare(tiny_task, config, model)
    config = configure(model=clip_name, classifier="text")
    made.prepare(tiny_task, config, make_setup(config, made).new_model(tiny_task.spec))


def test_each_layer_of_the_tower_is_a_block(tmp_path):
    from open_clip.transformer import VisionTransformer

    tower = VisionTransformer(32, 16, 32, 3, 2, 4.0, output_dim=DIM)
    assert len(blocks_of(tower)) == 1 + 3  # the first convolution, and the layers of the transformer


def test_images_that_a_tower_would_pad_are_refused(tmp_path):
    save_clip(tmp_path)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["preprocess_cfg"]["resize_mode"] = "longest"
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    name = f"clip:local-dir:{tmp_path}"
    assert build_model(name, 4, (32, 32, 3)).dim == DIM
    with refused("model.wrong-input", ConfigError, key="model", value=name):
        build_model(name, 4, (32, 48, 3))


def test_a_run_from_texts_has_its_accuracy_before_training(tmp_path, clip_name):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "local.lr=1e-9")
    random = make_tiny_run(tmp_path, "fedavg", *settings, name="random")
    run = make_tiny_run(tmp_path, "fedavg", *settings, "classifier=text", name="text")
    assert "zero_shot" not in random.summary["figures"]
    zero_shot = run.summary["figures"]["zero_shot"]
    # nothing was learned at this rate
    assert zero_shot == {"accuracy": run.summary["accuracy"]["last"], **run.summary["groups"]}
    trained = make_tiny_run(
        tmp_path, "fedavg", *settings[:-1], "classifier=text", "local.lr=0.05", "federation.rounds=8", name="trained"
    )
    assert trained.summary["figures"]["zero_shot"] == zero_shot
    assert trained.summary["accuracy"]["last"] > zero_shot["accuracy"]
    images = load(run.task.test.x)
    exported = raylt.load_model(raylt.export(run)).predict(images).labels
    right = (exported == torch.as_tensor(run.task.test.y)).float().mean().item()
    assert right == pytest.approx(zero_shot["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ["trainable=classifier"]),
        pytest.param("fedavg", ["trainable=classifier", "classifier=text"], marks=pytest.mark.slow),
        ("fedavg", ["trainable=classifier", "classifier=text_cosine"]),
        ("ditto", ["trainable=classifier", "classifier=text_cosine"]),
        pytest.param("fedavg", ["trainable=all"], marks=pytest.mark.slow),
        pytest.param("ditto", ["trainable=lora:2"], marks=pytest.mark.slow),
        ("promptfl", ["trainable=classifier", "classifier=text"]),
    ],
    ids=str,
)
def test_an_exported_model_needs_no_file_of_the_image_text_model(tmp_path, method, settings):
    origin = tmp_path / "clip"
    origin.mkdir()
    save_clip(origin, quick_gelu=True)
    run = make_tiny_run(tmp_path, method, f"model=clip:local-dir:{origin}", f"data.root={tmp_path}", *settings)
    client = None if method != "ditto" else 3
    images = load(run.task.test.x)
    expected = (run.model() if client is None else run.client_model(client)).predict(images).probabilities
    path = raylt.export(run)
    shutil.rmtree(origin)
    for cache in (image_text._loaded, image_text._texts):
        cache.cache_clear()
    assert torch.equal(raylt.load_model(path, client).predict(images).probabilities, expected)


@pytest.mark.parametrize(
    ("trainable", "setting", "value"),
    [
        ("classifier", "mean", [0.3, 0.3, 0.3]),
        pytest.param("all", "resize_mode", "shortest", marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_continue_with_other_preprocessing(tmp_path, trainable, setting, value):
    origin = tmp_path / "clip"
    origin.mkdir()
    save_clip(origin)
    name = f"clip:local-dir:{origin}"
    settings = (f"model={name}", f"trainable={trainable}", f"data.root={tmp_path}")
    run = make_tiny_run(tmp_path, "fedavg", *settings)
    file = origin / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["preprocess_cfg"][setting] = value
    file.write_text(json.dumps(config))
    image_text._loaded.cache_clear()
    with refused("model.weights-mismatch", CheckpointError, key="model", value=name):
        raylt.export(run)
    folders = sorted(path.name for path in run.folder.parent.iterdir())
    with refused("model.weights-mismatch", CheckpointError, key="model", value=name):
        raylt.resume(run, ["federation.rounds=9"], fleet="local")
    assert sorted(path.name for path in run.folder.parent.iterdir()) == folders  # no new run was begun


def test_an_exported_file_with_an_impossible_tower_is_refused(tmp_path, clip_name):
    run = make_tiny_run(tmp_path, "fedavg", f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}")
    content = artefact.read(raylt.export(run))
    tower = content.description["tower"]
    path = tmp_path / "changed.safetensors"
    for field, value, reason in (
        ("width", 33, "cannot build its image tower"),
        ("layers", 10**9, "layers is not a number"),
        ("timm_model_name", "hf-hub:somebody/something", "timm has no model"),
        ("anything", 1, "anything"),
    ):
        changed = {**content.description, "tower": {**tower, "vision": tower["vision"] | {field: value}}}
        artefact.write(path, content.tensors, changed)
        with pytest.raises((CheckpointError, ConfigError), match=reason):
            raylt.load_model(path)


def test_features_of_a_teachers_own_tower_are_the_teachers_features(tmp_path, clip_name):
    teacher = clip_name.removeprefix("clip:")
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", f"method.teacher={teacher}")
    run = make_tiny_run(tmp_path, "fedsm", *settings, "augment=crop_flip")
    of_images = teacher_features(open_client(run.task, run.method, 1, run.config), teacher)
    setup, task = encode(run.setup, run.task)
    of_features = teacher_features(open_client(task, run.method, 1, setup.config), teacher)
    assert of_features.shape == of_images.shape == (len(task.shards[1]), DIM)
    assert of_features.dtype == torch.float16
    # open_clip rounds pixels to 8 bits after resizing
    assert F.cosine_similarity(of_features.float(), of_images.float()).min() > 0.999
    assert torch.allclose(of_features.float().norm(dim=1), torch.ones(len(of_features)), atol=1e-3)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("fedsm", ("method.kd={}",)),
        pytest.param("clip2fl", ("method.kd={}", "method.contrast={}"), marks=pytest.mark.slow),
    ],
)
def test_a_frozen_encoder_can_have_its_own_model_as_the_teacher(tmp_path, clip_name, method, weights):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}")
    teacher = f"method.teacher={clip_name.removeprefix('clip:')}"
    full, none = ([weight.format(value) for weight in weights] for value in (1, 0))
    taught = make_tiny_run(tmp_path, method, *settings, teacher, *full, name="taught")
    untaught = make_tiny_run(tmp_path, method, *settings, teacher, *none, name="untaught")
    assert taught.summary["model_sha256"] != untaught.summary["model_sha256"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_clip(elsewhere)
    with refused("config.conflict", ConfigError, key="trainable", excludes="method.teacher"):
        make_tiny_run(tmp_path, method, *settings, f"method.teacher=local-dir:{elsewhere}", *full, name="other")


def test_a_teacher_that_is_fine_tuned_looks_at_images(tmp_path, clip_name):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "method.finetune=true")
    with refused("config.conflict", ConfigError, key="trainable", excludes="method.teacher"):
        make_tiny_run(tmp_path, "fedsm", *settings, f"method.teacher={clip_name.removeprefix('clip:')}")


def test_a_run_that_goes_on_says_it_once(tmp_path, clip_name):
    settings = (f"model={clip_name}", "trainable=classifier", f"data.root={tmp_path}", "classifier=text")
    make_tiny_run(tmp_path, "fedavg", *settings)
    longer = raylt.resume(tmp_path / "fedavg", ["federation.rounds=3"], fleet="local", quiet=True)
    assert ["zero_shot" in report["figures"] for report in longer.reports] == [False, False, True]


def test_features_of_the_tower_are_computed_once(clip_name, tiny_task, tmp_path):
    config = configure(model=clip_name, trainable="classifier", data={"clients": 6, "root": str(tmp_path)})
    _, task = encode(make_setup(config), tiny_task)
    assert task.test.x.shape == (len(tiny_task.test), 1, DIM)


def test_the_encoder_normalises_in_place_of_the_data(clip_name):
    assert not raylt.config.load(None, ["method=fedavg", f"model={clip_name}"]).data.normalise
    assert raylt.config.load(None, ["method=fedavg", "model=small"]).data.normalise


def test_paths_start_where_the_run_was_made(tmp_path):
    config = raylt.config.load(None, ["method=fedavg", "model=clip:local-dir:here"])
    assert located(config, tmp_path).model == f"clip:local-dir:{tmp_path / 'here'}"
    config = raylt.config.load(None, ["method=fedavg", "model=clip:ViT-B-32/openai:weights.pt"])
    assert located(config, tmp_path).model == f"clip:ViT-B-32/openai:{tmp_path / 'weights.pt'}"


@pytest.mark.parametrize(
    ("settings", "code", "key"),
    [
        (["classifier=text", "model=small"], "config.conflict", "classifier"),
        (["classifier=text_cosine", "model=small"], "config.conflict", "classifier"),
        (["model=clip:ViT-B-32"], "config.unknown-name", "model"),
        (["model=clip:ViT-B-33/openai"], "config.unknown-name", "model"),
        (["model=clip:ViT-B-32/openia"], "config.unknown-name", "model"),
        (["model=clip:ViT-B-32/openai:nowhere.pt"], "model.teacher-unavailable", "model"),
        (["model=clip:local-dir:nowhere"], "model.teacher-unavailable", "model"),
        (["model={name}", "weights=imagenet"], "config.conflict", "weights"),
        (["model={name}", "input=64"], "config.conflict", "input"),
        (["model={name}", "data.normalise=true"], "config.conflict", "model"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, clip_name, settings, code, key):
    with refused(code, ConfigError, key=key):
        make_tiny_run(tmp_path, "fedavg", *(setting.format(name=clip_name) for setting in settings))


def test_images_of_five_channels_are_refused(clip_name):
    with refused("model.wrong-input", ConfigError, key="model"):
        build_model(clip_name, 4, (32, 32, 5))
