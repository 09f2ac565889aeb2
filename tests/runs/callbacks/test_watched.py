"""The callbacks of a run for the terminal and TensorBoard."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from small_runs import make_tiny_run
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

import raylt
from raylt.config import load
from raylt.core.fleet.item_progress import ItemsProgress
from raylt.core.report import RoundReport
from raylt.data.images import cache
from raylt.data.label_maps import relabel
from raylt.runs.callbacks import prediction_grid, progress
from raylt.runs.callbacks.base import Callbacks
from raylt.runs.callbacks.tensorboard import Board, curve_of
from raylt.runs.callbacks.terminal import TerminalProgress
from raylt.store import Folder


def events(folder) -> list:
    content, parsed = next(folder.glob("events.*")).read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        parts = content[:8], content[12 : 12 + size]
        checks = content[8:12], content[12 + size : 16 + size]
        assert [int.from_bytes(check, "little") for check in checks] == [masked_crc32c(part) for part in parts]
        parsed.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return parsed


class Recorded(raylt.Callback):
    """Records the stages and steps of a run."""

    def __init__(self):
        self.events = []

    def on_progress(self, stage, done, total):
        self.events.append((stage, done, total))

    def on_step(self, report):
        self.events.append(report.step)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs"), "sfd", "data.partition=by_id", "federation.rounds=1")


# TensorBoard


def test_the_board_has_settings_and_curves_under_names_of_their_own(run):
    tags = {value.tag: value for event in events(run.folder) for value in event.summary.value}
    settings = tags["_hparams_/session_start_info"].metadata.plugin_data.content
    assert b"method.gamma" in settings
    assert b"local.lr" in settings
    assert {
        "accuracy/test set",
        "accuracy/few-shot",
        "clients/local, mean",
        "clients/owned, worst tenth",
        "training/loss",
        "traffic/train, bytes up",
        "seconds of stages/evaluation",
    } <= tags.keys()
    last = events(run.folder)[-2].summary.value  # the last event is the picture
    accuracy = {value.tag: value.simple_value for value in last}["accuracy/test set"]
    assert accuracy == pytest.approx(run.summary["accuracy"]["last"])


def test_a_board_that_continues_replaces_later_steps_of_the_one_before(tmp_path):
    board = Board(lambda: {"seed": 1})
    with Folder.open(tmp_path) as folder:
        for step in (3, 4):
            board.show(folder, {"step": step, "accuracy": 0.5})
    starts = [event.step for event in events(tmp_path) if event.session_log.status == SessionLog.START]
    assert starts == [3]


@pytest.mark.parametrize(
    ("figure", "curve"),
    [
        ("global_accuracy", "accuracy/global model"),
        ("clients/local/worst_decile", "clients/local, worst tenth"),
        ("figures/retrain_loss", "method/retrain loss"),
        ("figures/loss", "training/loss"),
        ("others/whole/accuracy", "other models/whole, accuracy"),
    ],
)
def test_curves_are_called_what_they_are(figure, curve):
    assert curve_of(figure) == curve


def shown(folder):
    """Return the last picture of a run, uint8 [H, W, 3], and its tag."""
    value = next(
        value
        for event in reversed(events(folder))
        for value in event.summary.value
        if value.WhichOneof("value") == "image"
    )
    picture = np.asarray(Image.open(io.BytesIO(value.image.encoded_image_string)))
    assert picture.shape == (value.image.height, value.image.width, 3)
    return picture, value.tag


def test_the_board_has_a_picture_of_predictions(run, tmp_path):
    picture, tag = shown(run.folder)
    assert tag == "predictions/global model"
    rows = np.linspace(0, 41, prediction_grid.MAX_IMAGES).round().astype(int)
    images, truth = cache.load(run.task.test.x)[rows], cache.load(run.task.test.y)[rows]
    right = run.model().predict(images).labels.numpy() == truth
    assert 0 < right.sum() < len(right)
    for place in range(prediction_grid.MAX_IMAGES):
        x, y = 6 + place % 6 * 102, 6 + place // 6 * (96 + 26 + 6)
        assert (picture[y : y + 96 : 12, x : x + 96 : 12] == images[place]).all()
        text_line = picture[y + 96 + 13 : y + 96 + 26, x : x + 96].astype(int)  # the text line with the prediction
        green = (text_line[..., 1] > text_line[..., 0]).sum() > (text_line[..., 0] > text_line[..., 1]).sum()
        assert green == right[place], place


def test_the_picture_of_clients_own_models_is_of_the_first_one_and_its_images(tmp_path):
    run = make_tiny_run(tmp_path, "fedper", "data.partition=by_id", "federation.rounds=1")
    picture, tag = shown(run.folder)
    assert tag == "predictions/client wien"
    first, last = (cache.load(run.task.test.x)[run.task.own_tests[0][place]] for place in (0, -1))
    assert (picture[6:102:12, 6:102:12] == first).all()
    shown_images = min(prediction_grid.MAX_IMAGES, len(run.task.own_tests[0])) - 1
    x, y = 6 + shown_images % 6 * 102, 6 + shown_images // 6 * 128
    assert (picture[y : y + 96 : 12, x : x + 96 : 12] == last).all()


def test_label_maps_are_shown_as_maps(tmp_path):
    run = make_tiny_run(tmp_path, "mupfl", "federation.rounds=1", maps=True)
    picture, tag = shown(run.folder)
    assert tag == "predictions/client 0"
    image, truth = cache.load(run.task.test.x)[:1], cache.load(run.task.test.y)[:1]
    predicted = run.client_model(0).predict(image).labels.numpy().astype(np.uint8)
    palette, view = prediction_grid.palette_of(run.task), run.task.views[0]
    for column, maps in enumerate((truth, predicted), 1):
        x = 6 + column * 102
        assert (picture[6:102:6, x : x + 96 : 6] == palette[relabel(maps, view)[0]]).all()
    assert (picture[6:102:6, 6:102:6] == image[0]).all()


def test_a_picture_that_cannot_be_drawn_is_reported_and_the_run_is_done(tmp_path, monkeypatch):
    class Messages(raylt.Callback):
        def on_message(self, text, minor=False):
            messages.append(text)

    messages = []
    config = make_tiny_run(tmp_path, "fedavg", "federation.rounds=1", name="first").config
    monkeypatch.setattr("raylt.runs.callbacks.prediction_grid._with_words", lambda *given: 1 / 0)
    run = raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[Messages()])
    assert run.state == "done"
    assert messages[-1].startswith("no picture of predictions: ZeroDivisionError")


# the terminal


def test_a_callback_receives_the_progress_inside_a_step(tmp_path):
    recorded = Recorded()
    settings = ["federation.rounds=1", "data.partition=by_id"]
    config = make_tiny_run(tmp_path, "bpfed", *settings, name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[recorded])
    assert recorded.events[:6] == [("join", n, 4) for n in range(5)] + [("train", 0, 4)]
    order = list(dict.fromkeys(event if isinstance(event, int) else event[0] for event in recorded.events))
    assert order == ["join", "train", "evaluation", "judge", 1, "covariance", "retrain", 2]


def test_a_server_says_what_it_does_itself(tmp_path):
    recorded = Recorded()
    config = make_tiny_run(tmp_path, "sfd", "federation.rounds=1", name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[recorded])
    assert ("synthesis", 0, 0) in recorded.events


@pytest.fixture
def screen():
    """Return a terminal of 80 columns, and a function that returns its text."""
    made = TerminalProgress()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    made._console, made._bar.live.console, made._bar.disable = console, console, False

    def shown() -> str:
        plain = Console(file=io.StringIO(), width=80)
        plain.print(made._bar.get_renderable())
        return plain.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]

    yield made, shown
    made.on_end(None)


def report(step: int, accuracy: float | None, shared: float | None = None, local: float | None = None) -> RoundReport:
    clients = None if local is None else {"local": {"mean": local, "worst_decile": 0.0}}
    return RoundReport(
        step=step,
        phase="round",
        seconds=1,
        evaluation_seconds=1,
        accuracy=accuracy,
        global_accuracy=shared,
        groups=None,
        clients=clients,
        traffic={},
        figures={"loss": 0.53},
    )


def test_the_bar_says_stage_loss_and_best_in_80_columns(screen, tmp_path):
    made, shown = screen
    made.on_start(tmp_path, load(None, ["method=bpfed", "federation.rounds=300"]), [])
    made.on_step(report(211, None, 0.4, 0.825))
    made.on_step(report(212, None, 0.4, 0.75))
    made.on_progress("covariance", 107, 120)
    lines = shown().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("round 212/300 ")
    # 88 rounds and the last phase, at 2 s each
    assert lines[0].rstrip().endswith(("covariance 107/120 loss 0.530 own 75.0 % (best 82.5) 02:58", "02:57"))


def test_the_bar_shows_a_personal_method_by_what_is_known(screen, tmp_path):
    made, shown = screen
    made.on_start(tmp_path, load(None, ["method=fedper"]), [])
    made.on_step(report(1, None, 0.5))
    made.on_step(report(2, None, 0.25))
    assert "global 25.0 % (best 50.0)" in shown()
    made.on_step(report(3, 0.125, 0.25))
    assert "acc 12.5 % (best 12.5)" in shown()
    made.on_step(report(4, None, 0.75))
    assert "acc 12.5 % (best 12.5)" in shown()


def test_steps_of_items_are_noted_by_number_and_forgotten(tmp_path, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    write = progress.item_writer(tmp_path, 3)
    write(1, 100)  # a short item writes no progress
    assert progress.read_items(tmp_path, range(5)) == {}
    now[0] += 1
    write(40, 100)
    assert progress.read_items(tmp_path, range(5)) == {3: (40, 100)}
    progress.remove_items(tmp_path, range(5))
    assert not list(tmp_path.iterdir())


def test_a_callback_receives_the_steps_inside_the_servers_items(tmp_path):
    seen = []

    class Recorded(raylt.Callback):
        def on_items(self, progress):
            seen.append(progress)

        def on_last_phase(self, seconds):
            seen.append(seconds)

    fields = (
        "method.rf_dim=60",
        "method.m_min=80",
        "method.m_max=90",
        "method.synthesis_steps=2",
        "method.retrain_epochs=2",
    )
    config = make_tiny_run(tmp_path, "sfd", *fields, "federation.rounds=1", name="first").config
    raylt.run(config, out=tmp_path, name="second", fleet="local", quiet=True, callbacks=[Recorded()])
    seconds, *steps = seen
    assert 0 < seconds < 60
    classes = steps[0].total
    assert [(s.stage, s.done, s.step, s.steps) for s in steps] == [
        ("synthesise", done, step, 2) for done in range(classes) for step in (1, 2)
    ]
    assert [s.share for s in steps] == pytest.approx([(k + 1) / (2 * classes) for k in range(2 * classes)])
    assert not list(tmp_path.rglob(".progress*"))


def test_progress_is_noted_and_forgotten(tmp_path):
    note = progress.progress_writer(tmp_path)
    assert progress.read_progress(tmp_path) is None
    note("train", 1, 10)
    note("train", 2, 10)  # skipped, because it comes right after the first
    assert progress.read_progress(tmp_path) == ("train", 1, 10)
    note("judge", 0, 10)
    assert progress.read_progress(tmp_path) == ("judge", 0, 10)
    (tmp_path / progress.FILE).write_text('["ju')
    assert progress.read_progress(tmp_path) is None
    note("map", 2, 10, 40, 100, 0.24)
    assert progress.read_progress(tmp_path) == ItemsProgress("map", 2, 10, 40, 100, 0.24)
    progress.remove_progress(tmp_path)
    assert not list(tmp_path.iterdir())


def test_each_callback_learns_of_the_end_of_a_run_even_if_one_before_it_raises():
    class Raises(raylt.Callback):
        def on_end(self, summary):
            raise ValueError(f"{summary} {len(ends)}")

    class Ends(raylt.Callback):
        def on_end(self, summary):
            ends.append(summary)

    ends = []
    with pytest.raises(ValueError, match="None 0"):
        Callbacks([Raises(), Ends(), Raises()]).on_end(None)
    assert ends == [None]
