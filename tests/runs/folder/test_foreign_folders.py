"""A run folder with links and FIFOs in place of every file: raylt neither leaves the folder nor waits."""

import errno
import os
import pickle
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from refusals import refused
from small_runs import make_run

import raylt
from raylt import Run, store
from raylt.core.device import describe
from raylt.errors import CheckpointError, ConfigError, DiskFull, RayltError
from raylt.own_code.commands import resume_call
from raylt.plots.style import new_figure, save
from raylt.runs.folder import provenance
from raylt.runs.verify import repair, verify
from raylt.store import LAST_LINE_BYTES, Folder, folder_for
from raylt.studies.records.record import failure_file, read_run
from raylt.studies.running.worker import EventSender, do

pytestmark = pytest.mark.timeout(30)
# files that a run reads and writes, and names that earlier versions used for unfinished files
NAMES = [
    "identity.json",
    "config.yaml",
    "split.json",
    "origins.json",
    "metrics.jsonl",
    "provenance.jsonl",
    ".lock",
    "checkpoints",
    "checkpoints/000003",
    "checkpoints/000003/manifest.json",
    "checkpoints/000003/server.safetensors",
    "checkpoints/.writing-000004",
    "summary.json",
    "model.safetensors",
    ".config.yaml.writing",
    ".metrics.jsonl.writing",
    ".summary.json.writing",
    ".split.json.writing",
]
MUST_BE_READ = {
    "identity.json",
    "config.yaml",
    "split.json",
    "origins.json",
    "metrics.jsonl",
    "checkpoints",
    "summary.json",
    "provenance.jsonl",
    ".lock",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a run that was killed after three of four rounds, and the hash of its final model."""
    run = make_run(tmp_path_factory.mktemp("runs"), "one", "method=fedavg", "federation.rounds=4", "output.keep=4")
    whole = run.summary["model_sha256"]
    for name in ("summary.json", "model.safetensors"):
        (run.folder / name).unlink()
    shutil.rmtree(run.folder / "checkpoints/000004")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:3]))
    return run.folder, whole


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


@pytest.fixture
def victims(tmp_path):
    """Make a folder of the user's with files; yield it, and assert after the test that it is unchanged."""
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    for file in (home / "file", home / "folder/file"):
        file.write_text("precious")
    yield home
    assert sorted(path.relative_to(home).as_posix() for path in home.rglob("*")) == ["file", "folder", "folder/file"]
    assert (home / "file").read_text() == (home / "folder/file").read_text() == "precious"


def replaced(folder, name):
    """Remove a file of a run folder; return its path."""
    file = folder / name
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    return file


def tried(folder, name, whole):
    """Resume the run; assert that it either ends with the same model or is refused in one line."""
    done = None
    with refusal():
        done = Run.open(folder).resume(fleet="local", quiet=True)
    assert (done is None) or name not in MUST_BE_READ
    assert (done is None) or done.summary["model_sha256"] == whole


@contextmanager
def refusal():
    """Assert that an error in this block has exit code 2 and one line that names the cause."""
    problems = []
    try:
        yield
    except RayltError as error:
        problems.append(error)
    assert [(error.exit_code, "\n" in str(error)) for error in problems] in ([], [(2, False)])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", ["file", *(pytest.param(to, marks=pytest.mark.slow) for to in ("folder", "missing"))])
def test_a_link_is_never_followed(made, folder, victims, name, to):
    replaced(folder, name).symlink_to(victims / to)
    tried(folder, name, made[1])
    assert read_run(folder).state in ("damaged", "done", "stopped", "missing")
    if Run(folder).state != "missing":
        assert not all(finding.whole for finding in verify(folder)) or name not in MUST_BE_READ
        with refusal():
            repair(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_fifo_is_never_waited_for(made, folder, name):
    os.mkfifo(replaced(folder, name))
    tried(folder, name, made[1])
    assert read_run(folder).state in ("damaged", "done", "stopped", "missing")
    if Run(folder).state != "missing":
        assert not all(finding.whole for finding in verify(folder)) or name not in MUST_BE_READ


@pytest.mark.parametrize("name", ["metrics.jsonl", "provenance.jsonl"])
def test_a_second_name_of_a_users_file_is_not_written_to(made, folder, victims, name):
    content = (folder / name).read_text()
    replaced(folder, name)
    (victims / "file").write_text(content)
    os.link(victims / "file", folder / name)
    with pytest.raises(CheckpointError, match="the file has other hard links"):
        Run.open(folder).resume(fleet="local", quiet=True)
    assert (victims / "file").read_text() == content
    (victims / "file").write_text("precious")


def test_a_link_in_place_of_a_failure_is_replaced(folder, victims):
    failure_file(folder).symlink_to(victims / "file")
    do(folder, Run.open(folder).config, "local", None, EventSender(open(os.devnull, "w")))  # noqa: SIM115
    assert not failure_file(folder).exists()


def test_a_picture_takes_the_place_of_a_link(folder, victims):
    (folder / "features.png").symlink_to(victims / "file")
    save(new_figure(1, 1), folder / "features.png")
    assert not (folder / "features.png").is_symlink()
    with pytest.raises(ConfigError, match=r"path: .*features\.png cannot be written .*irectory"):
        save(new_figure(1, 1), folder / "absent/features.png")


# names, modes and limits


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/etc/passwd", "a\0b"])
def test_only_plain_names_reach_a_file(tmp_path, name):
    with Folder.open(tmp_path) as folder:
        for reach in (
            folder.read,
            folder.inner,
            folder.remove,
            folder.lock,
            folder.hash,
            folder.new,
            lambda name: folder.write(name, ""),
            lambda name: folder.append(name, ""),
        ):
            with pytest.raises(CheckpointError, match="cannot have a file of this name"):
                reach(name)


def test_a_checkpoint_names_no_file_outside_of_it(folder):
    manifest = folder / "checkpoints/000003/manifest.json"
    manifest.write_text(manifest.read_text().replace('"server.safetensors"', '"../../model.safetensors"'))
    assert Run.open(folder).checkpoint().facts["step"] == 2


def test_a_run_is_its_users_alone(made):
    previous = os.umask(0)
    try:
        with folder_for(made[0].parent / "new" / "one") as folder:
            folder.write("a", "")
            folder.append("b", "")
        assert oct((made[0].parent / "new").stat().st_mode)[-3:] == "700"
        assert [oct(p.stat().st_mode)[-3:] for p in sorted((made[0].parent / "new/one").iterdir())] == ["600", "600"]
    finally:
        os.umask(previous)
    modes = {
        path.relative_to(made[0]).as_posix(): path.stat().st_mode & 0o77
        for path in made[0].rglob("*")
        if not path.name.startswith("events.")
    }
    assert made[0].stat().st_mode & 0o77 == 0
    assert {name: oct(mode) for name, mode in modes.items() if mode} == {}


def test_what_is_written_is_whole_or_not_there(tmp_path, monkeypatch):
    def fail(handle):
        raise KeyboardInterrupt

    with Folder.open(tmp_path) as folder:
        folder.write("it", "old")
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(KeyboardInterrupt):
            folder.write("it", "new")
        assert (folder.read("it"), folder.names()) == (b"old", ["it"])


def test_what_is_written_is_on_the_disk_when_the_call_returns(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")))
    with Folder.open(tmp_path) as folder, folder.inner("other", make=True) as other:
        folder.write("a", "new")
        content, place = flushed
        assert Path(content).name.startswith(".a.")
        assert place == str(tmp_path.resolve())
        folder.append("a", "more")
        folder.copy("a", other)
    assert flushed[2:] == [str(tmp_path.resolve() / name) for name in ("a", "other/a")]


@pytest.mark.parametrize("length", [0, 10, LAST_LINE_BYTES - 1, LAST_LINE_BYTES, 3 * LAST_LINE_BYTES])
def test_the_last_line_is_read_as_a_whole(tmp_path, length):
    with Folder.open(tmp_path) as folder:
        for beginning in (b"", b"first\n"):
            folder.write("log", beginning + b"x" * length + b"\nunfinished")
            assert folder.last_line("log") == b"x" * length


def test_a_lock_is_waited_for_only_where_that_is_asked_for(tmp_path):
    with Folder.open(tmp_path) as folder:
        first = folder.lock("lock")
        assert first is not None
        assert folder.lock("lock") is None
        threading.Timer(0.2, os.close, [first]).start()
        second = folder.lock("lock", wait=True)
        assert second is not None
        os.close(second)


def test_a_file_larger_than_can_be_right_is_not_read(tmp_path):
    with (tmp_path / "it.json").open("wb") as stream:
        stream.truncate(2**40)  # a sparse file
    with Folder.open(tmp_path) as folder, pytest.raises(CheckpointError, match=r"it\.json: .*1,099,511,627,776 bytes"):
        folder.read("it.json")


def test_deep_json_is_refused_in_a_line(folder):
    (folder / "identity.json").write_text("[" * 100_000)
    with refused("file.malformed", CheckpointError):
        _ = Run.open(folder).config


# a full disk


class Full:
    """Replaces os.fsync: the disk is full from the n-th call on, or files would be too large."""

    def __init__(self, after, number=errno.ENOSPC):
        self.left, self.number, self.fsync = after, number, os.fsync

    def __call__(self, handle):
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        self.fsync(handle)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", range(0, 14, 2))
def test_a_full_disk_ends_a_run_in_a_line_and_it_can_go_on(made, folder, monkeypatch, after):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Full(after))
        with refused("disk.full", DiskFull, path=str(folder)) as caught:
            Run.open(folder).resume(fleet="local", quiet=True)
    assert resume_call(folder) in str(caught.value)
    assert Run.open(folder).resume(fleet="local", quiet=True).summary["model_sha256"] == made[1]
    assert all(finding.whole for finding in verify(folder))


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "Free"), (errno.EDQUOT, "Free"), (errno.EFBIG, "ulimit -f")]
)
def test_a_full_disk_without_a_run_to_continue_asks_for_the_same_call_again(tmp_path, monkeypatch, number, remedy):
    monkeypatch.setattr(os, "fsync", Full(0, number))
    with refused("disk.full", DiskFull) as caught:
        raylt.run("fedavg", rounds=1, out=tmp_path, name="new", fleet="local", quiet=True)
    assert remedy in str(caught.value)
    assert "resume" not in str(caught.value)
    assert caught.value.exit_code == 1
    elsewhere = DiskFull(Path("/tmp/file"), number == errno.EFBIG).continued(tmp_path, "raylt resume it")
    assert remedy in str(elsewhere)
    assert str(elsewhere).startswith(f"{tmp_path}: /tmp/file: ")
    assert str(elsewhere).endswith("continue with raylt resume it.")
    assert str(pickle.loads(pickle.dumps(elsewhere))) == str(elsewhere)


def test_provenance_that_a_kill_cut_off_is_gone_on_with_in_a_new_line(folder):
    before = provenance.read(folder)
    with (folder / provenance.FILE).open("a") as stream:
        stream.write('{"date": "20')
    provenance.note(folder, "local", 3, Run.open(folder).config, describe(torch.device("cpu")))
    assert provenance.read(folder)[:-1] == before
    assert provenance.read(folder)[-1]["after_step"] == 3


NO_FILES = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/null"),
    "stream": lambda path: path.symlink_to("/proc/self/fd/1"),  # as /dev/stdout is
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, make):
    target = tmp_path / "out.json"
    make(target)
    before = target.lstat().st_mode
    with refused("file.not-plain", CheckpointError, path=str(target)):
        store.write(target, "content")
    assert target.lstat().st_mode == before
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_lock_that_the_file_system_refuses_leaves_no_open_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", refuse)
    with store.Folder.open(tmp_path) as folder:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(CheckpointError, match="No locks available"):
            folder.lock("lock")
        assert len(os.listdir("/proc/self/fd")) == before
