"""Which cluster to join, and how to get in: found out before Ray is imported, because Ray reads both when it is.

Whether a cluster asks for a token is its own word: the first call that a Ray driver makes is made here, without a token
and, where it is refused, with the one that is here. `Entry.variables` are what Ray then reads.
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

from raylt.errors import ConfigError

PATIENCE_S = 10.0
TOKEN_BYTES = 4096          # more is no token
# the call with which every Ray driver begins; it needs nothing but the token, and the answer is the cluster's id
FIRST_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"


@dataclass(frozen=True)
class Joined:
    """A cluster that this process joins, and who told it to: an option, a variable, or a Ray job."""

    address: str
    asked_by: str

    def __str__(self) -> str:
        return f"joined the Ray cluster at {self.address} ({self.asked_by})"

    @property
    def told(self) -> str:
        """How the user gave the address, as errors begin."""
        return f"--address {self.address}" if self.asked_by == "--address" else (
            f"{self.asked_by}, address {self.address}")


@dataclass(frozen=True)
class Entry:
    """How this process gets into a cluster.

    Args:
        address: HOST:PORT, or "local" for a new one.
        token: whether the cluster asks for one.
        remarks: what was mended or should be, a line each.
    """

    address: str
    token: bool
    remarks: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def whereabouts(address: str | None) -> Joined | None:
    """What to join: the option; else RAYLT_ADDRESS, which cluster.yaml sets on the head; else a job's own cluster.

    RAY_ADDRESS alone says nothing: it may have been exported for something else.
    """
    if address is not None:
        return None if address == "local" else Joined(address, "--address")
    if set_here := os.environ.get("RAYLT_ADDRESS"):
        return None if set_here == "local" else Joined(set_here, "RAYLT_ADDRESS")
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and (jobs := os.environ.get("RAY_ADDRESS")):
        return Joined(jobs, "this is a Ray job")
    return None


def entry(joined: Joined | None) -> Entry:
    """How to get into the cluster to be joined, or into a new local one; makes the token of the latter.

    Raises:
        ConfigError: nothing that can be joined is there, or it asks for a token that is not here.
    """
    return _local() if joined is None else _joined(joined)


def token_file() -> Path:
    """Where Ray looks for the token, unless RAY_AUTH_TOKEN holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def exposed(file: Path) -> str | None:
    """Who but its owner may read a file, as a clause; None where nobody."""
    try:
        facts = file.stat()
    except OSError:
        return None
    mode = stat.S_IMODE(facts.st_mode)
    return f"others may read it (mode {mode:o})" if mode & 0o077 else None


def _local() -> Entry:
    """A new cluster asks for a token unless the user said otherwise; Ray itself would leave the file open to read."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode.lower() != "token":
        return Entry("local", False, variables={"RAY_AUTH_MODE": mode})
    remarks: tuple[str, ...] = ()
    if not os.environ.get("RAY_AUTH_TOKEN"):
        file = token_file()
        if not file.exists():
            _make_token(file)
        _, remarks = _read(file)
    return Entry("local", True, remarks, {"RAY_AUTH_MODE": "token"})


def _joined(joined: Joined) -> Entry:
    address, given = _resolve(joined), os.environ.get("RAY_AUTH_MODE", "").lower()
    if _admits(joined, address, None):
        if given == "token":
            raise ConfigError(f"{joined.told}: asks for no token, though RAY_AUTH_MODE=token is set: anyone who "
                              "reaches it runs code there; start it with RAY_AUTH_MODE=token, or unset the variable "
                              "to join it as it is")
        return Entry(address, False, variables={"RAY_AUTH_MODE": "disabled"})
    token, remarks, where = os.environ.get("RAY_AUTH_TOKEN", ""), (), "RAY_AUTH_TOKEN"
    if not token:
        where = str(token_file())
        if not token_file().exists():
            raise ConfigError(f"{joined.told}: asks for a token, and {where} is not there; copy the cluster's "
                              "~/.ray/auth_token to it (mode 600), or name a file with it in RAY_AUTH_TOKEN_PATH")
        token, remarks = _read(token_file())
    if not _admits(joined, address, token):
        raise ConfigError(f"{joined.told}: no Ray cluster could be joined there, it refuses the token in {where}; copy "
                          "the cluster's ~/.ray/auth_token (mode 600), or name a file with it in RAY_AUTH_TOKEN_PATH")
    return Entry(address, True, remarks, {"RAY_AUTH_MODE": "token"})


def _resolve(joined: Joined) -> str:
    """HOST:PORT. Of `auto`, as Ray understands it: RAY_ADDRESS, else what `ray start` left on this machine."""
    address, source = joined.address, ""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
        source = f" (RAY_ADDRESS={address})"
        if address == "auto":
            address, source = _left_here(joined)
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 65535:
        raise ConfigError(f"{joined.told}{source}: must be HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{joined.told}{source}: nothing answers there ({why}); start a cluster with ray start "
                          "--head, or leave --address out for a local one") from None
    return address


def _left_here(joined: Joined) -> tuple[str, str]:
    """The address that `ray start` wrote down on this machine, and where."""
    file = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > 256 or facts.st_uid not in (0, os.geteuid()):
            # whoever wrote it would be sent our token
            raise ConfigError(f"{joined.told}: {file} is no file of yours; give the cluster's HOST:PORT")
        return file.read_text().strip(), f" (in {file})"
    except (OSError, UnicodeError):
        raise ConfigError(f"{joined.told}: no Ray cluster runs on this machine, {file} is not there; start one with "
                          "ray start --head, or give its HOST:PORT") from None


def _admits(joined: Joined, address: str, token: str | None) -> bool:
    """Whether the cluster answers a call with this token, or with none."""
    import grpc  # a tenth of a second, for those who join only

    options = [("grpc.enable_http_proxy", 0)]
    channel: Any = (grpc.insecure_channel(address, options=options) if not tls() else
                    grpc.secure_channel(address, _credentials(grpc), options=options))
    try:
        channel.unary_unary(FIRST_CALL)(b"", timeout=PATIENCE_S, metadata=(
            [("authorization", f"Bearer {token}")] if token else []))
        return True
    except grpc.RpcError as error:
        answer: Any = error
        if answer.code() is grpc.StatusCode.UNAUTHENTICATED:
            return False
        if answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ConfigError(f"{joined.told}: is there and does not answer within {PATIENCE_S:g} s; look at "
                              "gcs_server.out in the cluster's session folder") from None
        other = "without TLS, though RAY_USE_TLS is set" if tls() else "with TLS; then set RAY_USE_TLS as on its nodes"
        raise ConfigError(f"{joined.told}: what answers there is no Ray cluster (or one {other}); give the port that "
                          "ray start --head printed (6379 by default), not the dashboard's") from None
    finally:
        channel.close()


def tls() -> bool:
    """Whether Ray's processes talk over TLS here."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _credentials(grpc: Any) -> Any:
    """Of Ray's own settings: both sides show a certificate."""
    content = []
    for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT"):
        try:
            content.append(Path(os.environ[name]).read_bytes())
        except KeyError:
            raise ConfigError(f"RAY_USE_TLS is set and {name} is not; name the file, as on the nodes") from None
        except OSError as error:
            raise ConfigError(f"{name}={os.environ[name]}: {error.strerror}; name the file, as on the nodes") from None
    return grpc.ssl_channel_credentials(*content)


def _read(file: Path) -> tuple[str, tuple[str, ...]]:
    """The token, and what was done about a file that others may read."""
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > TOKEN_BYTES:      # a FIFO would keep us waiting
            raise ConfigError(f"{file}: is no token file; ray get-auth-token --generate writes one where none is")
        token = file.read_text().strip()
        if not token:
            raise ConfigError(f"{file}: holds no token; remove it, and ray get-auth-token --generate writes one")
        if not (who := exposed(file)):
            return token, ()
        if facts.st_uid != os.geteuid():
            return token, (f"the token file {file}: {who}, and it is another user's; ask for mode 600",)
        file.chmod(0o600)
        return token, (f"the token file {file}: {who}; it has mode 600 now, make a new token if someone else has an "
                       "account here",)
    except UnicodeError:
        raise ConfigError(f"{file}: is no token file; ray get-auth-token --generate writes one where none is") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a token file that you can read and that only you can read "
                          "(mode 600)") from None


def _make_token(file: Path) -> None:
    """Whole or not at all, and one of those who start at the same time makes it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".auth_token-")      # mode 600
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(secrets.token_hex(32))
            os.link(name, file)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; a new cluster asks for a token, name a file for it in "
                          "RAY_AUTH_TOKEN_PATH") from None
