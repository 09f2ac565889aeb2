"""Malformed input of every kind is refused in one line with exit code 2, or gives the result of undisturbed input.

The fast tests take a few cases of each generator. The slow tests take RAYLT_FUZZ cases in total (2,000 by default,
`make fuzz N=10000` for more). The draws are deterministic: the same number gives the same cases. The table of outcomes
is printed at the end.
"""

import functools
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st
from outcomes import outcome, table
from tiny import configure, make_experiment

import raylt
from raylt import Run
from raylt.config import Config, DataConfig, load, settings
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.reductions import mean
from raylt.data.images.cache import load as loaded
from raylt.data.sources.sources import open_source
from raylt.data.task import build_task
from raylt.methods import METHODS, make_method

TOTAL = int(os.environ.get("RAYLT_FUZZ", "2000"))
SHARES = {
    "overrides": 0.15,
    "files": 0.1,
    "data settings": 0.04,
    "splits": 0.07,
    "npz": 0.1,
    "image folders": 0.06,
    "replies": 0.1,
    "run folders": 0.06,
    "search folders": 0.02,
    "exported models": 0.06,
    "graphs": 0.02,
    "weights": 0.03,
    "teachers": 0.05,
    "records": 0.06,
    "studies": 0.03,
    "plugins": 0.02,
    "names": 0.01,
    "lists": 0.01,
    "signatures": 0.01,
    "method fields": 0.1,
    "imported lists": 0.08,
    "pages": 0.02,
    "pictures": 0.05,
}
FAST = {
    "overrides": 60,
    "files": 40,
    "data settings": 4,
    "splits": 25,
    "npz": 40,
    "image folders": 15,
    "replies": 40,
    "exported models": 40,
    "weights": 20,
    "teachers": 40,
    "records": 25,
    "studies": 15,
    "plugins": 20,
    "names": 20,
    "lists": 15,
    "signatures": 9,
    "method fields": 60,
    "imported lists": 60,
    "pages": 20,
    "pictures": 30,
}
pytestmark = pytest.mark.timeout(max(280, TOTAL))


@pytest.fixture(scope="module", autouse=True)
def shown(request):
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{table()}")


def cases(generator: str) -> Any:
    """Decorate a test that returns a strategy, the action on a case, and optionally a case that must give "the
    same"."""

    def decorate(test):
        few = [FAST[generator]] if generator in FAST else []
        many = pytest.param(round(TOTAL * SHARES[generator]), marks=pytest.mark.slow)

        @pytest.mark.parametrize("examples", [*few, many])
        def run(examples, request, tmp_path):
            draw, act, *clean = test(request.getfixturevalue, tmp_path)
            faults = []
            for case in clean:  # otherwise every case might be refused for an unrelated reason
                assert outcome(generator, *act(case)) == ("the same", ""), generator

            @how(
                max_examples=max(1, examples),
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=False,
            )
            @given(draw)
            def holds(case):
                word, seen = outcome(generator, *act(case))
                if word not in ("refused", "the same"):  # every case is counted in the table
                    faults.append(f"{word}: {seen}; {repr(case)[:600]}")

            holds()
            assert not faults, f"{len(faults)} of {examples}, as:\n" + "\n".join(faults[:5])

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


# settings

FIELDS = dict(settings())


def _configured(path: Path | None, overrides: list[str]) -> Config:
    config = load(path, overrides)
    make_method(config.method)
    return config


def _survives(config: Config, folder: Path) -> bool:
    """Return whether a config is the same after it was written and read as in run folders."""
    from raylt.runs.folder import writer

    if hasattr(writer, "yaml_text"):
        text = writer.yaml_text.write(config.model_dump(mode="json"))
    else:
        import yaml

        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (folder / "again.yaml").write_text(text)
    return load(folder / "again.yaml") == config


def _as_written(config: Config, key: str, text: str) -> bool:
    """Return whether a number or a truth value is the one that the text shows."""
    if key not in FIELDS:
        return True
    section, _, name = key.rpartition(".")
    value = getattr(getattr(config, section) if section else config, name)
    text = text.strip()
    if text in ("", "~", "null"):  # no value: the data decide
        return True
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        plain = text.lstrip("+-")
        return float(text) == value and (plain == "0" or not plain.startswith("0") or plain[1:2] in ".eE")
    return True


@pytest.mark.slow
@cases("overrides")
def test_overrides(fixture, folder):
    def act(pairs):
        given = [f"{key}={value}" for key, value in pairs]
        return (
            lambda: _configured(None, ["method=fedprox", *given]),
            lambda config: (
                _survives(config, folder) and all(_as_written(config, key, dict(pairs)[key]) for key, _ in pairs)
            ),
        )

    return st.lists(making.overrides, min_size=1, max_size=2), act


METHOD_FIELDS = [(name, field) for name in sorted(METHODS) for field in METHODS[name].model_fields if field != "name"]


@pytest.mark.slow
@cases("method fields")
def test_method_fields(fixture, folder):
    """Set any field of any method to any value, together with another setting."""

    def act(case):
        (name, field), value, pair = case
        given = [f"method={name}", f"method.{field}={value}", *(f"{key}={text}" for key, text in pair)]
        return lambda: _configured(None, given), lambda config: _survives(config, folder)

    clean = ("fedprox", "mu"), "0.5", []
    return (
        st.tuples(st.sampled_from(METHOD_FIELDS), making.values, st.lists(making.overrides, max_size=1)),
        act,
        clean,
    )


@pytest.mark.slow
@cases("files")
def test_configuration_files(fixture, folder):
    text = (Path(raylt.__file__).parent / "recipes/demo.yaml").read_bytes()
    lines = st.tuples(st.sampled_from(making.KEYS), making.values).map(
        lambda pair: text + f"\n{pair[0].rpartition('.')[2]}: {pair[1]}\n".encode(errors="ignore")
    )
    nested = st.tuples(st.sampled_from(sorted(FIELDS)), making.values).map(
        lambda pair: f"method: fedprox\n{pair[0].replace('.', ':{0}  ', 1).format(chr(10))}: {pair[1]}\n".encode(
            errors="ignore"
        )
    )

    def act(content):
        file = folder / "c.yaml"
        file.write_bytes(content)
        return lambda: _configured(file, []), lambda config: _survives(config, folder)

    return st.one_of(making.bytes_changed(text), lines, nested), act


@cases("data settings")
def test_data_settings(fixture, folder):
    fields = st.fixed_dictionaries(
        {},
        optional={
            "imbalance": st.sampled_from([1, 5, 20, 1000, 1e7]),
            "alpha": st.sampled_from([1e-9, 0.05, 0.5, 100, 1e7]),
            "partition": st.sampled_from(["creff", "dirichlet", "dirichlet_min", "iid", "by_id", "classes"]),
            "beta": st.sampled_from([1, 3, 10, 11]),
            "min_size": st.sampled_from([None, 0, 1, 50, 10**7]),
            "clients": st.sampled_from([1, 2, 7, 10, 11, 300, 1497, 10**7]),
            "seed": st.sampled_from([0, 1, 2**63 - 1]),
            "validation": st.sampled_from([0.0, 0.01, 0.5, 0.999]),
            "groups": st.sampled_from([None, (0, 0), (20, 60), (60, 20), (-1, 5)]),
        },
    )

    def right(task):
        rows = np.concatenate(task.split.clients)
        return len(np.unique(rows)) == len(rows) and len(task.shards) == len(task.split.clients)

    return fields, lambda case: (lambda: build_task(DataConfig(**case)), right)


# data


@functools.cache
def _clean_split() -> dict[str, Any]:
    return json.loads(build_task(DataConfig(clients=4, imbalance=100)).split.as_text())


def _same_rows(task: Any) -> bool:
    clean = _clean_split()
    return task.split.sha256 == clean["sha256"] and json.loads(task.split.as_text()) == clean


@cases("splits")
def test_splits(fixture, folder):
    clean = _clean_split()
    content = st.one_of(
        making.json_changed(clean).map(lambda tree: json.dumps(tree).encode()),
        making.bytes_changed(json.dumps(clean).encode()),
    )

    def act(content):
        (folder / "split.json").write_bytes(content)
        config = DataConfig(clients=4, imbalance=100, split=str(folder / "split.json"))
        return lambda: build_task(config), _same_rows

    return content, act


LISTS: list[Any] = [
    [[0, 5, 7], [1, 2]],
    {"wien": [0, 5, 7], "linz": [1, 2]},
    {"clients": {"wien": [0, 5], "linz": [1, 2], "graz": [3]}, "judged": ["graz"]},
    {"users": ["a", "b"], "user_data": {"a": {"x": [0, 5], "y": None}, "b": {"x": [1], "y": None}}},
]
TABLES = ["sample,client\n0,wien\n5,wien\n1,linz\n", "sample,client,part\n0,a,train\n5,b,train\n9,c,judged\n"]
WORDS_OF_LISTS = st.sampled_from(
    [
        "1_000",
        " 3",
        "+4",
        "\u0663",
        "9" * 5000,
        "\x00",
        '"',
        '"a\nb"',
        "x" * 200_000,
        "1e2",
        "-1",
        "",
        "\x1b[2J",
        "judged",
    ]
)


@pytest.mark.slow
@cases("imported lists")
def test_imported_lists(fixture, folder):
    """Read changed index lists of other tools: the result has each row that the file lists, and no other."""
    labels = np.asarray(open_source(DataConfig()).y_train)
    for tree in LISTS:
        if isinstance(tree, dict) and "user_data" in tree:
            for data in tree["user_data"].values():
                data["y"] = labels[data["x"]].tolist()
    odd_rows = st.lists(st.one_of(st.integers(-1, 2000), making.scalars), max_size=3)
    trees = st.one_of(
        st.sampled_from(LISTS).flatmap(making.json_changed).map(json.dumps),
        st.dictionaries(st.text(max_size=300), odd_rows, max_size=3).map(json.dumps),
        st.just('{"a": [0], "a": [1]}'),
    )
    tables = st.tuples(st.sampled_from(TABLES), st.integers(0, 40), WORDS_OF_LISTS).map(
        lambda case: case[0][: case[1]] + case[2] + case[0][case[1] :]
    )
    contents = st.one_of(
        trees.map(str.encode),
        tables.map(str.encode),
        st.sampled_from([*map(json.dumps, LISTS), *TABLES]).map(str.encode).flatmap(making.bytes_changed),
    )

    def act(content):
        file = folder / "lists.json"
        file.write_bytes(content)
        config = DataConfig(split=str(file), imbalance=None)

        def right(task):
            rows = np.concatenate(task.split.clients).tolist()
            return (
                len(set(rows)) == len(rows)
                and all(name.isprintable() and name.strip() for name in task.client_names)
                and _rows_of(content) == sorted(rows)
            )

        return lambda: build_task(config), right

    return contents, act, json.dumps(LISTS[1]).encode()


def _rows_of(content: bytes) -> list[int]:
    """Return the row numbers that a reader sees in a file of index lists, in ascending order."""
    text = content.decode("utf-8-sig")
    if text.lstrip()[:1] not in ("{", "["):
        place = text.splitlines()[0].replace(" ", "").split(",").index("sample")
        return sorted(int(line.split(",")[place]) for line in text.splitlines()[1:] if line.strip())
    tree = json.loads(text)
    tree = tree.get("clients", tree) if isinstance(tree, dict) else tree
    tree = tree.get("user_data", tree) if isinstance(tree, dict) else tree
    rows = []
    for value in tree.values() if isinstance(tree, dict) else tree:
        of_client = value if isinstance(value, list) else [*value.get("train", value.get("x", []))]
        rows += [row[0] if isinstance(row, list) else row for row in of_client]
    return sorted(rows)


def _sound(source: Any) -> bool:
    """Return whether a source keeps the promises that later code relies on."""
    names = source.class_names
    for x, y in ((source.x_train, source.y_train), (source.x_test, source.y_test)):
        labels = loaded(y)
        if len(x.shape) != 4 or len(x) != len(y) or not len(x) or labels.min() < 0 or labels.max() >= len(names):
            return False
    return len(set(names)) == len(names) and all(name and name.isprintable() for name in names)


@cases("npz")
def test_npz(fixture, folder):
    def act(content):
        (folder / "it.npz").write_bytes(content)
        return lambda: open_source(DataConfig(source=f"npz:{folder / 'it.npz'}")), _sound

    return making.npz_changed(), act


@cases("image folders")
def test_image_folders(fixture, folder):
    """Read a tree of pictures that has one odd file."""
    png = making.picture()
    contents = st.one_of(
        making.bytes_changed(png),
        making.bytes_changed(making.picture("JPEG")),
        st.binary(max_size=40),
        st.sampled_from(
            [
                making.claims(2**31 - 1, 2**31 - 1),
                making.claims(60_000, 60_000),
                making.claims(0, 5),
                b"",
                making.picture("GIF"),
                making.picture("BMP"),
                making.picture("TIFF"),
                making.picture("PPM"),
                making.picture(mode="L"),
                b"%!PS-Adobe\n",
                b"<svg/>",
                "pipe",
                "folder",
                "loop",
                "outside",
            ]
        ),
    )
    names = st.sampled_from(["a.png", "b.jpg", "b", ".hidden", "x.txt", "b\n.png", "\udcff.png", "b" * 200])
    counter = iter(range(10**9))

    def act(case):
        part, name, content = case
        root = folder / str(next(counter))
        for place in ("train", "test"):
            for label in ("cat", "dog"):
                (root / place / label).mkdir(parents=True)
                (root / place / label / "a.png").write_bytes(png)
        file = root / part / "cat" / name
        file.unlink(missing_ok=True)
        released = None
        if content == "pipe":
            os.mkfifo(file)
            # releases a thread that waits for a writer, because a thread cannot be interrupted
            released = threading.Timer(30, lambda: os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK)))
            released.daemon = True
            released.start()
        elif content == "folder":
            file.mkdir()
        elif content in ("loop", "outside"):
            file.symlink_to(file if content == "loop" else "/etc/hostname")
        else:
            file.write_bytes(content)

        def read():
            try:
                return open_source(DataConfig(source=f"folder:{root}", root=str(root / "root"), size=8))
            finally:
                if released is not None:
                    released.cancel()
                shutil.rmtree(root / "root", ignore_errors=True)

        return read, lambda source: len(source.class_names) == 2 and len(source.x_train) >= 1

    return st.tuples(st.sampled_from(["train", "test"]), names, contents), act


# replies

SENT: dict[str, Any] = {}


def send(client: Client, message: Message) -> Reply:
    """Reply honestly, except for the client with the lowest id."""
    model = {"w": torch.ones(2, 3) * client.id, "n": torch.tensor(3)}
    honest = Reply(float(len(client)), {"model": model, "loss": 1.0})
    return SENT["make"](honest) if client.id == 0 else honest


tensors = st.builds(
    lambda shape, dtype, value: torch.full(shape, value).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        ]
    ),
    st.sampled_from([0.0, 1.0, -1.0, 1e30, torch.inf, torch.nan]),
)
odd = st.sampled_from(
    [
        torch.ones(2, 3).to_sparse(),
        torch.ones(2, 3, device="meta"),
        torch.ones(1).expand(2, 3),
        torch.ones(3, 2).T,
        np.ones((2, 3), np.float32),
        np.float32(1),
        [1.0],
        (),
        {1, 2},
        b"w",
        object(),
        print,
        ValueError("w"),
        10**400,
        1j,
        range(3),
        Reply(1.0, {}),
    ]
)
leaves = st.one_of(tensors, odd, making.scalars)
names = st.one_of(
    st.text(max_size=4),
    st.sampled_from(["model", "loss", "w", "n", "model.w", "", 0, 1, True, None, (1,), 1.5, b"w", "x" * 600]),
)
trees = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=8)


@cases("replies")
def test_replies(fixture, folder):
    experiment = make_experiment(configure(federation={"retries": 0}), fixture("tiny_task"), folder)
    fleet, message = experiment.fleet, {"model": {"w": torch.zeros(2, 3), "n": torch.tensor(0)}}
    lost = (14 * 1 + 9 * 2 + 1 * 3 + 12 * 5) / 36  # the mean over clients 1, 2, 3 and 5

    def act(case):
        kind, value = case
        SENT["make"] = {
            "weight": lambda honest: Reply(value, honest.tree),
            "tree": lambda honest: Reply(honest.weight, value),
            "model": lambda honest: Reply(honest.weight, honest.tree | {"model": value}),
            "w": lambda honest: Reply(honest.weight, {"model": {**honest.tree["model"], "w": value}, "loss": 1.0}),
            "n": lambda honest: Reply(honest.weight, {"model": {**honest.tree["model"], "n": value}, "loss": 1.0}),
            "loss": lambda honest: Reply(honest.weight, honest.tree | {"loss": value}),
            "reply": lambda honest: value,
        }[kind]

        def ask():
            fleet.begin(2)
            return fleet.ask(send, fleet.everyone, message, model=mean.like(message["model"]), loss=mean)

        def right(got):
            w = got["model"]["w"]
            if 0 in [*fleet.round_stats.rejected, *fleet.round_stats.lost]:
                return torch.allclose(w, torch.full((2, 3), lost)) and got["loss"] == 1 and got["model"]["n"] == 3
            fits = w.shape == (2, 3) and w.dtype == torch.float32 and torch.isfinite(w).all()
            return (
                bool(fits)
                and (kind != "weight" or value == 24)
                and 0 <= got["model"]["n"] < 2**60
                and abs(got["loss"]) < 1e39
                and set(got["model"]) == {"w", "n"}
            )

        return ask, right

    return st.tuples(st.sampled_from(["weight", "tree", "model", "w", "n", "loss", "reply"]), trees), act


# folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Do two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        raylt.run(
            "fedprox",
            out=folder,
            name=f"r{seed}",
            fleet="local",
            quiet=True,
            seed=seed,
            overrides=["federation.rounds=2", "local.epochs=1", "data.clients=3", "data.imbalance=100"],
        ).folder
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def searches(tmp_path_factory) -> list[Path]:
    from tune import search, space

    folder = tmp_path_factory.mktemp("searches")
    config = load(
        None,
        [
            "method=fedprox",
            "federation.rounds=2",
            "local.epochs=1",
            "data.clients=3",
            "data.imbalance=100",
            "data.validation=0.2",
        ],
    )
    found = (
        search(
            config,
            space(config, {"local.lr": "loguniform(0.01, 0.3)"}),
            2,
            out=folder,
            name=f"s{seed}",
            fleet="local",
            parallel=1,
            seed=seed,
            scheduler="none",
        )
        for seed in (1, 2)
    )
    return [search.folder for search in found]


@st.composite
def folder_changed(draw: Any, made: Path, other: Path) -> tuple[str, str, Any]:
    """Return a file of a folder, the kind of change to it, and the new content."""
    files = sorted(str(file.relative_to(made)) for file in made.rglob("*") if file.is_file())
    weights = [name for name in files if name.endswith((".json", ".jsonl", ".yaml"))]
    name = draw(st.sampled_from(weights) if draw(st.booleans()) else st.sampled_from(files))
    content = (made / name).read_bytes()
    how = draw(st.sampled_from(["bytes", "bytes", "json", "json", "exchange", "remove", "pipe", "folder", "link"]))
    if how == "bytes":
        return name, how, draw(making.bytes_changed(content))
    if how == "json" and name.endswith(".json"):
        return name, "bytes", json.dumps(draw(making.json_changed(json.loads(content)))).encode()
    if how == "json" and name.endswith(".jsonl"):
        lines = content.decode().splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = json.dumps(draw(making.json_changed(json.loads(lines[at]))))
        return name, "bytes", "".join(f"{line}\n" for line in lines).encode()
    if how == "exchange" and (other / name).is_file():
        return name, "bytes", (other / name).read_bytes()
    return name, how if how in ("remove", "pipe", "folder", "link") else "remove", None


def _spoilt(made: Path, place: Path, case: tuple[str, str, Any]) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made, place)
    name, how, content = case
    file = place / name
    file.unlink()
    if how == "bytes":
        file.write_bytes(content)
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    elif how == "link":
        file.symlink_to("/etc/hostname")
    return place


def _of_run(folder: Path) -> Any:
    """Resume a run if something is missing; return its results without times."""
    run = Run.open(folder)
    run = run.resume(fleet="local", quiet=True)
    times = ("seconds", "evaluation_seconds", "stages", "date", "schema", "hash", "checkpoint")
    lines = [
        {key: value for key, value in line.items() if key not in times and "sha256" not in key} for line in run.reports
    ]
    experiment = run.experiment()
    return (
        run.config.model_dump(exclude={"output", "resources"}),
        run.split.as_text(),
        json.dumps(lines, sort_keys=True),
        run.summary["model_sha256"],
        run.summary["accuracy"],
        hash_tensors(experiment.server.model.state_dict()),
    )


@cases("run folders")
def test_run_folders(fixture, folder):
    made, other = fixture("runs")
    clean = _of_run(made)

    def act(case):
        place = _spoilt(made, folder / "run", case)
        return lambda: _of_run(place), lambda seen: seen == clean

    return folder_changed(made, other), act


def _of_search(folder: Path) -> Any:
    from tune import resume

    found = resume(folder, fleet="local")
    return [(record.id, record.values, record.outcome) for record in found.trials]


@cases("search folders")
def test_search_folders(fixture, folder):
    made, other = fixture("searches")
    clean = _of_search(made)

    def act(case):
        place = _spoilt(made, folder / "search", case)
        return lambda: _of_search(place), lambda seen: seen == clean

    return folder_changed(made, other), act
