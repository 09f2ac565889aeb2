import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from refusals import refused

from raylt.config import Config, allowed, load, load_data, settings, yaml_text
from raylt.errors import ConfigError, UnknownMethod
from raylt.methods import make_method

FEDAVG = "method=fedavg"
NAMES = "the name of a method, as in method.name=sfd, or a mapping with its name and fields"


def method_of(*overrides):
    return make_method(load(None, overrides).method)


def refusal(*overrides: str, path: Path | None = None) -> ConfigError:
    """Return the error that these settings raise when they are read or when the method is made."""
    named = [] if any(text.startswith("method") for text in overrides) else [FEDAVG]
    with pytest.raises(ConfigError) as caught:
        make_method(load(path, [*named, *overrides]).method)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


def facts(error: ConfigError) -> tuple[str, object, object]:
    """Return code, key and value of an error."""
    return error.code, error.details.get("key"), error.details.get("value")


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


# reading of files and settings


def test_only_the_method_has_no_default():
    config = load(None, [FEDAVG])
    assert (config.data.source, config.method, config.model) == ("digits", {"name": "fedavg"}, "small")
    assert config == Config(method="fedavg") == Config(method={"name": "fedavg"})


@pytest.mark.parametrize("overrides", [[], ["data.source=cifar10"], ["federation.rounds=3", "seed=1"]])
def test_a_method_must_be_named(overrides, file):
    for path in (None, file("local: {lr: 0.1}")):
        with refused("config.missing", ConfigError, key="method"):
            load(path, overrides)


def test_a_mistyped_setting_is_reported_before_the_missing_method():
    with refused("config.unknown-key", ConfigError, key="federation.round"):
        load(None, ["federation.round=3"])


def test_a_split_needs_no_method(file):
    assert load_data(None, ["data.clients=7"]).clients == 7
    assert load_data(file("data: {alpha: 0.1}"), ["method=sfd"]).alpha == 0.1
    assert load_data(file("method: {mu: 3}"), ["data.alpha=0.1"]).alpha == 0.1
    with refused("config.out-of-range", ConfigError, key="data.clients", value=0):
        load_data(None, ["data.clients=0"])


def test_a_recipe_is_a_file_by_its_name():
    config = load("recipe:demo", ["seed=3"])
    method = {"name": "sfd", "preset": "quick", "rf_dim": 1000}
    assert (config.seed, config.method) == (3, method)
    assert config == Config(method=method, seed=3)
    with refused("config.unknown-name", ConfigError, key="recipe", value="dem") as caught:
        load("recipe:dem")
    assert "recipe:demo" in str(caught.value)


def test_file_changes_what_it_names_and_overrides_change_the_file(file):
    path = file("seed: 4\ndata: {clients: 7, alpha: 0.1}\nlocal:\n  lr: 0.2\n")
    config = load(path, [FEDAVG, "data.alpha=0.3", "federation.rounds=5"])
    assert (config.seed, config.data.clients, config.data.alpha, config.local.lr) == (4, 7, 0.3, 0.2)
    assert (config.federation.rounds, config.data.imbalance) == (5, Config(method="fedavg").data.imbalance)


def test_last_of_two_overrides_counts():
    assert load(None, [FEDAVG, "seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file_is_the_default(file, text):
    assert load(file(text), [FEDAVG]) == Config(method="fedavg")


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedprox", "method.mu=0.1"],
        ["method.mu=0.1", "method=fedprox"],
        ["method.name=fedprox", "method.mu=0.1"],
        ["method={name: fedprox, mu: 0.1}"],
        ["method={name: fedprox}", "method.mu=0.1"],
    ],
)
def test_method_and_its_fields_can_be_given_in_any_spelling_and_order(overrides):
    assert load(None, overrides).method == {"name": "fedprox", "mu": 0.1}


@pytest.mark.parametrize("text", ["method: fedprox", "method: {name: fedprox}", "method:\n  name: fedprox\n  mu: 3"])
def test_override_changes_a_field_of_the_method_in_the_file(file, text):
    assert load(file(text), ["method.mu=0.1"]).method == {"name": "fedprox", "mu": 0.1}


def test_another_method_drops_the_fields_of_the_one_in_the_file(file):
    path = file("method: {name: fedprox, mu: 3}")
    assert load(path, ["method=fedavg"]).method == {"name": "fedavg"}
    assert load(path).method == {"name": "fedprox", "mu": 3}


@pytest.mark.parametrize("text", ["method: {mu: 3}", "method.mu: 3"])
@pytest.mark.parametrize("override", ["method=fedprox", "method.name=fedprox"])
def test_fields_without_a_method_in_the_file_are_those_of_the_method_that_is_named_later(file, text, override):
    assert load(file(text), [override]).method == {"name": "fedprox", "mu": 3}


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "0.00001", "1.0e-5", ".00001"])
def test_scientific_notation_is_a_number(file, text):
    assert load(None, [FEDAVG, f"local.lr={text}"]).local.lr == 1e-5
    assert load(file(f"local: {{lr: {text}}}"), [FEDAVG]).local.lr == 1e-5
    assert method_of("method=fedprox", f"method.mu={text}") == method_of("method=fedprox", "method.mu=0.00001")
    assert make_method(load(file(f"method: {{name: fedprox, mu: {text}}}")).method).model_dump() == {"mu": 1e-5}


def test_overrides_are_yaml_values():
    config = load(
        None,
        [
            FEDAVG,
            "data.groups=[3, 9]",
            "data.min_size=null",
            "data.download=true",
            "resources.actors=auto",
            "data.source=npz:/a=b.npz",
            "resources.gpus_per_client=0.25",
        ],
    )
    assert config.data.groups == (3, 9)
    assert (config.data.min_size, config.data.download, config.data.source) == (None, True, "npz:/a=b.npz")
    assert (config.resources.actors, config.resources.gpus_per_client) == ("auto", 0.25)


# properties of a Config


def test_config_is_immutable():
    config = load(None, [FEDAVG])
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        config.data.alpha = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_config_pickles():
    config = load(None, ["method=fedprox", "method.mu=0.1", "data.groups=[3, 9]"])
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method=fedprox", "method.mu=1e-5"],
        ["data.groups=[3, 9]", "data.alpha=0.1", "federation.deadline_s=1.5"],
        ["resources.actors=3", "resources.gpus_per_client=0.1", "data.min_size=0", "seed=123456789012345"],
    ],
)
def test_config_survives_being_written_as_yaml(file, overrides):
    config = load(None, [FEDAVG, *overrides])
    assert load(file(yaml.safe_dump(config.model_dump(mode="json")))) == config
    assert load(file(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))) == config


def test_config_imports_no_torch():
    script = "import sys, raylt.config; raylt.config.load(None, ['method=sfd']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=os.environ).returncode == 0


def test_settings_lists_every_key_once_with_its_meaning():
    listed = list(settings())
    keys = [key for key, _ in listed]
    flat = [
        f"{section}.{key}" if isinstance(part, dict) and section != "method" else section
        for section, part in Config(method="fedavg").model_dump().items()
        for key in (part if isinstance(part, dict) and section != "method" else [section])
    ]
    assert keys == flat
    # every description is a sentence
    assert [key for key, field in listed if not (field.description or "").endswith(".")] == []


# refused settings: each error has a code, the key and the value


@pytest.mark.parametrize(
    ("override", "key", "named"),
    [
        ("federation.round=2", "federation.round", ["federation.rounds", "quorum"]),
        ("federaton.rounds=2", "federaton", ["federation"]),
        ("local.epoch=1", "local.epoch", ["local.epochs"]),
        ("rounds=2", "rounds", ["federation.rounds"]),
        ("zzz=1", "zzz", ["seed, data"]),
        ("data.zzz.x=1", "data.zzz", ["source"]),
    ],
)
def test_unknown_setting_is_named_with_the_nearest_setting(override, key, named):
    error = refusal(override)
    assert (error.code, error.details["key"]) == ("config.unknown-key", key)
    assert all(part in str(error) for part in named), error


@pytest.mark.parametrize(
    ("override", "key", "value", "allowed"),
    [
        ("local.epochs=many", "local.epochs", "many", "a number > 0"),
        ("local.batch=1.5", "local.batch", 1.5, "a whole number >= 2"),
        ("local.lr=[1]", "local.lr", "[1]", "a number > 0"),
        ("data.download=perhaps", "data.download", "perhaps", "true or false"),
        ("data.groups=[1]", "data.groups", "[1]", "[number, number] or null"),
        ("data.root=123", "data.root", 123, "text"),
        ("data=null", "data", None, "a mapping"),
        ("data=5", "data", 5, "a mapping"),
        ("seed=null", "seed", None, "a whole number >= 0"),
        ("method=null", "method", None, NAMES),
        ("method=3", "method", 3, NAMES),
        ("method={mu: 3}", "method", "{'mu': 3}", NAMES),
        ("resources.actors=many", "resources.actors", "many", "a whole number >= 1 or auto"),
        ("resources.actors=1.5", "resources.actors", 1.5, "a whole number >= 1 or auto"),
    ],
)
def test_wrong_type_is_refused_with_the_values_that_are_allowed(override, key, value, allowed):
    error = refusal(override)
    assert (error.code in ("config.wrong-type", "config.missing"), *facts(error)[1:]) == (True, key, value)
    assert str(error).startswith(f"{key}: ")
    assert str(error).endswith(f" Give {allowed}."), error


@pytest.mark.parametrize("value", ["true", "false"])
def test_true_is_not_the_number_1_of_a_list_of_values(value):
    error = refusal(f"data.channels={value}")
    assert (error.code, error.details["key"]) == ("config.unknown-name", "data.channels")
    assert str(error).endswith(" Give one of: auto, 1, 3.")


def test_unknown_word_is_refused_with_the_words_that_are_allowed():
    error = refusal("data.tail=globall")
    assert facts(error) == ("config.unknown-name", "data.tail", "globall")
    assert "global, local, mixed" in str(error)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("data.alpha=0", "> 0"),
        ("data.alpha=-0.5", "> 0"),
        ("data.imbalance=0.5", ">= 1 or null"),
        ("data.clients=0", ">= 1 or null"),
        ("data.seed=-1", ">= 0"),
        ("federation.participation=0", "> 0 and <= 1"),
        ("federation.participation=1.01", "> 0 and <= 1"),
        ("federation.quorum=2", "> 0 and <= 1"),
        ("local.momentum=1", ">= 0 and < 1"),
        ("local.batch=1", ">= 2"),
        ("output.keep=1", ">= 2"),
        ("resources.actors=0", ">= 1 or auto"),
        ("resources.clients_per_actor=-2", ">= 1 or auto"),
        ("resources.gpus_per_client=-1", ">= 0 or auto"),
        ("resources.gpus_per_client=-0.1", ">= 0 or auto"),
        ("resources.cpus_per_client=0", "> 0 and <= 256"),
    ],
)
def test_value_out_of_range_is_refused_with_its_range(override, allowed):
    error = refusal(override)
    key, _, value = override.partition("=")
    assert facts(error) == ("config.out-of-range", key, float(value))
    assert str(error).endswith(f"number {allowed}."), error


def test_no_gpu_share_contradicts_a_device_that_must_be_a_gpu():
    error = refusal("resources.device=cuda", "resources.gpus_per_client=0")
    assert facts(error) == ("config.conflict", "resources.gpus_per_client", 0)


FLOATS = [key for key, field in settings() if "float" in str(field.annotation)]


@pytest.mark.parametrize("value", ["nan", ".nan", "inf", "-.inf", ".inf", "1e999"])
@pytest.mark.parametrize("key", FLOATS)
def test_no_setting_takes_nan_or_infinity(key, value):
    error = refusal(f"{key}={value}")
    assert error.details["key"] == key
    assert error.code in (
        "config.out-of-range",
        "config.wrong-type",
        "config.unknown-name",
    )  # YAML reads nan as text and .nan as a number


def test_listed_ranges_leave_out_the_bounds_that_only_catch_slips():
    listed = " ".join(allowed(field) for _, field in settings())
    assert "e+" not in listed
    assert "10000000" not in listed


# YAML 1.1 takes these for true, 8, 90, 1000, 16 and a day


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("federation.rounds", "010"),
        ("federation.rounds", "1:30"),
        ("federation.rounds", "1_000"),
        ("seed", "0x10"),
        ("local.lr", "1_0.5"),
        ("local.lr", "0b1"),
        ("local.lr", "1:30.5"),
        ("data.download", "on"),
        ("data.download", "yes"),
        ("data.download", "1"),
        ("data.download", "'true'"),
        ("federation.rounds", "true"),
        ("federation.rounds", "'3'"),
        ("local.lr", "'0.1'"),
        ("local.lr", "false"),
        ("resources.actors", "'8'"),
        ("resources.actors", "010"),
        ("data.groups", "['1', 2]"),
        ("data.groups", "[010, 20]"),
        ("method.mu", "'0.1'"),
        ("method.mu", "1_0"),
        ("seed", "2020-01-01"),
    ],
)
def test_text_that_looks_like_a_number_or_a_boolean_is_refused(file, setting, value):
    method = "method=fedprox"
    assert refusal(method, f"{setting}={value}").details["key"] == setting
    section, _, name = setting.rpartition(".")
    text = f"{section}: {{{name}: {value}}}" if section else f"{name}: {value}"
    text = text.replace("method: {", "method: {name: fedprox, ")
    with refused("config.wrong-type", ConfigError, key=setting):
        make_method(load(file(text), [] if section == "method" else [method]).method)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed: 1\nseed: 2", "line 2, column 1: the key seed occurs twice"),
        ("local:\n  lr: 0.1\n  batch: 4\n  lr: 0.2", "line 4, column 3: the key lr occurs twice"),
        ("local: &a {lr: 0.1}\ndata: *a", "line 2, column 7: *name is a reference to another value"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "is a reference to another value"),
        ("[" * 100, "more than 30 levels"),
        ("1: 2", "the key 1 is not a name"),
        ("seed: !!int '010'", "does not fit its tag"),
        ("seed: !!python/name:os.system x", "could not determine a constructor"),
        (f"seed: {'9' * 5000}", "300 digits"),
    ],
)
def test_a_file_that_could_be_misread_is_refused_with_its_place(file, text, place):
    error = refusal(path=file(text))
    assert error.code == "file.malformed"
    assert place in str(error)


@pytest.mark.parametrize("value", ["1e5", "010", "yes", "1:30", "0o17", "~", "null", "1.", "<<", "on", "'", "a: b"])
def test_a_text_that_looks_like_something_else_survives_being_written(file, value):
    config = load(None, [FEDAVG]).model_copy(update={"weights": value})
    assert load(file(yaml_text.write(config.model_dump(mode="json")))).weights == value


def test_pipe_device_folder_and_long_file_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "long.yaml").write_text("#" * (2**20 + 1))
    for path, code in (
        (tmp_path / "pipe.yaml", "file.not-plain"),
        (tmp_path / "long.yaml", "file.too-large"),
        (tmp_path, "file.unreadable"),
        (Path("/dev/zero"), "file.not-plain"),
    ):
        error = refusal(path=path)
        assert (error.code, error.details["path"]) == (code, str(path))


@pytest.mark.parametrize(
    "key", [key for key, field in settings() if "int" in str(field.annotation) or "float" in str(field.annotation)]
)
def test_every_number_has_an_upper_bound(key):
    value = "[1, 1e30]" if key == "data.groups" else "1e30"
    assert refusal(f"{key}={value}").details["key"].startswith(key)


def test_settings_that_are_floats_are_found():
    assert {"local.lr", "data.alpha", "federation.deadline_s", "resources.gpus_per_client"} <= set(FLOATS)


@pytest.mark.parametrize("text", ["data: [1, 2", "a: b: c", "\tseed: 1", "seed: 'open", "!!python/object:os.system {}"])
def test_file_that_is_not_yaml_is_refused_with_its_name(file, text):
    path = file(text)
    error = refusal(path=path)
    assert (error.code, error.details["path"]) == ("file.malformed", str(path))


def test_a_binary_file_is_not_yaml(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert refusal(path=path).code == "file.malformed"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[1, 2]", "list"),
        ("hello", "str"),
        ("3", "int"),
        ("[]", "list"),
        ("false", "bool"),
        ("0", "int"),
        ("''", "str"),
    ],
)
def test_file_that_is_no_mapping_is_refused(file, text, kind):
    error = refusal(path=file(text))
    assert error.code == "file.malformed"
    assert f"a {kind}" in str(error)


@pytest.mark.parametrize("text", ["1: 2", "data: {1: 2}", "null: 1", "[1, 2]: 3"])
def test_keys_that_are_no_names_are_refused(file, text):
    refusal(path=file(text))


def test_missing_file_is_named(tmp_path):
    path = tmp_path / "absent.yaml"
    error = refusal(path=path)
    assert (error.code, error.details["path"]) == ("file.not-found", str(path))


def test_a_list_with_too_few_values_is_shown():
    assert facts(refusal("data.groups=[20]")) == ("config.wrong-type", "data.groups", "[20]")
    assert "[20]" in str(refusal("data.groups=[20]"))


def test_a_method_without_fields_is_named():
    error = refusal("method=fedavg", "method.mu=1")
    assert (error.code, error.details["key"]) == ("config.unknown-key", "method.mu")
    assert "fedavg" in str(error)


@pytest.mark.parametrize("override", ["rounds", "other.yaml", "=3", "", "--fleet"])
def test_override_without_a_key_or_a_value_is_refused(override):
    error = refusal(override)
    assert (error.code, error.details["value"]) == ("config.malformed", override)
    assert "key=value" in str(error)


def test_override_that_is_no_yaml_value_is_refused():
    assert facts(refusal("data.groups=[3,")) == ("config.malformed", "data.groups", "[3,")


def test_override_into_a_scalar_is_refused(file):
    error = refusal("seed.x=2", path=file("seed: 1"))
    assert (error.code, error.details["key"]) == ("config.unknown-key", "seed.x")
    assert facts(refusal("seed.x=2")) == ("config.wrong-type", "seed", "{'x': 2}")
    assert refusal("data.alpha.x=2").details["key"] == "data.alpha"


# the method's own fields


def test_method_is_made_with_its_fields():
    assert method_of("method=fedprox", "method.mu=0.1").model_dump() == {"mu": 0.1}
    assert method_of("method=sfd", "method.rf_dim=60").model_dump()["rf_dim"] == 60


def test_unknown_method_is_named_with_the_nearest_known():
    with pytest.raises(UnknownMethod) as caught:
        method_of("method=fedprix")
    assert (caught.value.code, caught.value.details["value"]) == ("config.unknown-name", "fedprix")
    assert "Did you mean fedprox?" in str(caught.value)
    assert facts(refusal("method=zzz")) == ("config.unknown-name", "method", "zzz")


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (["method=fedprox", "method.mou=1"], "config.unknown-key", "method.mou"),
        (["method=fedavg", "method.mu=1"], "config.unknown-key", "method.mu"),
        (["method=fedprox", "method.mu=-1"], "config.out-of-range", "method.mu"),
        (["method=fedprox", "method.mu=large"], "config.wrong-type", "method.mu"),
        (["method=fedprox", "method.mu=.nan"], "config.out-of-range", "method.mu"),
        (["method=fedprox", "method.mu=.inf"], "config.out-of-range", "method.mu"),
    ],
)
def test_field_of_a_method_is_checked(overrides, code, key):
    error = refusal(*overrides)
    assert (error.code, error.details["key"]) == (code, key)


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        (["method=ccvr", "method.lr=0.1"], "method.retrain_lr"),
        (["method=sfd", "method.epochs=5"], "method.retrain_epochs"),
        (["method=sfd", "method.lr=0.1"], None),  # several fields end like this
    ],
)
def test_a_field_without_its_prefix_is_answered_with_the_whole_name(overrides, meant):
    text = str(refusal(*overrides))
    assert f"Did you mean {meant}?" in text if meant else "Did you mean" not in text


@pytest.mark.parametrize("key", ["kd", "retrain_lr"])
def test_an_unknown_key_without_section_is_answered_with_the_fields_place(key):
    text = str(refusal("method=fedsm", f"{key}=0.1"))
    assert f"For a field of the method, use method.{key}." in text


def test_an_unknown_key_that_a_section_has_is_answered_with_it_alone():
    text = str(refusal("method=fedsm", "lr=0.1"))
    assert "Did you mean local.lr?" in text
    assert "method.lr" not in text


def test_method_is_immutable():
    with pytest.raises(ValidationError, match="frozen"):
        method_of("method=fedprox").mu = 2


def test_a_value_that_ends_with_a_colon_is_a_text():
    assert load(None, [FEDAVG, "model=torchvision:"]).model == "torchvision:"


def test_a_file_may_have_dotted_keys_and_empty_sections(file):
    path = file("method: fedprox\nmethod.mu: 0.5\nfederation.rounds: 3\nfederation: {patience: 2}\ndata:\n")
    config = load(path, ["data.clients=4"])
    assert (config.method, config.federation.rounds) == ({"name": "fedprox", "mu": 0.5}, 3)
    assert (config.federation.patience, config.data.clients) == (2, 4)
    path = file("method: fedavg\nfederation.rounds: 3\nfederation: {rounds: 3}\n")
    assert "federation.rounds is in the file twice" in str(refusal(path=path))
    path = file("method: fedavg\nseed:\n")
    assert facts(refusal(path=path)) == ("config.wrong-type", "seed", None)
