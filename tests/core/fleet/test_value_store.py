"""Values by client that do not fit into memory go to a file and keep their bits."""

import errno
import tempfile
from pathlib import Path

import pytest
import torch
from refusals import refused
from tiny import configure, fingerprint, make_experiment, private_states

from raylt.core.fleet import value_store
from raylt.core.fleet.value_store import ValueStore
from raylt.errors import DiskFull
from raylt.methods.mupfl.method import MuPFL

VALUE = {
    "w": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "deep": {"count": torch.tensor(7), "flags": torch.tensor([True, False, True]), "none": torch.empty(0, 4)},
    "half": torch.randn(9).half(),
    "text": "a",
    "number": 2.5,
}


@pytest.fixture
def full(monkeypatch):
    """Set the limits so that no value fits into memory."""
    monkeypatch.setattr(value_store, "IN_MEMORY", 0)
    monkeypatch.setattr(value_store, "SMALLEST", 1)


@pytest.fixture
def mapped(monkeypatch):
    """Return a list that receives the size of each new memory map."""
    sizes, inner = [], value_store.mmap.mmap

    def counted(file, size, **places):
        sizes.append(size)
        return inner(file, size, **places)

    monkeypatch.setattr(value_store.mmap, "mmap", counted)
    return sizes


def test_a_value_in_the_file_has_the_same_bits_and_can_be_changed(full, mapped):
    store = ValueStore()
    kept = [store.keep(VALUE) for _ in range(3)]
    assert len(mapped) == 3
    kept[0]["w"].zero_()
    for value in kept[1:]:
        assert torch.equal(value["w"], VALUE["w"])
        assert torch.equal(value["last"], VALUE["last"])
        assert {name: leaf.tolist() for name, leaf in value["deep"].items()} == {
            name: leaf.tolist() for name, leaf in VALUE["deep"].items()
        }
        assert value["half"].dtype == torch.float16
        assert torch.equal(value["half"], VALUE["half"])
        assert (value["text"], value["number"]) == ("a", 2.5)
    assert torch.equal(store.keep({"w": VALUE["w"]})["w"], VALUE["w"])
    assert kept[0]["w"].eq(0).all()


def test_only_what_exceeds_the_memory_is_in_the_file(monkeypatch, mapped):
    monkeypatch.setattr(value_store, "IN_MEMORY", 100)
    monkeypatch.setattr(value_store, "SMALLEST", 30)
    store, parts = ValueStore(), {"a": torch.arange(9.0), "b": torch.ones(1)}
    assert store.keep(parts) is parts
    assert store.keep(parts) is parts
    kept = store.keep(parts)
    assert torch.equal(kept["a"], parts["a"])
    assert kept["b"].data_ptr() != parts["b"].data_ptr()  # a copy, because a view would keep the whole array alive
    small = {"a": torch.ones(6)}  # its 24 bytes are more than memory has left
    assert store.keep(small) is small
    assert mapped == [128]


def test_a_full_folder_for_temporary_files_is_said_in_one_line(full, monkeypatch):
    class Full:
        def seek(self, *_):
            return 0

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with refused("disk.full", DiskFull, path=str(Path(tempfile.gettempdir()))):
        ValueStore().keep(VALUE)


def test_a_run_whose_updates_have_no_room_in_memory_has_the_same_bits(tiny_task, tmp_path, monkeypatch, mapped):
    def states(name):
        method = MuPFL(m=5, tau=2, matching_steps=3)
        experiment = make_experiment(configure(federation={"rounds": 2}), tiny_task, tmp_path / name, method)
        figures = []
        while not experiment.done:
            figures.append(experiment.step().figures)
        private = {id: fingerprint(state) for id, state in private_states(experiment).items()}
        return fingerprint(experiment.server.model.state_dict()), private, figures

    expected = states("memory")
    assert mapped == []
    monkeypatch.setattr(value_store, "IN_MEMORY", 0)
    monkeypatch.setattr(value_store, "SMALLEST", 1)
    assert states("file") == expected
    assert len(mapped) > 10
