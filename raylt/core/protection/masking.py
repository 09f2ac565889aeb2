"""Secure aggregation (Bonawitz et al., CCS 2017, Figure 4, without the signatures of its active variant).

Round 0  Every member advertises two X25519 keys.
Round 1  Every member deals shares of its mask key and of its own seed, each encrypted for its receiver. It commits
         itself to them: the server gets the hash of each share and of the seed.
Round 2  Every member sends its vector plus the stream of its seed, plus or minus one stream for every other member.
         The two members of a pair draw their stream from the secret that their mask keys agree on. In the sum over all
         members these pairwise streams cancel.
Round 3  The survivors send their shares of the seed of each member that sent a vector, and their shares of the mask key
         of each member that did not; never both of one member. The server subtracts the remaining streams from the
         sum.

The commitments are an addition to the protocol. If a survivor sends shares that differ from those it was dealt, the
server notices and ignores its answer. The server also notices if a member's shares yield a secret that differs from the
member's commitment. The commitments reveal nothing about the vector that a member masks.

Vectors and their sums are uint64: nothing is rounded modulo 2^64, and a masked vector is uniformly distributed whatever
it hides. `Member` is a client's side and `Collector` the server's. They exchange only arguments and results.

Secrets are shared so that any `threshold` shares give the secret, and fewer reveal nothing (Shamir, CACM 1979).
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raylt.errors import RayltError, TooFewReplies

PRIME = 2**256 + 297  # the smallest prime above every secret of 32 bytes
SHARE_BYTES = 33
KEY_BYTES = 32
HASH_BYTES = 32
Keys = tuple[bytes, bytes]  # public keys for shares and for masks
Unmasking = dict[int, tuple[str, int]]  # "seed" or "key" and a share of it, by member


@dataclass(frozen=True)
class Commitment:
    """The published hashes of the secrets that one member deals to other members.

    The member's mask key needs no hash, since it has a public key.

    Attributes:
        seed: Hash of the seed.
        shares: Hash of each share, by kind and holder.
    """

    seed: bytes
    shares: Mapping[tuple[str, int], bytes]


@dataclass(frozen=True)
class Introduction:
    """Public keys and commitments by member, which the server has after rounds 0 and 1."""

    keys: Mapping[int, Keys]
    commitments: Mapping[int, Commitment]


class Member:
    """A client's side of one secure sum.

    Args:
        id: The member's number, from 0; its shares have the number `id + 1`.
    """

    def __init__(self, id: int):
        self.id = id
        self._share_key, share_public = _key_pair()
        self._mask_key, mask_public = _key_pair()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self.keys: Keys = share_public, mask_public  # round 0
        self._public_keys: Mapping[int, Keys] = {}  # by member
        self._shares: dict[int, tuple[int, int]] = {}  # received shares of each member's seed and mask key
        self.commitment: Commitment | None = None  # set in round 1

    def deal(self, all_keys: Mapping[int, Keys], threshold: int) -> dict[int, bytes]:
        """Return two encrypted shares for every other member (round 1).

        Args:
            all_keys: Public keys by member.
            threshold: Number of shares that recover a secret.
        """
        self._public_keys = all_keys
        numbers = [id + 1 for id in all_keys]
        seeds = split(self._seed, numbers, threshold)
        keys = split(self._mask_key, numbers, threshold)
        self._shares[self.id] = seeds[self.id + 1], keys[self.id + 1]
        share_hashes = {
            (kind, number - 1): hash_of(share)
            for kind, shares in (("seed", seeds), ("key", keys))
            for number, share in shares.items()
        }
        self.commitment = Commitment(hash_of(int.from_bytes(self._seed, "big")), share_hashes)
        sealed = {}
        for id in all_keys:
            if id != self.id:
                shares = seeds[id + 1].to_bytes(SHARE_BYTES, "big") + keys[id + 1].to_bytes(SHARE_BYTES, "big")
                cipher = ChaCha20Poly1305(self._share_secret(id))
                sealed[id] = cipher.encrypt(self._nonce(self.id, id), shares, None)
        return sealed

    def receive(self, sender: int, sealed: bytes) -> None:
        """Decrypt and store the shares that another member dealt to this member."""
        both = ChaCha20Poly1305(self._share_secret(sender)).decrypt(self._nonce(sender, self.id), sealed, None)
        self._shares[sender] = int.from_bytes(both[:SHARE_BYTES], "big"), int.from_bytes(both[SHARE_BYTES:], "big")

    def mask(self, vector: np.ndarray) -> np.ndarray:
        """Return the vector, uint64 [n], with masks added (round 2)."""
        masked = vector + stream(self._seed, len(vector))
        for id, (_, public) in self._public_keys.items():
            if id != self.id:
                add_pair(masked, self.id, id, agree(self._mask_key, public, b"mask"))
        return masked

    def unmask(self, survivors: Iterable[int]) -> Unmasking:
        """Return a share of each survivor's seed, and of every other member's mask key (round 3)."""
        sent = set(survivors)
        return {id: ("seed", seed) if id in sent else ("key", key) for id, (seed, key) in self._shares.items()}

    def _share_secret(self, other: int) -> bytes:
        return agree(self._share_key, self._public_keys[other][0], b"shares")

    @staticmethod
    def _nonce(sender: int, receiver: int) -> bytes:
        return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


@dataclass
class Collector:
    """The server's side of one secure sum.

    Attributes:
        introduction: Public keys and commitments of the members.
        length: Length of the vectors.
        wrong: Reason why a survivor's answer was not used, by survivor.
    """

    introduction: Introduction
    length: int
    wrong: dict[int, str] = field(default_factory=dict)
    _sent: dict[int, None] = field(default_factory=dict)  # the members that sent a vector, as an ordered set

    def __post_init__(self) -> None:
        self._keys = self.introduction.keys
        self._sum = np.zeros(self.length, dtype=np.uint64)

    def add(self, id: int, masked: np.ndarray) -> None:
        """Add a member's masked vector; the order of members does not matter."""
        self._sum += masked
        self._sent[id] = None

    def unmasked(self, answers: Mapping[int, Unmasking], threshold: int) -> np.ndarray:
        """Return the sum of all masked vectors without the masks, uint64 [n].

        Answers with a share that differs from the dealer's commitment are ignored; `wrong` names them.

        Args:
            answers: Answers of round 3 by survivor.
            threshold: Number of required survivors.

        Raises:
            TooFewReplies: Fewer survivors than the threshold gave a correct answer.
            RayltError: A member dealt shares of another secret than it committed itself to.
        """
        faults = {survivor: self._fault(survivor, answer) for survivor, answer in answers.items()}
        self.wrong = {survivor: fault for survivor, fault in faults.items() if fault is not None}
        right = {survivor: answer for survivor, answer in answers.items() if survivor not in self.wrong}
        if len(right) < threshold:
            wrong = ""
            if self.wrong:
                survivor, fault = next(iter(self.wrong.items()))
                wrong = f" Client number {survivor} {fault}."
            raise TooFewReplies(
                f"federation.secure: {len(right)} of {len(self._keys)} clients are left, and {threshold} are needed "
                f"to remove the masks from a secure sum.{wrong} The run's notes.log says why clients failed; "
                "if none did, lower federation.over_select.",
                code="reply.too-few",
                key="federation.secure",
                usable=len(right),
                asked=len(self._keys),
                needed=threshold,
            )
        used = dict(islice(right.items(), threshold))
        result = self._sum.copy()
        for id in self._keys:
            secret = self._secret(id, {survivor + 1: answer[id][1] for survivor, answer in used.items()})
            if id in self._sent:
                result -= stream(secret, self.length)
            else:
                for survivor in self._sent:
                    pair = np.zeros(self.length, dtype=np.uint64)
                    add_pair(pair, survivor, id, agree(secret, self._keys[survivor][1], b"mask"))
                    result -= pair
        return result

    def _kind(self, id: int) -> str:
        return "seed" if id in self._sent else "key"

    def _fault(self, survivor: int, answer: Unmasking) -> str | None:
        """Return how a survivor's shares differ from the shares that were dealt to it, or None."""
        for id in self._keys:
            kind, share = answer.get(id, ("", 0))
            if kind != self._kind(id):
                return f"gave no share of the {self._kind(id)} of member {id}"
            if not 0 <= share < PRIME or hash_of(share) != self.introduction.commitments[id].shares[kind, survivor]:
                return f"gave a wrong share of the {kind} of member {id}"
        return None

    def _secret(self, id: int, shares: Mapping[int, int]) -> bytes:
        """Return a member's seed or mask key, rebuilt from shares that the member dealt."""
        kind = self._kind(id)
        try:
            secret = join(shares)
        except ValueError:
            secret = bytes(KEY_BYTES)  # matches no commitment
        if kind == "seed":
            right = hash_of(int.from_bytes(secret, "big")) == self.introduction.commitments[id].seed
        else:
            right = public_key(secret) == self._keys[id][1]
        if not right:
            raise RayltError(
                f"federation.secure: the shares do not give the {kind} to which a client committed itself (member "
                f"{id}). Exclude the client, because its masks cannot be removed from the sum.",
                code="reply.wrong-share",
                key="federation.secure",
                member=id,
                kind=kind,
            )
        return secret


def introduce(members: Sequence[Member], threshold: int) -> Introduction:
    """Run rounds 0 and 1 among members, and return the introduction that the server receives.

    Args:
        members: All members, ordered by their numbers from 0.
        threshold: Number of shares that recover a secret.
    """
    keys = {member.id: member.keys for member in members}
    dealt = {member.id: member.deal(keys, threshold) for member in members}
    for sender, sealed in dealt.items():
        for receiver, shares in sealed.items():
            members[receiver].receive(sender, shares)
    commitments = {member.id: member.commitment for member in members if member.commitment is not None}
    return Introduction(keys, commitments)


def hash_of(secret: int) -> bytes:
    """Return the SHA-256 of a seed or share, which cannot be guessed from its hash."""
    return hashlib.sha256(secret.to_bytes(SHARE_BYTES, "big")).digest()


def add_pair(masked: np.ndarray, own: int, other: int, key: bytes) -> None:
    """Add or subtract, in place, the mask that two members share.

    The member with the smaller number adds the mask, the other member subtracts it.
    """
    mask = stream(key, len(masked))
    if own < other:
        masked += mask
    else:
        masked -= mask


def stream(key: bytes, length: int) -> np.ndarray:
    """Return the ChaCha20 key stream, uint64 [length], of a key that is used only once."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8")


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the 32-byte key that two members share for a purpose."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(hashes.SHA256(), 32, salt=None, info=purpose).derive(secret)


def public_key(private: bytes) -> bytes:
    """Return the public key that belongs to a private X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _key_pair() -> tuple[bytes, bytes]:
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, int]:
    """Split a secret into shares, one for each holder.

    A share is the value, at the holder's number, of a random polynomial whose value at 0 is the secret.

    Args:
        secret: At most 32 bytes.
        holders: Numbers of the holders, from 1.
        threshold: Number of shares that recover the secret; the polynomial's degree is one less.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: evaluate(coefficients, x, PRIME) for x in holders}


def evaluate(coefficients: list[int], x: int, prime: int) -> int:
    """Return the value of a polynomial at `x` modulo a prime; the constant coefficient comes first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


@lru_cache(maxsize=1)  # all secrets of a sum are recovered from shares of the same members
def _weights_at_zero(points: tuple[int, ...]) -> list[int]:
    """Return the weight of each point's value in the Lagrange interpolation at 0, modulo the prime."""
    weights = []
    for x in points:
        numerator = 1
        denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return weights


def join(shares: Mapping[int, int], length: int = 32) -> bytes:
    """Recover a secret of `length` bytes from shares, by Lagrange interpolation at 0.

    Raises:
        ValueError: There are too few shares, or they belong to several secrets. Not every such mistake is detected.
    """
    weights = _weights_at_zero(tuple(shares))
    value = sum(weight * share for weight, share in zip(weights, shares.values(), strict=True)) % PRIME
    if value >= 256**length:
        raise ValueError(f"{len(shares)} shares give no secret of {length} bytes: too few, or from several secrets")
    return value.to_bytes(length, "big")
