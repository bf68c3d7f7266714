"""The store of a campaign: immutable Arrow tables, and the manifests that commit them."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import BaseModel, ValidationError

from headrace.blocks.manifest import Manifest, Part
from headrace.engines.experience.files import Files, NotInStore, StoreError, placed

if TYPE_CHECKING:  # pyarrow is a sixth of what importing the flows takes: loaded with the first table
    import pyarrow as pa

__all__ = ["NotInStore", "Store", "StoreError", "stage_key"]


class Store(Files):
    """Tables and manifests below a URL. Data first, manifest last: what a manifest names is complete.

    Threads and processes may share one store. Two writers of the same stage, shard and key both succeed; the manifest
    of the first one counts, and both get that one from ``commit``.
    """

    def write_table(self, path: str, table: "pa.Table") -> Part:
        """Writes ``table`` as an Arrow IPC file in one record batch and returns the part that names it.

        The part's own path carries the digest (``gen.arrow`` → ``gen-<digest>.arrow``). Raises StoreError.
        """
        import pyarrow as pa

        with self.writing(path, tag=True) as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        return Part(path=placed(path, sink), rows=table.num_rows, nbytes=sink.nbytes, digest=sink.digest)

    def read_table(self, part: Part, *, verify: bool = False) -> "pa.Table":
        """The table of a part; memory-mapped and read-only when the store is local.

        The size is always checked, the digest when ``verify`` is set. Raises NotInStore, StoreError.
        """
        import pyarrow as pa

        where = f"{self.url}/{part.path}"
        with self._told("read", part.path):
            if self.local:
                target = self.locate(part.path)
                if (found := os.stat(target).st_size) != part.nbytes:
                    raise StoreError(_damaged(where, f"it has {found} bytes, its manifest says {part.nbytes}"))
                buffer = pa.memory_map(target).read_buffer()
            else:
                buffer = pa.py_buffer(self.fs.cat_file(self.locate(part.path)))
        if buffer.size != part.nbytes:
            raise StoreError(_damaged(where, f"it has {buffer.size} bytes, its manifest says {part.nbytes}"))
        if verify and (digest := xxhash.xxh3_128_hexdigest(memoryview(buffer))) != part.digest:
            raise StoreError(_damaged(where, f"its digest is {digest}, its manifest says {part.digest}"))
        try:
            table = pa.ipc.open_file(buffer).read_all()
        except pa.ArrowInvalid as error:
            raise StoreError(_damaged(where, f"it is no Arrow file: {error}")) from error
        if table.num_rows != part.rows:
            raise StoreError(_damaged(where, f"it has {table.num_rows} rows, its manifest says {part.rows}"))
        return table

    def commit(self, manifest: Manifest) -> Manifest:
        """Makes a stage's work count, and returns the manifest that counts.

        That is ``manifest``, unless one with the same stage, step, shard and key was committed before and its data is
        still there: then the earlier one, so that a late retry changes nothing. Raises StoreError when the data that
        the manifest names is not there.
        """
        if not self._complete(manifest):
            part = manifest.part
            raise StoreError(f"{manifest.stage} of step {manifest.step} names {part}, which is not in {self.url}")
        path = _manifest_path(manifest.stage, manifest.step, manifest.shard, manifest.key)
        data = manifest.model_dump_json(indent=1).encode()
        if self.create(path, data):
            return manifest
        earlier = self.lookup(manifest.stage, manifest.step, manifest.shard, manifest.key)
        if earlier is not None:
            return earlier
        self.put(path, data)  # the earlier one's data was lost
        return manifest

    def lookup(self, stage: str, step: int, shard: int, key: str) -> Manifest | None:
        """The manifest that a stage committed, or None when it did not, or when its data is gone or truncated."""
        try:
            manifest = Manifest.model_validate_json(self.get(_manifest_path(stage, step, shard, key)))
        except (NotInStore, ValidationError):
            return None
        return manifest if self._complete(manifest) else None

    def manifests(self, step: int, stage: str | None = None) -> list[Manifest]:
        """All that was committed for an iteration, by stage, shard and key."""
        folder = f"manifests/{step:06d}" + (f"/{stage}" if stage else "")
        return [Manifest.model_validate_json(data) for data in self.get_many(self.paths(folder))]

    def _complete(self, manifest: Manifest) -> bool:
        return manifest.part is None or self.size(manifest.part.path) == manifest.part.nbytes


def _manifest_path(stage: str, step: int, shard: int, key: str) -> str:
    return f"manifests/{step:06d}/{stage}/{shard:04d}-{key}.json"


def _damaged(where: str, why: str) -> str:
    return f"{where} is damaged: {why}. Delete it and run the campaign again: the stage that wrote it is repeated"


def stage_key(
    stage: str, version: str, config: BaseModel | Mapping[str, Any], inputs: Sequence[str], weights: str = ""
) -> str:
    """Content key of a stage's work: equal work, equal key; hex of 32 digits.

    version: of the stage's code; config: the settings that the stage reads; inputs: keys of the manifests that it
    reads, in order; weights: digest of the weights that it uses, where it uses any.
    """
    settings = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    content = [stage, version, settings, list(inputs), weights]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())
