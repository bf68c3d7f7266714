"""Control messages of the shm transport: JSON objects behind a length of four bytes, big-endian.

publisher → receiver: one byte that carries the descriptor of the memory, plan {version, slot_bytes, plan},
ready {index, slot, hash}, alive, commit {digest}, abort {reason}.
receiver → publisher: join {rank, pid}, ack {index}, done {digest}, abort {reason}.
"""

import json
from typing import Any

Message = dict[str, Any]

HEAD = 4
LIMIT = 256 << 20
"""Bytes of the longest message that is believed; a plan of a hundred thousand tensors has 20 MB."""


def encode(kind: str, **content: Any) -> bytes:
    body = json.dumps({"kind": kind, **content}, separators=(",", ":")).encode()
    return len(body).to_bytes(HEAD, "big") + body


def length(head: bytes) -> int:
    """Length of the body that follows. Raises ValueError when it cannot be one."""
    value = int.from_bytes(head, "big")
    if not 0 < value <= LIMIT:
        raise ValueError(f"a message of {value} bytes was announced")
    return value


def decode(body: bytes) -> Message:
    """Raises ValueError when it is no message."""
    message = json.loads(body)
    if not isinstance(message, dict) or "kind" not in message:
        raise ValueError("a message has no kind")
    return message
