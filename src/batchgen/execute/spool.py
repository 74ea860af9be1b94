"""Latents that wait on the disk between denoising and decoding: which of them are there, and which nobody waits for any more.

The workers write them and the journal says whose they are; imports neither torch nor diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from batchgen.journal import Journal
from batchgen.runfolder import RunFolder


class Spool:
    """Of one run. Mutable; paths are below the run folder."""

    def __init__(self, folder: RunFolder, journal: Journal) -> None:
        self._folder, self._journal = folder, journal
        self._paths: set[str] = set()

    def add(self, path: str) -> None:
        """A worker has written it."""
        self._paths.add(path)

    def present(self, spooled: Mapping[str, str]) -> dict[str, str]:
        """Of job -> path, what is on the disk; the journal forgets the rest, which costs those jobs their denoising again."""
        present = {key: path for key, path in spooled.items() if (self._folder.path / path).exists()}
        if len(present) < len(spooled):
            self._journal.drop_spool(set(spooled.values()) - set(present.values()))
        return present

    def sweep(self, *, everything: bool = False) -> None:
        """Removes latents whose jobs have an outcome; with no worker at work, `everything` that no job waits for."""
        used = self._journal.spool_in_use()
        if everything and self._folder.spool.is_dir():
            found = (path for path in self._folder.spool.rglob("*") if path.is_file())
            self._paths = {path.relative_to(self._folder.path).as_posix() for path in found}
        for path in self._paths - used:
            with suppress(OSError):  # left over at worst; the next run sweeps again
                (self._folder.path / path).unlink()
        self._paths &= used
