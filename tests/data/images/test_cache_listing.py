"""List the caches of decoded images with their contents, and remove them."""

import json
import os
import subprocess
import sys

import pytest
from PIL import Image
from refusals import refused

from raylt.data.images.cache import caches, clear
from raylt.data.images.cache_builder import unfinished
from raylt.data.images.image_trees import How, decode_tree
from raylt.errors import ConfigError, DataError
from raylt.store import Folder, folder_for


@pytest.fixture
def root(tmp_path):
    """Make a data.root with two caches, an unfinished one and a folder that is no cache."""
    Image.new("RGB", (20, 12), "red").save(tmp_path / "0.png")
    for side in (8, 9):
        decode_tree("folder", tmp_path, ["0.png"], How(side), tmp_path / "root/cache")
    (tmp_path / "root/cache/folder-x").mkdir()
    (tmp_path / "root/cache/folder-x/images.partial").write_bytes(b"..")
    (tmp_path / "root/cache/of somebody").mkdir()
    (tmp_path / "root/cache/of somebody/letter.txt").write_text("")
    return tmp_path / "root"


def test_caches_are_listed_with_what_they_are_of(root, tmp_path):
    known = caches(root)
    assert sorted((cache.of, cache.images, cache.side) for cache in known if cache.images) == [
        (str(tmp_path), 1, 8),
        (str(tmp_path), 1, 9),
    ]
    assert [cache.name for cache in known if cache.of == "unfinished"] == ["folder-x"]
    assert all(cache.size > 8 * 8 * 3 for cache in known if cache.images)
    assert caches(tmp_path / "nowhere") == []


def test_one_or_all_are_removed_and_nothing_else(root):
    first, *rest = caches(root)
    assert clear(root, first.name) == [first]
    assert caches(root) == rest
    assert clear(root, "all") == rest
    assert [path.name for path in (root / "cache").iterdir()] == ["of somebody"]
    assert clear(root, "all") == []
    with refused("data.unknown-cache", ConfigError, name="gone"):
        clear(root, "gone")


def test_a_cache_that_is_being_made_stays(root):
    cache = next(cache for cache in caches(root) if cache.images)
    with folder_for(root / "cache" / cache.name) as folder:
        lock = folder.lock("lock")
        assert lock is not None
        with refused("data.cache-busy", ConfigError, name=cache.name):
            clear(root, cache.name)
        os.close(lock)
    assert clear(root, cache.name) == [cache]


def test_a_cache_is_removed_under_its_lock(root, monkeypatch):
    cache = next(cache for cache in caches(root) if cache.images)
    locked = []
    real = Folder.rename

    def rename(folder, old, new):
        locked.append(folder.inner(old).is_locked("lock"))
        real(folder, old, new)

    monkeypatch.setattr(Folder, "rename", rename)
    assert clear(root, cache.name) == [cache]
    assert locked == [True]
    assert not (root / "cache" / cache.name).exists()
    assert cache not in caches(root)


def test_a_process_that_waits_for_a_removed_cache_is_told_so(root):
    name = next(cache.name for cache in caches(root) if cache.images)
    array = root / "cache" / name / "other.npy"
    with folder_for(array.parent) as folder:
        clear(root, name)
        with refused("data.cache-unreadable", DataError, path=str(array)), unfinished(folder, array):
            pass
    with folder_for(array.parent) as folder:  # removed after its lock's file was opened
        (root / "cache" / name).rename(root / "cache/away")
        with refused("data.cache-unreadable", DataError, path=str(array)), unfinished(folder, array):
            pass
    with folder_for(array.parent) as folder, unfinished(folder, array) as missing:
        assert missing


@pytest.mark.slow
def test_the_command_lists_and_removes(root):
    def data(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "raylt", "data", f"data.root={root}", *arguments], capture_output=True, text=True
        )

    assert len(json.loads(data("--cache", "--format", "json").stdout)) == 3
    assert "3 caches, " in data("--clear-cache", "all").stdout
    failed = data("--clear-cache", "gone")
    assert failed.returncode == 2
    assert "gone" in failed.stderr
