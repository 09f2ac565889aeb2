"""`entry`, which runs before Ray is imported, against a server that answers like Ray's GCS. Takes 3 s, without Ray."""

import os
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from refusals import refused

from actors.cluster.access import FIRST_CALL, ClusterEntry, Joined, cluster_to_join, entry, exposed
from raylt.errors import ConfigError

TOKEN = "right" * 8


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("RAY")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@contextmanager
def gcs(token):
    """Run a server that answers Ray's first call, and requires the token if there is one; yield its address."""

    def answer(request, context):
        if token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b"\n\x00"

    _, service, method = FIRST_CALL.split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def save_token(folder, text=TOKEN, mode=0o600):
    file = folder / ".ray/auth_token"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def joined(address):
    return entry(Joined(address, "--address"))


def test_it_imports_no_ray():
    code = "import actors.launch, actors.cluster.doctor, actors.cluster.session, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_cluster_with_a_token_is_entered_with_the_one_in_the_home_folder(tmp_path):
    save_token(tmp_path, TOKEN + "\n")
    with gcs(TOKEN) as address:
        assert joined(address) == ClusterEntry(address, True, (), {"RAY_AUTH_MODE": "token"})


def test_the_variable_counts_more_than_the_named_file_and_that_more_than_the_home_folder(tmp_path, monkeypatch):
    save_token(tmp_path, "wrong")
    named = tmp_path / "named"
    named.write_text(TOKEN)
    named.chmod(0o600)
    with gcs(TOKEN) as address:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
        assert joined(address).token
        named.write_text("wrong")
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        assert joined(address).token


def test_a_cluster_without_a_token_is_entered_without_whatever_lies_in_the_home_folder(tmp_path, monkeypatch):
    save_token(tmp_path)
    with gcs(None) as address:
        assert joined(address) == ClusterEntry(address, False, (), {"RAY_AUTH_MODE": "disabled"})
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert not joined(address).token


def test_the_cluster_decides_against_a_variable_left_in_the_shell(tmp_path, monkeypatch):
    save_token(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with gcs(TOKEN) as address:
        assert joined(address).variables == {"RAY_AUTH_MODE": "token"}


def test_who_asks_for_a_token_is_not_let_into_a_cluster_that_is_open_to_all(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with gcs(None) as address, refused("cluster.unprotected", address=address):
        joined(address)


def test_a_token_that_is_missing_or_wrong_is_said_at_once(tmp_path):
    with gcs(TOKEN) as address:
        with refused("cluster.token-missing", path=str(tmp_path / ".ray/auth_token")):
            joined(address)
        save_token(tmp_path, "wrong")
        with refused("cluster.token-refused", path=str(tmp_path / ".ray/auth_token")):
            joined(address)


def test_a_token_file_that_others_can_read_is_closed_and_said_so(tmp_path):
    file = save_token(tmp_path, mode=0o644)
    assert exposed(file) == "others may read it (mode 644)"
    with gcs(TOKEN) as address:
        (remark,) = joined(address).remarks
        assert "others may read it (mode 644); it has mode 600 now" in remark
        assert joined(address).remarks == ()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert exposed(file) is None


@pytest.mark.parametrize("kind", ["fifo", "folder", "empty", "huge", "bytes"])
def test_a_malformed_token_file_is_refused_without_a_wait(tmp_path, kind):
    file = tmp_path / ".ray/auth_token"
    file.parent.mkdir()
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case _:
            file.write_bytes({"empty": b" \n", "huge": b"x" * 2**20, "bytes": b"\xff\xfe"}[kind])
    with refused("cluster.token-unreadable", path=str(file)):
        entry(None)


def test_a_new_cluster_gets_a_token_that_only_its_user_can_read(tmp_path, monkeypatch):
    old = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:  # processes that start at the same time agree on one token
            entries = list(pool.map(lambda _: entry(None), range(8)))
    finally:
        os.umask(old)
    file = tmp_path / ".ray/auth_token"
    assert entries == [ClusterEntry("local", True, (), {"RAY_AUTH_MODE": "token"})] * 8
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert len(file.read_text()) == 64
    assert list(file.parent.iterdir()) == [file]


def test_a_new_cluster_asks_for_no_token_where_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert entry(None) == ClusterEntry("local", False, (), {"RAY_AUTH_MODE": "disabled"})
    assert not (tmp_path / ".ray").exists()


def test_auto_is_the_address_that_ray_start_left_here(tmp_path, monkeypatch):
    with refused("cluster.not-found", path=str(tmp_path / "ray/ray_current_cluster")):
        joined("auto")
    with gcs(None) as address:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        assert joined("auto").address == address
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
        with refused("cluster.bad-address", address="http://127.0.0.1:8265"):
            joined("auto")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's file takes root to make")
def test_an_address_that_another_user_left_is_not_sent_our_token(tmp_path):
    save_token(tmp_path)
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray/ray_current_cluster"
    with gcs(TOKEN) as address:
        file.write_text(address)
        os.chown(file, 12345, -1)
        with refused("cluster.untrusted-file", path=str(file)):
            joined("auto")


@pytest.mark.parametrize(
    "address",
    [
        "nonsense",
        "127.0.0.1",
        "127.0.0.1:port",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "127.0.0.1:\u0663",
        ":6379",
        "http://127.0.0.1:8265",
        "ray://127.0.0.1:10001",
    ],
)
def test_an_address_that_is_none_is_refused(address):
    with refused("cluster.bad-address", address=address):
        joined(address)


def test_an_address_without_a_listener_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with refused("cluster.no-answer", address=f"127.0.0.1:{port}"):
        joined(f"127.0.0.1:{port}")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_an_address_where_something_else_listens_is_refused(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                with line:
                    line.recv(100)
                    line.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with refused("cluster.not-ray"):
            joined(f"127.0.0.1:{listener.getsockname()[1]}")


def test_an_address_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr("actors.cluster.access.TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigError) as caught:
        joined(f"127.0.0.1:{listener.getsockname()[1]}")
    assert caught.value.code in ("cluster.not-ray", "cluster.no-answer")


@pytest.mark.parametrize(
    ("option", "variables", "address", "asked_by"),
    [
        (None, {}, None, None),
        (None, {"RAY_ADDRESS": "10.0.0.1:6379"}, None, None),
        ("auto", {"RAYLT_ADDRESS": "10.0.0.1:6379"}, "auto", "--address"),
        (None, {"RAYLT_ADDRESS": "auto"}, "auto", "RAYLT_ADDRESS"),
        ("local", {"RAYLT_ADDRESS": "auto"}, None, None),
        (None, {"RAYLT_ADDRESS": "local"}, None, None),
        (
            None,
            {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},
            "10.0.0.1:6379",
            "this is a Ray job",
        ),
    ],
)
def test_a_cluster_is_joined_only_when_asked(monkeypatch, option, variables, address, asked_by):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cluster = cluster_to_join(option)
    assert (cluster and cluster.address, cluster and cluster.asked_by) == (address, asked_by)
