"""Discovery of the cluster to join and its credentials, before Ray is imported.

Ray reads both from environment variables on import.

`entry` finds out whether a cluster requires a token: it makes the first call of a Ray driver without a token and, if
the cluster refuses it, again with the user's token. `ClusterEntry.variables` holds the resulting variables for Ray.
"""

import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raylt.errors import ConfigError, quoted, spoken

TIMEOUT_S = 10.0
MAX_TOKEN_BYTES = 4096
# The first call of every Ray driver. It needs only the token, and returns the id of the cluster.
FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"


@dataclass(frozen=True)
class Joined:
    """The address of a cluster that this process joins, and the source of the address.

    Args:
        address: HOST:PORT or "auto".
        asked_by: The option or variable that names the address, or "this is a Ray job".
    """

    address: str
    asked_by: str

    def __str__(self) -> str:
        return f"joined the Ray cluster at {self.address} ({self.asked_by})"

    @property
    def source(self) -> str:
        """Return the cluster's address with the option or variable that names it, for the start of error messages."""
        if self.asked_by == "--address":
            return f"{spoken('--address', 'address')} {quoted(self.address)}"
        return f"{self.asked_by}, address {self.address}"


@dataclass(frozen=True)
class ClusterEntry:
    """The address, token and variables with which this process enters a cluster.

    Args:
        address: HOST:PORT, or "local" for a new cluster.
        token: Whether the cluster requires a token.
        remarks: Lines about problems that were corrected or that the user should correct.
        variables: Environment variables that Ray reads.
    """

    address: str
    token: bool
    remarks: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def cluster_to_join(address: str | None) -> Joined | None:
    """Return the cluster to join; None if a new local cluster is to be started.

    In order of precedence, the address comes from the option, from RAYLT_ADDRESS, which cluster.yaml sets on the head,
    or from the Ray job as which this process runs. RAY_ADDRESS alone does not count, because it may have been exported
    for another purpose.

    Args:
        address: The value of the option `--address`.
    """
    if address is not None:
        return None if address == "local" else Joined(address, "--address")
    variable = os.environ.get("RAYLT_ADDRESS")
    if variable:
        return None if variable == "local" else Joined(variable, "RAYLT_ADDRESS")
    job_address = os.environ.get("RAY_ADDRESS")
    if job_address and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return Joined(job_address, "this is a Ray job")
    return None


def entry(joined: Joined | None) -> ClusterEntry:
    """Return the address, token and variables for the cluster to join, or for a new local cluster.

    For a new cluster, a token is created if there is none.

    Raises:
        ConfigError: The cluster does not answer, or requires a token that this machine does not have.
    """
    return _local_entry() if joined is None else _joined_entry(joined)


def token_file() -> Path:
    """Return the path where Ray looks for a token if RAY_AUTH_TOKEN is not set."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def exposed(file: Path) -> str | None:
    """Return a clause that warns that other users may read a file; None if only the owner may."""
    try:
        status = file.stat()
    except OSError:
        return None
    mode = stat.S_IMODE(status.st_mode)
    return f"others may read it (mode {mode:o})" if mode & 0o077 else None


def tls() -> bool:
    """Return whether Ray processes on this machine use TLS."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _local_entry() -> ClusterEntry:
    """Return the `ClusterEntry` of a new local cluster, which requires a token unless the user has set RAY_AUTH_MODE.

    The token file is created here, because Ray would create one that other users can read.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        return ClusterEntry("local", False, variables={"RAY_AUTH_MODE": mode})
    remarks: tuple[str, ...] = ()
    if not os.environ.get("RAY_AUTH_TOKEN"):
        file = token_file()
        if not file.exists():
            _make_token(file)
        _, remarks = _read_token(file)
    return ClusterEntry("local", True, remarks, {"RAY_AUTH_MODE": "token"})


def _joined_entry(joined: Joined) -> ClusterEntry:
    address = _resolve(joined)
    if _admits(joined, address, None):
        if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
            raise ConfigError(
                f"{joined.source}: the cluster requires no token, although RAY_AUTH_MODE=token is set, so anyone who "
                "reaches it can run code on it. Start it with RAY_AUTH_MODE=token, or unset the variable to join it.",
                code="cluster.unprotected",
                address=joined.address,
            )
        return ClusterEntry(address, False, variables={"RAY_AUTH_MODE": "disabled"})
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    remarks: tuple[str, ...] = ()
    origin = "RAY_AUTH_TOKEN"
    if not token:
        file = token_file()
        origin = str(file)
        if not file.exists():
            raise ConfigError(
                f"{joined.source}: the cluster requires a token, and there is no token file ({file}). Copy the "
                "cluster's ~/.ray/auth_token to it (mode 600), or name a token file in RAY_AUTH_TOKEN_PATH.",
                code="cluster.token-missing",
                address=joined.address,
                path=origin,
            )
        token, remarks = _read_token(file)
    if not _admits(joined, address, token):
        raise ConfigError(
            f"{joined.source}: the Ray cluster refuses the token of {origin}. Copy the cluster's ~/.ray/auth_token to "
            "it (mode 600), or name a token file in RAY_AUTH_TOKEN_PATH.",
            code="cluster.token-refused",
            address=joined.address,
            path=origin,
        )
    return ClusterEntry(address, True, remarks, {"RAY_AUTH_MODE": "token"})


def _resolve(joined: Joined) -> str:
    """Return the cluster's address as HOST:PORT, after checking that a server listens there.

    As in Ray, `auto` stands for RAY_ADDRESS or, if it is not set, for the address that `ray start` has recorded on this
    machine.
    """
    address = joined.address
    source = ""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
        source = f" (RAY_ADDRESS={address})"
        if address == "auto":
            address, source = _written_address(joined)
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 65535:
        raise ConfigError(
            f"{joined.source}{source}: is not the address of a cluster. Give HOST:PORT or auto.",
            code="cluster.bad-address",
            address=address,
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{joined.source}{source}: no server answers there ({cause}). Start a cluster with ray start --head, or "
            f"leave {spoken('--address', 'address')} out for a local one.",
            code="cluster.no-answer",
            address=address,
            cause=str(cause),
        ) from None
    return address


def _written_address(joined: Joined) -> tuple[str, str]:
    """Return the cluster address that `ray start` wrote to a file on this machine, and a note that names the file."""
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > 256 or status.st_uid not in (0, os.geteuid()):
            # another user could make this process send its token to a server of that user
            raise ConfigError(
                f"{joined.source}: the file with the cluster's address is not yours ({file}). Give HOST:PORT.",
                code="cluster.untrusted-file",
                path=str(file),
            )
        return file.read_text().strip(), f" (in {file})"
    except (OSError, UnicodeError):
        raise ConfigError(
            f"{joined.source}: no Ray cluster runs on this machine (no file {file}). Start one with ray start --head, "
            "or give its HOST:PORT.",
            code="cluster.not-found",
            path=str(file),
        ) from None


def _admits(joined: Joined, address: str, token: str | None) -> bool:
    """Return whether the cluster accepts a call with this token, or without a token if it is None."""
    import grpc  # Not at the top: it takes 0.1 s, and only a process that joins a cluster needs it.

    options = [("grpc.enable_http_proxy", 0)]
    channel: Any = (
        grpc.secure_channel(address, _tls_credentials(grpc), options=options)
        if tls()
        else grpc.insecure_channel(address, options=options)
    )
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        channel.unary_unary(FIRST_CALL)(b"", timeout=TIMEOUT_S, metadata=metadata)
        return True
    except grpc.RpcError as error:
        answer: Any = error
        if answer.code() is grpc.StatusCode.UNAUTHENTICATED:
            return False
        if answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ConfigError(
                f"{joined.source}: the server does not answer within {TIMEOUT_S:g} s. Look at gcs_server.out in the "
                "cluster's session folder.",
                code="cluster.no-answer",
                address=address,
            ) from None
        encryption = (
            "is a cluster without TLS, although RAY_USE_TLS is set"
            if tls()
            else "is a cluster with TLS: then set RAY_USE_TLS as on its nodes"
        )
        raise ConfigError(
            f"{joined.source}: the server is not a Ray cluster (or {encryption}). Give the port that ray start --head "
            "printed (6379 by default), not the dashboard's.",
            code="cluster.not-ray",
            address=address,
        ) from None
    finally:
        channel.close()


def _tls_credentials(grpc: Any) -> Any:
    """Return gRPC credentials from Ray's TLS settings. Client and server authenticate each other by certificates."""
    content = []
    for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT"):
        file = os.environ.get(name)
        if file is None:
            raise ConfigError(
                f"{name}: is not set, although RAY_USE_TLS is. Set it to the path of the file, as on the nodes.",
                code="cluster.tls-file",
                name=name,
            )
        try:
            content.append(Path(file).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{name}: the file cannot be read ({file}: {error.strerror}). Set it to the path of the file, as on "
                "the nodes.",
                code="cluster.tls-file",
                name=name,
                path=file,
            ) from None
    return grpc.ssl_channel_credentials(*content)


def _read_token(file: Path) -> tuple[str, tuple[str, ...]]:
    """Return the token in a file, and a remark if other users could read the file. Such a file is made private."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_TOKEN_BYTES:  # reading a FIFO would block
            raise _bad_token_file(file, "is not a token file")
        token = file.read_text().strip()
        if not token:
            raise _bad_token_file(file, "is empty")
        exposure = exposed(file)
        if not exposure:
            return token, ()
        if status.st_uid != os.geteuid():
            return token, (f"the token file {file}: {exposure}, and it belongs to another user; ask for mode 600",)
        file.chmod(0o600)
        remark = (
            f"the token file {file}: {exposure}; it has mode 600 now, create a new token if someone else has an "
            "account here"
        )
        return token, (remark,)
    except UnicodeError:
        raise _bad_token_file(file, "is not a token file") from None
    except OSError as error:
        raise ConfigError(
            f"{file}: the token file cannot be read ({error.strerror}). Give a token file that only you can read (mode "
            "600).",
            code="cluster.token-unreadable",
            path=str(file),
            cause=error.strerror,
        ) from None


def _bad_token_file(file: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"{file}: {fault}. Remove it; ray get-auth-token --generate creates a new one.",
        code="cluster.token-unreadable",
        path=str(file),
        cause=fault,
    )


def _make_token(file: Path) -> None:
    """Write a new token to a file atomically. If several processes start together, only one of them writes it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".auth_token-")  # mode 600
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(secrets.token_hex(32))
            os.link(name, file)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"{file}: the token of a new cluster cannot be written ({error.strerror}). Name a file for it in "
            "RAY_AUTH_TOKEN_PATH.",
            code="cluster.token-unwritable",
            path=str(file),
            cause=error.strerror,
        ) from None
