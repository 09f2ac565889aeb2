import errno
import hashlib
import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import tensor

from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.checkpoint import Checkpoint, hash_tensors, latest, write
from raylt.errors import CheckpointError, DiskFull
from raylt.tree import leaves

STATE = {
    "model": {
        "encoder.0.weight": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.randn(3).to(torch.float16),
        "brain": torch.randn(3).to(torch.bfloat16),
        "double": torch.randn(2, dtype=torch.float64),
        "counter": tensor(17),
        "mask": tensor([True, False]),
        "byte": tensor([255], dtype=torch.uint8),
        "zero": tensor(0.1),
        "empty": torch.zeros(0, 5),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "special": tensor([math.inf, -0.0]),
    },
    "state": {
        "none": None,
        "name": 'cluster é \n "quoted"',
        "empty": "",
        "x": 0.1,
        "tiny": 5e-324,
        "large": 2**60,
        "flag": True,
        "third": 1 / 3,
        "folder": {},
        "a": {"b": {"c": tensor([1])}},
    },
}


def save(parent, step, keep=2, previous=None, **named) -> Checkpoint:
    return write(parent, step, list(named.items()), {"step": step}, previous, keep)


def folders(parent) -> list[str]:
    return sorted(entry.name for entry in parent.iterdir())


def assert_same(was, now):
    assert json.dumps(_form(was)) == json.dumps(_form(now))  # this also compares the order of the keys
    for (path, a), (_, b) in zip(leaves(was), leaves(now), strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), path
            assert torch.equal(a.contiguous().flatten().view(torch.uint8), b.flatten().view(torch.uint8)), path
        else:
            assert type(a) is type(b), path
            assert a == b, path


def _form(tree):
    return {key: _form(value) if isinstance(value, dict) else None for key, value in tree.items()}


@pytest.fixture
def two(tmp_path):
    """Save checkpoints 1 and 2: a part `server`, whose w is the step, and an unchanged part `client-000`."""
    first = save(tmp_path, 1, **{"server": {"w": torch.full((50,), 1.0)}, "client-000": {"c": tensor([7])}})
    save(tmp_path, 2, previous=first, **{"server": {"w": torch.full((50,), 2.0)}, "client-000": None})
    return tmp_path


def test_every_kind_of_leaf_comes_back_exactly(tmp_path):
    written = save(tmp_path, 1, server=STATE, plain={"k": 1}, empty={})
    read, faults = latest(tmp_path)
    assert faults == []
    assert read == written
    assert read.facts == {"step": 1}
    assert_same(STATE, read.read("server"))
    assert (read.read("plain"), read.read("empty")) == ({"k": 1}, {})


def test_a_part_without_tensors_has_no_file(tmp_path):
    save(tmp_path, 1, server={"w": tensor([1.0])}, plain={"k": 1}, empty={})
    assert folders(tmp_path / "000001") == ["manifest.json", "server.safetensors"]


def test_tensors_that_share_memory_are_written_each(tmp_path):
    base = torch.arange(6.0)
    state = {"a": base, "same": base, "head": base[:3], "tail": base[3:], "expanded": tensor([2.0]).expand(4)}
    save(tmp_path, 1, client=state)
    assert_same(state, latest(tmp_path)[0].read("client"))


def test_what_is_read_does_not_depend_on_what_was_written_staying_as_it_was(tmp_path):
    weight = torch.zeros(3)
    save(tmp_path, 1, server={"w": weight})
    weight.add_(1)
    assert latest(tmp_path)[0].read("server")["w"].tolist() == [0, 0, 0]


def test_newest_is_read_by_number_not_by_name(tmp_path):
    for step in (999_999, 1_000_000):  # the second name is longer and sorts before the first
        save(tmp_path, step, keep=5, server={"w": tensor([step])})
    assert latest(tmp_path)[0].facts == {"step": 1_000_000}


def carry_on(parent, *steps):
    previous, _ = latest(parent)
    for step in steps:
        previous = save(
            parent, step, previous=previous, **{"server": {"w": torch.full((50,), step)}, "client-000": None}
        )


def inode(parent, step, part="client-000"):
    return (parent / f"{step:06d}/{part}.safetensors").stat().st_ino


def test_unchanged_part_shares_no_file_with_the_checkpoint_before_but_with_the_one_before_that(two):
    assert inode(two, 1) != inode(two, 2)
    was = [inode(two, 1), inode(two, 2)]
    for step in range(3, 7):
        carry_on(two, step)
        assert inode(two, step) == was[-2]  # an unchanged part is not written again
        was.append(inode(two, step))
    assert inode(two, 5, "server") != inode(two, 6, "server")


@pytest.mark.parametrize("steps", [(), (3,), (3, 4, 5)])
def test_a_damaged_newest_checkpoint_leaves_one_that_is_whole(two, steps):
    carry_on(two, *steps)
    newest = max(two.iterdir())
    for file in newest.glob("*.safetensors"):
        flip(file)
    saved, faults = latest(two)
    assert (int(saved.folder.name), len(faults)) == (int(newest.name) - 1, 1)
    assert saved.read("client-000")["c"].item() == 7


def test_a_part_that_was_damaged_is_not_carried_on(two):
    (two / "000001/client-000.safetensors").unlink()
    previous, _ = latest(two)
    flip(two / "000002/client-000.safetensors")
    with refused("checkpoint.damaged", CheckpointError, path=str(two / "000002/client-000.safetensors")):
        save(two, 3, previous=previous, **{"client-000": None})
    assert folders(two) == ["000001", "000002"]


def test_unchanged_part_survives_the_removal_of_the_folder_it_was_written_in(two):
    previous, _ = latest(two)
    for step in (3, 4, 5):
        previous = save(two, step, previous=previous, **{"server": {"w": torch.full((50,), step)}, "client-000": None})
    assert folders(two) == ["000004", "000005"]
    assert latest(two)[0].read("client-000")["c"].item() == 7


def test_a_part_that_changed_last_time_is_not_taken_from_the_checkpoint_before(tmp_path):
    first = save(tmp_path, 1, keep=3, server={"w": tensor([1.0])})
    second = save(tmp_path, 2, keep=3, previous=first, server={"w": tensor([2.0])})
    save(tmp_path, 3, keep=3, previous=second, server=None)
    saved, faults = latest(tmp_path)
    assert (saved.facts["step"], faults) == (3, [])
    assert saved.read("server")["w"].item() == 2


def test_unchanged_part_without_a_file_is_carried_on(tmp_path):
    first = save(tmp_path, 1, client={"k": 3, "none": None})
    save(tmp_path, 2, previous=first, client=None)
    assert latest(tmp_path)[0].read("client") == {"k": 3, "none": None}


def test_unchanged_part_is_copied_where_links_are_impossible(two, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    carry_on(two, 3)
    assert (two / "000003/client-000.safetensors").stat().st_nlink == 1
    assert latest(two)[0].read("client-000")["c"].item() == 7


@pytest.mark.parametrize("keep", [2, 3])
def test_only_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 6):
        save(tmp_path, step, keep=keep, server={"w": tensor([step])})
    assert folders(tmp_path) == [f"{step:06d}" for step in range(6 - keep, 6)]


def test_nothing_committed_is_no_checkpoint(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "absent") == (None, [])


# damaged checkpoints


def cut(file):
    file.write_bytes(file.read_bytes()[:-7])


def empty(file):
    file.write_bytes(b"")


def flip(file):
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def remove(file):
    file.unlink()


def null(file):
    file.write_text("null")


def grow(file):
    """Add terabytes that take no room on the disk, but hours to hash."""
    os.truncate(file, 2**42)


def claim(file):
    """Claim a header that is no header, in a file of the size of one."""
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


def swap_types(file):
    file.write_text('{"format": 1, "facts": {}, "parts": []}')


DAMAGE = [
    ("server.safetensors", cut),
    ("server.safetensors", flip),
    ("server.safetensors", empty),
    ("server.safetensors", grow),
    ("server.safetensors", claim),
    ("server.safetensors", remove),
    ("manifest.json", cut),
    ("manifest.json", empty),
    ("manifest.json", remove),
    ("manifest.json", null),
    ("manifest.json", swap_types),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(two, file, damage):
    damage(two / "000002" / file)
    saved, faults = latest(two)
    assert saved.facts == {"step": 1}
    assert saved.read("server")["w"][0] == 1
    assert len(faults) == 1
    assert faults[0].startswith("checkpoint 000002 is damaged (")
    assert "\n" not in faults[0]


def test_damage_to_a_tensor_file_names_the_file(two):
    flip(two / "000002/server.safetensors")
    assert latest(two)[1] == ["checkpoint 000002 is damaged (server.safetensors: its content does not match its hash)"]


def test_a_checkpoint_under_another_number_is_passed_over(two):
    (two / "000002").rename(two / "000007")
    saved, faults = latest(two)
    assert saved.facts == {"step": 1}
    assert faults == ["checkpoint 000007 is damaged (it belongs to step 2)"]


def test_another_format_is_refused(two):
    file = two / "000002/manifest.json"
    content = json.loads(file.read_text()) | {"format": 1}
    del content["sha256"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(content | {"sha256": digest}))
    assert "format 1, this raylt reads 3" in latest(two)[1][0]


@pytest.mark.parametrize("place", range(0, 180, 7))
def test_manifest_with_a_flipped_bit_is_passed_over(two, place):
    file = two / "000002/manifest.json"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    saved, faults = latest(two)
    assert saved is not None
    assert saved.folder.name == "000001"
    assert len(faults) == 1


@pytest.mark.parametrize(("file", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_damage_to_all_is_an_error_that_names_each(two, file, damage):
    for step in ("000001", "000002"):
        damage(two / step / file)
    with refused("checkpoint.damaged", CheckpointError, path=str(two)) as caught:
        latest(two)
    assert "000002 is damaged" in str(caught.value)
    assert "000001 is damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_checkpoint_is_replaced_when_its_step_is_taken_again(two):
    flip(two / "000002/server.safetensors")
    saved, _ = latest(two)
    save(two, 2, previous=saved, **{"server": {"w": torch.full((50,), 2.5)}, "client-000": None})
    again, faults = latest(two)
    assert faults == []
    assert again.facts == {"step": 2}
    assert again.read("server")["w"][0] == 2.5
    assert folders(two) == ["000001", "000002"]


# processes killed while they write


def test_leftover_of_a_killed_process_is_ignored_and_cleaned(two):
    left = two / ".000003.0123456789abcdef.writing"
    left.mkdir()
    (left / "manifest.json").write_text((two / "000002/manifest.json").read_text())
    assert latest(two)[0].facts == {"step": 2}
    save(two, 3, server={"w": tensor([3.0])})
    assert folders(two) == ["000002", "000003"]


def test_a_write_that_fails_leaves_the_committed_ones_alone(two, monkeypatch):
    def no_room(*_):
        raise SafetensorError("some words of the system")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", no_room)
        patch.setattr(os, "fsync", full)
        with refused("disk.full", DiskFull) as caught:
            save(two, 3, server={"w": tensor([3.0])})
    assert caught.value.path.name == "server.safetensors"
    assert folders(two) == ["000001", "000002"]
    saved, faults = latest(two)
    assert (saved.facts, faults) == ({"step": 2}, [])


def test_all_of_a_checkpoint_is_on_the_disk_before_it_gets_its_number(two, monkeypatch):
    events, replace = [], os.replace

    def renamed(old, new, **folders):
        events.append(new)
        replace(old, new, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: events.append(Path(os.readlink(f"/proc/self/fd/{handle}"))))
        patch.setattr(os, "replace", renamed)
        save(two, 3, server={"w": tensor([3.0])})
    number = events.index("000003")
    before = [event for event in events[:number] if isinstance(event, Path)]
    (unfinished,) = {path for path in before if path.parent == two.resolve() and path.name.startswith(".000003.")}
    assert unfinished / "server.safetensors" in before
    assert any("manifest.json" in path.name for path in before)
    assert events.index(unfinished) > max(events.index(path) for path in before if path.parent == unfinished)
    assert two.resolve() in events[number:]


def test_a_file_whose_writing_ends_halfway_replaces_none(tmp_path, monkeypatch):
    def halfway(tensors, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    name = "model.safetensors"
    checkpoint.replace_tensors(tmp_path, name, {"w": tensor([1.0])})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", halfway)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.replace_tensors(tmp_path, name, {"w": tensor([2.0])})
    assert load_file(tmp_path / name)["w"].tolist() == [1.0]
    assert folders(tmp_path) == [name]


def test_other_entries_beside_the_checkpoints_are_left_alone(two):
    (two / "notes").mkdir()
    (two / "1-copy").mkdir()
    save(two, 3, server={"w": tensor([3.0])})
    assert folders(two) == ["000002", "000003", "1-copy", "notes"]


# hashes of checkpoints


def test_hash_depends_on_neither_the_order_of_the_dict_nor_the_layout_in_memory():
    weight = torch.randn(2, 3, 4, 4)
    bias = tensor([1.0])
    expected = hash_tensors({"w": weight, "b": bias})
    assert hash_tensors({"b": bias, "w": weight}) == expected
    assert hash_tensors({"w": weight.to(memory_format=torch.channels_last), "b": bias}) == expected
    assert hash_tensors({"w": weight, "b": tensor([1.0, 5.0])[::2]}) == expected
    assert hash_tensors({"w": torch.nn.Parameter(weight), "b": bias}) == expected
    assert hash_tensors({"w": torch.arange(8.0)[::2]}) == hash_tensors({"w": tensor([0.0, 2.0, 4.0, 6.0])})


def test_hash_is_sha256_of_name_type_shape_and_bytes():
    expected = hashlib.sha256(b"w\0torch.float32\0[2]\0" + struct.pack("<2f", 1, 2)).hexdigest()
    assert hash_tensors({"w": tensor([1.0, 2.0])}) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.zeros(2, dtype=torch.float64)},
        {"w": tensor([0.0, 0.0, 0.0, 1e-45])},
        {"w": tensor([0.0, 0.0, 0.0, -0.0])},
        {"w": torch.zeros(4), "x": torch.zeros(0)},
        {"w": torch.zeros(3)},
        {},
    ],
    ids=["name", "shape", "type", "width", "value", "sign", "entry", "size", "nothing"],
)
def test_hash_depends_on(other):
    assert hash_tensors(other) != hash_tensors({"w": torch.zeros(4)})


def test_hash_takes_every_type():
    types = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64)
    tensors = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in types} | {"0-d": tensor(1)}
    assert len({hash_tensors({"w": value}) for value in tensors.values()}) == len(tensors)
