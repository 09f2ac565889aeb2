import hashlib
import json
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import yaml
from refusals import refused
from tensorboardX.proto.event_pb2 import Event
from torch import tensor

from raylt.config import Config, load
from raylt.core.checkpoint import checkpoint
from raylt.core.report import RoundReport
from raylt.data.splits.split import Split
from raylt.errors import CheckpointError, DiskFull, FolderHeld, at_the_shell
from raylt.runs.folder import provenance
from raylt.runs.folder.notes import NOTES, SERVER_DIED
from raylt.runs.folder.writer import Journal
from raylt.store import MAX_BYTES
from raylt.typed_json import hash_json

SPLIT = Split((np.array([0, 2]), np.array([1])), "0" * 64, "digits", 1.0, "iid", 0.5, 0)
DATA = {"training images": "1" * 64, "test images": "2" * 64}
CONFIG = load(None, ["method=fedprox", "method.mu=0.1", "seed=3"])


def report(step: int, **changes) -> RoundReport:
    values = {
        "step": step,
        "phase": "round",
        "seconds": 0.5,
        "evaluation_seconds": 0.25,
        "accuracy": 0.1 * step,
        "global_accuracy": 0.1 * step,
        "groups": {"many": 0.5, "medium": None, "few": 0.0},
        "clients": {"matched": {"mean": 0.5, "worst_decile": 0.25}},
        "traffic": {"train": {"down": 10, "up": 12, "replies": 2}},
        "figures": {"loss": 1.5, "kind": "text"},
    }
    return RoundReport(**(values | changes))


def commit(journal: Journal, *steps: int, lines: bool = True, **changes) -> None:
    """Write the checkpoints of these steps, and their lines."""
    previous = None
    for step in steps:
        facts = {"step": step, "report": json.loads(json.dumps(report(step, **changes).record()))}
        facts["seal"] = vars(journal.seal)
        previous = checkpoint.write(
            journal.folder / "checkpoints", step, [("server", {"w": tensor([float(step)])})], facts, previous, 2
        )
        if lines:
            journal.append(report(step, **changes))


def release(journal: Journal) -> None:
    """Leave the block of a run."""
    journal.__exit__()


def steps_of(journal: Journal) -> list[int]:
    return [line["step"] for line in journal.reports()]


def events_of(folder) -> list[tuple[str, int, float]]:
    """Return tag, step and value of every scalar in TensorBoard's files: records of length, CRC, bytes, CRC."""
    scalars = []
    for file in sorted(folder.glob("events.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += 12 + length + 4
    return scalars


@pytest.fixture
def journal(tmp_path):
    with Journal.create(tmp_path / "out" / "run", CONFIG, SPLIT, DATA) as journal:
        (journal.folder / provenance.FILE).write_text('{"torch": "2"}\n')
        yield journal


def test_new_folder_holds_the_resolved_configuration_and_the_split(journal):
    assert Config.model_validate(yaml.safe_load((journal.folder / "config.yaml").read_text())) == CONFIG
    assert Split.load(journal.folder / "split.json").sha256 == SPLIT.sha256
    assert journal.reports() == []


def test_create_refuses_a_folder_that_exists_and_says_how_to_continue_it(tmp_path):
    (tmp_path / "run").mkdir()
    with refused("run.exists", CheckpointError, path=str(tmp_path / "run")) as caught:
        Journal.create(tmp_path / "run", CONFIG, SPLIT, DATA)
    assert "remove" in str(caught.value)
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "config.yaml").write_text("")
    with refused("run.exists", CheckpointError) as caught:
        Journal.create(tmp_path / "run", CONFIG, SPLIT, DATA)
    assert f"raylt.resume({str(tmp_path / 'run')!r})" in str(caught.value)
    (tmp_path / "file").write_text("")
    with refused("run.exists", CheckpointError, path=str(tmp_path / "file")):
        Journal.create(tmp_path / "file", CONFIG, SPLIT, DATA)


def test_create_refuses_a_place_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("file.unwritable", CheckpointError, path=str(tmp_path / "file" / "run")) as caught, at_the_shell():
        Journal.create(tmp_path / "file" / "run", CONFIG, SPLIT, DATA)
    assert "--out" not in str(caught.value)  # which raylt resume does not have


def test_a_folder_whose_creation_fails_is_removed(tmp_path, monkeypatch):
    def full(*_):
        raise DiskFull(tmp_path)

    monkeypatch.setattr(Split, "save", full)
    with pytest.raises(DiskFull):
        Journal.create(tmp_path / "run", CONFIG, SPLIT, DATA)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    Journal.create(tmp_path / "run", CONFIG, SPLIT, DATA).close()


def test_deaths_of_the_server_are_counted_in_notes_of_any_size(journal):
    assert journal.server_deaths() == 0
    journal.note(f"{SERVER_DIED} (ActorDiedError); the run ends")
    with (journal.folder / NOTES).open("r+b") as notes:
        notes.seek(MAX_BYTES)  # the bytes between are zeros
        notes.write(b"\n")
    journal.note(f"{SERVER_DIED} (ActorDiedError); the run ends")
    assert journal.server_deaths() == 2


def test_folder_is_held_until_its_block_ends(journal):
    with journal, refused("run.busy", FolderHeld, path=str(journal.folder)):
        Journal(journal.folder)
    release(Journal(journal.folder))


@pytest.mark.slow
def test_folder_held_by_another_process_is_refused_until_that_is_killed(journal):
    release(journal)
    script = f"""
import time
from pathlib import Path
from raylt.runs.folder.reader import is_locked
from raylt.runs.folder.writer import Journal
journal = Journal(Path({str(journal.folder)!r}))
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with refused("run.busy", FolderHeld):
            Journal(journal.folder)
        holder.kill()
    release(Journal(journal.folder))


def test_appended_reports_come_back(journal):
    journal.append(report(1, rejected={3: "w is not finite"}, lost=[2], retried=[2, 2]))
    journal.append(report(2, accuracy=None, groups=None, clients=None))
    first, second = journal.reports()
    assert first["rejected"] == {"3": "w is not finite"}  # keys of JSON objects are text
    assert (first["lost"], first["retried"], first["groups"]["medium"]) == ([2], [2, 2], None)
    assert (second["step"], second["accuracy"], second["clients"]) == (2, None, None)


def test_rewind_of_an_undisturbed_run_changes_nothing(journal):
    commit(journal, 1, 2, 3)
    before = (journal.folder / "metrics.jsonl").read_bytes()
    saved, faults = journal.rewind()
    assert (saved.facts["step"], faults) == (3, [])
    assert (journal.folder / "metrics.jsonl").read_bytes() == before


def test_rewind_before_the_first_checkpoint_drops_all_lines(journal):
    journal.append(report(1))
    assert journal.rewind() == (None, [])
    assert journal.reports() == []


def test_rewind_drops_lines_after_the_checkpoint(journal):
    commit(journal, 1, 2)
    journal.append(report(3))
    journal.append(report(4))
    assert journal.rewind()[0].facts["step"] == 2
    assert steps_of(journal) == [1, 2]


def test_rewind_restores_a_missing_line_from_the_checkpoint(journal):
    commit(journal, 1, 2)
    commit(journal, 3, lines=False)  # as if killed between the checkpoint and its line
    complete = [{"schema": 2, **json.loads(json.dumps(report(step).record()))} for step in (1, 2, 3)]
    journal.rewind()
    dated = journal.reports()
    assert len({line.pop("previous") for line in dated}) == 3
    assert [line.pop("date") is None for line in dated] == [False, False, True]  # the restored line has no date
    assert dated == complete


def test_rewind_misses_the_checkpoint_of_a_line_that_it_restored(journal):
    commit(journal, 1, lines=False)
    journal.rewind()
    shutil.rmtree(journal.folder / "checkpoints")
    with refused("checkpoint.not-found", CheckpointError, steps=1):
        journal.rewind()
    assert steps_of(journal) == [1]


def test_rewind_takes_a_figure_that_is_not_a_number_for_unchanged(journal):
    commit(journal, 1, figures={"loss": float("nan"), "losses": {"mean": float("nan")}})
    assert journal.rewind()[0].facts["step"] == 1


@pytest.mark.parametrize("left", [1, 40, -1])
def test_rewind_takes_a_cut_off_last_line_from_the_checkpoint(journal, left):
    commit(journal, 1, 2, 3)
    file = journal.folder / "metrics.jsonl"
    *whole, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole) + last[:-1][:left])
    journal.rewind()
    restored = json.loads(last) | {"date": None}
    restored["sha256"] = hash_json({key: value for key, value in restored.items() if key != "sha256"})
    assert file.read_text() == "".join([*whole, json.dumps(restored) + "\n"])


def test_rewind_drops_a_cut_off_line_after_the_checkpoint(journal):
    commit(journal, 1, 2)
    with (journal.folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "pha')
    journal.rewind()
    assert steps_of(journal) == [1, 2]
    journal.append(report(3))
    assert steps_of(journal) == [1, 2, 3]


def test_rewind_passes_over_a_damaged_checkpoint_and_drops_its_line(journal):
    commit(journal, 1, 2, 3)
    (journal.folder / "checkpoints/000003/server.safetensors").write_bytes(b"")
    saved, faults = journal.rewind()
    assert saved.facts["step"] == 2
    assert [fault[:28] for fault in faults] == ["checkpoint 000003 is damaged"]
    assert steps_of(journal) == [1, 2]


def test_rewind_keeps_the_lines_when_no_checkpoint_is_usable(journal):
    commit(journal, 1, 2)
    for manifest in journal.folder.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    with refused("checkpoint.damaged", CheckpointError):
        journal.rewind()
    assert steps_of(journal) == [1, 2]


def test_tensorboard_shows_every_number_under_its_name(journal):
    journal.append(report(1))
    journal.append(report(2))
    release(journal)
    scalars = {(tag, step): value for tag, step, value in events_of(journal.folder)}
    assert scalars["accuracy/test set", 1] == pytest.approx(0.1)
    assert scalars["accuracy/test set", 2] == pytest.approx(0.2)
    assert scalars["clients/matched, worst tenth", 2] == 0.25
    assert scalars["traffic/train, bytes up", 1] == 12
    assert scalars["training/loss", 1] == 1.5
    assert scalars["accuracy/few-shot", 1] == 0
    tags = {tag for tag, _ in scalars}
    assert not tags & {"step", "phase", "method/kind", "accuracy/medium-shot"}


def test_written_summary_is_sealed(journal):
    journal.append(report(1))
    written = journal.write_summary({"accuracy": {"last": 0.1}})
    assert json.loads((journal.folder / "summary.json").read_text()) == written
    assert written["accuracy"] == {"last": 0.1}
    assert (written["run"], written["line"]) == (journal.seal.run, journal.seal.line)
    content = {key: value for key, value in written.items() if key != "sha256"}
    assert written["sha256"] == hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def test_folder_is_free_after_a_run_that_raised(journal):
    with pytest.raises(KeyError), journal:
        raise KeyError
    release(Journal(journal.folder))


def test_no_half_written_files_are_left(journal):
    commit(journal, 1)
    journal.rewind()
    journal.write_summary({})
    assert list(journal.folder.rglob(".*writing*")) == []


def test_a_run_that_came_to_nothing_is_removed_unless_another_process_took_it_up(tmp_path):
    with Journal.create(tmp_path / "run", CONFIG, SPLIT, DATA) as first:
        pass
    with Journal(tmp_path / "run") as second:
        first.discard()
        assert (tmp_path / "run" / "config.yaml").exists()
        second.append(report(1))
    first.discard()  # the folder then has a round and is kept
    assert (tmp_path / "run" / "config.yaml").exists()
    with Journal.create(tmp_path / "other", CONFIG, SPLIT, DATA) as other:
        pass
    other.discard()
    assert not (tmp_path / "other").exists()
    with Journal.create(tmp_path / "held", CONFIG, SPLIT, DATA) as held:
        held.discard()
    assert not (tmp_path / "held").exists()
