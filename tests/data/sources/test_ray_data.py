"""Images that Ray Data reads, and the parts of their reading that need no Ray."""

import io
import os
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow.fs import LocalFileSystem, S3FileSystem, copy_files
from refusals import refused

from raylt.config import DataConfig
from raylt.config.paths import located_data
from raylt.data.images.cache import load
from raylt.data.images.cache_builder import BAD, COLOUR, GREY, DecodedRows, append, bad_rows, unfinished
from raylt.data.images.image_trees import How
from raylt.data.sources import ray_data
from raylt.data.sources.labels import NameCodes
from raylt.data.sources.ray_data import Columns, DecodeBatch, Reading, find_columns
from raylt.data.sources.sources import open_source
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError, RayltError
from raylt.store import folder_for


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def objects(*values):
    """A column as Ray Data gives it in numpy's form."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def reading(tmp_path, kind="parquet", train=("a.parquet",), test=None, **columns):
    names = {"image": None, "label": None, "client": None, "sized": False} | columns
    array = tmp_path / "cache" / "images.npy"
    return Reading(f"ray:{tmp_path}", str(tmp_path), kind, train, test, How(8, "auto"), **names, array=array)


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def no_reader(monkeypatch):
    """The reader is not started, and what it would be asked for is kept."""
    asked = []

    def stop(reading):
        asked.append(reading)
        raise InterruptedError

    monkeypatch.setattr(ray_data, "_call_reader", stop)
    return asked


def ask(no_reader, folder, **settings):
    with pytest.raises(InterruptedError):
        open_source(DataConfig(source=f"ray:{folder}", root=str(folder.parent / "root"), **settings))
    return no_reader[-1]


# the files and parts


def test_files_of_both_parts_are_read_in_the_order_of_their_names(tmp_path, no_reader):
    for name in ("train/b.parquet", "train/a.parquet", "test/c.parquet", "train/_metadata", "train/.a.parquet"):
        write(tmp_path / name, label=[1])
    asked = ask(no_reader, tmp_path)
    assert asked.kind == "parquet"
    assert (asked.train, asked.test) == (("train/a.parquet", "train/b.parquet"), ("test/c.parquet",))


def test_without_a_folder_train_everything_is_for_training(tmp_path, no_reader):
    write(tmp_path / "test/c.parquet", label=[1])
    write(tmp_path / "more/a.parquet", label=[1])
    asked = ask(no_reader, tmp_path)
    assert (asked.train, asked.test) == (("more/a.parquet", "test/c.parquet"), None)


def test_another_part_can_be_the_test_set(tmp_path, no_reader):
    for part in ("train", "test", "held"):
        write(tmp_path / part / "a.parquet", label=[1])
    assert ask(no_reader, tmp_path, test_part="held").test == ("held/a.parquet",)
    with refused("config.unknown-name", ConfigError, key="data.test_part", value="none"):
        open_source(DataConfig(source=f"ray:{tmp_path}", root=str(tmp_path), test_part="none"))


def test_a_uri_is_read_as_its_path(tmp_path, no_reader):
    write(tmp_path / "data" / "a.parquet", label=[1])
    by_path = ask(no_reader, tmp_path / "data")
    with pytest.raises(InterruptedError):
        open_source(DataConfig(source=f"ray:file://{tmp_path}/data", root=str(tmp_path / "root")))
    assert no_reader[-1].train == by_path.train


def test_another_file_or_setting_has_another_cache(tmp_path, no_reader):
    file = tmp_path / "data" / "a.parquet"
    write(file, label=[1])
    first = ask(no_reader, tmp_path / "data").array
    assert ask(no_reader, tmp_path / "data").array == first
    assert ask(no_reader, tmp_path / "data", size=32).array != first
    assert ask(no_reader, tmp_path / "data", depth=12).array != first
    assert ask(no_reader, tmp_path / "data", client_column="shop").array != first
    os.utime(file, ns=(1, 1))
    assert ask(no_reader, tmp_path / "data").array != first


@pytest.mark.parametrize("address", ["absent", "file:///absent/a.parquet", "s4://bucket/x", "empty"])
def test_nothing_to_read_is_named(tmp_path, address):
    (tmp_path / "empty").mkdir()
    address = address if "://" in address else tmp_path / address
    with refused("data.not-found", DataError, key="data.source", value=f"ray:{address}"):
        open_source(DataConfig(source=f"ray:{address}", root=str(tmp_path)))


@pytest.mark.parametrize("names", [("a.parquet", "b.tar"), ("a.csv",), ("a/x.png", "b.tar")])
def test_files_of_one_kind_are_asked_for(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with refused("data.wrong-layout", DataError, key="data.source"):
        open_source(DataConfig(source=f"ray:{tmp_path}", root=str(tmp_path / "root")))


def test_files_of_other_kinds_are_left_out_with_a_note(tmp_path):
    for name in ("a.parquet", "README.md", "LICENSE", "more/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (train, test), notes = ray_data._list_parts(DataConfig(source=f"ray:{tmp_path}"), str(tmp_path))
    assert ([file.path for file in train], test) == (["a.parquet"], None)
    assert notes == ("3 files of other kinds were left out: 2 .md, 1 without a suffix",)


def test_a_source_without_a_path_is_refused():
    with refused("config.unknown-name", ConfigError, key="data.source", value="ray"):
        open_source(DataConfig(source="ray"))


def test_a_relative_path_starts_in_the_folder_of_the_run(tmp_path):
    assert located_data(DataConfig(source="ray:rows"), tmp_path).source == f"ray:{tmp_path / 'rows'}"
    assert located_data(DataConfig(source="ray:s3://b/rows"), tmp_path).source == "ray:s3://b/rows"


def test_image_files_have_the_classes_and_clients_of_their_folders(tmp_path):
    files = {"train": ("train/wien/cat/1.png", "train/linz/dog/2.png"), "test": ("test/wien/cat/3.png",)}
    train, test = ray_data.image_parts(reading(tmp_path, "images", **files))
    assert (train.classes, train.clients) == (("cat", "dog"), ("wien", "linz"))
    assert (test.classes, test.clients) == (("cat",), ("wien",))
    with refused("data.wrong-layout", DataError):
        ray_data.image_parts(reading(tmp_path, "images", train=("1.png",)))
    with refused("data.wrong-layout", DataError, name="owl"):
        ray_data.image_parts(reading(tmp_path, "images", train=("train/cat/1.png",), test=("test/owl/3.png",)))


# the columns


ROW = {"photo": {"bytes": b"x", "path": None}, "kind": np.int64(3), "shop": "wien"}


def test_columns_are_found_by_what_they_hold(tmp_path):
    assert find_columns(reading(tmp_path, client="shop"), ROW) == Columns("photo", "kind", "shop", numbers=True)
    named = find_columns(reading(tmp_path, image="photo", label="shop", client="kind"), ROW)
    assert named == Columns("photo", "shop", "kind", client_numbers=True)


def test_a_tar_has_its_class_in_cls(tmp_path):
    row = {"__key__": "a/1", "jpg": b"x", "cls": b"3", "shop.txt": b"wien", "__url__": "x.tar"}
    asked = reading(tmp_path, "webdataset", client="shop.txt")
    assert find_columns(asked, row) == Columns("jpg", "cls", "shop.txt", "__key__")


@pytest.mark.parametrize("key", ["image", "label", "client"])
def test_a_column_that_does_not_exist_is_named(tmp_path, key):
    with refused("config.unknown-name", ConfigError, key=f"data.{key}_column", value="none"):
        find_columns(reading(tmp_path, **{key: "none"}), ROW)


@pytest.mark.parametrize(
    ("more", "key"), [({"icon": b"y"}, "image"), ({"price": np.int64(1)}, "label"), ({"photo": 1.5}, "image")]
)
def test_a_choice_of_columns_is_left_to_the_user(tmp_path, more, key):
    with refused("config.unknown-name", ConfigError, key=f"data.{key}_column", value=None):
        find_columns(reading(tmp_path, client="shop"), ROW | more)


@pytest.mark.parametrize("value", [0.5, None, np.array([1, 2]), np.bool_(True), {"a": 1}])
@pytest.mark.parametrize("key", ["label", "client"])
def test_values_that_are_no_names_are_refused(tmp_path, key, value):
    with refused("data.malformed", DataError, key=f"data.{key}_column"):
        find_columns(reading(tmp_path, **{"label": "kind", key: "odd"}), ROW | {"odd": value})


def test_arrays_keep_their_size(tmp_path):
    nested = objects(np.array([1, 2, 3], np.uint8), np.array([4, 5, 6], np.uint8))
    assert find_columns(reading(tmp_path), ROW | {"photo": nested, "shop": 0.5}).shape == (2, 3, 1)
    assert find_columns(reading(tmp_path), ROW | {"photo": np.zeros((4, 5, 3)), "shop": 0.5}).shape == (4, 5, 3)
    with refused("config.conflict", ConfigError, key="data.size"):
        find_columns(reading(tmp_path, sized=True), ROW | {"photo": nested, "shop": 0.5})


@pytest.mark.parametrize("value", [np.zeros(4), np.zeros((2, 2, 5)), objects(np.zeros(2), np.zeros(3)), "x.png"])
def test_values_that_are_no_images_are_refused(tmp_path, value):
    with refused("data.malformed", DataError, key="data.image_column", value="photo"):
        find_columns(reading(tmp_path, image="photo", label="kind"), ROW | {"photo": value})


# the decoding


def test_a_batch_is_decoded_as_image_files_are():
    grey = np.full((12, 8), 7, np.uint8)
    red = np.zeros((8, 8, 3), np.uint8)
    red[..., 0] = 200
    decode = DecodeBatch(Columns("photo", "kind", None), How(8, "auto"))
    out = decode({"photo": objects(png(grey), {"bytes": png(red)}, b"x", None), "kind": np.arange(4)})
    assert out["pixels"][0].tolist() == np.full((8, 8, 3), 7).tolist()
    assert out["pixels"][1].tolist() == red.tolist()
    assert out["state"].tolist() == [GREY, COLOUR, BAD, BAD]
    assert [bool(cause) for cause in out["cause"]] == [False, False, True, True]
    assert out["label"].tolist() == [0, 1, 2, 3]
    assert not out["deep"].any()


def test_a_batch_of_arrays_has_one_shape_and_one_scale():
    decode = DecodeBatch(Columns("photo", "kind", None, shape=(2, 2, 1)), How(224, "auto"))
    images = [np.array([[0, 65535], [257, 0]], np.uint16), np.zeros((2, 2)), np.zeros((2, 3)), np.full((2, 2), 9.0)]
    out = decode({"photo": objects(*images), "kind": np.arange(4)})
    assert out["pixels"][0, ..., 0].tolist() == [[0, 255], [1, 0]]
    assert out["state"].tolist() == [COLOUR, COLOUR, BAD, BAD]


def test_a_batch_takes_a_bounded_memory():
    assert DecodeBatch(Columns("photo", "kind", None), How(8, "auto")).rows == 1024
    assert DecodeBatch(Columns("photo", "kind", None), How(224, "auto")).rows == 55
    assert DecodeBatch(Columns("photo", "kind", None), How(8192, "auto")).rows == 1


# names


def test_names_have_one_order_whatever_order_they_come_in():
    codes = NameCodes("data.label_column", "ray:x")
    codes.add(np.array([10, 9, 10]))
    codes.add(np.array([2]))
    names, positions = codes.sorted(numbers=True)
    assert (names, positions.tolist()) == (["2", "9", "10"], [2, 1, 2, 0])
    names, positions = codes.sorted(numbers=False)
    assert (names, positions.tolist()) == (["10", "2", "9"], [0, 2, 0, 1])


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (np.array([1.0, np.nan]), "data.malformed"),
        (objects("a", None), "data.malformed"),
        (objects("a", ""), "data.malformed"),
        (np.array([1.0, 0.5]), "data.malformed"),
        (objects("a", "b\n"), "data.bad-name"),
    ],
)
def test_a_row_without_a_name_is_refused(values, code):
    with refused(code, DataError, key="data.label_column"):
        NameCodes("data.label_column", "ray:x").add(values)


@pytest.mark.parametrize("names", [np.array(["b", "a", "", "a"]), objects("b", "a", "", "a")])
def test_the_first_row_without_a_name_is_named_across_batches(names):
    codes = NameCodes("data.label_column", "ray:x")
    codes.add(np.array(["a", "b", "a"]))
    with pytest.raises(DataError) as caught:
        codes.add(names)
    assert caught.value.details["row"] == 5


def test_a_name_of_an_array_is_quoted_as_plain_text():
    with pytest.raises(DataError, match=r"printed \('b\\n'\)"):
        NameCodes("data.label_column", "ray:x").add(np.array(["a", "b\n"]))


# the cache


def part(*levels, bad=()):
    states = np.array([BAD if position in bad else COLOUR for position in range(len(levels))], np.uint8)
    pixels = np.repeat(np.array(levels, np.uint8), 12).reshape(-1, 2, 2, 3)
    return DecodedRows(pixels, states, {position: f"row of {levels[position]}" for position in bad})


@pytest.mark.parametrize("whole", [True, False])
def test_rows_are_appended_in_their_order(tmp_path, whole):
    path = tmp_path / "cache" / "images.npy"
    with folder_for(path.parent) as folder:
        with unfinished(folder, path) as missing:
            assert missing
            parts = [part(1, 2), part(3, 4, 5, bad=(1,))]
            bad = append(folder, path, (2, 2, 3), parts, lambda count: {"images": count}, whole=whole)
        assert bad == bad_rows(folder, path) == {3: "row of 4"}
    assert path.exists() != whole
    if not whole:
        assert np.load(path)[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_grey_rows_have_one_channel_if_all_are_grey(tmp_path):
    path = tmp_path / "cache" / "images.npy"
    grey = DecodedRows(part(1, 2).pixels, np.array([GREY, BAD], np.uint8), {1: "row 1"})
    with folder_for(path.parent) as folder:
        append(folder, path, (2, 2, 3), [grey, grey], lambda count: {}, grey=True, whole=False)
    assert np.load(path).shape == (4, 2, 2, 1)


def test_a_reader_that_dies_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", label=[1])
    monkeypatch.setattr(ray_data, "READER", "import os; os._exit(3)")
    with refused("data.decoding-failed", RayltError, key="data.source"):
        open_source(DataConfig(source=f"ray:{tmp_path}", root=str(tmp_path / "root")))


# with Ray


def add(archive, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


@pytest.fixture
def stored(tmp_path):
    """The same 30 images of three shops as image files, as a tar, and in two Parquet files of several groups."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(30):
        content = png(generator.integers(0, 256, (12, 10, 3), dtype=np.uint8))
        rows.append((f"{number:03}", content, f"{number % 11:02}", ("wien", "linz", "graz")[number % 3]))
    rows.sort(key=lambda row: (row[3], row[2], row[0]))  # the order of folders
    for name, content, label, shop in rows:
        file = tmp_path / "folder" / shop / label / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (tmp_path / "parquet").mkdir()
    for start, name in ((0, "a"), (13, "b")):
        names, contents, labels, shops = zip(*rows[start : start + (13 if name == "a" else 17)], strict=True)
        table = pa.table({"name": names, "photo": contents, "kind": labels, "shop": shops})
        pq.write_table(table, tmp_path / "parquet" / f"{name}.parquet", row_group_size=4)
    (tmp_path / "tar").mkdir()
    with tarfile.open(tmp_path / "tar" / "0.tar", "w") as archive:
        for number, (_, content, label, shop) in enumerate(rows):
            for suffix, member in (("png", content), ("cls", label.encode()), ("shop.txt", shop.encode())):
                add(archive, f"{number:03}.{suffix}", member)
    return tmp_path


@pytest.mark.slow
def test_every_form_of_the_same_images_gives_the_same_task(stored, monkeypatch):
    monkeypatch.setenv("RAYLT_ADDRESS", "local")

    def task(source, **columns):
        root = str(stored / "root")
        return build_task(DataConfig(source=source, root=root, size=8, channels=3, **columns))

    want = task(f"folder:{stored}/folder")
    named = {"label_column": "kind", "client_column": "shop"}
    got = {
        "parquet": task(f"ray:{stored}/parquet", **named),
        "tar": task(f"ray:file://{stored}/tar/0.tar", client_column="shop.txt"),
        "images": task(f"ray:{stored}/folder"),
    }
    monkeypatch.setattr(ray_data, "_call_reader", None)  # the second opening reads the cache
    got["again"] = task(f"ray:{stored}/parquet", **named)
    for form, task_of_form in got.items():
        assert task_of_form.class_names == want.class_names, form
        assert task_of_form.client_names == want.client_names, form
        assert task_of_form.split.sha256 == want.split.sha256, form
        for shard, wanted in zip(task_of_form.shards, want.shards, strict=True):
            assert np.array_equal(load(shard.x), load(wanted.x)), form
            assert np.array_equal(load(shard.y), load(wanted.y)), form
        assert np.array_equal(load(task_of_form.test.x), load(want.test.x)), form


@pytest.fixture
def bucket(stored, monkeypatch):
    """The same images in a bucket of an S3 server in this process: (its address, the query of a URI)."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    server.start()
    host, port = server.get_host_and_port()
    system = S3FileSystem(endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True)
    system.create_dir("shops")
    copy_files(str(stored), "shops", source_filesystem=LocalFileSystem(), destination_filesystem=system)
    yield "s3://shops", f"?endpoint_override={host}:{port}&scheme=http"
    server.stop()


@pytest.mark.slow
def test_a_bucket_gives_the_task_of_its_files(stored, bucket, monkeypatch):
    monkeypatch.setenv("RAYLT_ADDRESS", "local")
    address, query = bucket

    def task(source, **columns):
        return build_task(DataConfig(source=source, root=str(stored / "root"), size=8, channels=3, **columns))

    want = task(f"folder:{stored}/folder")
    for form, columns in {
        "parquet": {"label_column": "kind", "client_column": "shop"},
        "tar": {"client_column": "shop.txt"},
        "folder": {},
    }.items():
        got = task(f"ray:{address}/{form}{query}", **columns)
        assert got.split.sha256 == want.split.sha256, form
        for shard, wanted in zip(got.shards, want.shards, strict=True):
            assert np.array_equal(load(shard.x), load(wanted.x)), form
    for missing in (f"{address}/nothing{query}", f"s3://nowhere/tar{query}"):
        with refused("data.not-found", DataError, key="data.source", value=f"ray:{missing}"):
            task(f"ray:{missing}")


@pytest.mark.slow
def test_errors_of_the_reader_arrive_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYLT_ADDRESS", "local")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 is all there is PAR1")
    with refused("data.malformed", DataError, key="data.source"):
        open_source(DataConfig(source=f"ray:{tmp_path}/damaged.parquet", root=str(tmp_path)))
