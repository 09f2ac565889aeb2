"""Bring cluster-local.yaml up with `ray up` over ssh, on three network namespaces of this machine (lab.sh).

Takes about 150 s. Needs root, sshd and rsync (Debian: openssh-server, rsync), and a kernel with namespaces.
"""

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from started import BIN, save_token, wait_for

ROOT = Path(__file__).parents[2]
NEEDED = ("/usr/sbin/sshd", "ssh-keygen", "rsync", "unshare", "nsenter", "ip")
RUN = "raylt run method=fedavg data.clients=2 local.epochs=1 --out /mnt/raylt/runs"
OWN = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_not():
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root makes network namespaces and runs sshd for them"
    made = subprocess.run([*OWN, "ip", "link", "add", "lab", "type", "bridge"], capture_output=True, text=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else None


REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.skipif(REASON is not None, reason=str(REASON))]


class Lab:
    """Three machines, and a shell on the computer from which they are reached."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "shared").mkdir()
        for name in ("key", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        (folder / "sshd.conf").write_text(
            f"Port 22\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPidFile none\n"
        )
        for number in (1, 2, 3, 4):
            home = folder / f"home-{number}"
            home.mkdir()
            (home / ".bash_profile").write_text(". ~/.bashrc\n")
            (home / ".bashrc").write_text("export PYTHONPATH=~/raylt\n")  # `ray up` copies raylt to this folder
            (home / ".venv-raylt").symlink_to(sys.prefix)  # the machines have no network to install from
        save_token(folder / "home-1")
        config = (ROOT / "cluster-local.yaml").read_text()
        for example, value in {
            "head_ip: 192.168.1.10 ": "head_ip: 10.77.0.2 ",
            "ssh_user: you": "ssh_user: root",
            "192.168.1.11, 192.168.1.12": "10.77.0.3, 10.77.0.4",
            "~/.ssh/id_ed25519": f"{folder}/key",
        }.items():
            assert config.count(example) == 1
            config = config.replace(example, value)
        (folder / "cluster.yaml").write_text(config)
        # lab.sh gets its own session and is killed: it ignores SIGTERM, and its end ends all processes inside
        self.process = subprocess.Popen(
            [*OWN, "bash", Path(__file__).with_name("lab.sh"), folder, "3", ROOT, sys.prefix, sys.base_prefix],
            start_new_session=True,
        )
        wait_for((folder / "ready").exists, self.process)
        (self.inside,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *command, **variables):
        """Start a command in a checkout on the user's computer, with the environment of a fresh shell."""
        environment = {
            "HOME": pwd.getpwuid(os.geteuid()).pw_dir,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        } | variables
        self.started.append(
            subprocess.Popen(
                [
                    "nsenter",
                    "--target",
                    self.inside,
                    "--net",
                    "--mount",
                    "--pid",
                    "--",
                    "env",
                    "-i",
                    "-C",
                    ROOT,
                    *(f"{key}={value}" for key, value in environment.items()),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.started[-1]

    def call(self, *command, timeout=150.0, **variables):
        process = self.start(*command, **variables)
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, output
        return output

    def exec(self, line, **more):
        return self.call("ray", "exec", self.folder / "cluster.yaml", line, **more)

    def nodes(self):
        """Return the number of the cluster's nodes, from `raylt plan`."""
        return int(self.exec("raylt plan --format json").split('"nodes": "')[1].split(":")[0])

    def lose(self, number):
        """Kill all processes of a machine at once."""
        pid = (self.folder / f"machine-{number}.pid").read_text().strip()
        self.start("bash", "-c", f"kill -9 {pid}").wait(20)

    def raylets(self):
        """Return the command lines of the raylets on all machines."""
        listed = subprocess.run(
            ["nsenter", "--target", self.inside, "--mount", "--pid", "--", "ps", "-eo", "args"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return [line for line in listed.splitlines() if "/raylet/raylet " in line]

    def close(self):
        self.process.kill()
        self.process.wait()
        for process in self.started:
            process.wait(20)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield made
    finally:
        made.close()


def summary(lab, name):
    return json.loads((lab.folder / f"shared/runs/{name}/summary.json").read_text())


def test_a_cluster_of_ones_own_machines(lab):
    yaml = lab.folder / "cluster.yaml"
    lab.call("ray", "up", "--yes", yaml)
    wait_for(lambda: lab.nodes() == 3, seconds=90)
    for number in (2, 3, 4):
        token = lab.folder / f"home-{number}/.ray/auth_token"
        assert token.read_text() == (lab.folder / "home-1/.ray/auth_token").read_text()
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert (lab.folder / f"home-{number}/raylt/raylt/data/task.py").is_file()
    output = lab.exec("raylt doctor")  # the command exits with 1 if it finds a problem
    assert "joined the Ray cluster at auto (RAYLT_ADDRESS)" in output

    # a job is sent through the tunnel of `ray dashboard`
    lab.start("ray", "dashboard", yaml)
    job = ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"]
    wait_for(lambda: lab.start("curl", "-s", "http://127.0.0.1:8265/api/authentication_mode").wait(20) == 0)
    output = lab.call(*job, *RUN.split(), "federation.rounds=2", "--name", "job", RAY_AUTH_MODE="token")
    assert "joined the Ray cluster at auto (RAYLT_ADDRESS), 3: 6 CPUs" in output

    # a machine is lost in the middle of a run, whose result stays the same
    run = lab.start("ray", "exec", yaml, f"{RUN} federation.rounds=30 --name run")
    record = lab.folder / "shared/runs/run/metrics.jsonl"
    wait_for(lambda: record.exists() and record.read_text().count("\n") >= 3, run, seconds=90)
    lab.lose(4)
    output, _ = run.communicate(timeout=150)
    assert run.returncode == 0, output
    assert "joined the Ray cluster at auto (RAYLT_ADDRESS), 3: 6 CPUs" in output
    lab.exec(f"{RUN} federation.rounds=30 --name alone --fleet local")
    assert "its process died" in (record.parent / "notes.log").read_text()
    assert summary(lab, "run")["model_sha256"] == summary(lab, "alone")["model_sha256"]
    wait_for(lambda: lab.nodes() == 2)

    lab.call("ray", "down", "--yes", yaml)
    end = time.monotonic() + 45  # the other machine notices after 15 s that the head is gone
    while lab.raylets() and time.monotonic() < end:
        time.sleep(1)
    assert lab.raylets() == []
