"""Groups that are finished while others of their shard are still sampled, for whoever need not wait for the shard.

Nothing here counts: a shard is what its manifest names. These files are a head start, and are removed at the commit.
"""

import io
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.engines.experience.files import Files, NotInStore

if TYPE_CHECKING:
    import pyarrow as pa


def folder_of(stage: str, step: int, shard: int, key: str) -> str:
    """Where a shard's finished groups lie; the key is that of its manifest."""
    return f"experience/{step:06d}/early-{stage}-{shard}-{key}"


def put(store: Files, folder: str, group: int, rows: "pa.Table") -> None:
    """Writes the rows of a finished group."""
    import pyarrow as pa

    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, rows.schema) as writer:
        writer.write_table(rows)
    store.put(f"{folder}/{group}.arrow", buffer.getbuffer())


def take(store: Files, folder: str, seen: set[str]) -> "list[pa.Table]":
    """Tables that were not taken before; adds them to ``seen``."""
    import pyarrow as pa

    found = []
    for path in store.paths(folder):
        if path not in seen:
            seen.add(path)
            with suppress(NotInStore):  # the shard was committed meanwhile
                found.append(pa.ipc.open_file(store.get(path)).read_all())
    return found


def remove(store: Files, folder: str) -> None:
    """The shard is committed: its manifest is what counts."""
    for path in store.paths(folder):
        store.remove(path)
