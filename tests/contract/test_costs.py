"""The measured costs of a method: bytes, passes over the samples, and the parts that the server sees."""

import pytest
from small_runs import QUICK

from raylt import tree
from raylt.config import Config
from raylt.contract import costs
from raylt.contract.case import pixels
from raylt.contract.costs import measure, relative_cost, server_multiplications, server_steps
from raylt.core.method import Method
from raylt.methods import METHODS
from raylt.models import MODELS, build_model

OURS = {name: method for name, method in METHODS.items() if method.__module__.startswith("raylt.")}


def calls(method: Method, cut: bool = True):
    return measure(method, MODELS["small"], (8, 8, 1), 4, cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_no_client_is_asked_after_the_servers_own_work_in_the_last_phase(name):
    """The measurement ends at the server's own work and would miss a later call."""
    method = OURS[name](**QUICK.get(name, {}))
    assert calls(method, cut=True) == calls(method, cut=False)


def test_fedavgs_bytes_are_the_models_and_one_number():
    for model, image in (("small", (8, 8, 1)), ("resnet8", (8, 8, 3))):
        (one,) = measure(METHODS["fedavg"](), MODELS[model], image, 10)
        size = tree.nbytes(dict(build_model(model, 10, image).state_dict()))
        assert (one.when, one.name, one.up, one.down) == ("round", "train", size + 8, size)
        assert one.sends == {"model": "mean", "loss": "mean"}
        assert (one.trained, one.read) == (1, 0)


@pytest.mark.parametrize(
    ("name", "fields", "passes"),
    [
        ("fedprox", {}, [(1, 0)]),
        ("ditto", {}, [(2, 0)]),
        ("fedrep", {"head_epochs": 4}, [(1, 4), (0, 4)]),  # no gradient comes back to the encoder from the head
        ("moon", {}, [(1, 2)]),
        ("balancefl", {}, [(1, 1)]),
        ("balancefl", {"fa": False}, [(1, 0)]),
        ("qfedavg", {}, [(1, 1)]),
        ("fedncm", {}, [(1, 0), (0, 1)]),
        ("creff", {"per_class": 2}, [(1, 1)]),
        ("promptfl", {}, [(0, 1)]),  # its frozen encoder hides its layers
    ],
    ids=str,
)
def test_passes_are_counted_copies_of_the_model_included(name, fields, passes):
    assert [(call.trained, call.read) for call in calls(METHODS[name](**fields))] == passes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields", "epochs", "expected"),
    [
        ("fedavg", {}, 2, 1),
        ("fedavg", {}, 0.5, 1),  # the tiny run would round half a batch up to a whole one
        ("fedavg", {}, 2.5, 1),
        ("moon", {}, 1, 5 / 3),
        ("fedrep", {"head_epochs": 4}, 2, (4 / 3 + 2) / 2),
        ("fedrep", {"head_epochs": 4}, 0.5, (4 / 3 + 0.5) / 0.5),
        ("fedncm", {}, 1, 1),  # the last phase does not count
        ("balancefl", {"fa": False}, 1, 4 / 3),  # its teacher reads only where a client lacks two classes
        ("balancefl", {"fa": False, "kd": 0}, 1, 1),
    ],
    ids=str,
)
def test_passes_of_a_round_are_a_multiple_of_fedavgs(name, fields, epochs, expected):
    cost = relative_cost(METHODS[name](**fields), MODELS["small"], (8, 8, 1), 4, epochs)
    assert cost == pytest.approx(expected)


def test_passes_of_rounds_that_differ_are_averaged_over_the_run():
    def cost(name, rounds, **fields):
        return relative_cost(METHODS[name](**fields), MODELS["small"], (8, 8, 1), 4, rounds=rounds)

    # prototypes are read in each of four rounds, and once more where the classifier is re-trained
    assert cost("rucr", 4, retrain_rounds=1) == pytest.approx((4 * (1 + 1 / 3) + 1 / 3) / 4)
    assert cost("fedrela", 4, after=0.5) == pytest.approx((4 + 1 / 3) / 4)  # each client labels its samples again once
    # its mixing weights are learned from a client's second round on, and the longest there
    first, second, third = (cost("fedala", rounds) * rounds for rounds in (1, 2, 3))
    assert first == pytest.approx(1)
    assert second - first > third - second > 1.2


def test_a_pass_through_some_layers_counts_as_their_share():
    (train, _) = calls(METHODS["flea"]())
    # 8x8 images pass through 32 * 9 * 64 and 64 * 32 * 9 * 16 multiplications of the model `small`
    upper = 16 / 17
    # the client's activations, their mixtures with shared ones, and the received model's reading of the mixtures
    assert (train.trained, train.read) == pytest.approx((1 + 2 * upper, upper))


def test_passes_of_a_run_include_those_that_are_made_once():
    def cost(name, **fields):
        return relative_cost(METHODS[name](**fields), MODELS["small"], (8, 8, 1), 4, rounds=2, asked=5)

    assert cost("fedavg") == 1
    assert cost("fedncm") == pytest.approx(1 + 1 / 3 / 5)  # each client reads its samples once after the last round
    assert cost("fedetf") > 2 * relative_cost(METHODS["fedetf"](), MODELS["small"], (8, 8, 1), 4)


def test_parts_seen_client_by_client_are_marked_and_sums_are_not():
    (scaffold,) = calls(METHODS["scaffold"]())
    assert "each" not in scaffold.sends.values()
    mupfl = {call.name: call for call in calls(METHODS["mupfl"](m=2, tau=1))}
    assert mupfl["train"].sends["update"] == "each"
    assert mupfl["keep"].sends == {}
    assert calls(METHODS["local"]())[0].up == 8  # the loss only


def test_hidden_hooks_are_gone_after_a_measurement():
    from torch.nn.modules import module

    before = len(module._global_forward_pre_hooks)
    calls(METHODS["fedavg"]())
    assert len(module._global_forward_pre_hooks) == before


def of_server(name, rounds=3, model=MODELS["small"], **fields):
    return server_multiplications(METHODS[name](**fields), model, (8, 8, 1), 4, rounds)


def test_the_servers_products_are_counted_by_hand():
    # the forward product and the weights' gradient: d = 64 features, C = 4 classes, 80 features, 7 epochs
    assert of_server("ccvr", virtual=20, retrain_epochs=7) == 2 * 64 * 4 * 80 * 7
    # two steps on 50 features
    assert of_server("fednpc", samples=50, steps=2) == 2 * 64 * 4 * 50 * 2
    # the encoder reads one image of each of 4 classes in the rounds after the first
    assert of_server("ratioloss", rounds=3) >= 2 * 4 * (32 * 9 * 64 + 64 * 32 * 9 * 16)
    assert of_server("fedavg") == of_server("bpfed") == of_server("sfd", safs=False) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sfd", {"rf_dim": 100, "synthesis_steps": 6, "retrain_epochs": 5}),
        ("creff", {"per_class": 3, "matching_steps": 5, "retrain_epochs": 4}),
        ("mupfl", {"m": 2, "matching_steps": 4}),
        ("ccvr", {"virtual": 20, "retrain_epochs": 1}),
        ("fedic", {"steps": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_multiplications_of_many_steps_follow_from_those_of_two(name, fields, monkeypatch):
    monkeypatch.setitem(costs.REPLACED, "fedic", {})
    extrapolated = of_server(name, **fields)
    monkeypatch.setattr(costs, "STEPS", ())
    assert extrapolated == of_server(name, **fields) > 0


@pytest.mark.slow
def test_work_of_each_round_is_counted_in_each_round_and_pixels_count_as_features():
    fields = {"m": 2, "tau": 1, "matching_steps": 3}
    assert of_server("mupfl", 4, **fields) == 2 * of_server("mupfl", 2, **fields) > 0
    assert of_server("mupfl", 2, pixels, **fields) > 0


def test_the_servers_work_is_a_number_of_steps_on_full_batches(monkeypatch):
    monkeypatch.setattr(costs, "_SERVER", {})
    method = {"name": "ccvr", "virtual": 20, "retrain_epochs": 7}
    config = Config.model_validate(
        {"method": method, "model": "small", "local": {"batch": 16}, "federation": {"rounds": 3}}
    )
    per_image = 32 * 9 * 64 + 64 * 32 * 9 * 16
    expected = 2 * 64 * 4 * 80 * 7 / (3 * 16 * per_image)
    assert server_steps(config, (8, 8, 1), 4) == pytest.approx(expected)

    def steps(**fields):
        return server_steps(config.model_copy(update={"method": method | fields}), (8, 8, 1), 4)

    assert steps(retrain_lr=0.003) == pytest.approx(expected)
    assert len(costs._SERVER) == 1  # a rate does not change the work, which is not measured again
    assert steps(virtual=40) == pytest.approx(2 * expected)
    assert len(costs._SERVER) == 2


def test_a_large_model_does_not_run_for_a_server_that_only_aggregates(monkeypatch):
    monkeypatch.setattr(costs, "_SERVER", {})
    factories = []

    def noted(method, factory, *args, **rounds):
        factories.append(factory)
        return server_multiplications(method, factory, *args, **rounds)

    monkeypatch.setattr(costs, "server_multiplications", noted)
    for name, runs in (("fedavg", 1), ("fednpc", 2)):
        factories.clear()
        config = Config.model_validate({"method": name, "model": "resnet8", "federation": {"rounds": 3}})
        assert (server_steps(config, (8, 8, 1), 4) > 0) is (runs == 2)
        assert factories[0] is MODELS["small"]
        assert len(factories) == runs
