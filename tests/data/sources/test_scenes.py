import json
import os

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from raylt.config import DataConfig
from raylt.data.images.cache import Mapped, load
from raylt.data.label_maps import VOID
from raylt.data.sources import scenes
from raylt.data.sources.sources import open_source
from raylt.errors import DataError

# 4 x 6 pixels; columns 0 to 5 hold indices 0, 1, 5, 10, 11 (void) and 3
INDICES = np.tile(np.array([0, 1, 5, 10, 11, 3], dtype=np.uint8), (4, 1))
FRAMES = {"train": ["0001TP_006690", "0016E5_00390", "0016E5_00420"], "test": ["Seq05VD_f00000", "0001TP_008550"]}


def picture(red: int) -> np.ndarray:
    return np.full((4, 6, 3), (red, 100, 200), dtype=np.uint8)


@pytest.fixture
def config(tmp_path):
    return DataConfig(source="camvid", root=str(tmp_path), size=8)


@pytest.fixture
def tree(tmp_path):
    """Write SegNet's layout of CamVid; image i of a part has the red value 40 * i."""
    for part, names in FRAMES.items():
        for folder in (part, f"{part}annot"):
            (tmp_path / "camvid" / folder).mkdir(parents=True)
        for i, name in enumerate(names):
            Image.fromarray(picture(40 * i)).save(tmp_path / "camvid" / part / f"{name}.png")
            Image.fromarray(INDICES).save(tmp_path / "camvid" / f"{part}annot" / f"{name}.png")
    return tmp_path / "camvid"


@pytest.fixture
def arrays(tmp_path):
    np.savez(
        tmp_path / "camvid.npz",
        **{
            f"{key}_{part}": value
            for part, names in FRAMES.items()
            for key, value in {
                "x": np.stack([picture(40 * i) for i in range(len(names))]),
                "y": np.stack([INDICES] * len(names)),
                "seq": [name.partition("_")[0] for name in names],
            }.items()
        },
    )
    return tmp_path / "camvid.npz"


def write_maps(place, indices):
    """Replace the second training map, or, in an npz, whose maps have one type, all maps but the first."""
    if place.suffix == ".npz":
        content = dict(np.load(place))
        content["y_train"] = np.stack([INDICES.astype(indices.dtype) * 0, indices, indices])
        np.savez(place, **content)
    else:
        image = Image.fromarray(indices)
        image.save(place / "trainannot/0016E5_00390.png", "TIFF" if image.mode == "F" else "PNG")


@pytest.mark.parametrize("layout", ["tree", "arrays"])
def test_camvid_is_resized_with_its_maps_and_knows_its_recordings(layout, config, request):
    request.getfixturevalue(layout)
    source = open_source(config)
    assert source.kind == "segmentation"
    assert source.class_names[0] == "sky"
    assert len(source.class_names) == 11
    assert isinstance(source.x_train, Mapped)
    assert source.x_train.shape == (3, 8, 12, 3)
    assert source.x_test.shape == (2, 8, 12, 3)
    assert load(source.x_train)[:, 0, 0, 0].tolist() == [0, 40, 80]
    assert load(source.y_train)[0, 0].tolist() == [0, 0, 1, 1, 5, 5, 10, 10, VOID, VOID, 3, 3]
    assert source.ids.tolist() == ["0001TP", "0016E5", "0016E5"]


@pytest.mark.parametrize(("depth", "grey"), [(None, 12), (12, 187)])
@pytest.mark.parametrize("layout", ["tree", "arrays"])
def test_frames_of_16_bits_keep_their_scale(layout, depth, grey, config, request, tmp_path):
    place = request.getfixturevalue(layout)
    deep = np.full((4, 6), 3000, np.uint16)
    if layout == "arrays":
        with np.load(place) as entries:
            content = dict(entries)
        content |= {f"x_{part}": np.stack([deep] * len(content[f"x_{part}"])) for part in FRAMES}
        np.savez(place, **content)
    else:
        for file in place.glob("t*[nt]/*.png"):
            if file.parent.name in FRAMES:
                Image.fromarray(deep).save(file)
    source = open_source(config.model_copy(update={"depth": depth}))
    assert np.unique(load(source.x_train)).tolist() == [grey]
    assert np.unique(load(source.x_test)).tolist() == [grey]


def test_a_second_opening_uses_the_cache(config, tree, monkeypatch):
    before = load(open_source(config).y_train)
    monkeypatch.setattr(scenes, "pack", None)  # a call would fail
    assert (load(open_source(config).y_train) == before).all()


def test_frames_of_another_height_or_depth_have_a_cache_of_their_own(config, tree):
    changes = ({}, {"size": 4}, {"depth": 8})
    paths = [open_source(config.model_copy(update=change)).x_train.path for change in changes]
    assert len(set(paths)) == 3


@pytest.mark.parametrize(("folder", "changed"), [("train", "x_train"), ("trainannot", "y_train")])
def test_a_frame_or_map_that_was_replaced_is_decoded_again(config, tree, folder, changed):
    before = open_source(config)
    file = tree / folder / "0016E5_00390.png"
    pixels = INDICES[:, ::-1].copy() if folder == "trainannot" else picture(255)
    Image.fromarray(pixels).save(file)
    os.utime(file, ns=(1, 1))
    after = open_source(config)
    for part in ("x_train", "y_train", "x_test", "y_test"):
        same = (load(getattr(after, part)) == load(getattr(before, part))).all()
        assert same == (part != changed), part


@pytest.mark.parametrize(
    ("layout", "indices", "words"),
    [
        ("tree", INDICES.astype(np.uint16) * 257, "(uint16, largest value 2827, instead"),
        ("tree", INDICES.astype(np.float32) / 2, "(float32, largest value 5.5, instead"),
        ("arrays", INDICES.astype(np.int64) - 1, "(int64, largest value 10, instead"),
        ("arrays", INDICES.astype(np.int32) * 257, "(int32, largest value 2827, instead"),
    ],
)
def test_label_maps_of_other_numbers_are_refused_by_name(layout, config, request, indices, words):
    write_maps(request.getfixturevalue(layout), indices)
    with refused("data.undecodable", DataError, row=1) as caught:
        open_source(config)
    assert words in str(caught.value)
    assert ("0016E5_00390" if layout == "tree" else "label map 1") in str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.bool_])
@pytest.mark.parametrize("layout", ["tree", "arrays"])
def test_label_maps_of_16_bits_and_of_one_bit_hold_indices(layout, config, request, dtype):
    indices = (INDICES == 1).astype(dtype) if dtype == np.bool_ else INDICES.astype(dtype)
    write_maps(request.getfixturevalue(layout), indices)
    row = load(open_source(config).y_train)[1, 0].tolist()
    bits = [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert row == (bits if dtype == np.bool_ else [0, 0, 1, 1, 5, 5, 10, 10, VOID, VOID, 3, 3])


def test_arrays_that_changed_are_decoded_again(config, arrays):
    before = open_source(config).x_train.path
    content = dict(np.load(arrays))
    np.savez(arrays, **(content | {"x_train": content["x_train"] + 9}))
    assert open_source(config).x_train.path != before


def test_camvid_that_is_nowhere_names_both_places(config):
    with refused("data.not-found", DataError, value="camvid"):
        open_source(config)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (
            lambda tree: (tree / "testannot/0001TP_008550.png").unlink(),
            "data.not-found",
            "testannot/0001TP_008550.png: no such label map",
        ),
        (lambda tree: [file.unlink() for file in (tree / "train").iterdir()], "data.not-found", "train: no frames"),
        (
            lambda tree: (tree / "train/0016E5_00390.png").write_bytes(b"x"),
            "data.undecodable",
            "0016E5_00390.png (not an image",
        ),
        (
            lambda tree: Image.new("RGB", (6, 4)).save(tree / "trainannot/0016E5_00390.png"),
            "data.undecodable",
            "trainannot/0016E5_00390.png (shape [4, 6, 3], and each pixel needs one class index, not a colour).",
        ),
        (
            lambda tree: Image.new("L", (3, 2)).save(tree / "trainannot/0016E5_00390.png"),
            "data.undecodable",
            "trainannot/0016E5_00390.png (3x2 pixels, and its image has 6x4 pixels). Replace or remove it.",
        ),
        (
            lambda tree: Image.new("RGB", (6, 5)).save(tree / "train/0016E5_00390.png"),
            "data.undecodable",
            "train/0016E5_00390.png (6x5 pixels, and the first image of camvid-train has 6x4 pixels). Replace",
        ),
    ],
)
def test_damaged_trees_are_refused(config, tree, spoil, code, words):
    spoil(tree)
    with refused(code, DataError) as caught:
        open_source(config)
    assert words in str(caught.value)


def test_arrays_without_recordings_are_refused(config, arrays):
    content = dict(np.load(arrays))
    del content["seq_train"]
    np.savez(arrays, **content)
    with refused("data.malformed", DataError, array="seq_train"):
        open_source(config)
    arrays.write_bytes(b"PK\3\4 not a zip")
    with refused("data.malformed", DataError, path=str(arrays)):
        open_source(config)


@pytest.fixture
def cityscapes(tmp_path):
    """Write torchvision's layout: two cities to train on, one to test on; ids 7 (road), 0 (unlabelled), 26 (car),
    33, 16."""
    ids = np.tile(np.array([7, 0, 26, 33, 16, 7], dtype=np.uint8), (4, 1))
    for split, cities in (("train", ["aachen", "bochum"]), ("val", ["lindau"])):
        for city in cities:
            stem = f"{city}_000000_000019"
            files = ("leftImg8bit", "leftImg8bit", picture(7)), ("gtFine", "gtFine_labelIds", ids)
            for folder, name, content in files:
                place = tmp_path / "cityscapes" / folder / split / city
                place.mkdir(parents=True)
                Image.fromarray(content).save(place / f"{stem}_{name}.png")
            (tmp_path / "cityscapes/gtFine" / split / city / f"{stem}_gtFine_polygons.json").write_text(json.dumps({}))
    return DataConfig(source="cityscapes", root=str(tmp_path), size=8)


def test_cityscapes_is_read_by_torchvision_and_tested_on_its_validation_part(cityscapes):
    source = open_source(cityscapes)
    assert source.class_names[:2] == ("road", "sidewalk")
    assert len(source.class_names) == 19
    assert (len(source.x_train), len(source.x_test)) == (2, 1)
    assert load(source.y_train)[0, 0].tolist() == [0, 0, VOID, VOID, 13, 13, 18, 18, VOID, VOID, 0, 0]
    assert sorted(source.ids.tolist()) == ["aachen", "bochum"]


def test_absent_cityscapes_tells_where_to_get_it(tmp_path):
    with refused("data.not-found", DataError, value="cityscapes") as caught:
        open_source(DataConfig(source="cityscapes", root=str(tmp_path)))
    assert "leftImg8bit_trainvaltest.zip" in str(caught.value)


def test_shapes_are_the_same_everywhere_and_long_tailed():
    source = open_source(DataConfig(source="shapes"))
    again = open_source(DataConfig(source="shapes", seed=1))
    assert (load(source.x_train) == load(again.x_train)).all()
    counts = np.bincount(load(source.y_train).ravel(), minlength=256)
    assert counts[2] > counts[3] > counts[4] > counts[5] > 0
    assert 0 < counts[VOID] < 0.1 * counts.sum()
    assert set(np.flatnonzero(counts)) == {*range(6), VOID}


def test_npz_files_may_hold_label_maps(tmp_path):
    x = np.zeros((3, 4, 5), dtype=np.uint8)
    y = np.where(np.arange(5) == 4, VOID, np.arange(5) % 2).astype(np.uint8) * np.ones((3, 4, 1), dtype=np.uint8)
    content = {"x_train": x, "y_train": y, "x_test": x[:1], "y_test": y[:1], "class_names": ["a", "b"]}

    def opened(**changes):
        np.savez(tmp_path / "it.npz", **(content | changes))
        return open_source(DataConfig(source=f"npz:{tmp_path / 'it.npz'}"))

    assert opened(id_train=[1, 1, 2]).kind == "segmentation"
    with refused("data.malformed", DataError, array="y_test"):
        opened(y_test=np.array([0]))
    with refused("data.malformed", DataError, array="y_train") as caught:
        opened(y_train=y.clip(0, 7))
    assert "labels from 0 to 7" in str(caught.value)
