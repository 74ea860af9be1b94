"""Holds a lease as one process that tests can kill: `python lease_run.py ADDRESS HOST SHARD RENEW STALE TAKE_OVER`, SHARD `-` for none.

Says "held", "refused: ..." or what it waits for, one line each; then lives until its stdin ends, says "lost: ..." if so, and gives back.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from batchgen.errors import LeaseHeldError
from batchgen.lease import Lease
from batchgen.outputs.urls import Location
from batchgen.runlock import Holder
from batchgen.shards import Shard


def main() -> int:
    address, host, shard, renew, stale, take_over = sys.argv[1:]
    lease = Lease(
        Location.parse(address), None if shard == "-" else Shard.parse(shard), renew_seconds=float(renew), stale_seconds=float(stale),
        holder=replace(Holder.me(), host=host) if host else None,
    )
    try:
        lease.acquire(take_over=take_over == "yes", say=lambda line: print(f"said: {line}", flush=True))
    except LeaseHeldError as error:
        print(f"refused: {error.message}", flush=True)
        return error.exit_code
    print("held", flush=True)
    sys.stdin.read()
    lost = lease.confirm()  # a beat may not have come since
    if lost is not None:
        print(f"lost: {lost.message}", flush=True)
    lease.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
