"""`tgen bench` in llama-bench's formats, saved runs, and invalid options."""

import csv
import io
import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.command import tgen
from tgen.benchmark import trials
from tgen.benchmark.trials import Trial, throughput_report
from tgen.benchmark.workload import Workload
from tgen.cli.app import run
from tgen.cli.bench import llama_bench
from tgen.cli.bench.options import parse_sizes
from tgen.cli.bench.throughput import find_record
from tgen.errors import UsageError
from tgen.reports.benchmark import Machine
from tgen.reports.inspection import ModelSummary

# Printed by llama-bench b6000 and later.
LLAMA_BENCH_TABLE = """\
| model                          |       size |     params | backend    | threads |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | ------: | --------------: | -------------------: |
| llama 7B mostly Q4_0           |   3.56 GiB |     6.74 B | CPU        |       8 |            pp64 |         32.29 ± 1.21 |
"""  # noqa: E501
# Fields that llama.cpp's compare script reads: none may be missing or null.
FIELDS = (
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename",
    "model_type", "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask",
    "cpu_strict", "poll", "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu",
    "no_kv_offload", "flash_attn", "devices", "tensor_split", "tensor_buft_overrides", "load_mode",
    "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx",
    "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
)  # fmt: skip
KEYS = {
    "build_commit", "test_time", "avg_ts", "cpu_info", "gpu_info", "backends", "n_gpu_layers",
    "tensor_buft_overrides", "model_filename", "model_type", "n_batch", "n_ubatch", "embeddings",
    "cpu_mask", "cpu_strict", "poll", "n_threads", "type_k", "type_v", "use_mmap", "no_kv_offload",
    "split_mode", "main_gpu", "tensor_split", "flash_attn", "n_prompt", "n_gen", "n_depth",
}  # fmt: skip


def make_records(*tests, seconds=(0.1, 0.2, 0.3), n_parameters=6_740_000_000):
    summary = ModelSummary(
        path="m", family="llama", config={"context_length": 64, "n_layers": 2}, parameters=[],
        n_parameters=n_parameters, n_embedding_parameters=0, weight_bytes=1,
        cache_bytes_per_token=8, attention_bytes=1,
    )  # fmt: skip
    machine = Machine(cpu="A", load=None, n_cpus=2, versions={"python": "3"})
    trials = [Trial(prefill=round(s * 1e9), decode=0, cache_bytes=None) for s in seconds]
    options = {"engine": "kernels", "dtype": "float32", "threads": 8, "bound": None}
    return [
        llama_bench.format_record(
            throughput_report(test, trials, **options),
            summary, machine, gpu="", cache_dtype="float32", peak=None, seed=1, peak_memory=None,
        )
        for test in tests
    ]  # fmt: skip


def test_markdown_aligns_with_llama_benchs_table():
    lines = llama_bench.to_markdown(
        make_records(Workload(n_prompt=64), Workload(n_gen=8))
    ).splitlines()
    expected = LLAMA_BENCH_TABLE.splitlines()
    assert lines[:2] == expected[:2]
    for line in lines[2:4]:
        bars = [i for i, c in enumerate(line) if c == "|"]
        assert bars == [i for i, c in enumerate(expected[2]) if c == "|"]
    assert "llama 6.7B F32" in lines[2]
    assert "25.11 GiB" in lines[2]
    assert "6.74 B" in lines[2]
    assert "391.11 ± 222.04" in lines[2]  # mean and sample standard deviation of 640, 320, 213.3
    assert lines[4] == ""
    assert re.fullmatch(r"build: \S+ \(0\)", lines[5])
    swept = make_records(Workload(n_prompt=4), Workload(n_prompt=4, batch=2), n_parameters=1000)
    head, _, one, two, *_ = llama_bench.to_markdown(swept).splitlines()
    assert "|   batch |" in head
    assert one.split("|")[6].strip() + two.split("|")[6].strip() == "12"


def test_records_have_all_fields_in_llama_benchs_order():
    (row,) = make_records(Workload(n_prompt=64, n_depth=3))
    assert tuple(row)[: len(FIELDS)] == FIELDS
    assert set(row) >= KEYS
    assert all(row[name] is not None for name in KEYS)
    assert row["avg_ns"] == 200_000_000
    assert row["stddev_ns"] == 100_000_000
    assert row["samples_ns"] == [100_000_000, 200_000_000, 300_000_000]
    assert row["ci95_ts"] == [None, None]  # too few trials
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["test_time"])
    rows = make_records(Workload(n_prompt=64), Workload(n_gen=2))
    assert json.loads(llama_bench.to_json(rows)) == rows
    assert [json.loads(line) for line in llama_bench.to_jsonl(rows).splitlines()] == rows
    text = llama_bench.to_csv(rows)
    assert text.splitlines()[1].startswith(f'"{row["build_commit"]}","0",')
    read = list(csv.DictReader(io.StringIO(text)))
    assert set(read[0]) >= set(FIELDS)
    assert (read[1]["n_gen"], read[1]["cpu_strict"], read[0]["peak_ts"]) == ("2", "0", "")
    assert make_records(Workload(n_gen=1), seconds=[0.1])[0]["stddev_ts"] == 0


def test_sizes_are_lists_and_ranges():
    assert parse_sizes("-p", ["512"]) == [512]
    assert parse_sizes("-p", ["128,256", "128"]) == [128, 256]
    assert parse_sizes("-p", ["16-64+16"]) == [16, 32, 48, 64]
    assert parse_sizes("-p", ["16-100*2,7"]) == [16, 32, 64, 7]
    assert parse_sizes("-p", ["3-5"]) == [3, 4, 5]
    for wrong in ("", "a", "-1", "5-3", "1-9+0", "1-9*1", "0-9*2", "1.5", "1-999999999"):
        with pytest.raises(UsageError, match="-p"):
            parse_sizes("-p", [wrong])


def test_a_comparison_uses_the_saved_runs_model(trained, tmp_path, capsysbinary):
    saved, other = tmp_path / "saved.json", tmp_path / "other"
    options = ["-r", "2", "--no-limits"]
    tests = ["-p", "4", "-n", "0", "--threads", "1"]
    assert run(["bench", "-m", str(trained), *tests, "--save", str(saved), *options]) == 0
    capsysbinary.readouterr()
    assert run(["bench", "--compare", str(saved), *options]) == 0
    shown = capsysbinary.readouterr()
    assert shown.err.startswith(f"{trained}\n".encode())
    assert b"models:" not in shown.out
    shutil.copytree(trained, other)
    assert run(["bench", "-m", str(other), "--compare", str(saved), *options]) == 0
    shown = b" ".join(capsysbinary.readouterr().out.split())
    assert f"models: {other} now, {trained} then".encode() in shown
    shutil.rmtree(other)
    records = [row | {"model_filename": str(other)} for row in json.loads(saved.read_text())]
    saved.write_text(json.dumps(records))
    assert run(["bench", "--compare", str(saved), *options]) == 2
    assert b"does not exist" in capsysbinary.readouterr().err


def test_saved_run_is_compared(trained, tmp_path, capsysbinary, monkeypatch):
    saved = tmp_path / "saved.json"
    base = ["bench", "-m", str(trained), "-r", "8", "--no-limits", "-q"]
    assert (
        run(
            [
                *base,
                "-p",
                "4",
                "-n",
                "2",
                "--threads",
                "1",
                "--cache-dtype",
                "float16",
                "--save",
                str(saved),
            ]
        )
        == 0
    )
    rows = json.loads(saved.read_text())
    assert [(row["n_prompt"], row["n_gen"], row["n_threads"]) for row in rows] == [
        (4, 0, 1),
        (0, 2, 1),
    ]
    capsysbinary.readouterr()
    assert run([*base, "--compare", str(saved), "--json"]) == 0
    record = json.loads(capsysbinary.readouterr().out)
    assert [one["label"] for one in record["differences"]] == ["pp4", "tg2"]
    assert record["before"] == rows
    # One nanosecond per saved trial: a change far above any noise.
    quick = [row | {"samples_ns": [1 for _ in row["samples_ns"]]} for row in rows]
    saved.write_text(json.dumps(quick))
    assert run([*base, "--compare", str(saved)]) == 0
    assert b"slower" in capsysbinary.readouterr().out
    assert run([*base, "--compare", str(saved), "--fail-if-slower", "5%"]) == 1
    assert b"of its saved speed" in capsysbinary.readouterr().err
    saved.write_text(json.dumps([row | {"cpu_info": "another"} for row in rows]))
    assert run([*base, "--compare", str(saved)]) == 2
    assert b"was 'another' in the saved run" in capsysbinary.readouterr().err
    odd = [
        rows[0] | {name: value}
        for name, value in [("samples_ns", ["a"]), ("samples_ns", [0]), ("n_prompt", -5),
                            ("n_depth", [1]), ("dtype", "x"), ("engine", None), ("batch", "1")]
    ]  # fmt: skip
    lacking = [{name: v for name, v in rows[0].items() if name != "n_depth"}]
    bad_files = ["", "{}", "[1]", '[{"samples_ns": [1]}]', "[" * 9999, "[]", json.dumps(lacking)]
    for bad in [*bad_files, *(json.dumps([one]) for one in odd)]:
        saved.write_text(bad)
        assert run([*base, "--compare", str(saved)]) == 2
        assert b"is not a saved benchmark" in capsysbinary.readouterr().err
    saved.write_text(json.dumps(rows))
    monkeypatch.setattr(trials, "run_trial", None)  # errors come before any measurement
    for more in (
        ["-p", "5"],
        ["-d", "3", "-p", "4"],
        ["--batch", "2", "-p", "4"],
        ["--cache-dtype", "float32"],
    ):
        assert run([*base, "--compare", str(saved), *more]) == 2
        assert b"has no pp" in capsysbinary.readouterr().err


def test_a_saved_record_is_of_the_same_setup_and_workload():
    setup = SimpleNamespace(engine="kernels", dtype="float32", cache_dtype="float32", threads=2)
    row = {
        "n_prompt": 8, "n_gen": 0, "n_depth": 0, "engine": "kernels", "dtype": "float32",
        "n_threads": 2, "batch": 1, "type_k": "f32",
    }  # fmt: skip
    found = partial(find_record, Path("x.json"), setup=setup, workload=Workload(n_prompt=8))
    assert found([row | {"last": False}, row, row | {"batch": 2}]) is row
    for name in row:
        with pytest.raises(UsageError, match="no pp8 with engine kernels"):
            found([row | {name: "other"}])


def test_saved_run_of_many_setups_is_compared(trained, tmp_path, capsysbinary):
    saved = tmp_path / "saved.json"
    base = ["bench", "-m", str(trained), "-r", "5", "--no-limits", "-q", "-o", "json"]
    swept = [
        "--dtype",
        "float32,int8",
        "-d",
        "0,20",
        "--batch",
        "1,2",
        "-n",
        "0",
        "--threads",
        "1",
    ]
    assert run([*base, *swept, "--save", str(saved)]) == 0
    rows = json.loads(capsysbinary.readouterr().out)
    assert len(rows) == 8
    assert run([*base, "--compare", str(saved)]) == 0
    record = json.loads(capsysbinary.readouterr().out)
    assert len(record["differences"]) == 8
    assert [row["type_k"] for row in record["rows"]] == ["f32"] * 4 + ["f16"] * 4
    names = ("test", "dtype", "batch", "n_depth", "n_threads")
    assert [[row[n] for n in names] for row in record["rows"]] == [
        [row[n] for n in names] for row in rows
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-p", "999"], "pp999"),
        (["-p", "0", "-n", "0"], "no tokens"),
        (["-r", "0"], "--trials"),
        (["--compare", "nothing.json"], "nothing.json"),
        (["--against", "nobody"], "--against"),
        (["--against", "self", "-r", "3"], "at least 8 (got 3)"),
        (["--against", "self", "--compare", "x"], "cannot be combined"),
        (["--kv-cache", "--train"], "cannot be combined"),
        (["--kv-cache", "-l", "999"], "999"),
        (["--train", "-p", "4"], "--n-prompt"),
        (["--fail-if-slower", "5%"], "--compare"),
        (["--compare", "x", "--fail-if-slower", "much"], "--fail-if-slower"),
        (["--pg", "4"], "--pg"),
        (["--engine", "gpu"], "--engine"),
        (["--dtype", "int3"], "--dtype"),
        (["--save", "."], "--save"),
        (["-o", "md", "--kv-cache"], "--output md"),
        (["--batch", "0"], "--batch"),
        (["--train", "--batch", "2,4"], "--batch: "),
        (["--end-to-end", "-p", "2,4"], "--n-prompt: "),
        (["--train", "--dtype", "int8"], "--dtype"),
        (["-r", "1001"], "--trials"),
        (["--threads", "99"], "--threads: must be between"),
        (["--end-to-end", "-p", "999"], "got 999 and"),
        (["--end-to-end", "-p", "0"], "got 0 and"),
    ],
)
def test_invalid_options_fail_before_any_measurement(
    trained, arguments, expected, capsysbinary, monkeypatch
):
    monkeypatch.setattr(trials, "run_trial", None)
    status = run(["bench", "-m", str(trained), "-q", "--no-limits", *arguments])
    stderr = capsysbinary.readouterr().err.decode()
    assert status in (1, 2), stderr
    assert expected in stderr
    assert len(stderr.splitlines()) <= 3


def test_output_formats(trained):
    arguments = ["bench", "-m", trained, "-r", 6, "-p", 4, "-n", 2, "--batch", "1,2", "--no-limits"]
    shown = tgen(*arguments).stdout.decode()
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["pp4", "tg2", "pp4", "tg2"]
    assert "bytes per token" in shown
    assert tgen(*arguments, "-o", "md").stdout.decode().splitlines()[0].startswith("| model")
    for form in ("json", "jsonl"):
        text = tgen(*arguments, "-o", form).stdout
        rows = json.loads(text) if form == "json" else [json.loads(x) for x in text.splitlines()]
        assert [(row["n_prompt"], row["batch"]) for row in rows] == [(4, 1), (0, 1), (4, 2), (0, 2)]
    assert len(tgen(*arguments, "-o", "csv").stdout.splitlines()) == 5
