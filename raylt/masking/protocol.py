"""Secure aggregation (Bonawitz et al., CCS 2017, Figure 4, without the signatures of its active variant).

Round 0  every member advertises two X25519 keys.
Round 1  every member deals shares of its mask key and of a seed of its own, each encrypted for whom it is.
Round 2  every member sends its vector plus the stream of its seed, plus or minus a stream for every other member, which
         both draw from the secret that their mask keys agree on. In the sum over all members these cancel.
Round 3  of those who sent a vector the survivors give their shares of the seed, of those who did not their shares of
         the mask key; never both of one member. The server takes the streams that are left off the sum.

Vectors are uint64, and so is their sum: modulo 2^64 nothing is rounded, and a masked vector is uniform whatever it
hides. `Member` is a client's side and `Collector` the server's; all that passes between them are their arguments and
results.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raylt.errors import TooFewReplies
from raylt.masking.shamir import SHARE_BYTES, join, split

KEY_BYTES = 32
Keys = tuple[bytes, bytes]              # public keys: for shares, for masks
Unmasking = dict[int, tuple[str, int]]  # by member: "seed" or "key", and a share of it


def stream(key: bytes, length: int) -> np.ndarray:
    """ChaCha20's stream of a key that is used for nothing else, uint64 [length]."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * length)), dtype="<u8")


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The key of 32 bytes that two members share for a purpose."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(hashes.SHA256(), 32, salt=None, info=purpose).derive(secret)


def _pair() -> Keys:
    private = X25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


class Member:
    """A client's side of one sum.

    Args:
        id: its number, from 0; that of its shares is one more.
    """

    def __init__(self, id: int):
        self.id = id
        (self._share_key, share_public), (self._mask_key, mask_public) = _pair(), _pair()
        self._seed = secrets.token_bytes(KEY_BYTES)
        self.keys: Keys = share_public, mask_public     # round 0
        self._all: Mapping[int, Keys] = {}
        self._held: dict[int, tuple[int, int]] = {}     # shares of others: of the seed, of the mask key

    def deal(self, everybody: Mapping[int, Keys], threshold: int) -> dict[int, bytes]:
        """Round 1: for each member, itself apart, its two shares, encrypted.

        Args:
            everybody: public keys by member.
        """
        self._all = everybody
        seeds, keys = (split(secret, (id + 1 for id in everybody), threshold)
                       for secret in (self._seed, self._mask_key))
        self._held[self.id] = seeds[self.id + 1], keys[self.id + 1]
        return {id: ChaCha20Poly1305(self._share_secret(id)).encrypt(
            self._nonce(self.id, id), seeds[id + 1].to_bytes(SHARE_BYTES, "big")
            + keys[id + 1].to_bytes(SHARE_BYTES, "big"), None) for id in everybody if id != self.id}

    def hold(self, sender: int, sealed: bytes) -> None:
        """Keeps the shares that another member dealt to this one."""
        both = ChaCha20Poly1305(self._share_secret(sender)).decrypt(self._nonce(sender, self.id), sealed, None)
        self._held[sender] = int.from_bytes(both[:SHARE_BYTES], "big"), int.from_bytes(both[SHARE_BYTES:], "big")

    def mask(self, vector: np.ndarray) -> np.ndarray:
        """Round 2: the vector uint64 [n] under its masks."""
        masked = vector + stream(self._seed, len(vector))
        for id, (_, public) in self._all.items():
            if id != self.id:
                add_pair(masked, self.id, id, agree(self._mask_key, public, b"mask"))
        return masked

    def unmask(self, survivors: Iterable[int]) -> Unmasking:
        """Round 3: a share of the seed of each survivor, and of the mask key of everybody else."""
        sent = set(survivors)
        return {id: ("seed", seed) if id in sent else ("key", key) for id, (seed, key) in self._held.items()}

    def _share_secret(self, other: int) -> bytes:
        return agree(self._share_key, self._all[other][0], b"shares")

    @staticmethod
    def _nonce(sender: int, receiver: int) -> bytes:
        return sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")


def introduce(members: Sequence[Member], threshold: int) -> dict[int, Keys]:
    """Rounds 0 and 1 among members who are all there: their public keys, with every share dealt.

    Args:
        members: whose numbers are their places.
    """
    keys = {member.id: member.keys for member in members}
    dealt = {member.id: member.deal(keys, threshold) for member in members}
    for sender, sealed in dealt.items():
        for receiver, shares in sealed.items():
            members[receiver].hold(sender, shares)
    return keys


def add_pair(masked: np.ndarray, own: int, other: int, key: bytes) -> None:
    """Adds the mask that a member has for another to a vector, in place: plus at the smaller, minus at the larger."""
    mask = stream(key, len(masked))
    if own < other:
        masked += mask
    else:
        masked -= mask


@dataclass
class Collector:
    """The server's side of one sum.

    Attributes:
        keys: public keys by member.
        length: of the vectors.
    """

    keys: Mapping[int, Keys]
    length: int
    _sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sum = np.zeros(self.length, dtype=np.uint64)

    def add(self, id: int, masked: np.ndarray) -> None:
        """Takes in a member's masked vector; in any order."""
        self._sum += masked
        self._sent.append(id)

    def unmasked(self, answers: Mapping[int, Unmasking], threshold: int) -> np.ndarray:
        """The sum over those who sent a vector, uint64 [n].

        Args:
            answers: of round 3, by survivor.

        Raises:
            TooFewReplies: they are fewer than the threshold.
        """
        if len(answers) < threshold:
            raise TooFewReplies(f"{len(answers)} of {len(self.keys)} clients are left, {threshold} are needed to take "
                                "the masks off a secure sum; lower federation.over_select or ask fewer clients")
        some = dict(list(answers.items())[:threshold])
        result = self._sum.copy()
        for id in self.keys:
            kind = "seed" if id in self._sent else "key"
            shares = {}
            for survivor, answer in some.items():
                told, share = answer[id]
                assert told == kind, f"member {survivor} gave a share of the {told} of {id}"
                shares[survivor + 1] = share
            secret = join(shares)
            if kind == "seed":
                result -= stream(secret, self.length)
            else:
                for survivor in self._sent:
                    pair = np.zeros(self.length, dtype=np.uint64)
                    add_pair(pair, survivor, id, agree(secret, self.keys[survivor][1], b"mask"))
                    result -= pair
        return result
