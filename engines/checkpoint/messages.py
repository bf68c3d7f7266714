"""Control messages between publisher and receivers: JSON objects behind a length of four bytes, big-endian.

publisher → receiver: plan {version, transport, device, hashing, slot_bytes, plan, facts}, begin {group},
ready {index, slot, hash, form, nbytes} (transport tcp: then the bytes), alive, commit {digest}, abort {reason}.
receiver → publisher: join {rank, pid, base, held}, ack {index}, done {digest}, abort {reason}.
Over TCP a receiver says the address's secret first; transport shm sends one byte with its memory's descriptor first.
"""

import json
from typing import Any

Message = dict[str, Any]

HEAD = 4
LIMIT = 256 << 20
"""Bytes of the longest message that is believed; a plan of a hundred thousand tensors has 20 MB."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode(kind: str, **content: Any) -> bytes:
    body = _encode({"kind": kind, **content}).encode()
    return len(body).to_bytes(HEAD, "big") + body


def length(head: bytes) -> int:
    """Length of the body that follows. Raises ValueError when it cannot be one."""
    value = int.from_bytes(head, "big")
    if not 0 < value <= LIMIT:
        raise ValueError(f"a message of {value} bytes was announced")
    return value


def decode(body: bytes) -> Message:
    """Raises ValueError when it is no message."""
    message = json.loads(body.decode())
    if not isinstance(message, dict) or "kind" not in message:
        raise ValueError("a message has no kind")
    return message
