"""Where publisher and receivers of one machine meet: a unix socket's path, which either side may come to first."""

import ctypes
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headrace.engines.checkpoint.errors import WeightError

_IN_MOVED_TO, _IN_CREATE, _IN_CLOEXEC, _IN_NONBLOCK = 0x80, 0x100, 0o2000000, 0o4000


def listen(address: str, version: int) -> socket.socket:
    """A listening socket that appears under ``address`` in one step, so that whoever sees it can connect."""
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


def connect(address: str, deadline_s: float, failed: Callable[[str, str], WeightError]) -> tuple[socket.socket, int]:
    """A connection that was welcomed, and the descriptor of the memory that came with the welcome.

    Waits for a publisher that does not listen yet. ``failed`` makes the error from what happened and what to try.
    """
    end = time.monotonic() + deadline_s
    folder = os.path.dirname(os.path.abspath(address))
    try:
        os.makedirs(folder, exist_ok=True)
        appeared = _watch(folder)
    except OSError as error:
        raise failed(f"cannot wait for {address}: {error}", "a folder that this user may write") from error
    try:
        while True:
            link = socket.socket(socket.AF_UNIX)
            # OSError: there is no socket yet, or that of a publisher which ended.
            with suppress(OSError), short(address) as path:
                link.settimeout(max(end - time.monotonic(), 1e-3))
                link.connect(path)
                welcome, descriptors, _, _ = socket.recv_fds(link, 1, 1)
                if welcome and descriptors:
                    return link, descriptors[0]
            link.close()
            while not _named(appeared, os.path.basename(address), end - time.monotonic()):
                if time.monotonic() >= end:
                    raise failed(
                        f"no publisher listened at {address} for {deadline_s:g} s",
                        "publish to the same address, on the same machine",
                    )
    finally:
        os.close(appeared)


def _watch(folder: str) -> int:
    """An inotify descriptor that reports what appears in a folder: a wait that needs no polling."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_MOVED_TO | _IN_CREATE) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _named(descriptor: int, name: str, timeout_s: float) -> bool:
    """True when something of that name appeared; False when anything else did or time is over."""
    if not select.select([descriptor], [], [], max(timeout_s, 0))[0]:
        return False
    return os.fsencode(name) in os.read(descriptor, 1 << 16)


@contextmanager
def short(path: str) -> Iterator[str]:
    """Another name of ``path``, short enough for a unix socket (107 bytes), valid in this process inside the block."""
    folder, name = os.path.split(os.path.abspath(path))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
