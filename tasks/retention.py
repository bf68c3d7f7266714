"""What stays of trainer states and kept weight versions: the newest, those that are needed, those that are pinned."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from headrace.engines.experience.files import Files

PINNED = "PINNED"
"""A file of this name in the folder of a trainer state or of a version keeps it for ever."""


@dataclass(frozen=True)
class Shelf:
    """Numbered folders in one folder of a store. One counts while its marker, written last, is in it."""

    files: Files
    folder: str
    prefix: str
    """Of the folders' names, before six digits."""
    marker: str

    def path(self, number: int) -> str:
        """Path of a folder below the store."""
        return f"{self.folder}/{self.prefix}{number:06d}"

    def complete(self) -> list[int]:
        """Numbers of those that count, ascending. Raises StoreError."""
        return sorted(number for number, names in self._found().items() if self.marker in names)

    def pin(self, number: int) -> None:
        """Keeps one for ever. Raises StoreError."""
        self.files.put(f"{self.path(number)}/{PINNED}", b"")

    def tidy(self, keep: int, newest: int, needed: Collection[int] = ()) -> None:
        """Deletes all up to ``newest`` but the last ``keep`` (1 at least), the needed and the pinned ones, which do not
        count. Raises StoreError.

        What never came to its marker goes as well. In a deletion the marker goes first: one that is interrupted leaves
        nothing that counts, and the next call deletes the rest.
        """
        found = {number: names for number, names in sorted(self._found().items()) if PINNED not in names}
        complete = [number for number, names in found.items() if self.marker in names]
        stays = {*complete[-keep:], *needed}
        for number in found:
            if number <= newest and number not in stays:
                self.files.remove(f"{self.path(number)}/{self.marker}")
                self.files.remove_folder(self.path(number))

    def _found(self) -> dict[int, set[str]]:
        """Number → names of the files in its folder."""
        form = re.compile(rf"{re.escape(f'{self.folder}/{self.prefix}')}(-?\d+)/(.+)")
        found: dict[int, set[str]] = {}
        for path in self.files.paths(self.folder):
            if (match := form.fullmatch(path)) is not None:
                found.setdefault(int(match[1]), set()).add(match[2])
        return found


def states(files: Files) -> Shelf:
    """Trainer state after so many iterations, below a campaign's folder."""
    return Shelf(files, "checkpoints", "step-", "COMPLETE")


def versions(files: Files, folder: str = "weights") -> Shelf:
    """Kept weight versions, below a campaign's store or its folder."""
    return Shelf(files, folder, "v", "manifest.json")
