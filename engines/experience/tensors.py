"""Arrow columns as tensors, without copies. The only file of this room that imports torch.

The tensors alias the table's memory, which is read-only when the table is memory-mapped: never write to them in place.
Columns of lists over response tokens share one offsets tensor, so that jagged tensors of them can be combined.
"""

import pyarrow as pa
import pyarrow.compute as pc
import torch
from tensordict import TensorDict
from torch import Tensor


class ColumnError(ValueError):
    """Columns or rows of experience do not fit together."""


def column_to_jagged(table: pa.Table, name: str) -> tuple[Tensor, Tensor]:
    """A list column as (values [total tokens], offsets int64 [rows + 1]); row i is values[offsets[i]:offsets[i + 1]].

    values aliases the table's memory when the column is one chunk (as ``Store.read_table`` gives it). Raises
    ColumnError when the column is no list of numbers, or has nulls.
    """
    column = _one_chunk(table, name)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not _is_number(kind.value_type):
        raise ColumnError(f"column {name} is {kind}, not a list of numbers")
    if column.null_count or column.values.null_count:
        raise ColumnError(f"column {name} has nulls")
    if not len(column):
        return _dense(column.values.slice(0, 0)), torch.zeros(1, dtype=torch.int64)
    offsets = _dense(column.offsets).to(torch.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return _dense(column.values.slice(first, last - first)), offsets - first if first else offsets


def join_columns(generate: pa.Table, *others: pa.Table) -> pa.Table:
    """All columns of one set of samples, in the order of ``generate``; tables are joined by ``uid``.

    No data is copied for tables that are in that order already. Raises ColumnError when a uid is missing, doubled or
    unknown, or when two tables have a column of one name.
    """
    order = _uids(generate, "the first table")
    joined = generate
    for place, other in enumerate(others, start=2):
        uids = _uids(other, f"table {place}")
        if not uids.equals(order):
            rows = _places(order, uids)
            missing = order.filter(rows.is_null())
            unknown = uids.filter(_places(uids, order).is_null())
            for found, what in ((missing, "misses"), (unknown, "has, unknown to the first table,")):
                if len(found):
                    raise ColumnError(f"table {place} {what} {len(found)} samples, the first is {found[0]}")
            other = other.take(rows)
        for name in other.column_names:
            if name == "uid":
                continue
            if name in joined.column_names:
                raise ColumnError(f"column {name} is in table {place} and in one before it")
            joined = joined.append_column(other.schema.field(name), other.column(name))
    return joined


def to_tensordict(table: pa.Table, *others: pa.Table) -> TensorDict:
    """The numbers of one or more tables, joined by ``uid``, as a TensorDict of batch size [rows].

    Lists of numbers become jagged nested tensors [rows, ragged]; lists of equal lengths share one offsets tensor.
    Numbers become [rows], zero-copy; booleans are unpacked; a null number becomes NaN, where the type is a float.
    Text, maps and structures are left out.
    """
    joined = join_columns(table, *others) if others else table
    known: list[Tensor] = []
    out: dict[str, Tensor] = {}
    for name in joined.column_names:
        kind = joined.schema.field(name).type
        if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
            values, offsets = column_to_jagged(joined, name)
            shared = next((o for o in known if torch.equal(o, offsets)), None)
            if shared is None:
                known.append(shared := offsets)
            out[name] = torch.nested.nested_tensor_from_jagged(values, shared)
        elif pa.types.is_boolean(kind):
            out[name] = _dense(_no_nulls(_one_chunk(joined, name), name).cast(pa.uint8())).to(torch.bool)
        elif _is_number(kind):
            column = _one_chunk(joined, name)
            if column.null_count and pa.types.is_floating(kind):
                column = column.fill_null(float("nan"))
            out[name] = _dense(_no_nulls(column, name))
    return TensorDict(out, batch_size=[joined.num_rows])


def _uids(table: pa.Table, what: str) -> pa.Array:
    if "uid" not in table.column_names:
        raise ColumnError(f"{what} has no uid column")
    uids = _no_nulls(_one_chunk(table, "uid"), "uid")
    if len(uids.unique()) != len(uids):
        counts = uids.value_counts()
        doubled = counts.field("values").filter(pc.call_function("greater", [counts.field("counts"), 1]))
        raise ColumnError(f"{what} has {len(doubled)} samples more than once, the first is {doubled[0]}")
    return uids


def _places(uids: pa.Array, among: pa.Array) -> pa.Array:
    """Index of each uid in ``among``; null where it is not there."""
    return pc.call_function("index_in", [uids], pc.SetLookupOptions(among))


def _one_chunk(table: pa.Table, name: str) -> pa.Array:
    if name not in table.column_names:
        raise ColumnError(f"there is no column {name}; there are {', '.join(table.column_names)}")
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _no_nulls(column: pa.Array, name: str) -> pa.Array:
    if column.null_count:
        raise ColumnError(f"column {name} has {column.null_count} nulls")
    return column


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _dense(column: pa.Array) -> Tensor:
    # DLPack, because torch.frombuffer refuses the read-only buffers of a memory map.
    return torch.from_dlpack(column)
