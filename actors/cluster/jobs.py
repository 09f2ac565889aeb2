"""Ray jobs: raylt commands that run on a cluster independently of the terminal that submitted them.

A job is submitted to the cluster's dashboard. Ray uploads the working directory and runs the command on the head node.
The run folder lies on the cluster and is kept after the job has ended.
"""

import json
import logging
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from actors.cluster.access import token_file
from actors.cluster.session import environment
from raylt.errors import ConfigError, RayltError, one_line, quoted

TIMEOUT_S = 10
EXCLUDED = (".git", ".venv", "__pycache__", "/runs", "/data", "/docs/_build", "*.pyc")  # Not uploaded.
KEY = "raylt"  # Key of the command in a job's metadata.
FOLDER = "raylt_folder"  # Key of the run folder on the cluster in a job's metadata.
INTERRUPTED = 130  # Exit code of a run that raylt stop or a signal ended.
UPLOAD_LOGGERS = (
    "dashboard.modules.dashboard_sdk",
    "_private.runtime_env.packaging",
    "_private.runtime_env.working_dir",
)
END_STATES = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class SubmittedJob:
    """A raylt command that was submitted to a cluster as a Ray job.

    Attributes:
        id: Ray's id of the job.
        state: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        command: The command, without `raylt`.
        folder: Run folder on the cluster; None for a command without a run.
        started: Start time in seconds since 1970; None before the start.
    """

    id: str
    state: str
    command: str
    folder: str | None
    started: float | None


class JobClient:
    """Client for the raylt jobs of a cluster; see `connect`."""

    def __init__(self, client: Any):
        self._client = client

    def submit(
        self, command: Sequence[str], folder: str | None, working_directory: Path | None, variables: dict[str, str]
    ) -> str:
        """Submit a raylt command to the cluster and return the id of the job.

        Args:
            command: The words after `raylt`. A word with `~/` at its start or after `=` is a path on the cluster.
            folder: Run folder on the cluster; None for a command without a run.
            working_directory: Folder to upload; None for none.
            variables: Environment variables of the job.

        Raises:
            ConfigError: The working directory cannot be sent, for example because it is too large.
        """
        words = " ".join(_on_cluster(word) for word in command)
        files = {"working_dir": str(working_directory), "excludes": list(EXCLUDED)} if working_directory else {}
        metadata = {KEY: shlex.join(command)} | ({} if folder is None else {FOLDER: folder})
        try:
            return self._client.submit_job(
                entrypoint=f"exec python -m raylt {words}",
                runtime_env={**files, "env_vars": {"PYTHONUNBUFFERED": "1"} | variables},
                metadata=metadata,
            )
        except ValueError as error:
            raise ConfigError(
                f"{working_directory}: cannot be sent to the cluster ({one_line(error)}). Start in a folder that has "
                "only the configuration and your own code, or list other files in .gitignore.",
                code="job.not-sent",
                path=str(working_directory),
            ) from None

    def list(self) -> list[SubmittedJob]:
        """Return the raylt jobs of the cluster, oldest first."""
        jobs = [_job_of(details) for details in self._client.list_jobs() if KEY in (details.metadata or {})]
        return sorted(jobs, key=lambda job: job.started or float("inf"))

    def find(self, name: str) -> SubmittedJob:
        """Return the job with this id, or the latest job whose run folder has this name.

        Raises:
            ConfigError: No job matches.
        """
        jobs = [job for job in self.list() if name in (job.id, job.folder, Path(job.folder or "").name)]
        if not jobs:
            raise ConfigError(
                f"{name}: no job of raylt on the cluster has this id or run. List them with raylt ls --address.",
                code="job.not-found",
                name=name,
            )
        return jobs[-1]

    def lines(self, job: SubmittedJob, every_s: float) -> Iterator[str]:
        """Yield the output of a job in pieces until the job ends.

        Args:
            job: The job.
            every_s: Interval in seconds at which the output is read.
        """
        shown = 0
        while True:
            ended = self._current(job.id).state in END_STATES
            text = self._client.get_job_logs(job.id)
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if ended:
                return
            time.sleep(every_s)

    def wait(self, id: str) -> SubmittedJob:
        """Wait until a job ends, and return the job."""
        while (job := self._current(id)).state not in END_STATES:
            time.sleep(0.5)
        return job

    def _current(self, id: str) -> SubmittedJob:
        """Return a raylt job in its current state."""
        return _job_of(self._client.get_job_info(id))

    def output(self, id: str) -> str:
        """Return the text that a job has printed so far."""
        return self._client.get_job_logs(id)

    def interrupt(self, job: SubmittedJob) -> None:
        """Stop a job with a signal. Its run can be resumed."""
        self._client.stop_job(job.id)


@contextmanager
def connect(address: str) -> Iterator[JobClient]:
    """Connect to the dashboard of a cluster, with the user's token if the dashboard requires one.

    Args:
        address: Address of the dashboard, as in http://head:8265.

    Raises:
        ConfigError: No dashboard answers there, or it requires a token that this machine does not have.
    """
    address = address.rstrip("/")
    token = _asks_for_token(address)
    if token and not os.environ.get("RAY_AUTH_TOKEN") and not token_file().exists():
        raise ConfigError(
            f"--address {address}: the cluster requires a token, and there is no token file ({token_file()}). Copy the "
            "cluster's ~/.ray/auth_token to it (mode 600), or name a token file in RAY_AUTH_TOKEN_PATH.",
            code="cluster.token-missing",
            address=address,
            path=str(token_file()),
        )
    with environment({"RAY_AUTH_MODE": "token" if token else "disabled"}):
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        for module in UPLOAD_LOGGERS:  # they log each step of the upload
            logging.getLogger(f"ray.{module}").setLevel(logging.ERROR)
        try:
            client = JobSubmissionClient(address)
        except AuthenticationError:
            raise ConfigError(
                f"--address {address}: the cluster refuses the token of this machine. Copy the cluster's "
                "~/.ray/auth_token here (mode 600), or name a token file in RAY_AUTH_TOKEN_PATH.",
                code="cluster.token-refused",
                address=address,
            ) from None
        except (ConnectionError, RuntimeError) as error:
            raise _no_dashboard(address, one_line(error)) from None
        try:
            yield JobClient(client)
        except (ConnectionError, RuntimeError) as error:
            if isinstance(error, RayltError):
                raise
            raise _no_dashboard(address, one_line(error)) from None


def _asks_for_token(address: str) -> bool:
    """Return whether a dashboard requires a token. The check itself needs no token."""
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"--address {quoted(address)}: is not the address of a dashboard. Give one as http://HOST:8265.",
            code="cluster.bad-address",
            address=address,
        )
    try:
        with urllib.request.urlopen(f"{address}/api/authentication_mode", timeout=TIMEOUT_S) as answer:
            return json.load(answer)["authentication_mode"] == "token"
    except urllib.error.URLError as error:
        raise _no_dashboard(address, str(error.reason)) from None
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise _no_dashboard(address, one_line(error)) from None


def _no_dashboard(address: str, cause: str) -> ConfigError:
    return ConfigError(
        f"--address {address}: no Ray dashboard answers there ({cause}). Give the address that ray start --head "
        "printed, http://HOST:8265 by default; for a head on another machine, forward the port with ssh.",
        code="cluster.no-answer",
        address=address,
        cause=cause,
    )


def _job_of(details: Any) -> SubmittedJob:
    started = None if details.start_time is None else details.start_time / 1000
    metadata = details.metadata
    state = str(details.status.value)
    if state == "FAILED" and details.driver_exit_code == INTERRUPTED:  # for Ray, any exit code but 0 is a failure
        state = "STOPPED"
    return SubmittedJob(details.submission_id, state, metadata[KEY], metadata.get(FOLDER), started)


def _on_cluster(word: str) -> str:
    """Quote a word for the cluster's shell, where a leading ~/ stands for the home folder on the cluster."""
    key, equals, value = word.partition("=")
    if equals and value.startswith("~/"):
        return f'{shlex.quote(f"{key}=")}"$HOME"/{shlex.quote(value[2:])}'
    if word.startswith("~/"):
        return f'"$HOME"/{shlex.quote(word[2:])}'
    return shlex.quote(word)
