"""Processes of srun or mpirun that do not know of each other."""

import pytest

from tgen import distributed
from tgen.distributed import launch

SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("launcher", "number", "variables"),
    [("srun", "SLURM_PROCID", SRUN), ("mpirun", "OMPI_COMM_WORLD_RANK", MPIRUN)],
)
def test_processes_without_torchrun_are_refused_once(
    monkeypatch, run_here, tmp_path, launcher, number, variables
):
    monkeypatch.setattr(launch, "_REPORT_SECONDS", 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for command in (["train", "x.txt"], ["generate", "-m", "m", "--input", "x.txt"]):
        monkeypatch.setenv(number, "0")
        first = run_here(*command, cwd=tmp_path)
        assert first.stderr.startswith(f"error: {launcher} started 8 processes".encode())
        assert first.stderr.count(b"\n") == 2
        monkeypatch.setenv(number, "1")
        other = run_here(*command, cwd=tmp_path)
        assert (first.returncode, other.returncode, other.stderr) == (2, 2, b"")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        distributed.check_launcher()
        monkeypatch.delenv("RANK")


@pytest.mark.parametrize("variables", [{"SLURM_NTASKS": "8"}, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_of_slurm_is_not_refused(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    distributed.check_launcher()
