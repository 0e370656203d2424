"""Starts the launcher for tests: as a user does, or from a process that has imported everything already.

Imports are nearly all of a short run's time. `Server` pays them once and forks a child for every run, before JAX has started
anything; the child then runs what `python experiments/launch.py` runs.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = ROOT / "tests" / "experiments" / "tiny_config.py"
_SECONDS = 240

_SERVE = """
import json, os, sys
from absl import app
from experiments import launch

for line in sys.stdin:
    request = json.loads(line)
    if "pid" in request:
        pid, status = os.waitpid(request["pid"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    elif not (answer := os.fork()):
        output = os.open(request["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        os.environ.update(request["environment"])
        sys.argv = ["launch.py", *request["arguments"]]
        app.run(launch.main, flags_parser=launch.parse)
    print(json.dumps(answer), flush=True)
"""


class Result(NamedTuple):
    """What is left of a run that ended."""

    status: int
    output: str


def flags(workdir, *more, variant="small"):
    return [f"--config={CONFIG}:{variant}", f"--workdir={workdir}", *more]


def devices(count):
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


class Server:
    """Runs the launcher in forks of one process."""

    def __init__(self):
        command = [sys.executable, "-c", _SERVE]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, output, arguments, environment=None):
        pid = self._ask(arguments=arguments, environment=environment or {}, output=str(output))
        return Run(self, pid, pathlib.Path(output))

    def run(self, output, arguments, environment=None):
        return self.start(output, arguments, environment).wait()

    def status(self, pid):
        return self._ask(pid=pid)

    def close(self):
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Run(NamedTuple):
    """A run that was started."""

    server: Server
    pid: int
    output: pathlib.Path

    def wait(self):
        end = time.monotonic() + _SECONDS
        while (status := self.server.status(self.pid)) is None:
            if time.monotonic() > end:
                self.send_signal(signal.SIGKILL)
            time.sleep(0.02)
        return Result(status, self.output.read_text())

    def send_signal(self, number):
        os.kill(self.pid, number)


def command(workdir, *more, variant="small", **options):
    """Starts the launcher as a user does, from a directory that is not the repository's."""
    line = [sys.executable, str(ROOT / "experiments" / "launch.py"), *flags(workdir, *more, variant=variant)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        line, cwd=workdir.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


def wait_for_file(path):
    end = time.monotonic() + _SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"no {path} in {_SECONDS} s"
        time.sleep(0.01)


def wait_for_step(workdir, step):
    """Returns once there is a checkpoint of this step or a later one."""
    newest, end = 0, time.monotonic() + _SECONDS
    while newest < step:
        assert time.monotonic() < end, f"no checkpoint of step {step} in {_SECONDS} s"
        steps = [int(path.name) for path in workdir.glob("checkpoints/tiny/*") if path.name.isdigit()]
        newest = max(steps, default=0)
        time.sleep(0.002)
