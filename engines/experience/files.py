"""Bytes in a store: any fsspec URL, whole files only, errors for people. Needs neither Arrow nor torch.

A file appears complete or not at all: locally it is written under a temporary name, synced and renamed; on an object
store it is one upload, in pieces where it is long. Files are never changed after that.
"""

import errno
import io
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, cast

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_PIECE = 16 << 20
"""Bytes of a piece of an upload: an object store takes at most 10,000 of them, and none but the last below 5 MB."""


class StoreError(RuntimeError):
    """The store could not do what was asked; the message says where and what to do."""


class NotInStore(StoreError):
    """The file does not exist."""


class Sink(io.RawIOBase):
    """Passes bytes on to a file; counts and hashes them on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self.nbytes += view.nbytes
        return view.nbytes

    @property
    def digest(self) -> str:
        """xxh3-128 of what was written so far, as hex."""
        return self._hash.hexdigest()


class Files:
    """The files below ``url``: a local folder, or anything that fsspec opens (``s3://bucket/prefix``).

    Paths are relative to the URL, with forward slashes. Safe to share between threads, and to use after a fork.
    """

    def __init__(self, url: str, **storage_options) -> None:
        if not url:
            raise StoreError("the store has no URL: give a folder, or s3://bucket/prefix")
        self.url = str(url).rstrip("/") or "/"
        # Another process may write at any time: a cached listing would hide its files.
        self._options = {"use_listings_cache": False, **storage_options}
        self._pid = -1
        self._connect()

    def __reduce__(self):
        return _reopen, (type(self), self.url, self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _connect(self) -> None:
        try:
            self._remote, self._root = fsspec.url_to_fs(self.url, **self._options)
        except ImportError as error:
            extra = "s3" if self.url.startswith("s3") else None
            hint = f"pip install 'headrace[{extra}]'" if extra else str(error)
            raise StoreError(f"{self.url} needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise StoreError(f"{self.url} is no URL that fsspec knows: {error}") from error
        self.local = isinstance(self._remote, LocalFileSystem)
        self._failures: tuple[type[Exception], ...] = (OSError,)
        if "s3" in self._remote.protocol:
            from botocore.exceptions import BotoCoreError, ClientError

            self._failures = (OSError, BotoCoreError, ClientError)
        self._pid = os.getpid()

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The file system; a new one after a fork, as connections do not survive it."""
        if self._pid != os.getpid():
            self._connect()
        return self._remote

    def locate(self, path: str) -> str:
        """Where ``path`` is for the file system: an absolute path, or bucket and key."""
        if not path or path.startswith("/") or ".." in path.split("/"):
            raise StoreError(f"{path!r} is no path below {self.url}")
        return f"{self._root.rstrip('/')}/{path}"

    @contextmanager
    def _told(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotInStore(f"cannot {action} {self.url}/{path}: it does not exist") from error
        except self._failures as error:
            raise StoreError(self._explain(action, path, error)) from error

    def _explain(self, action: str, path: str, error: Exception) -> str:
        said = f"cannot {action} {self.url}/{path}: "
        if self.local and isinstance(error, OSError) and error.errno in _FULL:
            folder = self._root
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            left = shutil.disk_usage(folder).free
            return (
                f"{said}{error.strerror} ({left / 1e6:.0f} MB free on the disk of {folder}). Nothing was committed. "
                f"Free space there (old weight versions and finished campaigns below {self.url} are the largest), or "
                "raise the quota or file-size limit, then run the same command again"
            )
        if isinstance(error, PermissionError):
            return f"{said}permission denied ({error}); check the owner, or the credentials of the store"
        return f"{said}{error or type(error).__name__}"

    @contextmanager
    def writing(self, path: str, *, tag: bool = False, create: bool = False) -> Iterator[Sink]:
        """A sink whose bytes are the file ``path`` when the block ends; when the block raises, nothing is there.

        tag: puts the first 16 digits of the digest into the name (``a.arrow`` → ``a-<digest>.arrow``), so that two
        writers of one path never replace each other's bytes; ``placed(path, sink)`` is the name.
        create: StoreError, caused by FileExistsError, when the file is there already.
        """
        with self._told("write", path):
            if self.local:
                with self._staged(path) as (temporary, sink):
                    yield sink
                target = self.locate(placed(path, sink) if tag else path)
                try:
                    _publish(temporary, target, create)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(temporary)
            elif tag or create:
                buffer = io.BytesIO()
                sink = Sink(cast(BinaryIO, buffer))
                yield sink
                self._upload(placed(path, sink) if tag else path, buffer.getvalue(), create)
            else:
                with self._uploading(path) as sink:
                    yield sink

    @contextmanager
    def _staged(self, path: str) -> Iterator[tuple[str, Sink]]:
        folder, name = os.path.split(self.locate(path))
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.tmp")
        try:
            with open(temporary, "xb", buffering=0) as raw, io.BufferedWriter(raw, 1 << 20) as file:
                yield temporary, Sink(cast(BinaryIO, file))
                file.flush()
                os.fsync(raw.fileno())
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @contextmanager
    def _uploading(self, path: str) -> Iterator[Sink]:
        file = cast(AbstractBufferedFile, self.fs.open(self.locate(path), "wb", block_size=_PIECE))
        try:
            yield Sink(cast(BinaryIO, file))
        except BaseException:
            file.discard()
            file.closed = True  # closing it would upload what there is
            raise
        file.close()

    def _upload(self, path: str, data: bytes, create: bool = False) -> None:
        self.fs.pipe_file(self.locate(path), data, mode="create" if create else "overwrite")

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Writes a whole file; replaces one that exists. Raises StoreError."""
        if not self.local:
            with self._told("write", path):
                return self._upload(path, bytes(data))
        with self.writing(path) as sink:
            sink.write(data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes a whole file unless it exists; False when it does. Of several writers exactly one gets True."""
        try:
            with self.writing(path, create=True) as sink:
                sink.write(data)
        except StoreError as error:
            if isinstance(error.__cause__, FileExistsError) or "PreconditionFailed" in str(error.__cause__):
                return False
            raise
        return True

    def remove(self, path: str) -> None:
        """Deletes a file that no manifest names; nothing happens when it does not exist. Raises StoreError."""
        with suppress(NotInStore), self._told("delete", path):
            self.fs.rm_file(self.locate(path))

    def remove_folder(self, path: str) -> None:
        """Deletes all files below a folder; nothing happens when it does not exist. Raises StoreError."""
        with suppress(NotInStore), self._told("delete", path):
            if self.local:
                shutil.rmtree(self.locate(path))
            else:
                self.fs.rm(self.locate(path), recursive=True)

    def get(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file, or those in [start, stop) as far as it has them. Raises NotInStore, StoreError."""
        with self._told("read", path):
            if not self.local:
                return cast(bytes, self.fs.cat_file(self.locate(path), start=start or None, end=stop))
            with open(self.locate(path), "rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else stop - start)

    def get_many(self, paths: Sequence[str]) -> list[bytes]:
        """The bytes of several files, in order; concurrently where the store is remote."""
        if self.local or len(paths) < 2:
            return [self.get(path) for path in paths]
        with self._told("read", f"{paths[0]} … {paths[-1]}"):
            found = cast(dict[str, bytes], self.fs.cat([self.locate(path) for path in paths]))
        return [found[self.locate(path)] for path in paths]

    def size(self, path: str) -> int | None:
        """Size in bytes; None when the file does not exist."""
        try:
            with self._told("look at", path):
                if self.local:
                    return os.stat(self.locate(path)).st_size
                return int(self.fs.info(self.locate(path))["size"])
        except NotInStore:
            return None

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def paths(self, prefix: str) -> list[str]:
        """Paths of all files below the folder ``prefix``, sorted."""
        top = self.locate(prefix)
        with self._told("list", prefix):
            if self.local:
                found = [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]
            else:
                found = self.fs.find(top)
        skip = len(self._root.rstrip("/")) + 1
        return sorted(p[skip:].replace(os.sep, "/") for p in found if not os.path.basename(p).startswith("."))

    def folders(self, path: str) -> list[str]:
        """Names of the folders in the folder ``path``, sorted; none where it does not exist. Raises StoreError."""
        try:
            with self._told("list", path):
                found = self.fs.ls(self.locate(path), detail=True)
        except NotInStore:
            return []
        return sorted(os.path.basename(entry["name"].rstrip("/")) for entry in found if entry["type"] == "directory")


def _reopen(kind: type[Files], url: str, options: dict) -> Files:
    return kind(url, **options)


def placed(path: str, sink: Sink) -> str:
    """The tagged name of ``path`` (see ``Files.writing``)."""
    stem, dot, ending = path.rpartition(".")
    return f"{stem}-{sink.digest[:16]}{dot}{ending}" if dot else f"{path}-{sink.digest[:16]}"


def _publish(temporary: str, target: str, create: bool) -> None:
    # The folder is not synced, which would double the cost: a power failure may lose the newest names (a journal keeps
    # their order), never half a file, and work whose manifest is lost is simply done again.
    if create:
        os.link(temporary, target)  # unlike a rename, fails when the target exists
    else:
        os.replace(temporary, target)
