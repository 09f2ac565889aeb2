import pytest

from raylt.config import Config
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, in_range
from raylt.methods import METHODS, make_method
from tune.axes import Grid, parse, written
from tune.space import combinations, configure, contains, draw, separate, space, spaces_of

LR = {"local.lr": "loguniform(0.01, 0.3)"}


@pytest.mark.parametrize("name", METHODS)
def test_every_draw_of_every_methods_space_is_a_valid_configuration(name):
    its = space(Config(method={"name": name}), {**LR, "data.seed": "grid(0, 1, 2)", "local.epochs": "choice(1, 2)"})
    assert its.keys() >= {f"method.{field}" for field in METHODS[name].model_fields}
    for index in range(60):
        values = draw(its, 0, name, index)
        assert contains(its, values)
        config = configure(Config(method="sfd"), name, values)
        assert configure(config, name, {}) == config
        assert Config.model_validate_json(config.model_dump_json()) == config
        method = make_method(config.method)
        assert all(getattr(method, key[7:]) == value for key, value in values.items() if key.startswith("method."))


@pytest.mark.parametrize("name", METHODS)
def test_every_default_lies_in_its_range(name):
    its = space(Config(method={"name": name}))
    assert all(in_range(METHODS[name].model_fields[key[7:]].default, axis) for key, axis in its.items()
               if not isinstance(axis, Grid))


@pytest.mark.parametrize(("text", "axis"), [
    ("choice(0.1,1)", Choice(0.1, 1)), ("choice(a, b)", Choice("a", "b")), ("choice(true, null)", Choice(True, None)),
    ("uniform(0, 1)", Uniform(0.0, 1.0)), ("loguniform(1e-4,0.3)", LogUniform(1e-4, 0.3)), ("grid(0,1,2)",
                                                                                           Grid((0, 1, 2))),
    ("uniform(-1,1)", Uniform(-1.0, 1.0)), ("0.1", None), ("folder:a(b)", None), ("", None), ("choice", None)])
def test_parse_reads_ranges_and_leaves_other_values(text, axis):
    assert parse(text) == axis
    if axis is not None:
        assert parse(written(axis)) == axis


@pytest.mark.parametrize(("text", "says"), [
    ("chioce(1)", "no such range"), ("choice()", "one value"), ("choice(1,1)", "twice"), ("uniform(1)", "two numbers"),
    ("uniform(1,0)", "low < high"), ("loguniform(0,1)", "0 < low"), ("uniform(a,b)", "two numbers"),
    ("uniform(0,.inf)", "two numbers"), ("choice([1],2)", "plain"), ("choice(1,{)", "plain"),
    ("uniform(true,2)", "two numbers"), ("choice(__import__('os'))", "")])
def test_parse_refuses_in_one_line(text, says):
    if not says:        # words are words: nothing is evaluated
        assert parse(text) == Choice("__import__('os')")
        return
    with pytest.raises(ConfigError, match=says) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_fixed_fields_are_not_searched_and_given_ranges_stand_before_declared_ones():
    config = Config(method={"name": "fedprox", "mu": 0.5})
    assert space(config) == {}
    assert space(Config(method={"name": "fedprox"}), {"method.mu": "choice(0.1, 1)"}) == {"method.mu": Choice(0.1, 1)}


@pytest.mark.parametrize(("ranges", "says"), [
    ({"local.lrr": "uniform(0,1)"}, "lr"), ({"local.batch": "uniform(2,9)"}, "local.batch"),
    ({"method.nu": "uniform(0,1)"}, "mu"), ({"local.lr": "uniform(-1,1)"}, "local.lr"),
    ({"nothing.lr": "uniform(0,1)"}, "no such setting"), ({"resources.actors": "choice(1,2)"}, "decides no result"),
    ({"local.lr": "0.1"}, "not a range")])
def test_ranges_that_a_setting_cannot_have_are_refused(ranges, says):
    with pytest.raises(ConfigError, match=says):
        space(Config(method={"name": "fedprox"}), ranges)


def test_fields_restrict_what_is_searched_of_a_method():
    lr, config = {"local.lr": Uniform(0.1, 0.2)}, Config(method={"name": "fedprox"})
    assert space(config, lr, fields=[]) == lr
    assert spaces_of(["fedprox"], lr, config, ["mu"]).keys() == {"fedprox"}
    assert space(config, lr, fields=["mu"]).keys() == {"method.mu", "local.lr"}
    with pytest.raises(ConfigError, match=r"method\.nu"):
        spaces_of(["fedprox"], lr, config, ["mu", "nu"])


def test_separate_tells_ranges_from_values():
    assert separate(["local.lr=uniform(0,1)", "method=fedprox"]) == (["method=fedprox"], {"local.lr": Uniform(0, 1)})


def test_ranges_of_a_field_go_to_the_methods_that_have_it():
    mu, lr = {"method.mu": Uniform(0, 1)}, {"local.lr": Uniform(0.1, 0.2)}
    assert spaces_of(["fedavg", "fedprox"], mu | lr, Config(method="sfd")) == {"fedavg": lr, "fedprox": mu | lr}
    with pytest.raises(ConfigError, match="nothing to search"):
        spaces_of(["fedavg"], {}, Config(method="sfd"))
    with pytest.raises(ConfigError, match="none of"):
        spaces_of(["fedavg", "fedprox"], {"method.nu": Uniform(0, 1)}, Config(method="sfd"))


def test_a_draw_is_used_once_for_each_value_of_a_grid():
    its = space(Config(method={"name": "fedprox"}), {"data.seed": "grid(0,1,2)"})
    drawn = [draw(its, 0, "fedprox", i) for i in range(6)]
    assert [d["data.seed"] for d in drawn] == [0, 1, 2, 0, 1, 2]
    assert len({d["method.mu"] for d in drawn}) == 2


def test_combinations_take_the_ends_of_a_range():
    found = combinations({"a": Choice(1, 2), "b": LogUniform(0.01, 1.0)})
    assert found == [{"a": a, "b": b} for a in (1, 2) for b in (0.01, 0.1, 1.0)]
