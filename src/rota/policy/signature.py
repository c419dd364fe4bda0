"""Signatures of policies: an Ed25519 signature over the bytes of the file, in a file beside it.

    openssl genpkey -algorithm ed25519 -out policy.key && openssl pkey -in policy.key -pubout -out policy.pub
    openssl pkeyutl -sign -rawin -inkey policy.key -in policy.yaml -out policy.yaml.sig

With a key, an existing signature must be valid, and a missing one is refused if signatures are required. Two files
cannot be replaced atomically: a reader in between finds a mismatch, keeps the current policy and retries.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Final

import msgspec

from rota.model.errors import InvalidInput, InvalidSetting

SIGNATURE_BYTES: Final = 64
_FILE_BYTES_MAX: Final = 4096


class SignatureVerifier(msgspec.Struct, frozen=True):
    """Verifies the signature of a policy file; does nothing without a key."""

    key_file: Path | None = None
    signature_file: Path | None = None
    """Default: the policy file with `.sig` appended."""
    required: bool = False

    def check(self, policy: Path, content: bytes) -> None:
        """Raises InvalidInput for a wrong signature, or a missing one that is required."""
        if self.key_file is None:
            return
        signature = self._read_signature(self.signature_file or policy.with_name(f"{policy.name}.sig"))
        if signature is not None:
            _verify(self.key_file, signature, content, policy)
        elif self.required:
            raise InvalidInput(
                f"{policy}:1: the policy has no signature and policy.signature_required is set: sign it."
            )

    @staticmethod
    def _read_signature(path: Path) -> bytes | None:
        try:
            content = path.read_bytes()[:_FILE_BYTES_MAX]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInput(f"The signature {path} cannot be read ({error.strerror}): check the file.") from error
        try:
            return content if len(content) == SIGNATURE_BYTES else base64.b64decode(content.strip(), validate=True)
        except (binascii.Error, ValueError):
            return b""


def _verify(key_file: Path, signature: bytes, content: bytes, policy: Path) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(key_file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidSetting("policy.public_key_file cannot be read: name a PEM file with an Ed25519 key.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidSetting("policy.public_key_file has a key of another type: use an Ed25519 key.")
    try:
        key.verify(signature, content)
    except InvalidSignature:
        raise InvalidInput(f"{policy}:1: the signature does not match this file: sign it again.") from None
