"""Every way to join a cluster from a bare shell, in real processes; some ways without a token are soak tests."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from ray._private.services import get_node_ip_address
from started import BIN, RAYLT, bare, call, free_port, nodes, save_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN = ["run", "method=fedavg", "data.clients=2", "federation.rounds=1", "local.epochs=1", "--name", "r"]


@pytest.fixture(scope="module", params=["token", pytest.param("none", marks=pytest.mark.soak)])
def cluster(request, tmp_path_factory):
    """Yield the cluster's address, its dashboard's address, and the home folder of its user."""
    folder = tmp_path_factory.mktemp(request.param)
    home, board = folder / "home", free_port()
    home.mkdir()
    if request.param == "token":
        save_token(home)  # `ray start` then requires this token
    with nodes(
        folder.parent / request.param[0],
        bare(home),
        ["--num-cpus=3", "--num-gpus=0", "--dashboard-host=127.0.0.1", f"--dashboard-port={board}"],
    ) as address:
        yield address, f"http://127.0.0.1:{board}", home


def finished(done, folder, origin):
    assert done.returncode == 0, done.stdout + done.stderr
    assert origin in done.stdout + done.stderr
    assert json.loads((folder / "r/summary.json").read_text())["model_sha256"]


def test_a_run_joins_by_option(cluster, tmp_path):
    address, _, home = cluster
    done = call(*RAYLT, *RUN, "--address", address, "--out", tmp_path, env=bare(home))
    finished(done, tmp_path, f"joined the Ray cluster at {address} (--address)")


def test_a_plan_joins_by_variable(cluster):
    address, _, home = cluster
    done = call(*RAYLT, "plan", "--format", "json", env=bare(home, RAYLT_ADDRESS=address))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reasons"]["nodes"] == "1: 3 CPUs and 0 GPUs"


def test_a_job_joins_the_cluster_that_it_was_submitted_to(cluster, tmp_path):
    _, board, home = cluster
    # Ray's own command sends the token only with this variable; the job itself gets no such setting
    submit = {"RAY_AUTH_MODE": "token"} if (home / ".ray/auth_token").exists() else {}
    done = call(
        BIN / "ray",
        "job",
        "submit",
        "--address",
        board,
        "--",
        *RAYLT,
        *RUN,
        "--out",
        tmp_path,
        env=bare(home, **submit),
    )
    finished(done, tmp_path, "(this is a Ray job)")


@pytest.mark.parametrize("mode", ["token", pytest.param("disabled", marks=pytest.mark.soak)])
def test_a_plain_run_has_a_cluster_of_its_own(mode, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done = call(
        *RAYLT,
        *RUN,
        "--out",
        tmp_path,
        env=bare(home, RAY_ADDRESS="127.0.0.1:1", **({} if mode == "token" else {"RAY_AUTH_MODE": mode})),
    )
    finished(done, tmp_path, "fedavg on digits")
    assert (home / ".ray/auth_token").exists() == (mode == "token")


def test_one_process_joins_one_cluster_after_the_other(tmp_path):
    """The second cluster uses another authentication mode than the first, which Ray has already read."""
    program = Path(__file__).with_name("several.py")
    done = call(sys.executable, program, tmp_path, env=bare(tmp_path), timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "new:True",
        "here:True",
        "new:False",
        "here:False",
        "new:True",
        "here:True",
        "RAY_AUTH_MODE=None",
    ]


def test_a_cluster_with_tls_is_joined_with_rays_own_settings(tmp_path, tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    home = tmp_path / "home"
    save_token(home)
    made = call(
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=raylt",
        "-addext",
        f"subjectAltName=IP:127.0.0.1,IP:{get_node_ip_address()},DNS:localhost",
        "-keyout",
        tmp_path / "key",
        "-out",
        tmp_path / "crt",
        env=bare(home),
    )
    assert made.returncode == 0, made.stderr
    tls = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(tmp_path / "crt"),
        "RAY_TLS_SERVER_CERT": str(tmp_path / "crt"),
        "RAY_TLS_SERVER_KEY": str(tmp_path / "key"),
    }
    plan = [*RAYLT, "plan", "--format", "json", "--address"]
    with nodes(
        tmp_path_factory.getbasetemp() / "s",
        bare(home, **tls),
        ["--num-cpus=3", "--num-gpus=0", "--include-dashboard=false"],
    ) as address:
        done = call(*plan, address, env=bare(home, **tls))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["reasons"]["nodes"] == "1: 3 CPUs and 0 GPUs"
        refused = call(*plan, address, env=bare(home))
        assert refused.returncode == 2
        assert "[cluster.not-ray]" in refused.stderr
        assert "RAY_USE_TLS" in refused.stderr
