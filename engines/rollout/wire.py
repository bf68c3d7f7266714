"""Frames between a rollout host and the engine program that runs in another environment. Standard library only.

A frame is a JSON object and a block of bytes: token ids and log-probabilities travel as arrays, not as text, which
is what an HTTP front end spends its time on. Both sides run this file, so the byte order is the machine's.
"""

import asyncio
import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

_HEAD = struct.Struct("<II")
MOST_BYTES = 1 << 30
"""Of one frame; more is not what this program sends."""


class BrokenFrame(ConnectionError):
    """The bytes are not a frame: another program, or another version of this one, is at the other end."""


def pack(message: dict[str, Any], block: bytes = b"") -> bytes:
    """The bytes of one frame."""
    head = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(len(head), len(block)) + head + block


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """The next frame; None when the other side has closed. Raises BrokenFrame."""
    try:
        head, block = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if head + block > MOST_BYTES:
            raise BrokenFrame(f"a frame of {head + block} bytes")
        return json.loads(await reader.readexactly(head)), await reader.readexactly(block)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    except ValueError as error:
        raise BrokenFrame(f"a frame that is no JSON: {error}") from error


def pack_ints(values: Iterable[int]) -> bytes:
    """int32."""
    return array("i", values).tobytes()


def unpack_ints(block: bytes | memoryview) -> list[int]:
    """int32."""
    values = array("i")
    values.frombytes(block)
    return values.tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """float32."""
    return array("f", values).tobytes()


def unpack_floats(block: bytes | memoryview) -> list[float]:
    """float32."""
    values = array("f")
    values.frombytes(block)
    return values.tolist()
