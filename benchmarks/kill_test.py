"""Kills a run at random moments and compares what it ends with to a run that was left alone.

    python benchmarks/kill_test.py --config=configs/fk_steering.py:smoke --kills=10

Every kill is SIGKILL, to a process that is at work: after its metrics have passed a random row, the rows being spread over
the run. What is compared is the digest of the final parameters and the metrics file, byte for byte. Exit status 1 if they differ.
Arguments that it does not know go to the launcher.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

LAUNCHER = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "launch.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="file[:variant]")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", help="folder for the two runs; a temporary one by default")
    arguments, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(arguments.workdir or temporary)
        root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(LAUNCHER), f"--config={arguments.config}", *extra]
        return compare(command, root, arguments.kills, random.Random(arguments.seed))


def compare(command: list[str], root: pathlib.Path, kills: int, rng: random.Random) -> int:
    """Runs `command` twice under `root`, once with `kills` kills; returns 0 if both end the same."""
    whole, killed = root / "whole", root / "killed"
    start = time.perf_counter()
    _finish(command, whole)
    print(f"uninterrupted: {_rows(whole)} rows in {time.perf_counter() - start:.1f} s", flush=True)

    rows = _rows(whole)
    for number in range(kills):
        # One row in each of `kills` equal parts of the run.
        target = int(rows * (number + rng.random()) / kills)
        seen = _kill_at(command, killed, target, rng.random() * 0.02)
        if seen is None:
            print(f"kill {number + 1}: the run was over before row {target}", flush=True)
            return 1
        print(f"kill {number + 1}: at row {seen} of {rows}", flush=True)
    _finish(command, killed)

    digests = [json.loads((path / "summary.json").read_text())["params_digest"] for path in (whole, killed)]
    same_metrics = (whole / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()
    print(f"parameters {'identical' if digests[0] == digests[1] else 'DIFFER'}: {digests[0][:16]} {digests[1][:16]}")
    print(f"metrics {'identical' if same_metrics else 'DIFFER'}: {rows} rows")
    return 0 if digests[0] == digests[1] and same_metrics else 1


def _finish(command: list[str], workdir: pathlib.Path) -> None:
    done = subprocess.run([*command, f"--workdir={workdir}"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}the run failed with status {done.returncode}")


def _kill_at(command: list[str], workdir: pathlib.Path, target: int, delay: float) -> int | None:
    """Kills the run `delay` seconds after it has written `target` rows; returns how many it had, None if it was over."""
    with subprocess.Popen([*command, f"--workdir={workdir}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        before = _rows(workdir)  # of the last attempt, until this one opens the file anew
        opened = not before
        while run.poll() is None:
            now = _rows(workdir)
            opened = opened or now < before
            if opened and now >= target:
                break
            time.sleep(0.001)
        time.sleep(delay)
        alive = run.poll() is None
        run.kill()
    return _rows(workdir) if alive else None


def _rows(workdir: pathlib.Path) -> int:
    try:
        return (workdir / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
