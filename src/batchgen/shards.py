"""A share of a manifest's jobs, for job arrays: which of N runs a job belongs to, by its identity alone.

Knows nothing of files or schedulers. Added or removed rows move no other job: its place is in its key, not in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchgen.jobs import Job

MOST_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class Shard:
    """The `number`th of `count` shares, from 1 as people and job arrays count."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_SHARDS:
            raise ValueError(f"a run is split into 1 to {MOST_SHARDS} shards, not {self.count}")
        if not 1 <= self.number <= self.count:
            raise ValueError(f"shard {self.number} is not one of 1 to {self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/3`. Raises ValueError that says what is wrong."""
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is no shard; write it like 2/3, counting from 1")
        return cls(int(match.group(1)), int(match.group(2)))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def label(self) -> str:
        """`2-of-3`, for names of files and objects."""
        return f"{self.number}-of-{self.count}"

    @classmethod
    def of_key(cls, key: str, count: int) -> Shard:
        """Which of `count` shares the job of this key (32 hex digits, see `jobs.job_key`) is in. Keys are hashes, so shares are alike."""
        return cls(int(key[:16], 16) % count + 1, count)

    def holds(self, key: str) -> bool:
        """Whether the job of this key belongs to this share."""
        return self == Shard.of_key(key, self.count)

    def of(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The share's jobs, in their order. Names were given to all of them before, so that no two shares use one."""
        return (job for job in jobs if self.holds(job.key))

    def share(self, jobs: int) -> int:
        """About how many of so many jobs are in this share."""
        return -(-jobs // self.count)
