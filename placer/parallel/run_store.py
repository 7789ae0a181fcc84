"""Authenticated messages between ranks in the store of a run, which is writable by anyone."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from graphs.printable import escaped
from placer.parallel.groups import wire_device

Store: TypeAlias = Any
"""``torch.distributed.Store``, which type checkers do not know."""
SECRET_BYTES: Final = 32


class RunStore:
    """Texts of the ranks in a store; entries not written by a rank count as absent.

    The store lists its keys to anyone who connects, so secret keys would not help: texts carry an
    authentication code instead.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        """Wrap a store shared by the ranks with the same secret."""
        self._store = store
        self._secret = secret

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        content = text.encode()
        self._store.set(key, self._code(key, content) + content)

    def get(self, key: str) -> str | None:
        """Return a text, escaped for printing; None if no rank has written it yet."""
        if not self._store.check([key]):  # get would wait for the key
            return None
        found: bytes = self._store.get(key)
        code, content = found[:SECRET_BYTES], found[SECRET_BYTES:]
        if not hmac.compare_digest(code, self._code(key, content)):
            return None
        return escaped(content.decode())

    def _code(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, hashlib.sha256)


def shared_secret() -> bytes:
    """Draw a secret on the first rank and broadcast it via the process group, not the store."""
    drawn = torch.frombuffer(bytearray(os.urandom(SECRET_BYTES)), dtype=torch.uint8)
    drawn = drawn.to(wire_device(None))
    dist.broadcast(drawn, 0)
    return bytes(drawn.tolist())
