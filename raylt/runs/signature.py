"""Signatures of results, made and checked by OpenSSH's `ssh-keygen -Y`.

Hashes show that a file was changed. Only a signature shows who vouches for it, since it cannot be made without the key.
The signature of FILE is in FILE.sig, in the namespace "raylt".
"""

import subprocess
import tempfile
from pathlib import Path

from raylt import store
from raylt.disk import is_file
from raylt.errors import CheckpointError, ConfigError, on_one_line

ENDING = ".sig"
NAMESPACE = "raylt"
MAX_FILE_BYTES = 2**30  # maximum size of a signed file
_MAX_SIGNATURE_BYTES = 2**16
_TIMEOUT_S = 120  # long enough to type a passphrase


def signature_of(file: Path) -> Path:
    """Return the path of the signature that belongs to a file."""
    return file.with_name(file.name + ENDING)


def sign(file: Path, key: Path) -> Path:
    """Sign a file with an SSH key.

    Args:
        file: The file to sign.
        key: File with a private key, or with a public key whose private key an SSH agent has.

    Returns:
        The path of the signature.

    Raises:
        ConfigError: ssh-keygen is missing, or cannot use the key.
    """
    content = store.read(file, MAX_FILE_BYTES)
    if not is_file(key):
        raise ConfigError(
            f"--sign: no such file ({key}). Give an SSH key.", code="signature.not-made", key="--sign", path=str(key)
        )
    answer = _ssh_keygen(["-Y", "sign", "-f", str(key.resolve()), "-n", NAMESPACE], content)
    if answer.returncode:
        raise ConfigError(
            f"--sign: ssh-keygen cannot sign ({key}: {_reason(answer)}). Give an SSH key that it can use.",
            code="signature.not-made",
            key="--sign",
            path=str(key),
        )
    target = signature_of(file)
    store.write(target, answer.stdout)
    return target


def check_signature(file: Path, signers: Path | None = None) -> str:
    """Check the signature of a file, and return the signer.

    Args:
        file: The signed file.
        signers: File of allowed signers, see `man ssh-keygen`. Without it any key is accepted, and the key is returned.

    Raises:
        CheckpointError: The file was changed after it was signed, the signature is damaged, or no allowed signer made
            it.
        ConfigError: ssh-keygen is missing.
    """
    content = store.read(file, MAX_FILE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        # use copies, because ssh-keygen would block on a FIFO
        signature = Path(folder) / "signature"
        signature.write_bytes(store.read(signature_of(file), _MAX_SIGNATURE_BYTES))
        if signers is None:
            answer = _ssh_keygen(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)], content)
            return f"signed with {_key_of(answer, file)}; use --signers to check whose key it is"
        allowed = Path(folder) / "signers"
        allowed.write_bytes(store.read(signers))
        names = _ssh_keygen(["-Y", "find-principals", "-f", str(allowed), "-s", str(signature)], b"")
        name = names.stdout.decode(errors="replace").partition("\n")[0]
        if names.returncode or not name:
            raise _wrong(file, "no allowed signer made it")
        words = ["-Y", "verify", "-f", str(allowed), "-I", name, "-n", NAMESPACE, "-s", str(signature)]
        return f"signed by {on_one_line(name)} with {_key_of(_ssh_keygen(words, content), file)}"


def _key_of(answer: "subprocess.CompletedProcess[bytes]", file: Path) -> str:
    if answer.returncode:
        raise _wrong(file, _reason(answer))
    return on_one_line(answer.stdout.decode(errors="replace").strip().rpartition(" with ")[2])


def _wrong(file: Path, reason: str) -> CheckpointError:
    path = signature_of(file)
    return CheckpointError(
        f"{path}: does not match {file.name} ({reason}). Put the signed file back, or sign it again.",
        code="signature.wrong",
        path=str(path),
        reason=reason,
    )


def _reason(answer: "subprocess.CompletedProcess[bytes]") -> str:
    return on_one_line(" ".join((answer.stderr or answer.stdout).decode(errors="replace").split())[:200])


def _ssh_keygen(words: list[str], content: bytes) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(
            ["ssh-keygen", *words], input=content, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ConfigError(
            "ssh-keygen: is not installed. Install OpenSSH to make and check signatures.",
            code="config.missing-package",
            name="ssh-keygen",
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"ssh-keygen: did not finish in {_TIMEOUT_S} s. Use a key without a passphrase, or a key in an SSH agent.",
            code="signature.not-made",
            key="--sign",
        ) from None
