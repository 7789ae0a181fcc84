"""What ranks tell each other through the store of a run, which anyone who reaches it can write."""

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
    """Texts of the ranks in a store; what others than ranks write there is as if it were not.

    The store lists its keys to whoever connects, so that a secret key would keep nobody out: texts
    carry a code of authentication instead.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        """Share ``store`` with the ranks that have the same secret."""
        self._store = store
        self._secret = secret

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        content = text.encode()
        self._store.set(key, self._code(key, content) + content)

    def get(self, key: str) -> str | None:
        """Return a text as it may be printed; None where no rank has written one yet."""
        if not self._store.check([key]):  # else the store would wait for it
            return None
        found: bytes = self._store.get(key)
        code, content = found[:SECRET_BYTES], found[SECRET_BYTES:]
        if not hmac.compare_digest(code, self._code(key, content)):
            return None
        return escaped(content.decode())

    def _code(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, hashlib.sha256)


def shared_secret() -> bytes:
    """Draw a secret on the first rank and give it to all, through their group and not the store."""
    drawn = torch.frombuffer(bytearray(os.urandom(SECRET_BYTES)), dtype=torch.uint8)
    drawn = drawn.to(wire_device(None))
    dist.broadcast(drawn, 0)
    return bytes(drawn.tolist())
