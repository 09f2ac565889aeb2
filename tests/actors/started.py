"""Clusters that tests start with `ray start`, and commands that run in a bare environment."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private.services import get_node_ip_address

BIN = Path(sys.executable).parent
RAYLT = (sys.executable, "-m", "raylt")


def bare(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a fresh shell that finds the raylt under test."""
    return {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])} | variables


def call(*command: object, env: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, timeout=timeout)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def save_token(home: Path) -> Path:
    file = home / ".ray/auth_token"
    file.parent.mkdir(parents=True)
    file.touch(0o600)
    file.write_text(secrets.token_hex(32))
    return file


@contextmanager
def nodes(folder: Path, env: dict[str, str], *options: list[str]) -> Iterator[str]:
    """Start a cluster with one node per list of options, the head first; yield its address."""
    port = free_port()
    address = f"{get_node_ip_address()}:{port}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for more in options:
            where = [f"--address={address}"] if started else ["--head", f"--port={port}", f"--temp-dir={folder}"]
            log = folder.parent / f"{folder.name}-{len(started)}.txt"
            with log.open("w") as out:
                started.append(
                    subprocess.Popen(
                        [
                            BIN / "ray",
                            "start",
                            "--block",
                            "--object-store-memory=100000000",
                            "--metrics-export-port=0",
                            f"--dashboard-agent-listen-port={free_port()}",
                            *where,
                            *more,
                        ],
                        env=env,
                        stdout=out,
                        stderr=out,
                    )
                )
            try:
                wait_for(lambda log=log: "Ray runtime started" in log.read_text(), started[-1])
            except AssertionError as error:
                raise AssertionError(f"{error}: {log.read_text()}") from None
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def wait_for(claim, process: subprocess.Popen[bytes] | None = None, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.poll() is None, "it ended"
        time.sleep(0.1)
