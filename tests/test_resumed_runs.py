"""What a run goes on from: whole states of its own, and the settings that it began with."""

from pathlib import Path

import pytest

from test_runs import contents, request, resume
from tgen import runs
from tgen.checkpoint import run_state
from tgen.errors import TrainingError, UsageError
from tgen.reports import DoneReport
from tgen.runs import saving


def test_other_settings_are_refused_with_the_difference_or_noted(tmp_path):
    out = tmp_path / "model"
    list(runs.start(request(tmp_path)))
    same = {
        "settings": {"steps": 14, "seed": 1337},
        "overrides": {"dropout": "0.1", "n_layers": "1"},
    }
    list(resume(out, threads=1, **same))
    with pytest.raises(TrainingError, match=r"dropout is 0\.1 in this run, not 0.2"):
        next(resume(out, overrides={"dropout": "0.2"}))
    with pytest.raises(UsageError, match="n_layers is 1 in this run, not 2"):
        next(resume(out, overrides={"n_layers": "2"}, override=True))
    with pytest.raises(UsageError, match="optimizer is muon in this run, not adamw"):
        next(resume(out, overrides={"optimizer": "adamw"}, override=True))
    with pytest.raises(UsageError, match="the run is at step 14"):
        next(resume(out, settings={"steps": 9}, override=True))
    longer = {"settings": {"steps": 20}, "overrides": {"learning_rate": "0.001"}}
    reports = list(resume(out, threads=1, override=True, **longer))
    assert isinstance(reports[-1], DoneReport)
    assert reports[-1].step == 20
    noted = run_state.load_run(out)[0]["overridden"]
    assert noted[0] == "from step 14: steps 14 -> 20"
    assert noted[1].startswith("from step 14: learning_rate 0.00")
    assert noted[1].endswith(" -> 0.001")
    assert noted == reports[0].notes[-2:]
    # It is the run's own now.
    list(resume(out, threads=1, **longer))


def damage(state: Path, how: str) -> None:
    arrays, manifest = state / "state.safetensors", state / "manifest.json"
    whole = arrays.read_bytes()
    if how == "cut short":
        arrays.write_bytes(whole[:-1])
    elif how == "one bit":
        arrays.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    elif how == "zeros":
        arrays.write_bytes(bytes(len(whole)))
    elif how == "gone":
        arrays.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "a manifest that lies":
        manifest.write_text(manifest.read_text().replace('"step": ', '"step": 1'))
    else:
        manifest.write_bytes(b"\0" * 100)


@pytest.mark.parametrize(
    "how",
    ["cut short", "one bit", "zeros", "gone", "no manifest", "a manifest that lies", "garbage"],
)
def test_a_damaged_state_is_set_aside_and_the_one_before_goes_on(tmp_path, how):
    out = tmp_path / "model"
    list(runs.start(request(tmp_path)))
    whole = contents(out)
    *_, before, newest = sorted((out / "training").glob("state-*"))
    damage(newest, how)
    reports = list(resume(out, threads=1))
    assert any("set aside as damaged-state-00000014" in note for note in reports[0].notes)
    assert reports[0].resumed_at_step == int(before.name[-8:]) == 10
    assert (out / "training" / "damaged-state-00000014").is_dir()
    after = {name: one for name, one in contents(out).items() if "damaged" not in name}
    assert after == whole
    for state in (out / "training").glob("state-*"):
        damage(state, how)
    with pytest.raises(TrainingError, match="no state of the run"):
        next(resume(out))
    assert len(list((out / "training").glob("damaged-*"))) >= 3


def test_a_state_of_another_run_is_not_taken(tmp_path):
    for name in ("model", "other"):
        list(runs.start(request(tmp_path, name)))
    mine, other = (tmp_path / name / "training" for name in ("model", "other"))
    (mine / "state-00000014").rename(mine / "gone")
    (other / "state-00000014").rename(mine / "state-00000014")
    reports = list(resume(tmp_path / "model", threads=1))
    assert any("is of another run" in note for note in reports[0].notes)
    assert reports[0].resumed_at_step == 10


def test_another_machine_is_said(tmp_path, monkeypatch):
    list(runs.start(request(tmp_path)))
    *_, last = next(resume(tmp_path / "model", threads=1)).notes
    assert "last bit" not in last
    monkeypatch.setattr(saving, "__version__", "9.9")
    *_, last = next(resume(tmp_path / "model", threads=1)).notes
    assert last == ("not to the last bit as without a break: tgen 0.1.0 is 9.9 now")
