"""Index lists of other tools become a sealed split or are refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from refusals import refused

import raylt
from raylt.config import DataConfig
from raylt.data.splits.check import complete
from raylt.data.splits.split import Split
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError

LISTS = {"wien": [4, 0, 2], "linz": [1, 3], "graz": [5, 6, 7, 8]}


@pytest.fixture
def npz(tmp_path):
    x = np.arange(10, dtype=np.uint8).repeat(4).reshape(10, 2, 2)
    y = np.arange(10) % 2
    np.savez(tmp_path / "it.npz", x_train=x, y_train=y, x_test=x[:4] + 99, y_test=y[:4], class_names=["a", "b"])
    return tmp_path / "it.npz"


def imported(npz, content, name="lists.json", **settings):
    file = npz.parent / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return build_task(DataConfig(source=f"npz:{npz}", split=str(file), **settings))


def pets(tmp_path):
    """Write a folder of 12 images of two classes, without a test part, and return its settings."""
    from PIL import Image

    for i in range(12):
        file = tmp_path / "pets" / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 10 * i).save(file)
    return {"source": f"folder:{tmp_path / 'pets'}", "root": str(tmp_path / "root"), "size": 8}


LEAF = {
    "users": ["wien", "linz", "graz"],
    "num_samples": [3, 2, 4],
    "user_data": {name: {"x": rows, "y": [row % 2 for row in rows]} for name, rows in LISTS.items()},
}
CSV = "sample,client\n" + "".join(f"{row},{name}\n" for name, rows in LISTS.items() for row in rows)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ([*LISTS.values()], ("0", "1", "2")),
        ({str(k): rows for k, rows in enumerate(LISTS.values())}, ("0", "1", "2")),
        (LISTS, tuple(LISTS)),
        ({"clients": LISTS}, tuple(LISTS)),
        ({name: {"train": rows, "val": []} for name, rows in LISTS.items()}, tuple(LISTS)),
        (LEAF, tuple(LISTS)),
        (CSV, tuple(LISTS)),
        (CSV.replace("\n", "\r\n").replace(",", ", "), tuple(LISTS)),
    ],
    ids=["lists", "numbers", "names", "clients", "parts", "leaf", "csv", "windows"],
)
def test_lists_of_other_tools_are_a_sealed_split(npz, tmp_path, content, names):
    task = imported(npz, content)
    assert task.client_names == names
    assert [rows.tolist() for rows in task.split.clients] == [sorted(rows) for rows in LISTS.values()]
    assert (task.split.partition, task.own_tests, task.new_clients) == ("imported", None, ())
    assert task.notes[0].startswith("1 of 10 training images are in no client's list")
    task.split.save(tmp_path / "split.json")
    again = build_task(DataConfig(source=f"npz:{npz}", split=str(tmp_path / "split.json")))
    assert again.split.seal == task.split.seal
    assert Split.load(tmp_path / "split.json").sha256 == task.split.sha256


def test_numbers_are_put_in_their_order(npz):
    task = imported(npz, {"10": [1], "2": [0], "1": [2]})
    assert task.client_names == ("1", "2", "10")
    assert [rows.tolist() for rows in task.split.clients] == [[2], [0], [1]]


@pytest.mark.parametrize(
    "content",
    [
        {"clients": LISTS, "judged": ["linz"]},
        CSV.replace("client\n", "client,part\n").replace("wien\n", "wien,train\n").replace("linz\n", "linz,judged\n"),
    ],
)
def test_clients_may_only_be_judged(npz, content):
    task = imported(npz, content)
    assert task.new_clients == (1,)
    config = DataConfig(source=f"npz:{npz}", split="lists.json")
    assert complete(config, task.split).new_clients == 1
    with refused("data.split-mismatch"):
        imported(npz, content, new_clients=2)


@pytest.mark.parametrize(
    "content",
    [
        {"clients": {"wien": [0, 1], "linz": []}, "judged": ["wien"]},
        "sample,client,part\n0,wien,judged\n1,wien,judged\n2,linz,test\n",
    ],
)
def test_lists_without_an_image_to_train_on_are_refused(tmp_path, content):
    lists = tmp_path / "lists"
    lists.write_text(content if isinstance(content, str) else json.dumps(content))
    with refused("data.too-few", DataError, key="data.split", value=1):
        build_task(DataConfig(**pets(tmp_path), split=str(lists)))


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({}, None),
        ({"partition": "imported", "imbalance": 1, "clients": 3, "seed": 5}, None),
        ({"min_size": 3}, "data.min_size = 3 has no effect"),
        ({"test_share": 0.5}, "data.test_share = 0.5 has no effect"),  # the file has a test part
        (
            {"partition": "iid", "imbalance": 5, "tail": "local", "alpha": 9, "per_client": 1},
            "data.imbalance = 5.0, data.partition = iid, data.alpha = 9.0, data.tail = local, data.per_client = 1 have "
            "no effect",
        ),
    ],
)
def test_a_notice_names_settings_that_lists_override(npz, settings, unused):
    task = imported(npz, LISTS, **settings)
    notices = [note for note in task.notes if "no effect" in note]
    since = f", since {npz.parent / 'lists.json'} lists the samples of each client"
    assert notices == ([] if unused is None else [unused + since])
    config = DataConfig(source=f"npz:{npz}", split=str(npz.parent / "lists.json"), **settings)
    recorded = complete(config, task.split)
    assert (recorded.imbalance, recorded.partition, recorded.tail) == (1, "imported", "global")
    assert not [note for note in build_task(recorded).notes if "data.partition" in note]


def test_the_usual_settings_of_a_benchmark_are_not_named_with_lists(tmp_path):
    (tmp_path / "lists.json").write_text("[[0, 1, 2], [3, 4]]")
    task = build_task(DataConfig(split=str(tmp_path / "lists.json")))
    assert not any("no effect" in note for note in task.notes)


def test_clients_may_have_test_images_of_their_own(tmp_path):
    settings = pets(tmp_path)
    lists = {"wien": {"train": [0, 1, 6], "test": [2, 7]}, "linz": {"train": [3, 8], "test": [9]}}
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    task = build_task(DataConfig(**settings, split=str(tmp_path / "lists.json")))
    assert task.own_tests is not None
    assert [rows.tolist() for rows in task.own_tests] == [[0, 1], [2]]
    assert task.test.labels().tolist() == [0, 1, 1]
    # without test lists, a part of the lists becomes the test set
    (tmp_path / "lists.json").write_text(json.dumps([[*range(6)], [*range(6, 12)]]))
    task = build_task(DataConfig(**settings, split=str(tmp_path / "lists.json"), test_share=0.5))
    assert (task.own_tests, len(task.test), task.sizes.sum()) == (None, 6, 6)
    assert not {*np.concatenate(list(task.split.clients))} & {*np.concatenate(list(task.split.test or ()))}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([[0, 1], [2, 10]], "outside 0 to 9, the training images (10)"),
        ([[0, -1]], "(-1)"),
        ([[0.0]], "(0.0)"),
        ([[True]], "(True)"),
        ([["0"]], "not a whole number ('0')"),
        ([[0, 1], [2, 1]], "row 1 is listed twice, by the client 0 and the client 1"),
        ({"a": {"train": [3, 0, 3]}}, "row 3 is listed twice, by the client a."),
        ([[], []], "its clients have no rows"),
        ({}, "it has no clients"),
        ({"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [0]}}}, "num_samples does not match"),
        ("sample,client\n0,a\n1,b,2\n", "line 3 has more values"),
        ({"a": 3}, "the client a"),
        ({"a": {"train": [0], "test": [1]}}, "test images of its own"),
        ({"clients": [[0]], "judged": ["0"]}, "at least one must train"),
        ({"clients": [[0]], "judged": ["7"]}, "(7)"),
        ({"user_data": {"a": {"x": [[0.1, 0.2]], "y": [0]}}}, "has images instead"),
        ({"user_data": {"a": {"x": [0], "y": [1]}}}, "labels y of a"),
        ("[[0, 1]", "not JSON"),
        ("row,owner\n0,a\n", "columns row, owner"),
        ("sample,client\n0,\n", "line 2"),
        ("sample,client\nx,a\n", "line 2"),
        ("sample,client,part\n0,a,dev\n", "(dev)"),
        ("3", "columns 3"),
        ("[]", "no client"),
    ],
)
def test_lists_that_do_not_fit_are_refused(npz, content, words):
    with refused("data.malformed", DataError, path=str(npz.parent / "lists.json")) as caught:
        imported(npz, content)
    assert words in str(caught.value)


def test_a_pickle_is_not_read(npz):
    (npz.parent / "lists.pkl").write_bytes(b"\x80\x04\x95\x0b")
    with refused("data.malformed", path=str(npz.parent / "lists.pkl")) as caught:
        build_task(DataConfig(source=f"npz:{npz}", split=str(npz.parent / "lists.pkl")))
    assert "JSON" in str(caught.value)


def test_imported_is_no_partition_to_draw(npz):
    with refused("config.conflict", key="data.partition", value="imported"):
        build_task(DataConfig(source=f"npz:{npz}", partition="imported", clients=2))


def test_a_run_over_imported_lists_continues_without_the_file(tmp_path):
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps([list(range(k, 1497, 50)) for k in range(5)]))
    run = raylt.run(
        "fedavg", data={"source": "digits", "split": str(lists)}, rounds=1, model="small", fleet="local", out=tmp_path
    )
    lists.unlink()
    assert run.config.data.clients == 5
    assert run.config.data.imbalance == 1
    assert raylt.Run(run.folder).split.seal == run.split.seal
    assert len(raylt.resume(run.folder, ["federation.rounds=2"], fleet="local").reports) == 2


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [0, 1], "a": [2]}',
        "[[0, null], [1]]",
        '{"users": ["a"], "user_data": {"a": {"x": 5, "y": [1]}}}',
        '{"users": ["a", "b"], "user_data": {"a": {"x": [0]}}}',
        '{"a": {"train": 3}, "b": [1]}',
        '{"a\\u001b[2J": [0], "b": [1]}',
        "sample,client\n1_0,a\n2,b\n",
        "sample,client\n\u0663,a\n2,b\n",
        "sample,client,client\n1,a,b\n",
        'sample,client,"a\nb"part\n1,a,train\n2,b,judged\n',
        'sample,client,"a\nb"\n1,a,train\n2,b,judged\n',
        f"sample,client\n1,{'x' * 200_000}\n",
    ],
)
def test_lists_that_could_be_misread_are_refused_in_one_line(tmp_path, text):
    file = tmp_path / "lists"
    file.write_text(text)
    with refused("data.malformed", DataError) as caught:
        build_task(DataConfig(split=str(file), imbalance=None))
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_client_has_a_name_that_tables_have_room_for(tmp_path):
    file = tmp_path / "lists"
    file.write_text(json.dumps({"a" * 300: [0], "b": [1]}))
    with refused("data.bad-name", DataError, value=300):
        build_task(DataConfig(split=str(file), imbalance=None))


def test_a_row_twice_in_one_list_is_refused_where_a_test_part_is_drawn(tmp_path):
    lists = [[*range(6), 0, 1, 2, 3, 4, 5], [*range(6, 12)]]
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    with refused("data.malformed") as caught:
        build_task(DataConfig(**pets(tmp_path), split=str(tmp_path / "lists.json")))
    assert "row 0 is listed twice, by the client 0." in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client_names": ("wien", "linz")}, "2 client names for 3 clients"),
        ({"test": ()}, "0 lists of test samples for 3 clients"),
        ({"test": (np.array([11]),)}, "1 lists of test samples for 3 clients"),
        ({"clients": (), "test": (), "client_names": ()}, "no sample"),
        ({"judged": (3,)}, "a client that the split does not have (3)"),
    ],
)
def test_names_and_test_lists_of_another_number_than_clients_are_refused(tmp_path, changes, words):
    lists = {name: {"train": [4 * k, 4 * k + 1], "test": [4 * k + 2]} for k, name in enumerate(LISTS)}
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    config = DataConfig(**pets(tmp_path))
    split = build_task(config.model_copy(update={"split": str(tmp_path / "lists.json")})).split
    build_task(config, split=split)
    with refused("data.split-mismatch") as caught:
        build_task(config, split=replace(split, **changes))
    assert words in str(caught.value)


def test_test_lists_of_ids_need_not_be_those_of_the_clients(tmp_path):
    for client in ("anna", "bert", "cora"):
        pets(tmp_path / client)
        (tmp_path / "shops").mkdir(exist_ok=True)
        (tmp_path / client / "pets").rename(tmp_path / "shops" / client)
    settings = {"source": f"folder:{tmp_path / 'shops'}", "root": str(tmp_path / "root"), "size": 8}
    config = DataConfig(**settings, partition="iid", clients=2)
    task = build_task(config)
    assert len(task.split.test or ()) == 3
    assert build_task(config, split=task.split).own_tests is None


def test_lists_of_rows_are_refused_if_doubles_leave_the_rows(tmp_path):
    file = tmp_path / "lists.json"
    file.write_text(json.dumps([[0, 1, 2, 3], [4, 5, 6, 7]]))
    config = DataConfig(**pets(tmp_path), split=str(file), doubles="drop")
    with refused("config.conflict", ConfigError, key="data.doubles", excludes="data.split"):
        build_task(config)
    build_task(config.model_copy(update={"doubles": "keep"}))
