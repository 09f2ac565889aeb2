from io import BytesIO

import pytest
from PIL import Image
from refusals import refused
from small_runs import make_run
from tiny import pixels

from raylt.errors import CheckpointError, ConfigError
from raylt.models import MODELS
from raylt.plots.predictions import draw_predictions

SHAPES = (
    "data.source=shapes",
    "data.clients=3",
    "data.imbalance=1",
    "model=lraspp",
    "local.batch=32",
    "federation.participation=0.3",
    "evaluation.batch=40",
)


@pytest.fixture(scope="module", autouse=True)
def small_models():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lraspp", pixels)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "plain", *SHAPES, "data.partition=iid", "method=fedavg")


def colours(figure) -> set[tuple[int, int, int]]:
    with Image.open(BytesIO(figure._repr_png_())) as image:
        return {colour for n, colour in image.convert("RGB").getcolors(image.width * image.height) if n > 2000}


@pytest.mark.slow
def test_picture_shows_chosen_images_in_the_colours_of_their_classes(finished, tmp_path):
    path = tmp_path / "two.png"
    figure = draw_predictions(finished, [0, 5], path=str(path))
    with Image.open(path) as image:
        assert image.size == (1560, round(120 * (1.5 + 2 * 4.2)))
    assert {(48, 18, 59), (255, 255, 255)} < colours(figure)  # sky has turbo's first colour, void is white


@pytest.mark.slow
def test_a_client_of_a_personal_method_sees_its_classes_and_background(tmp_path):
    run = make_run(tmp_path, "own", *SHAPES, "data.partition=classes", "method=fedper")
    sky, background = (48, 18, 59), (0, 0, 0)
    assert {sky, background} <= colours(draw_predictions(run))
    seen = colours(draw_predictions(run, client=1))
    assert background in seen
    assert sky not in seen


@pytest.mark.parametrize(
    ("arguments", "code", "details"),
    [
        ({"images": [3, 80]}, "config.out-of-range", {"key": "--image", "value": 80}),
        ({"client": 7}, "client.unknown", {"client": 7}),
        ({"client": "nobody"}, "client.unknown", {"client": "nobody"}),
    ],
)
def test_images_and_clients_that_there_are_not_are_refused(finished, arguments, code, details):
    with refused(code, ConfigError, **details):
        draw_predictions(finished, **arguments)


def test_unfinished_runs_and_other_tasks_are_refused(tmp_path):
    digits = make_run(tmp_path, "digits", "method=fedavg")
    with refused("run.wrong-kind", CheckpointError, task="classification"):
        draw_predictions(digits)
    (digits.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        draw_predictions(digits)
