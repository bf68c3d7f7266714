"""Where publisher and receivers meet; either side may come first.

On one machine it is a unix socket's path. Between machines it is ``host:port#secret``: the port is reserved before the
first publish and stays with the process, so that receivers can wait there, and only those who know the secret are
answered.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headrace.blocks.weights import WeightSource
from headrace.engines.checkpoint.carriers.names import LOCAL
from headrace.engines.checkpoint.errors import WeightError

_LOOK_S, _AGAIN_S = 0.001, 0.1
"""Between two attempts to reach a publisher on this machine, and on another."""
_ABSENT_S = 30.0
"""How long a receiver looks for a publisher that does not listen. It may come first, but not long before."""
_reserved: dict[str, socket.socket] = {}


def reserve(host: str) -> str:
    """``host:port#secret``: a free port of this process, by the name under which receivers reach this machine."""
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    listener.setblocking(False)
    address = f"{host}:{listener.getsockname()[1]}#{secrets.token_hex(16)}"
    _reserved[address] = listener
    return address


def unreserve(address: str) -> None:
    """Gives the port back."""
    if (listener := _reserved.pop(address, None)) is not None:
        listener.close()


def parse_address(address: str) -> tuple[str, int, str]:
    """(host, port, secret) of ``host:port#secret``. Raises ValueError."""
    place, _, secret = address.partition("#")
    host, _, port = place.rpartition(":")
    if not host or not secret:
        raise ValueError(f"{place!r} is no address of a publisher: host:port#secret")
    return host, int(port), secret


def tune(connection: socket.socket) -> None:
    """Small messages leave at once. Buffers are left to the kernel, which lets them grow further than a caller may."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def listen(address: str, version: int, *, local: bool) -> socket.socket:
    """A listening socket. Raises WeightError when it cannot be had."""
    if local:
        return _listen_at_path(address, version)
    if address not in _reserved:
        raise WeightError(
            f"{address.partition('#')[0]} was not reserved by this process", version=version, advice="reserve(host)"
        )
    return _reserved[address]


def unlisten(listener: socket.socket, address: str, *, local: bool) -> None:
    """After the receivers were gathered. A reserved port stays: the next version's receivers may come already."""
    if local:
        with suppress(FileNotFoundError):
            os.unlink(address)
        listener.close()


def turn_away(address: str) -> None:
    """After a publish that failed: who still waits at its reserved port hears so, and does not take the next version's
    place."""
    if (listener := _reserved.get(address)) is not None:
        with suppress(OSError):  # there is nobody
            while True:
                listener.accept()[0].close()


def _listen_at_path(address: str, version: int) -> socket.socket:
    """A socket that appears under ``address`` in one step, so that whoever sees it can connect."""
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(address)), exist_ok=True)
        with socket.socket(socket.AF_UNIX) as probe, short(address) as path:
            probe.settimeout(1)
            if probe.connect_ex(path) == 0:
                raise WeightError(
                    f"another process publishes at {address}", version=version, advice="an address for each trainer"
                )
        hidden = f"{address}.new"
        with suppress(FileNotFoundError):
            os.unlink(hidden)
        with short(hidden) as path:
            listener.bind(path)
        os.chmod(hidden, 0o600)
        listener.listen(128)
        os.replace(hidden, address)
    except OSError as error:
        listener.close()
        raise WeightError(
            f"cannot listen at {address}: {error}", version=version, advice="a folder that this user may write"
        ) from error
    except WeightError:
        listener.close()
        raise
    return listener


def connect(
    source: WeightSource, deadline_s: float, failed: Callable[[str, str], WeightError]
) -> tuple[socket.socket, list[int]]:
    """A connection to a publisher, and for shm the descriptors that came with its welcome: of the ring, and of the
    number that says how far this receiver has read.

    Waits for a publisher that does not listen yet. ``failed`` makes the error from what happened and what to try.
    """
    patience_s = min(deadline_s, _ABSENT_S)
    if source.transport in LOCAL:
        return _connect_at_path(source.address, source.transport == "shm", patience_s, failed)
    return _connect_to_port(source.address, patience_s, failed), []


def _connect_to_port(address: str, patience_s: float, failed: Callable[[str, str], WeightError]) -> socket.socket:
    end = time.monotonic() + patience_s
    try:
        host, port, secret = parse_address(address)
    except ValueError as error:
        raise failed(str(error), "the address that reserve gave") from error
    while True:
        try:
            link = socket.create_connection((host, port), max(end - time.monotonic(), 1e-3))
            tune(link)
            link.sendall(secret.encode())
            return link
        except OSError as error:
            if time.monotonic() + _AGAIN_S >= end:
                what = f"no publisher was reached at {host}:{port} for {patience_s:g} s ({error})"
                raise failed(what, "whether that host and port can be reached from here") from error
        time.sleep(_AGAIN_S)


def _connect_at_path(
    address: str, welcomed: bool, patience_s: float, failed: Callable[[str, str], WeightError]
) -> tuple[socket.socket, list[int]]:
    end = time.monotonic() + patience_s
    try:
        os.makedirs(os.path.dirname(os.path.abspath(address)), exist_ok=True)
    except OSError as error:
        raise failed(f"cannot wait for {address}: {error}", "a folder that this user may write") from error
    while True:
        link = socket.socket(socket.AF_UNIX)
        # OSError: there is no socket yet, or that of a publisher which ended.
        with suppress(OSError), short(address) as path:
            link.settimeout(max(end - time.monotonic(), 1e-3))
            link.connect(path)
            if not welcomed:
                return link, []
            welcome, descriptors, _, _ = socket.recv_fds(link, 1, 2)
            if welcome and len(descriptors) == 2:
                return link, descriptors
        link.close()
        if time.monotonic() >= end:
            raise failed(
                f"no publisher listened at {address} for {patience_s:g} s",
                "publish to the same address, on the same machine",
            )
        time.sleep(_LOOK_S)  # part of the pause of every update; closing an inotify watch alone takes longer


@contextmanager
def short(path: str) -> Iterator[str]:
    """Another name of ``path``, short enough for a unix socket (107 bytes), valid in this process inside the block."""
    folder, name = os.path.split(os.path.abspath(path))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
