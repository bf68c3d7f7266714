"""Problems from a file of JSON lines."""

import bz2
import gzip
import lzma
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from headrace.blocks.data import Jsonl
from headrace.engines.data.base import DataError, Listed, Problem, Splits, permutation, without
from headrace.engines.experience.files import Files, StoreError

COMPRESSED = {"gz": gzip.decompress, "bz2": bz2.decompress, "xz": lzma.decompress}
SHOWN_ERRORS = 10


class _Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: str


class _Row(BaseModel):
    """One line. Fields that are not named here are left alone."""

    id: str | int | None = None
    prompt: str | None = Field(None, min_length=1)
    messages: list[_Message] | None = Field(None, min_length=1)
    ground_truth: Any

    @model_validator(mode="after")
    def _one_prompt(self) -> "_Row":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either `prompt` (text) or `messages` (chat)")
        if self.messages is not None and self.messages[-1].role != "user":
            raise ValueError(f"the last message is of role {self.messages[-1].role!r}; it must be the user's")
        return self


def jsonl(spec: Jsonl) -> Splits:
    """Reads and checks the whole file. Rows that ask the same as a held-out row are left out of training."""
    rows = _read(spec.path)
    name = spec.path.rsplit("/", 1)[-1]
    if isinstance(spec.held_out, str):
        held, train = _read(spec.held_out), rows
    else:
        rows = without(rows, [])
        if spec.held_out >= len(rows):
            raise DataError(f"{spec.path} has {len(rows)} different problems, and held_out is {spec.held_out}")
        shuffled = [rows[i] for i in permutation(len(rows), spec.seed)]
        held, train = shuffled[: spec.held_out], shuffled[spec.held_out :]
    return Splits(Listed(name, without(train, held)), Listed(f"{name}/held-out", held))


def _read(path: str) -> list[Problem]:
    folder, _, name = path.rpartition("/")
    stem = name.split(".")[0]
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    errors: list[str] = []
    for number, line in enumerate(_text(folder, name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            problem = _problem(_Row.model_validate_json(line), f"{stem}:{number}")
        except ValidationError as error:
            errors += [f"line {number}: {_readable(e)}" for e in error.errors()]
            continue
        twin = lines.setdefault(problem.prompt_id, number)
        if twin != number:
            errors.append(f"line {number}: id {problem.prompt_id!r} is also that of line {twin}")
        problems.append(problem)
    if errors:
        more = len(errors) - SHOWN_ERRORS
        shown = "\n  ".join(errors[:SHOWN_ERRORS] + ([f"and {more} more"] if more > 0 else []))
        raise DataError(f"{path} cannot be used:\n  {shown}")
    return problems


def _text(folder: str, name: str) -> str:
    try:
        data = Files(folder or ".").get(name)
        if unpack := COMPRESSED.get(name.rpartition(".")[2]):
            data = unpack(data)
        return data.decode("utf-8-sig")
    except StoreError as error:
        raise DataError(f"the data set cannot be read: {error}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{folder}/{name} is not the compressed file that its name says: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{folder}/{name} is not UTF-8 text: {error}") from error


def _problem(row: _Row, place: str) -> Problem:
    if row.messages is not None:
        messages = [m.model_dump() for m in row.messages]
    else:
        messages = [{"role": "user", "content": row.prompt or ""}]
    return Problem(place if row.id is None else str(row.id), messages, row.ground_truth)


def _readable(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else error["msg"].removeprefix("Value error, ")
