import errno
import os
import random
import signal
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import launch
from tests.experiments import launcher


@pytest.fixture(scope="module")
def server():
    serving = launcher.Server()
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The command, run by a user to its end; its workdir, output and seconds."""
    workdir, start = tmp_path_factory.mktemp("whole") / "run", time.monotonic()
    process = launcher.command(workdir, variant="long")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return workdir, output, errors, time.monotonic() - start


@pytest.fixture(scope="module")
def one(server, tmp_path_factory):
    """A run on one device."""
    workdir = tmp_path_factory.mktemp("one") / "run"
    result = server.run(workdir.parent / "output", launcher.flags(workdir))
    assert result.status == 0, result.output
    return workdir


def test_a_run_says_what_it_does_and_nothing_else(whole):
    workdir, output, errors, _ = whole
    lines = output.splitlines()
    assert errors == ""
    assert all(line.startswith("tiny: ") for line in lines[: lines.index(next(x for x in lines if x.startswith("Claims")))])
    assert "The bias stays small" in output and "yes" in output
    assert lines[-1].endswith(f"everything is in {workdir}: summary.json, figures/, metrics.jsonl, checkpoints/")


def test_the_summary_has_everything_that_identifies_and_judges_the_run(whole):
    summary = launcher.summary(whole[0])
    assert list(summary) == ["config", "versions", "devices", "seconds", "metrics", "params_digest", "claims"]
    assert summary["config"]["optimiser"]["learning_rate"] == 0.01 and summary["config"]["variant"] == "long"
    assert summary["versions"]["jax"] == jax.__version__ and {"python", "jaxml25", "flax", "optax"} < set(
        summary["versions"]
    )
    assert summary["devices"] and 0 < summary["seconds"] < whole[3] and len(summary["params_digest"]) == 64
    (claim,) = summary["claims"]
    assert list(claim) == ["claim", "paper", "measured", "stderr", "bar", "holds"]
    assert claim["holds"] is True and claim["measured"] == summary["metrics"]["bias"] == launcher.rows(whole[0])[-1]["bias"]


def test_kills_at_random_moments_leave_the_parameters_and_metrics_of_an_uninterrupted_run(server, whole, tmp_path):
    workdir, draw = tmp_path / "run", random.Random(time.time_ns())
    process = launcher.command(workdir, variant="long")
    time.sleep(draw.uniform(0, 0.5 * whole[3]))  # while it starts
    process.kill()
    process.communicate()
    for step in (40, 150):
        run = server.start(tmp_path / f"killed{step}", launcher.flags(workdir, variant="long"))
        launcher.wait_for_step(workdir, step)
        time.sleep(draw.uniform(0, 0.3))  # some saves later, or in the middle of one
        run.send_signal(signal.SIGKILL)
        assert run.wait().status == -signal.SIGKILL
    result = server.run(tmp_path / "output", launcher.flags(workdir, variant="long"))
    assert result.status == 0 and result.output.startswith("tiny: resumed at step ")
    assert launcher.summary(workdir)["params_digest"] == launcher.summary(whole[0])["params_digest"]
    assert (workdir / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()


def test_sigterm_writes_a_checkpoint_exits_with_status_0_and_the_run_goes_on_from_there(server, whole, tmp_path):
    workdir = tmp_path / "run"
    run = server.start(tmp_path / "stopped", launcher.flags(workdir, variant="long"))
    launcher.wait_for_step(workdir, 30)
    run.send_signal(signal.SIGTERM)
    result = run.wait()
    assert result.status == 0
    stopped = result.output.splitlines()[-1]
    assert stopped.startswith("tiny: stopped by a signal at step ") and stopped.endswith("run the same command to go on")
    step = int(stopped.removeprefix("tiny: stopped by a signal at step ").split(",")[0])
    result = server.run(tmp_path / "output", launcher.flags(workdir, variant="long"))
    assert result.status == 0 and f"tiny: resumed at step {step} of 300\n" in result.output
    assert launcher.summary(workdir)["params_digest"] == launcher.summary(whole[0])["params_digest"]
    assert (workdir / "metrics.jsonl").read_bytes() == (whole[0] / "metrics.jsonl").read_bytes()


def test_a_finished_workdir_is_refused_and_overwritten_when_asked_to_with_the_same_outcome(server, one):
    before = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    refused = server.run(one.parent / "refused", launcher.flags(one))
    assert refused.status == 1 and refused.output == (
        f"workdir {one} holds a finished run; give another --workdir, or --overwrite to replace it\n"
    )
    assert before == {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    digest = launcher.summary(one)["params_digest"]
    assert server.run(one.parent / "again", launcher.flags(one, "--overwrite")).status == 0
    assert launcher.summary(one)["params_digest"] == digest
    assert (one / "metrics.jsonl").read_bytes() == before[one / "metrics.jsonl"]


_WRONG = {
    "key": (
        ["--config.optimiser.learning_rat=1"],
        "no key 'optimiser.learning_rat'; did you mean 'optimiser.learning_rate'?",
    ),
    "outer key": (["--config.optimizer.name=adam"], "no key 'optimizer.name'; did you mean 'optimiser.name'?"),
    "value": (["--config.steps=many"], "steps"),
    "flag": (["--overwrit"], "Unknown command line flag 'overwrit'. Did you mean: overwrite ?"),
    "processes": (["--process_id=0"], "--coordinator_address must be given too"),
    "module": (["--config.experiment=tests.experiments.tiny_experimen"], "there is no experiment"),
}


@pytest.mark.parametrize(("flags", "message"), _WRONG.values(), ids=_WRONG)
def test_what_is_wrong_with_the_flags_is_one_line_before_anything_is_written(server, tmp_path, flags, message):
    result = server.run(tmp_path / "output", launcher.flags(tmp_path / "run", *flags))
    assert result.status == 1 and len(result.output.splitlines()) == 1 and message in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config={config}:smal", "--workdir={run}"], "--config: variant must be small or long, got 'smal'"),
        (["--config={config}y", "--workdir={run}"], "--config: there is no file '{config}y'"),
        (["--config={config}"], "flag --workdir=None: Flag --workdir must have a value other than None."),
        (["--workdir={run}"], "flag --config=None: Flag --config must have a value other than None."),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_line(server, tmp_path, flags, message):
    names = {"config": launcher.CONFIG, "run": tmp_path / "run"}
    result = server.run(tmp_path / "output", [flag.format(**names) for flag in flags])
    assert result.status == 1 and result.output == message.format(**names) + "\n"
    assert not (tmp_path / "run").exists()


def test_a_metric_that_is_not_finite_ends_the_run_with_one_line_and_its_last_good_checkpoint(server, tmp_path):
    arguments = launcher.flags(tmp_path / "run", "--config.fail_at=23")
    result = server.run(tmp_path / "output", arguments)
    assert result.status == 1
    assert result.output == "tiny: grad_norm is nan at step 23; the last checkpoint before it was kept\n"
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "tiny").iterdir()) == ["10", "20"]
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_full_disk_is_one_line_that_says_so(server, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    result = server.run(tmp_path / "output", launcher.flags(tmp_path / "run"))
    assert result.status == 1 and result.output == (
        f"workdir {tmp_path / 'run'}: No space left on device; what was written before is kept, run the same command to go on\n"
    )


def test_a_workdir_that_cannot_be_written_is_one_line_that_says_so(server, tmp_path):
    (tmp_path / "file").write_text("")
    result = server.run(tmp_path / "output", launcher.flags(tmp_path / "file" / "run"))
    assert result.status == 1 and result.output == f"cannot write workdir {tmp_path / 'file' / 'run'}: Not a directory\n"


def _assert_same_curve(workdir, one):
    """Sums over devices are taken in another order: the loss may differ in its last bit."""
    ours, reference = launcher.rows(workdir), launcher.rows(one)
    assert [row.get("step") for row in ours] == [row.get("step") for row in reference]
    for row, expected in zip(ours[:-1], reference[:-1], strict=True):
        assert abs(row["loss"] - expected["loss"]) <= 3e-7 * expected["loss"]


@pytest.mark.parametrize("axes", [{"data": 8, "model": 1}, {"data": 4, "model": 2}], ids=str)
def test_the_loss_curve_on_eight_devices_is_that_on_one(server, one, tmp_path, axes):
    mesh = [f"--config.mesh.{name}={size}" for name, size in axes.items()]
    result = server.run(tmp_path / "output", launcher.flags(tmp_path / "run", *mesh), launcher.devices(8))
    assert result.status == 0, result.output
    assert len(launcher.summary(tmp_path / "run")["devices"]) == 8
    places = launcher.summary(tmp_path / "run")["metrics"]["places"]  # after training, where the rules put them
    expected = {"hidden/kernel": "P(None, 'model')", "out/kernel": "P('model', None)"}
    for path, place in places.items():
        assert place == next((spec for name, spec in expected.items() if path.endswith(name)), "P()"), path
    assert len(places) > 6
    _assert_same_curve(tmp_path / "run", one)


def _start_two(server, tmp_path, name, *more):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = [f"--coordinator_address=localhost:{port}", "--num_processes=2", *more]
    flags = [launcher.flags(tmp_path / "run", *together, f"--process_id={i}") for i in range(2)]
    return [server.start(tmp_path / f"{name}{i}", flags[i]) for i in range(2)]


def _said(result):
    """What is printed but for what the library of the processes' connections tells of itself."""
    return [line for line in result.output.splitlines() if "peer ranks" not in line and "preemption_notifier" not in line]


def test_two_processes_stop_together_go_on_and_end_with_the_curve_of_one(server, one, tmp_path):
    runs = _start_two(server, tmp_path, "first")
    launcher.wait_for_file(tmp_path / "run" / "metrics.jsonl")  # the step to stop at takes them some steps to agree on
    runs[1].send_signal(signal.SIGTERM)
    results = [run.wait() for run in runs]
    assert [result.status for result in results] == [0, 0], results
    assert "stopped by a signal at step " in results[0].output and _said(results[1]) == []

    results = [run.wait() for run in _start_two(server, tmp_path, "second")]
    assert [result.status for result in results] == [0, 0], results
    assert "tiny: resumed at step " in results[0].output and _said(results[1]) == []
    assert len(launcher.summary(tmp_path / "run")["devices"]) == 2
    _assert_same_curve(tmp_path / "run", one)
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1  # only process 0 writes


def test_a_model_that_is_split_over_two_processes_has_the_curve_of_a_whole_one_and_is_not_run_twice(server, one, tmp_path):
    mesh = ["--config.mesh.data=1", "--config.mesh.model=2"]
    results = [run.wait() for run in _start_two(server, tmp_path, "run", *mesh)]
    assert [result.status for result in results] == [0, 0], results
    _assert_same_curve(tmp_path / "run", one)
    assert launcher.summary(tmp_path / "run")["claims"][0]["holds"]
    refused = [run.wait() for run in _start_two(server, tmp_path, "again", *mesh)]
    assert [result.status for result in refused] == [1, 1], refused
    assert "holds a finished run" in refused[0].output
    assert _said(refused[1]) == [f"process 0 cannot use workdir {tmp_path / 'run'}"]


def test_a_config_that_does_not_repeat_its_variant_is_judged_by_the_name_on_the_command_line(server, tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from tests.experiments import tiny_config\n"
        "def get_config(variant):\n"
        "    config = tiny_config.get_config()\n"
        "    del config.variant\n"
        "    config.steps = {'smoke': 4, 'small': 8}[variant]\n"
        "    return config\n"
    )
    result = server.run(tmp_path / "output", [f"--config={config}:smoke", f"--workdir={tmp_path / 'run'}"])
    assert result.status == 0 and "not judged" in result.output, result.output
    assert launcher.summary(tmp_path / "run")["claims"][0]["holds"] is None
    result = server.run(tmp_path / "wrong", [f"--config={config}:smal", f"--workdir={tmp_path / 'other'}"])
    assert result.status == 1 and result.output == "--config: 'smal' is not among its variants\n"


def test_the_tasks_of_a_slurm_step_start_as_one_run_and_a_batch_script_alone(monkeypatch):
    for name, value in (("JOB_ID", "7"), ("STEP_NODELIST", "n[1-2]"), ("PROCID", "0"), ("LOCALID", "0"), ("NTASKS", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launch._is_slurm_step()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not launch._is_slurm_step()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    assert not launch._is_slurm_step()


def test_the_digest_is_that_of_the_numbers_in_the_order_of_their_paths():
    params = {"b": jnp.arange(3.0), "a": {"x": jnp.ones(2)}}
    digest = launch.params_digest(params)
    assert digest == launch.params_digest({"a": {"x": np.ones(2, np.float32)}, "b": np.arange(3, dtype=np.float32)})
    assert digest != launch.params_digest({"b": jnp.arange(3.0), "a": {"y": jnp.ones(2)}})
    assert digest != launch.params_digest({"b": jnp.arange(3.0), "a": {"x": jnp.ones(2).at[0].set(1 + 1e-7)}})


def test_a_full_disk_is_recognised_however_deep_the_error_is_wrapped():
    wrapped = RuntimeError("save failed")
    wrapped.__cause__ = ValueError("RESOURCE_EXHAUSTED: '/x/manifest': No space left on device [os_error_code='28']")
    assert launch._environment_error(wrapped) == "No space left on device"
    assert launch._environment_error(OSError(errno.EROFS, os.strerror(errno.EROFS))) == "Read-only file system"
    assert launch._environment_error(OSError(errno.ENOENT, "missing")) is None
    assert launch._environment_error(ValueError("a bug")) is None
