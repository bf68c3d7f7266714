"""JSON messages over a socket, with a deadline for each."""

import json
import socket
import struct
import time
from typing import Any

HEADER = struct.Struct("!I")


class Channel:
    """One end of a connection between two processes; for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Any, timeout_s: float | None) -> None:
        """Raises TimeoutError past ``timeout_s``, OSError when the other end is gone."""
        data = json.dumps(message).encode()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(HEADER.pack(len(data)) + data)

    def receive(self, timeout_s: float | None) -> Any:
        """Raises TimeoutError past ``timeout_s``, EOFError when the other end is gone."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        (size,) = HEADER.unpack(self._read(HEADER.size, end))
        return json.loads(self._read(size, end))

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int, end: float | None) -> bytes:
        data = bytearray()
        while len(data) < size:
            if end is not None:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._socket.settimeout(left)
            else:
                self._socket.settimeout(None)
            try:
                chunk = self._socket.recv(size - len(data))
            except ConnectionResetError as error:
                raise EOFError from error
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)
