"""Trial runs of a user's own model before a run."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

import raylt
from raylt.errors import ConfigError
from raylt.models import MODELS, build, try_model
from raylt.models.split import with_encoder
from raylt.runs.start import configure, plan_run

SHAPE, CLASSES, DIM = (8, 8, 3), 10, 16
PIXELS = 8 * 8 * 3


class TwoOutputs(nn.Module):
    """Returns two values in training mode, like models with auxiliary classifiers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(PIXELS, DIM)

    def forward(self, x):
        features = self.layer(x.flatten(1))
        return (features, features) if self.training else features


class Tied(nn.Module):
    def __init__(self, pixels=PIXELS, dim=DIM):
        super().__init__()
        self.inward = nn.Linear(pixels, dim)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(self.inward(x.flatten(1))))


class Repeated(nn.Module):
    """Has a buffer that shows one number as a vector."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(PIXELS, DIM)
        self.register_buffer("scale", torch.ones(1).expand(DIM))

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.scale


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(PIXELS, DIM)

    def forward(self, x):
        return self.layer(x.flatten(1).detach()).detach()


class Counted(nn.Flatten):
    """A layer with a state that is not a tensor."""

    def get_extra_state(self):
        return {"calls": 1}


def linear(width=DIM, **options):
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width, **options))


def split(encoder, dim=DIM):
    return raylt.SplitModel(encoder, dim, CLASSES)


def with_classes(count):
    model = split(linear())
    model.classifier = nn.Linear(DIM, count)
    return model


def without_gradients():
    model = split(Detached())
    model.classifier.requires_grad_(False)
    return model


def infinite():
    model = split(linear())
    nn.init.constant_(model.classifier.weight, float("inf"))
    return model


class CountsItsCalls(nn.Module):
    """Keeps a number between calls that is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(PIXELS, DIM)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x.flatten(1)) * self.calls


class CountsInABuffer(CountsItsCalls):
    def __init__(self):
        super().__init__()
        del self.calls
        self.register_buffer("calls", torch.tensor(0))


class DrawsElsewhere(nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1)) * np.random.default_rng().random()


def with_own_weights(classes, shape):
    model = raylt.SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * shape[2], DIM)), DIM, classes)
    nn.init.constant_(model.classifier.bias, np.random.default_rng().random())
    return model


@pytest.mark.parametrize(
    ("model", "code", "details"),
    [
        (lambda: split(linear(), 32), "model.wrong-output", {"part": "encoder", "shape": [2, DIM]}),
        (lambda: split(TwoOutputs()), "model.wrong-output", {"part": "encoder", "shape": "tuple"}),
        (lambda: split(nn.Sequential(nn.Conv2d(3, DIM, 3))), "model.wrong-output", {"shape": [2, DIM, 6, 6]}),
        (lambda: with_classes(3), "model.wrong-output", {"part": "classifier", "shape": [2, 3]}),
        (infinite, "model.wrong-output", {"part": "classifier"}),
        (lambda: split(Tied()), "model.shared-memory", {"entries": ["encoder.first.weight", "encoder.second.weight"]}),
        (lambda: split(Repeated()), "model.shared-memory", {"entries": ["encoder.scale", "encoder.scale"]}),
        (lambda: split(linear()).bfloat16(), "model.wrong-dtype", {"dtype": "bfloat16"}),
        (lambda: split(linear()).half(), "model.wrong-dtype", {"dtype": "float16"}),
        (lambda: split(linear()).double(), "model.wrong-dtype", {"dtype": "float64"}),
        (lambda: split(nn.Sequential(*linear(), Counted())), "model.wrong-dtype", {"entry": "encoder.2._extra_state"}),
        (lambda: split(nn.Sequential(nn.Flatten(), nn.Linear(PIXELS + 1, DIM))), "model.failed", {}),
        (without_gradients, "model.failed", {}),
        (lambda: split(CountsItsCalls()), "model.not-repeatable", {}),
        (lambda: split(DrawsElsewhere(PIXELS, DIM)), "model.not-repeatable", {}),
    ],
)
def test_a_model_that_no_run_could_end_with_is_refused(model, code, details):
    with refused(code, ConfigError, key="model", value="own", **details):
        try_model("own", model(), SHAPE)


@pytest.mark.parametrize("encoder", [CountsInABuffer(), nn.Sequential(*linear(), nn.BatchNorm1d(DIM), nn.Dropout())])
def test_a_model_may_keep_buffers_and_draw_with_torch(encoder):
    try_model("own", split(encoder), SHAPE)


def test_weights_that_every_process_would_draw_anew_are_refused(no_guests, tmp_path):
    class Building(raylt.Method):
        name: ClassVar[str] = "building"
        paper: ClassVar[str] = "for tests"

        def build(self, spec, base):
            return with_own_weights(spec.classes, spec.shape)

    where = {"rounds": 1, "clients": 3, "out": tmp_path, "fleet": "local", "quiet": True}
    with refused("model.not-repeatable", ConfigError, key="model", entry="classifier.bias"):
        raylt.run("fedavg", model=with_own_weights, **where)
    with refused("model.not-repeatable", ConfigError, key="method", value="building", entry="classifier.bias"):
        raylt.run(Building(), **where)
    assert list(tmp_path.iterdir()) == []


def test_the_message_names_the_line_of_the_user(tmp_path):
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x @ None\n")
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with refused("model.failed", ConfigError) as caught:
        try_model("own", split(scope["Net"]()), SHAPE)
    assert "net.py:4" in str(caught.value)


def test_lazy_layers_get_their_shapes_and_the_same_weights_everywhere():
    def lazy(classes, shape):
        return split(nn.Sequential(nn.Flatten(), nn.LazyLinear(DIM), nn.LazyBatchNorm1d()))

    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build(CLASSES, SHAPE, name="lazy", factory=lazy, weights=None, side=None))
    weight = models[0].encoder[1].weight  # pyright: ignore[reportIndexIssue]
    assert weight.shape == (DIM, PIXELS)
    assert torch.equal(weight, models[1].encoder[1].weight)  # pyright: ignore[reportIndexIssue]
    assert models[0].training
    assert torch.equal(models[0].encoder[2].running_mean, torch.zeros(DIM))  # pyright: ignore[reportIndexIssue]
    try_model("lazy", models[0], SHAPE)


def test_lazy_layers_that_get_no_shape_are_refused():
    def never(classes, shape):
        return split(nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(DIM)))

    with refused("model.failed", ConfigError, key="model", value="never"):
        build(CLASSES, SHAPE, name="never", factory=never, weights=None, side=None)


def test_a_run_is_refused_before_its_folder_is_made(no_guests, tmp_path):
    def narrow(classes, shape):
        return raylt.SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * shape[2], 20)), 32, classes)

    with refused("model.wrong-output", ConfigError, value="narrow", shape=[2, 20]):
        raylt.run("fedavg", model=narrow, rounds=1, clients=3, out=tmp_path, fleet="local", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("base", "code"),
    [
        (lambda base: with_encoder(base, nn.Sequential(base.encoder, Tied(base.dim, base.dim))), "model.shared-memory"),
        (lambda base: with_encoder(base, nn.Sequential(base.encoder, nn.Linear(base.dim, 3))), "model.wrong-output"),
    ],
    ids=["tied", "narrow"],
)
def test_a_method_s_own_model_is_tried_before_the_folder_is_made(no_guests, tmp_path, base, code):
    class Building(raylt.Method):
        name: ClassVar[str] = "building"
        paper: ClassVar[str] = "for tests"

        def build(self, spec, model):
            return base(model)

    with refused(code, ConfigError, key="method", value="building"):
        raylt.run(Building(), rounds=1, clients=3, out=tmp_path, fleet="local", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_the_trial_changes_no_random_number(no_guests):
    def noisy(classes, shape):
        return raylt.SplitModel(
            nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(8 * 8 * shape[2], DIM)), DIM, classes
        )

    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    plan_run(configure("fedavg", (), {"model": noisy, "clients": 3}))
    assert torch.equal(torch.rand(4), expected)


def test_a_model_whose_classifier_gives_maps_fits_segmentation():
    model = build(3, (32, 32, 3), name="lraspp", factory=MODELS["lraspp"], weights=None, side=None)
    try_model("lraspp", model, (32, 32, 3))
