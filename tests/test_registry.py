"""A user's own methods, models, sources and augmentations, from a folder outside the package."""

import functools
import hashlib
import shutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

import raylt
from raylt import registry
from raylt.config import load
from raylt.data.augment import color_jitter, crop_flip
from raylt.data.task import build_task
from raylt.errors import ConfigError
from raylt.models import build_model
from raylt.own_code.plugin_file import run_plugin
from raylt.registry import check_origins, load_plugin, origins, register, resolve
from raylt.runs.export import artefact
from raylt.runs.export.export import export
from raylt.studies.study import Study
from raylt.studies.verify import verify_study

SHOPS = Path(__file__).parent / "guests" / "shops.py"
SETTINGS = [
    "method=smoothed",
    "model=tinynet",
    "augment=dim",
    "data.source=stripes",
    "data.clients=3",
    "data.imbalance=1",
    "federation.rounds=2",
    "local.epochs=1",
]


@pytest.fixture(autouse=True)
def own_modules(no_guests):
    """Unload the modules of plugins after each test."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(registry.PLUGIN) or name == "helper":
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def shops(tmp_path):
    """Copy the plugin and its helper to a folder; return the plugin's path."""
    folder = tmp_path / "own"
    shutil.copytree(SHOPS.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "shops.py"


def run(tmp_path, **how):
    return raylt.run(load(None, SETTINGS), out=tmp_path / "runs", name="own", fleet="local", quiet=True, **how)


def test_a_plugin_brings_all_four_kinds_and_a_run_records_them(shops, tmp_path):
    plugins = load_plugin(shops)
    assert {(plugin.kind, plugin.name) for plugin in plugins} == {
        ("method", "smoothed"),
        ("model", "tinynet"),
        ("source", "stripes"),
        ("augmentation", "dim"),
    }
    made = run(tmp_path)
    assert made.summary["accuracy"]["last"] > 0.6
    assert made.config.method == {"name": "smoothed", "smoothing": 0.1}
    assert {record["name"] for record in made.origins} == {"smoothed", "tinynet", "stripes", "dim"}
    assert {record["origin"] for record in made.origins} == {"shops.py"}
    assert all(len(record["sha256"]) == 64 for record in made.origins)
    about = artefact.read(export(made, tmp_path / "own.safetensors")).description
    assert {(record["kind"], record["name"]) for record in about["guests"]} == {
        ("method", "smoothed"),
        ("model", "tinynet"),
    }


def test_a_run_is_not_opened_without_its_plugin_nor_with_a_changed_one(shops, tmp_path):
    load_plugin(shops)
    folder = run(tmp_path).folder
    recorded = raylt.Run.open(folder).origins
    file = export(folder, tmp_path / "own.safetensors")
    registry._plugins.pop(("method", "smoothed"))
    registry.TABLES["method"].pop("smoothed")
    with refused("plugin.missing", ConfigError, name="smoothed"):
        _ = raylt.Run.open(folder).setup
    shops.write_text(shops.read_text() + "\n# another\n")
    load_plugin(shops)
    with refused("plugin.changed", ConfigError):
        check_origins(recorded, folder)
    with refused("plugin.changed", ConfigError):
        raylt.Run.open(folder).resume(fleet="local", quiet=True)
    with refused("plugin.changed", ConfigError):
        _ = raylt.Run.open(folder).task
    with refused("plugin.changed", ConfigError):
        raylt.load_model(file)


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("from near import SCALE", "near.py"),
        ("import near", "near.py"),
        ("def late():\n    import near", "near.py"),
        ("import first", "near.py"),  # which imports it
        ("import pack.near", "pack/near.py"),
        ("from pack import near", "pack/near.py"),
        ("import pack.inner", "pack/near.py"),
        ("import whole", "whole/near.py"),
    ],
)
def test_the_hash_of_a_plugin_covers_the_files_that_it_imports(tmp_path, imports, name):
    text = "import raylt\n{}\ndef scaled(classes, shape): ...\nraylt.register(scaled, kind='model')\n"
    for folder in ("pack", "whole"):
        (tmp_path / folder).mkdir()
    (tmp_path / "first.py").write_text("import near\n")
    (tmp_path / "pack/inner.py").write_text("from .near import SCALE\n")
    (tmp_path / "whole/__init__.py").write_text("from .near import SCALE\n")
    for file in ("near.py", "pack/near.py", "whole/near.py", "other.py"):
        (tmp_path / file).write_text("SCALE = 1\n")
    hashes = []
    for changed in (None, name, "other.py"):
        if changed:
            (tmp_path / changed).write_text("SCALE = 2\n")
        file = tmp_path / "own.py"
        file.write_text(text.format(imports))
        hashes += [registry._source_hash(run_plugin(file))]
        for module in ("near", "first", "pack", "pack.near", "pack.inner", "whole", "whole.near"):
            sys.modules.pop(module, None)
    before, with_changed_import, with_other_change = hashes
    assert before != with_changed_import == with_other_change


def test_the_hash_of_a_plugin_without_imports_of_its_own_is_that_of_its_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import json\nimport raylt\n")
    assert registry._source_hash(run_plugin(file)) == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_study_is_not_read_without_the_plugin_of_an_arm_which_is_named(shops, tmp_path):
    load_plugin(shops)
    definition = {
        "name": "study",
        "base": {"data": {"clients": 3}, "federation.rounds": 1, "local.epochs": 1, "model": "small"},
        "arms": {"fedavg": "fedavg", "mine": "smoothed"},
        "seeds": 1,
    }
    folder = raylt.study(definition, out=tmp_path, parallel=1).folder
    registry._plugins.pop(("method", "smoothed"))
    registry.TABLES["method"].pop("smoothed")
    with refused("plugin.missing", ConfigError, name="smoothed") as caught:
        Study.open(folder)
    assert str(caught.value) == (
        f"{folder}/mine/seed-0: the run's method 'smoothed' is not registered (shops.py). Give --plugin shops.py again."
    )
    (finding,) = [each for each in verify_study(folder) if not each.checked]
    assert finding.detail == str(caught.value)


def test_models_need_no_plugin_that_only_makes_the_task(shops, tmp_path):
    load_plugin(shops)
    register(lambda labels, clients, *_: np.array_split(np.arange(len(labels)), clients), "thirds", kind="partition")
    settings = ["method=fedavg", "model=small", "data.source=stripes", "data.partition=thirds", "data.clients=3"]
    config = load(None, [*settings, "data.imbalance=1", "federation.rounds=1", "local.epochs=1"])
    folder = raylt.run(config, out=tmp_path / "runs", name="own", fleet="local", quiet=True).folder
    for kind, name in (("source", "stripes"), ("partition", "thirds")):
        registry._plugins.pop((kind, name))
        registry.TABLES[kind].pop(name)
    run = raylt.Run.open(folder)
    assert {record["name"] for record in run.origins} == {"stripes", "thirds"}  # not the other three of the plugin
    image = np.full((1, 8, 8, 1), 100, np.uint8)
    model = raylt.load_model(export(folder, tmp_path / "model.safetensors"))
    assert model.predict(image).shares == run.model().predict(image).shares
    for needs_data in (lambda: run.task, lambda: run.resume(fleet="local", quiet=True)):
        with refused("plugin.missing", ConfigError):
            needs_data()


def test_a_run_of_raylts_own_parts_records_no_origins(tmp_path):
    made = raylt.run("fedavg", rounds=1, epochs=1, out=tmp_path, name="plain", fleet="local", quiet=True)
    assert made.origins == []
    assert not (made.folder / "origins.json").exists()


def test_values_come_through_the_library(tmp_path):
    class Mine(raylt.Method):
        name = "mine"
        paper = "for tests"
        __annotations__ = {}

    def two_layers(classes, shape):
        return raylt.SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), 8, classes)

    made = raylt.run(
        Mine(),
        model=two_layers,
        data="digits",
        rounds=1,
        clients=3,
        out=tmp_path,
        name="values",
        fleet="local",
        quiet=True,
    )
    assert made.config.model == "two_layers"
    assert {(r["kind"], r["name"], r["origin"]) for r in made.origins} == {
        ("method", "mine", "value"),
        ("model", "two_layers", "value"),
    }


def test_a_partial_function_is_recorded_with_the_file_of_its_function(tmp_path):
    def net(width, classes, shape):
        raise NotImplementedError

    try:
        assert raylt.register(functools.partial(net, 3), "narrow", kind="model") == "narrow"
        raylt.register(functools.partial(net, 4), "narrow", kind="model")  # the same function again
        plugin = registry._plugins["model", "narrow"]
        assert plugin.sha256 == registry._source_hash(sys.modules[__name__])
        assert raylt.register(functools.partial(net, 5), kind="model") == "net"
    finally:
        for name in ("narrow", "net"):
            registry._plugins.pop(("model", name), None)
            registry.TABLES["model"].pop(name, None)


@pytest.mark.parametrize(("recorded", "now"), [(None, "0" * 64), ("0" * 64, None), (None, None)])
def test_a_value_of_a_notebook_has_no_hash_to_compare(monkeypatch, tmp_path, recorded, now):
    monkeypatch.setitem(registry._plugins, ("model", "own"), registry.Plugin("model", "own", None, "value", now))
    record = {"kind": "model", "name": "own", "origin": "value", "sha256": recorded}
    check_origins([record], tmp_path)
    with refused("plugin.missing", ConfigError, name="other") as caught:
        check_origins([record | {"name": "other"}], tmp_path)
    assert "raylt.register" in str(caught.value)


def test_installed_packages_offer_theirs_by_entry_points(monkeypatch, shops):
    monkeypatch.syspath_prepend(str(shops.parent))
    offered = {
        ("raylt.models", "wide"): "shops:tinynet",
        ("raylt.models", "clip"): "shops:tinynet",
        ("raylt.methods", "smoothed"): "shops:Smoothed",
        ("raylt.sources", "halves"): "shops:stripes",
        ("raylt.models", "broken"): "shops:nothing",
    }
    monkeypatch.setattr(
        registry,
        "entry_points",
        lambda group, name: [EntryPoint(name, offered[group, name], group)] if (group, name) in offered else [],
    )
    setup = resolve(load(None, ["method=smoothed", "model=wide"]))
    assert type(setup.method).__name__ == "Smoothed"
    assert setup.model(2, (8, 8, 1)).dim == 16
    assert resolve(load(None, ["method=smoothed", "model=clip"])).model(2, (8, 8, 1)).dim == 16
    registry.seek(load(None, ["method=fedavg", "data.source=halves"]))
    assert build_task(load(None, ["method=fedavg", "data.source=halves", "data.imbalance=1"]).data).classes == 2
    assert {record["origin"] for record in origins(load(None, ["method=smoothed", "model=wide"]))} == {
        "shops:Smoothed",
        "shops:tinynet",
    }
    with refused("plugin.failed", ConfigError, name="broken"):
        resolve(load(None, ["method=fedavg", "model=broken"]))


@pytest.mark.parametrize("model", ["small", "timm:resnet18", "torchvision:resnet18", "clip:ViT-B-32/openai"])
def test_installed_packages_are_not_searched_for_what_raylt_has_itself(monkeypatch, model):
    monkeypatch.setattr(registry, "entry_points", lambda group, name: pytest.fail(f"searched for {name} in {group}"))
    resolve(load(None, ["method=fedavg", "data.source=folder:shops", f"model={model}"]))


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (None, "file.not-found", "own.py"),
        ("x = 1\n", "plugin.no-method", "own.py"),
        ("raise OSError('no net')\n", "plugin.failed", "OSError: no net"),
        ("def f(:\n", "plugin.failed", "SyntaxError"),
        ("import raylt\nraylt.register(3)\n", "plugin.wrong-type", "(3)"),
        ("import raylt\nraylt.register(print)\n", "plugin.wrong-type", "print"),
        ("import raylt\ndef small(c, s): ...\nraylt.register(small, kind='model')\n", "plugin.name-taken", "'small'"),
        (
            "import raylt\nclass A(raylt.Method):\n    name = 'fedavg'\n    paper = 'x'\n    __annotations__ = {}\n",
            "plugin.name-taken",
            "'fedavg'",
        ),
        ("import raylt\nraylt.register(print, kind='modell')\n", "plugin.wrong-type", "Did you mean model?"),
        ("import raylt\ndef digits(c): ...\nraylt.register(digits, kind='source')\n", "plugin.name-taken", "'digits'"),
    ],
)
def test_plugins_that_cannot_be_used_are_refused_in_one_line(tmp_path, text, code, named):
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(text)
    with refused(code, ConfigError) as raised:
        load_plugin(file)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_notebook_cell_that_is_run_again_replaces_its_method():
    def define(paper):
        class Again(raylt.Method):
            name = "again"
            __annotations__ = {}

        Again.paper = paper
        return Again

    register(define("first"))
    register(define("second"))
    assert registry.TABLES["method"]["again"].paper == "second"


def test_a_model_that_is_none_is_named():
    register(lambda classes, shape: nn.Linear(3, 3), "nothing", kind="model")
    task = build_task(load(None, ["method=fedavg"]).data)
    with pytest.raises(ConfigError, match=r"^model: .*Linear.*raylt\.SplitModel"):
        resolve(load(None, ["method=fedavg", "model=nothing"])).new_model(task.spec)


@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("torchvision:resnet18", (32, 32, 3), 512),
        ("torchvision:squeezenet1_1", (64, 64, 3), None),
        ("torchvision:mobilenet_v3_small", (32, 32, 1), 1024),
        ("timm:resnet10t", (32, 32, 1), 512),
    ],
)
def test_models_of_other_libraries(name, shape, dim):
    if dim is None:
        with pytest.raises(ConfigError, match="does not end in a linear layer"):
            build_model(name, 7, shape)
        return
    model = build_model(name, 7, shape)
    assert model.dim == dim
    assert model(torch.zeros(2, shape[2], *shape[:2])).shape == (2, 7)
    assert {entry.partition(".")[0] for entry in model.state_dict()} == {"encoder", "classifier"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torchvision:resnet19", "torchvision has no classifier 'resnet19'"),
        ("timm:resnet19x", "timm has no model 'resnet19x'"),
        ("timm:resnet18.nosuch", r"resnet18\.nosuch .*Invalid pretrained tag .*list_pretrained\('resnet18\*'\)"),
        ("keras:x", "Give a built-in one .*torchvision:NAME, timm:NAME or clip:NAME"),
        (
            "torchvision:vit_b_16",
            r"does not accept images of 32x32 .*224 but got 32\!\). Set input=224, or use another model",
        ),
        ("timm:vit_tiny_patch16_224", r"does not accept images of 32x32 .* Set input=224, or use another model"),
    ],
)
def test_models_of_other_libraries_that_cannot_be_had_are_named(name, problem):
    with pytest.raises(ConfigError, match=problem):
        build_model(name, 7, (32, 32, 3))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(32, 32, 3), (32, 32, 1), (32, 32, 4)])
def test_a_torchvision_model_starts_from_a_file_but_for_its_classifier(tmp_path, shape):
    from torchvision.models import resnet18

    torch.manual_seed(1)
    theirs = resnet18(weights=None)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    model = build_model("torchvision:resnet18", 7, shape, str(tmp_path / "theirs.pth"))
    own = model.encoder.state_dict()
    assert torch.equal(own["body.layer4.1.conv2.weight"], theirs.layer4[1].conv2.weight)
    assert model.classifier.weight.shape == (7, 512)
    x = torch.rand(2, shape[2], 32, 32)
    if shape[2] == 3:
        assert torch.equal(own["body.conv1.weight"], theirs.conv1.weight)
    elif shape[2] == 1:  # a grey image acts as if all three channels held it
        first = torch.nn.functional.conv2d(x.expand(2, 3, 32, 32), theirs.conv1.weight, stride=2, padding=3)
        assert torch.allclose(model.encoder.body.conv1(x), first, atol=1e-5)
    else:
        assert own["body.conv1.weight"].shape == (64, 4, 7, 7)
        assert torch.allclose(own["body.conv1.weight"][:, 3], theirs.conv1.weight[:, 0] * 0.75)


def test_a_timm_model_starts_from_a_file_but_for_its_classifier(tmp_path):
    import timm

    torch.manual_seed(1)
    theirs = timm.create_model("resnet10t", num_classes=1000)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    model = build_model("timm:resnet10t", 7, (32, 32, 1), str(tmp_path / "theirs.pth"))
    assert torch.equal(model.encoder.state_dict()["body.layer4.0.conv2.weight"], theirs.layer4[0].conv2.weight)
    assert model.classifier.weight.shape == (7, 512)


def test_weights_of_a_model_with_classifiers_on_the_way_are_taken_without_them(tmp_path):
    from torchvision.models import googlenet

    theirs = googlenet(weights=None, init_weights=False)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    model = build_model("torchvision:googlenet", 7, (32, 32, 3), str(tmp_path / "theirs.pth"))
    assert torch.equal(model.encoder.state_dict()["body.conv1.conv.weight"], theirs.conv1.conv.weight)
    assert not any("aux" in name for name in model.state_dict())


def test_a_distilled_model_starts_from_a_file_but_for_both_its_classifiers(tmp_path):
    import timm

    theirs = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=1000)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    model = build_model("timm:deit_tiny_distilled_patch16_224", 7, (224, 224, 3), str(tmp_path / "theirs.pth"))
    assert torch.equal(model.encoder.state_dict()["body.dist_token"], theirs.dist_token)


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet10t"])
def test_weights_that_cannot_be_had_are_one_line(tmp_path, name):
    torch.save({"something": torch.zeros(2)}, tmp_path / "other.pth")
    (tmp_path / "no.pth").write_text("no weights")
    for file, problem in (("gone.pth", "no such file"), ("other.pth", "^weights: "), ("no.pth", "^weights: ")):
        with pytest.raises(ConfigError, match=problem) as raised:
            build_model(name, 7, (32, 32, 3), str(tmp_path / file))
        assert "\n" not in str(raised.value)


def test_several_augmentations_are_joined_and_each_must_exist(tmp_path):
    both = resolve(load(None, ["method=fedavg", "augment=crop_flip+color_jitter"])).augment
    x, y = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8), torch.arange(4)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    expected = color_jitter(*crop_flip(x, y, generators[0]), generators[0])[0]
    assert torch.equal(both(x, y, generators[1])[0], expected)
    with refused("config.unknown-name", ConfigError, key="augment", value="colour"):
        resolve(load(None, ["method=fedavg", "augment=crop_flip+colour"]))
    maps = load(
        None,
        [
            "method=fedavg",
            "augment=crop_flip+rand_augment",
            "model=lraspp",
            "data.source=shapes",
            "data.partition=iid",
            "data.imbalance=1",
        ],
    )
    setup, spec = resolve(maps), build_task(maps.data).spec
    with refused("config.conflict", key="augment", excludes="segmentation"):
        setup.check(spec, setup.new_model(spec))


def test_timm_models_take_arguments_by_their_name():
    pytest.importorskip("timm")
    name = "timm:vit_tiny_patch16_224,img_size=32,patch_size=8,depth=1"
    model = build_model(name, 7, (32, 32, 1))
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    with refused("model.wrong-input", ConfigError, key="model") as caught:
        build_model("timm:vit_tiny_patch16_224,depth=1", 7, (32, 32, 1))
    assert "img_size=32" in str(caught.value)


@pytest.mark.parametrize("argument", ["img_size", "num_classes=3", "a b=1", "img_size=[1"])
def test_arguments_of_timm_that_cannot_be_given_are_refused(argument):
    pytest.importorskip("timm")
    with refused("config.malformed", ConfigError, key="model", argument=argument):
        build_model(f"timm:vit_tiny_patch16_224,{argument}", 7, (32, 32, 1))


def test_an_argument_that_a_timm_model_lacks_is_refused():
    pytest.importorskip("timm")
    with refused("config.conflict", ConfigError, key="model"):
        build_model("timm:resnet10t,img_size=32", 7, (32, 32, 1))
