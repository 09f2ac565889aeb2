"""Private states of many clients in packs: a reader gets each client's newest state, and little is written."""

import random
from types import SimpleNamespace

import torch
from tiny import fingerprint

from raylt.core.checkpoint import checkpoint, client_states
from raylt.core.checkpoint.checkpoint import Checkpoint, ClientStates
from raylt.core.checkpoint.client_states import SavedStates


class Kept(SimpleNamespace):
    """A fleet that only serves private states."""

    def private_states(self, ids):
        return ((id, self.held[id]) for id in ids)


def state_of(id: int, step: int, numbers: int = 3) -> dict:
    """Return a client's state: one of three forms by id, with numbers that change with the step for some clients."""
    model = {"head.weight": torch.full((numbers,), float(1000 * id + step))}
    state = {"calls": step % 2, "map": {"x": torch.tensor(step)}, "none": None}
    return {"model": model if id % 3 else {}, "state": state}


def saved_after(folder, step: int, fleet: Kept, before: Checkpoint | None) -> tuple[Checkpoint, int]:
    """Save a checkpoint; return it and the number of client states that were written for it."""
    written = 0

    def parts():
        nonlocal written
        for name, part in client_states.parts(step, {} if before is None else before.parts, fleet):
            written += len(part.by_client) if isinstance(part, ClientStates) else 0
            yield name, part

    saved = checkpoint.write(folder, step, parts(), {"step": step}, before, 2)
    fleet.changed.clear()
    return saved, written


def test_the_newest_of_each_client_is_read_and_few_are_written_twice(tmp_path):
    clients, asked, steps, rng = 900, 90, 25, random.Random(0)
    fleet, before, written = Kept(held={}, changed=set()), None, 0
    for step in range(1, steps + 1):
        for id in rng.sample(range(clients), asked):
            fleet.held[id] = state_of(id, step)
            fleet.changed.add(id)
        before, more = saved_after(tmp_path / "c", step, fleet, before)
        written += more
    saved, faults = checkpoint.latest(tmp_path / "c")
    assert not faults
    kept = SavedStates(saved)
    assert kept.part_of.keys() == fleet.held.keys()
    assert {id: fingerprint(kept.read(id)) for id in fleet.held} == {
        id: fingerprint(state) for id, state in fleet.held.items()
    }
    assert kept.read(clients) is None
    assert written < 2 * steps * asked
    assert len(saved.parts) < 2 * clients / asked
    assert (saved.folder / "manifest.json").stat().st_size < 40 * len(fleet.held)


def test_the_newest_pack_is_that_of_the_largest_step_however_many_digits_it_has():
    old, new = "clients-999999-0", "clients-1000000-0"
    saved = {name: {"tree": {"clients": dict.fromkeys(ids)}} for name, ids in ((old, "37"), (new, "7"))}
    assert client_states.part_of_client(saved) == {3: old, 7: new}


def test_one_client_at_a_time_makes_no_file_for_each(tmp_path):
    fleet, before, most = Kept(held={}, changed=set()), None, 0
    for step in range(1, 201):
        fleet.held[step] = state_of(step, step)
        fleet.changed.add(step)
        names = [name for name, _ in client_states.parts(step, {} if before is None else before.parts, fleet)]
        before = SimpleNamespace(parts={name: {"tree": part} for name, part in _trees(before, step, fleet).items()})
        fleet.changed.clear()
        most = max(most, len(names))
    assert most <= 200 // client_states.SMALL_PACK_CLIENTS + 1


def _trees(before, step, fleet):
    trees = {}
    for name, part in client_states.parts(step, {} if before is None else before.parts, fleet):
        trees[name] = (
            before.parts[name]["tree"]
            if part is None
            else {"clients": {str(id): 0 for id in part.by_client}, "bytes": part.size}
        )
    return trees


def test_a_full_pack_is_cut_and_large_states_stay_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(client_states, "PACK_BYTES", 8000)
    monkeypatch.setattr(client_states, "SMALL_PACK_BYTES", 4000)
    fleet = Kept(
        held={id: {"model": {"w": torch.full((1000,), float(id))}, "state": {}} for id in range(6)},
        changed=set(range(6)),
    )
    first, written = saved_after(tmp_path / "c", 1, fleet, None)
    assert [list(first.parts[name]["tree"]["clients"]) for name in first.parts] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert written == 6
    fleet.changed.add(0)
    second, written = saved_after(tmp_path / "c", 2, fleet, first)
    assert written == 1
    assert set(second.parts) == {*first.parts, "clients-000002-0"}
    fleet.changed.add(1)
    third, written = saved_after(tmp_path / "c", 3, fleet, second)
    assert written == 1
    assert "clients-000001-0" not in third.parts
    assert all(SavedStates(third).read(id)["model"]["w"][0] == id for id in range(6))


def test_a_pack_of_which_less_than_half_is_in_use_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(client_states, "SMALL_PACK_BYTES", 1)
    fleet = Kept(held={id: state_of(id, 1) for id in range(4)}, changed=set(range(4)))
    saved, _ = saved_after(tmp_path / "c", 1, fleet, None)
    for step, id, kept in ((2, 0, True), (3, 1, True), (4, 2, False)):
        fleet.changed.add(id)
        saved, _ = saved_after(tmp_path / "c", step, fleet, saved)
        assert ("clients-000001-0" in saved.parts) == kept
    assert SavedStates(saved).part_of.keys() == fleet.held.keys()


def test_a_copied_checkpoint_has_all_states_in_new_packs(tmp_path):
    states = {id: state_of(id, 1) for id in (0, 7, 1234)}
    first, _ = saved_after(tmp_path / "c", 1, Kept(held=states, changed=set(states)), None)
    copied = dict(client_states.copied(9, first))
    assert list(copied) == ["clients-000009-0"]
    assert {id: fingerprint(state) for id, state in copied["clients-000009-0"].by_client.items()} == {
        id: fingerprint(state) for id, state in states.items()
    }
