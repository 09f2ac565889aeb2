"""Checks before a run that all entries of a model can be sent."""

import pytest
import torch
from refusals import refused
from torch import nn

import raylt
from raylt.errors import ConfigError
from raylt.models.split import SplitModel
from raylt.runs.start import configure, plan_run

DIM = 16


class Encoder(nn.Module):
    """A linear encoder with one more buffer."""

    def __init__(self, pixels, value, persistent=True, step=0):
        super().__init__()
        self.layer = nn.Linear(pixels, DIM)
        self.register_buffer("extra", torch.as_tensor(value), persistent=persistent)
        self.step = step

    def forward(self, x):
        if self.training and self.step:
            self.extra += self.step
        return self.layer(x.flatten(1))


def planned(value, settings=None, **options):
    def with_buffer(classes, shape):
        return SplitModel(Encoder(shape[0] * shape[1] * shape[2], value, **options), DIM, classes)

    plan_run(configure("fedavg", (), {"model": with_buffer, "clients": 3} | (settings or {})))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-1e9, "model.out-of-range"),
        (-1, "model.out-of-range"),
        (2**60, "model.out-of-range"),
        (float("-inf"), "model.not-finite"),
        (float("nan"), "model.not-finite"),
        (1j, "model.wrong-dtype"),
        (torch.zeros(2, dtype=torch.bfloat16), "model.wrong-dtype"),
    ],
)
def test_a_buffer_that_no_reply_may_have_is_refused(no_guests, value, code):
    with refused(code, ConfigError, key="model", value="with_buffer", entry="encoder.extra") as caught:
        planned(value)
    assert "persistent=False" in str(caught.value)


def test_a_negative_variance_is_refused_before_the_run(no_guests):
    def with_variance(classes, shape):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], DIM))
        encoder.register_buffer("running_var", torch.tensor([-0.5]))
        return SplitModel(encoder, DIM, classes)

    with refused("model.out-of-range", ConfigError, key="model", entry="encoder.running_var"):
        plan_run(configure("fedavg", (), {"model": with_variance, "clients": 3}))


def test_a_counter_that_is_too_large_for_secure_sums_is_refused(no_guests):
    planned(2**40)
    with refused("model.out-of-range", ConfigError, entry="encoder.extra"):
        planned(2**40, {"secure": True})


def test_a_parameter_that_no_reply_may_have_is_refused(no_guests):
    def large(classes, shape):
        model = SplitModel(Encoder(shape[0] * shape[1] * shape[2], 0.0), DIM, classes)
        nn.init.constant_(model.encoder.layer.bias, 2e6)  # pyright: ignore
        return model

    with refused("model.out-of-range", ConfigError, entry="encoder.layer.bias") as caught:
        plan_run(configure("fedavg", (), {"model": large, "clients": 3}))
    assert "initial values" in str(caught.value)


def test_only_entries_that_travel_count(no_guests):
    planned(float("-inf"), persistent=False)
    planned(float("-inf"), {"trainable": "classifier"})  # frozen
    planned(-1, step=1)  # no longer negative when it travels
    with refused("model.out-of-range", ConfigError, entry="encoder.extra"):
        planned(0, step=-1)


def test_boolean_buffers_can_be_exchanged_as_secure_sums(no_guests, tmp_path):
    def with_flags(classes, shape):
        return SplitModel(Encoder(shape[0] * shape[1] * shape[2], [True, False]), DIM, classes)

    run = raylt.run(
        "fedavg",
        model=with_flags,
        data="digits",
        clients=3,
        rounds=1,
        secure=True,
        overrides=["local.steps=1"],
        fleet="local",
        out=tmp_path,
        quiet=True,
    )
    assert run.model().network.state_dict()["encoder.extra"].tolist() == [True, False]
