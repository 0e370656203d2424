"""A peer in an environment of its own: a process that answers timing requests, so that both sides are measured in one run.

The peer's script reads one JSON object a line on standard input and answers with one a line on standard output.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

RESULTS = pathlib.Path(__file__).parent / "results"


class Peer:
    """Runs `script` under the interpreter named by JAXML25_PEER_PYTHON, by default that of .venv-peers."""

    def __init__(self, script: str):
        root = pathlib.Path(__file__).parent.parent
        python = os.environ.get("JAXML25_PEER_PYTHON", root / ".venv-peers" / "bin" / "python")
        if not pathlib.Path(python).exists():
            sys.exit(f"no peer environment at {python}: see benchmarks/peers/requirements.txt, or set JAXML25_PEER_PYTHON")
        command = [str(python), str(pathlib.Path(__file__).parent / "peers" / script)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, task: str, **arguments) -> dict:
        """Sends one request and waits for its answer."""
        self._process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the peer stopped while working on {task}")
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def side_by_side(ours: Callable[[], object], theirs: Callable[[], float], *, rounds: int) -> dict:
    """Times both in turn, so that what else the machine does hits both, and reports medians and their ratio."""
    ours(), theirs()
    pairs = [(seconds(ours), theirs()) for _ in range(rounds)]
    mine, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    return {
        "ours_ms": round(1e3 * mine, 4),
        "peer_ms": round(1e3 * peer, 4),
        "peer_over_ours": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "rounds": rounds,
    }


def write(name: str, rows: dict, **environment) -> None:
    """Prints the rows and keeps them as JSON next to the claims they support."""
    RESULTS.mkdir(exist_ok=True)
    report = {"environment": environment, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
