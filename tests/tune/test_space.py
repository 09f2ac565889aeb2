import pytest
from refusals import refused

from raylt.config import Config, check
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, in_range
from raylt.methods import METHODS, make_method
from tune.space import Grid, combinations, configure, draw, parse, separate, space, spaces_of, to_text, value_at

LR = {"local.lr": "loguniform(0.01, 0.3)"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", METHODS)
def test_every_draw_of_every_methods_space_is_a_valid_configuration(name):
    method_space = space(
        Config(method={"name": name}), {**LR, "data.seed": "grid(0, 1, 2)", "local.epochs": "choice(1, 2)"}
    )
    assert method_space.keys() >= {f"method.{field}" for field in METHODS[name].model_fields}
    for index in range(25):
        values = draw(method_space, 0, name, index)
        assert values.keys() == method_space.keys()
        for key, axis in method_space.items():
            assert values[key] in axis.values if isinstance(axis, Grid) else in_range(values[key], axis)
        config = configure(Config(method="sfd"), name, values)
        assert configure(config, name, {}) == config
        assert Config.model_validate_json(config.model_dump_json()) == config
        method = make_method(config.method)
        assert all(getattr(method, key[7:]) == value for key, value in values.items() if key.startswith("method."))


@pytest.mark.parametrize("name", METHODS)
def test_every_default_lies_in_its_range(name):
    method_space = space(Config(method={"name": name}))
    assert all(
        in_range(METHODS[name].model_fields[key[7:]].default, axis)
        for key, axis in method_space.items()
        if not isinstance(axis, Grid)
    )


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("choice(0.1,1)", Choice(0.1, 1)),
        ("choice(a, b)", Choice("a", "b")),
        ("choice(true, null)", Choice(True, None)),
        ("uniform(0, 1)", Uniform(0.0, 1.0)),
        ("loguniform(1e-4,0.3)", LogUniform(1e-4, 0.3)),
        ("grid(0,1,2)", Grid((0, 1, 2))),
        ("uniform(-1,1)", Uniform(-1.0, 1.0)),
        ("0.1", None),
        ("folder:a(b)", None),
        ("", None),
        ("choice", None),
    ],
)
def test_parse_reads_ranges_and_leaves_other_values(text, axis):
    assert parse(text) == axis
    if axis is not None:
        assert parse(to_text(axis)) == axis


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("chioce(1)", "Use choice(a, b, ...)"),
        ("choice()", "Give at least one"),
        ("choice(1,1)", "Give each value once"),
        ("uniform(1)", "Use uniform(low, high)"),
        ("uniform(1,0)", "Give low < high"),
        ("uniform(1,1)", "Give low < high"),
        ("loguniform(0,1)", "Give 0 < low < high"),
        ("uniform(a,b)", "Use uniform(low, high)"),
        ("uniform(0,.inf)", "Use uniform(low, high)"),
        ("choice([1],2)", "Separate numbers or words"),
        ("choice(1,{)", "Separate numbers or words"),
        ("uniform(true,2)", "Use uniform(low, high)"),
    ],
)
def test_parse_refuses_with_a_remedy_in_one_line(text, remedy):
    with refused("search.bad-range", ConfigError, value=text) as caught:
        parse(text)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parse_evaluates_no_code():
    assert parse("choice(__import__('os'))") == Choice("__import__('os')")


def test_fixed_fields_are_not_searched_and_given_ranges_replace_declared_ones():
    config = Config(method={"name": "fedprox", "mu": 0.5})
    assert space(config) == {}
    assert space(Config(method={"name": "fedprox"}), {"method.mu": "choice(0.1, 1)"}) == {"method.mu": Choice(0.1, 1)}


@pytest.mark.parametrize(
    ("ranges", "setting"),
    [
        ({"local.lrr": "uniform(0,1)"}, "lr"),
        ({"local.batch": "uniform(2,9)"}, "local.batch"),
        ({"method.nu": "uniform(0,1)"}, "mu"),
        ({"local.lr": "uniform(-1,1)"}, "local.lr"),
    ],
)
def test_ranges_that_a_setting_cannot_have_are_refused(ranges, setting):
    with pytest.raises(ConfigError, match=setting):
        space(Config(method={"name": "fedprox"}), ranges)


@pytest.mark.parametrize(
    ("key", "text", "code"),
    [
        ("nothing.lr", "uniform(0,1)", "config.unknown-key"),
        ("resources.actors", "choice(1,2)", "search.not-searchable"),
        ("output.keep", "choice(1,2)", "search.not-searchable"),
        ("method", "choice(sfd,fedavg)", "search.not-searchable"),
        ("local.lr", "0.1", "search.bad-range"),
    ],
)
def test_ranges_of_what_cannot_be_searched_are_refused(key, text, code):
    with refused(code, ConfigError, key=key):
        space(Config(method={"name": "fedprox"}), {key: text})


def test_a_range_of_the_method_is_refused_before_the_method_is_missed():
    with refused("search.not-searchable", ConfigError, key="method"):
        separate(["method=choice(sfd,fedavg)"])


def test_fields_restrict_what_is_searched_of_a_method():
    lr, config = {"local.lr": Uniform(0.1, 0.2)}, Config(method={"name": "fedprox"})
    assert space(config, lr, fields=[]) == lr
    assert spaces_of(["fedprox"], lr, config, ["mu"]).keys() == {"fedprox"}
    assert space(config, lr, fields=["mu"]).keys() == {"method.mu", "local.lr"}
    with refused("search.unknown-field", ConfigError, key="method.nu"):
        spaces_of(["fedprox"], lr, config, ["mu", "nu"])


def test_separate_splits_ranges_from_values():
    assert separate(["local.lr=uniform(0,1)", "method=fedprox"]) == (["method=fedprox"], {"local.lr": Uniform(0, 1)})


def test_ranges_of_a_field_go_to_the_methods_that_have_it():
    mu, lr = {"method.mu": Uniform(0, 1)}, {"local.lr": Uniform(0.1, 0.2)}
    assert spaces_of(["fedavg", "fedprox"], mu | lr, Config(method="sfd")) == {"fedavg": lr, "fedprox": mu | lr}
    with refused("search.nothing-to-search", ConfigError):
        spaces_of(["fedavg"], {}, Config(method="sfd"))
    with refused("search.unknown-field", ConfigError, key="method.nu"):
        spaces_of(["fedavg", "fedprox"], {"method.nu": Uniform(0, 1)}, Config(method="sfd"))


def test_a_draw_is_used_once_for_each_value_of_a_grid():
    method_space = space(Config(method={"name": "fedprox"}), {"data.seed": "grid(0,1,2)"})
    drawn = [draw(method_space, 0, "fedprox", i) for i in range(6)]
    assert [d["data.seed"] for d in drawn] == [0, 1, 2, 0, 1, 2]
    assert len({d["method.mu"] for d in drawn}) == 2


def test_a_draw_is_used_with_every_combination_of_several_grids():
    two_grids = {"data.seed": Grid((0, 1)), "local.epochs": Grid((1, 2, 3, 4)), "local.lr": Uniform(0.0, 1.0)}
    drawn = [tuple(draw(two_grids, 0, "fedavg", i).values()) for i in range(16)]
    assert {values[:2] for values in drawn[:8]} == {(seed, epochs) for seed in (0, 1) for epochs in (1, 2, 3, 4)}
    assert [len({values[2] for values in part}) for part in (drawn[:8], drawn[8:], drawn)] == [1, 1, 2]


def test_combinations_take_the_ends_of_a_range():
    trials = combinations({"a": Choice(1, 2), "b": LogUniform(0.01, 1.0)})
    assert trials == [{"a": a, "b": b} for a in (1, 2) for b in (0.01, 0.1, 1.0)]


def test_a_drawn_float_has_four_digits_and_lies_in_its_range():
    assert value_at(Uniform(0.0, 1.0), 0.123456789) == 0.1235
    assert value_at(LogUniform(0.01, 1.0), 0.5) == 0.1
    # 0.12344 and 0.65436 round to values outside
    assert [value_at(Uniform(0.12344, 0.65436), u) for u in (0.0, 1.0)] == [0.12344, 0.65436]


def test_settings_and_methods_are_drawn_by_random_numbers_of_their_own():
    space = {"local.lr": Uniform(0.0, 1.0), "local.momentum": Uniform(0.0, 1.0)}
    values = [value for method in ("fedavg", "fedprox") for value in draw(space, 0, method, 0).values()]
    assert len(set(values)) == 4


def test_a_trial_keeps_the_given_fields_of_its_method_and_names_all():
    base = Config(method={"name": "fedprox", "mu": 0.5})
    assert configure(base, "fedprox", {"local.lr": 0.1}).method == {"name": "fedprox", "mu": 0.5}
    assert configure(base, "moon", {}).method.keys() == {"name", *METHODS["moon"].model_fields}
    assert configure(Config(method={"name": "fedprox"}), "fedprox", {}).method.keys() == {"name", "mu"}


def test_fields_that_are_named_apply_to_the_methods_that_have_them():
    config = Config(method={"name": "fedavg"})
    spaces = spaces_of(["fedprox", "fedavg"], {"local.lr": Uniform(0.01, 0.1)}, config, ["mu"])
    assert {method: list(space) for method, space in spaces.items()} == {
        "fedprox": ["method.mu", "local.lr"],
        "fedavg": ["local.lr"],
    }


def test_a_number_and_a_truth_value_are_two_choices():
    assert [type(value) for value in parse("choice(1, true, 1.0)").values] == [int, bool, float]


@pytest.mark.parametrize(("start", "value"), [(None, 24), (24, None)])
def test_a_trial_derives_the_normalisation_from_its_own_input(start, value):
    base = check(Config, {"method": {"name": "fedavg"}, "model": "torchvision:resnet18", "input": start})
    trial = configure(base, "fedavg", {"input": value})
    assert base.data.normalise is (start is None)
    assert trial.data.normalise is (value is None)
    assert configure(base, "fedavg", {"data.normalise": True, "input": 24}).data.normalise is True
