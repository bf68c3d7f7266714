"""Event files for TensorBoard, written without torch."""

import importlib
import importlib.util
import io
import logging
import os
import struct
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

NAME = "events.out.tfevents.0000000000.headrace"
"""One file for each campaign: every attempt appends to it."""
HEADER = struct.Struct("<QI")
"""A record is its length, a checksum of the length, the data, a checksum of the data (4 bytes)."""
NOT_SHOWN = {"step", "at"}


def write_tensorboard(folder: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Appends iterations to the campaign's event file; makes folder and file where they are missing.

    Row keys are tags; ``step`` is the step and ``at`` the wall time. A row whose step was written before restarts the
    curves there: TensorBoard drops what the file had from that step on. What a kill left half-written at the end is cut
    off. Where the tensorboard package is missing it says so once, and nothing is written.
    """
    if not _installed():
        return
    event_pb2, summary_pb2 = _messages("event_pb2"), _messages("summary_pb2")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "a+b") as file:
        end, last = _whole_records(file)
        file.truncate(end)
        events = [] if end else [event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")]
        for row in rows:
            step, at = int(row["step"]), row.get("at", time.time())
            if last is not None and step <= last:
                restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                events.append(event_pb2.Event(wall_time=at, step=step, session_log=restart))
            values = [
                summary_pb2.Summary.Value(tag=name if "/" in name else f"iteration/{name}", simple_value=value)
                for name, value in row.items()
                if name not in NOT_SHOWN
            ]
            events.append(event_pb2.Event(wall_time=at, step=step, summary=summary_pb2.Summary(value=values)))
            last = step
        # One write, so that a kill between two records leaves none or all.
        file.write(b"".join(map(_record, events)))
        file.flush()
        os.fsync(file.fileno())


def _messages(module: str) -> Any:
    """Generated code: its names exist at run time only."""
    return importlib.import_module(f"tensorboard.compat.proto.{module}")


@lru_cache(maxsize=1)
def _installed() -> bool:
    found = importlib.util.find_spec("tensorboard") is not None
    if not found:
        logging.getLogger(__name__).warning(
            "no TensorBoard files: tensorboard is not installed (pip install tensorboard)"
        )
    return found


def _record(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _whole_records(file: BinaryIO) -> tuple[int, int | None]:
    """Where the last complete record ends, and the step of that record; None when no iteration is there yet."""
    size = file.seek(0, os.SEEK_END)
    begin = end = 0
    while end + HEADER.size <= size:
        file.seek(end)
        length = HEADER.unpack(file.read(HEADER.size))[0]
        after = end + HEADER.size + length + 4
        if after > size:
            break
        begin, end = end, after
    if not begin:  # nothing, or the file's version alone
        return end, None
    file.seek(begin + HEADER.size)
    return end, _messages("event_pb2").Event.FromString(file.read(end - begin - HEADER.size - 4)).step
