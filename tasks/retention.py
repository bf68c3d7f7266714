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
        return [number for number in self._numbers() if self._has(number, self.marker)]

    def pin(self, number: int) -> None:
        """Keeps one for ever. Raises StoreError."""
        self.files.put(f"{self.path(number)}/{PINNED}", b"")

    def tidy(self, keep: int, newest: int, needed: Collection[int] = ()) -> None:
        """Deletes all up to ``newest`` but the last ``keep`` (1 at least), the needed and the pinned ones, which do not
        count. Raises StoreError.

        What never came to its marker goes as well. In a deletion the marker goes first: one that is interrupted leaves
        nothing that counts, and the next call deletes the rest.
        """
        found = [number for number in self._numbers() if not self._has(number, PINNED)]
        complete = [number for number in found if self._has(number, self.marker)]
        stays = {*complete[-keep:], *needed}
        for number in found:
            if number <= newest and number not in stays:
                self.files.remove(f"{self.path(number)}/{self.marker}")
                self.files.remove_folder(self.path(number))

    def _numbers(self) -> list[int]:
        names = (re.fullmatch(rf"{self.prefix}(-?\d+)", name) for name in self.files.folders(self.folder))
        return sorted(int(name[1]) for name in names if name)

    def _has(self, number: int, name: str) -> bool:
        return self.files.exists(f"{self.path(number)}/{name}")


def states(files: Files) -> Shelf:
    """Trainer state after so many iterations, below a campaign's folder."""
    return Shelf(files, "checkpoints", "step-", "COMPLETE")


def versions(files: Files, folder: str = "weights") -> Shelf:
    """Kept weight versions, below a campaign's store or its folder."""
    return Shelf(files, folder, "v", "manifest.json")
