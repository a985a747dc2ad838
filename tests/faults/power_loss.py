"""Power loss at any moment of a run's saves: every possible state of the disk can be loaded.

    python tests/faults/power_loss.py [--long | COUNT]

The operations of all saves of a run are recorded once. States of the disk that they allow (see
device.py) are written to a folder and read with the real loader: everything reported as saved, or a
newer version, must load with the right bytes. Then the syncs of files.py are omitted one at a time.
Each time, some state must fail to load: otherwise the sync is useless, or the states are too few.
"""

import os
import random
import shutil
import sys
from pathlib import Path

import story
import tiny
from calls import intercept_calls
from device import Device, Operation, Recorder

_CAUGHT_WITHIN = 20_000  # states


def main() -> int:
    """Check random states, then omit one sync at a time."""
    count = tiny.count(__doc__, short=1_000, long=1_000_000)
    with tiny.scratch() as scratch:
        real = scratch / "real"
        real.mkdir()
        recorder = Recorder(real)
        with intercept_calls(recorder):
            story.play(real / "models" / "m", recorder.record_promise)
        operations = recorder.operations
        n_states, n_different, problems = lose_power(
            operations, count, scratch / "after", stop_at=5
        )
        for problem in problems:
            print(problem, file=sys.stderr)
        sites = sorted({o.site for o in operations if o.kind == "sync"})
        unseen = []
        for site in sites:
            without = [o for o in operations if o.site != site]
            n, _, found = lose_power(without, _CAUGHT_WITHIN, scratch / "after", stop_at=1)
            if not found:
                unseen.append(site)
                print(f"without {site}: nothing is lost in {n:,} states", file=sys.stderr)
    print(
        f"{n_states:,} states after power loss ({n_different:,} different): {len(problems)} lost; "
        f"{len(sites)} syncs omitted one at a time: {len(sites) - len(unseen)} caught"
    )
    return int(bool(problems or unseen))


def lose_power(
    operations: list[Operation], count: int, folder: Path, *, stop_at: int
) -> tuple[int, int, list[str]]:
    """Return the number of states, of different states, and the problems."""
    rng = random.Random(tiny.seed)
    seen: set[int] = set()
    problems: list[str] = []
    rounds = -(-count // len(operations))
    devices = []
    device = Device()
    for operation in operations:
        device.do(operation)
        devices.append(device.copy())
    n = 0
    for n in range(1, rounds * len(devices) + 1):
        device = devices[n * 7919 % len(devices)]  # a mixed order finds problems sooner
        tree = tuple(device.after_power_loss(rng).tree())
        promise = device.promise or story.Promise()
        if (key := hash((tree, promise))) in seen:
            continue
        seen.add(key)
        _write_out(tree, folder)
        if problem := story.check(folder / "models" / "m", promise):
            problems.append(f"after operation {n * 7919 % len(devices)}: {problem}")
            if len(problems) == stop_at:
                break
    return n, len(seen), problems


def _write_out(tree: tuple[tuple[str, bytes | None], ...], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in tree:
        if content is None:
            os.mkdir(folder / name)
        else:
            (folder / name).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
