"""The metrics of all iterations, as one Parquet file in the campaign's store."""

import threading
from collections.abc import Mapping

from headrace.engines.experience.store import NotInStore, Store, StoreError

PATH = "history.parquet"


class History:
    """One row for each iteration, ordered by ``step``; a metric that an iteration does not have is null.

    One process writes; the file is replaced whole and atomically, so that anything may read it at any time. Threads of
    the writing process may share the object.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._rows: dict[int, dict[str, float]] | None = None

    def add(self, row: Mapping[str, float]) -> None:
        """Adds the iteration ``row["step"]``; rows of it and of later ones, from before a step back, go.

        Raises StoreError.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self._lock:
            rows = self._load()
            step = int(row["step"])
            kept = {known: rows[known] for known in rows if known < step} | {step: dict(row)}
            names = dict.fromkeys(name for known in kept.values() for name in known)
            columns = {name: [known.get(name) for known in kept.values()] for name in names}
            kinds = {name: pa.int64() if name == "step" else pa.float64() for name in columns}
            table = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            self._store.put(PATH, sink.getvalue().to_pybytes())
            self._rows = kept

    def rows(self) -> list[dict[str, float]]:
        """All rows, in the order of their steps. Raises StoreError when the file is damaged."""
        with self._lock:
            return [dict(row) for row in self._load().values()]

    def _load(self) -> dict[int, dict[str, float]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._rows is None:
            try:
                table = pq.read_table(pa.BufferReader(self._store.get(PATH)))
            except NotInStore:
                self._rows = {}
            except pa.ArrowInvalid as error:
                where = f"{self._store.url}/{PATH}"
                raise StoreError(f"{where} is damaged: {error}. Delete it: only the curves so far are lost") from error
            else:
                found = ({k: v for k, v in row.items() if v is not None} for row in table.to_pylist())
                self._rows = {int(row["step"]): row for row in found}
        return self._rows
