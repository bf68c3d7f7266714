"""Where the campaign is now, in one small file: for ``headrace status`` and the live display."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Progress:
    """Fields are merged into the file at ``path``; every write replaces it whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fields: dict[str, Any] = {}

    def update(self, **fields: Any) -> None:
        self._fields |= fields | {"at": time.time()}
        written = self._path.with_suffix(".tmp")
        written.write_text(json.dumps(self._fields))
        os.replace(written, self._path)


def read(path: Path) -> dict[str, Any]:
    """The last state, or nothing where no campaign wrote one."""
    return json.loads(path.read_text()) if path.exists() else {}
