"""`tgen inspect`: tables, JSON and files equal the reports."""

import csv
import io
import json
import os
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.color import ColorSystem

import tgen
from support.models import make_model
from tgen.checkpoint import model_dir, safetensors_file
from tgen.cli import rich_console
from tgen.cli.inspect import output
from tgen.config import ModelConfig, SamplingConfig
from tgen.drawing.heat_map import AUTO_SELECTED
from tgen.drawing.page import attention_page
from tgen.drawing.view_options import View
from tgen.generation.distribution import sampling_distribution
from tgen.inspection.inspector import Inspector
from tgen.loaded_model import make_vocabulary
from tgen.reports.json_text import json_value

PATCH = ["--patch=What is the king!", "--contrast=b"]


@pytest.fixture(scope="module")
def inspector(trained):
    return Inspector(model_dir.load(trained), b"What is the king?")


def test_json_equals_the_reports(inspect, inspector):
    views = [*(f"--view={view}" for view in View), *PATCH, "--layer=0", "--head=all"]
    done = inspect(*views)
    assert done.returncode == 0, done.stderr
    shown = inspect("--json", *views)
    record = json.loads(shown.stdout)
    assert record["schema"] == "tgen.inspect/3"
    assert [token["id"] for token in record["text"]] == inspector.ids
    expected = inspector.attention([(0, head) for head in range(inspector.config.n_heads)])
    for one, report in zip(record["attention"], expected, strict=True):
        assert [len(row) for row in one["weights"]] == list(range(1, len(inspector.ids) + 1))
        assert one["weights"][-1] == pytest.approx(report.weights[-1].tolist(), abs=1e-6)
    heads = inspector.heads()
    assert len(record["heads"]["heads"]) == inspector.config.n_heads  # of the one layer
    assert record["heads"]["heads"][0]["previous"] == pytest.approx(heads.heads[0].previous, 1e-4)
    assert record["tokens"]["bits_per_byte"] == pytest.approx(inspector.text.bits_per_byte, 1e-5)
    assert record["predict"][0]["id"] == inspector.predictions()[0].id
    assert record["lens"]["answer"] == record["predict"][0]["id"] == record["why"]["targets"][0]
    without = inspector.ablation()
    assert [one["group"] for one in record["ablation"]["groups"]] == [
        g.group for g in without.groups
    ]
    assert record["ablation"]["loss"] == pytest.approx(without.loss, 1e-5)
    (patched,) = inspector.patching(b"What is the king!", contrast=b"b")
    assert np.allclose(record["patch"][0]["scores"], patched.scores, atol=1e-5)
    assert all(check["passed"] for check in record["verify"])
    assert record["training"][0]["kind"] == "PlanReport"


def test_predictions_with_sampling_options_are_those_of_generate(inspect, inspector):
    flags = ["--view=predict", "--temperature=0.7", "--top-k=5", "--samplers=top-k,temperature"]
    report = json.loads(inspect(*flags, "--repetition-penalty=1.2", "--json").stdout)["predict"]
    sampling = SamplingConfig(
        temperature=0.7, top_k=5, samplers="top_k,temperature", repetition_penalty=1.2
    )
    expected = sampling_distribution(
        inspector.next_logits(), inspector.ids, sampling, make_vocabulary(inspector.bundle), top=10
    )
    assert report == json_value(expected)
    assert [step["sampler"] for step in report["steps"]] == ["penalties", "top_k", "temperature"]
    rows = [*csv.DictReader(io.StringIO(inspect(*flags, "--csv", "-").stdout.decode()))]
    assert [float(row["final"]) > 0 for row in rows] == [True] * 5 + [False] * 5
    assert {row["removed_by"] for row in rows} == {"", "top_k"}
    shown = inspect(*flags, "--width", "100").stdout.decode()
    assert shown.count("removed by top_k") == 5
    assert "top_k 5: removes" in shown
    assert "temperature 0.7: removes no token" in shown
    narrow = inspect(*flags, "--width", "60").stdout.decode()
    assert "no room for the probabilities between" in narrow
    assert "sampled" in narrow


def test_every_view_describes_every_family(inspect, family, model_directory, tmp_path):
    missing = {View.training, View.sources, *((View.lens,) if family == "classic" else ())}
    views = [view for view in View if view not in missing]
    selected = [f"--view={view}" for view in views] + ["--layer=all", "--head=all", "--contrast=b"]
    prompt = "What is the king? Tis more."
    selected.append(f"--patch={prompt.replace('?', '!')}")
    shown = inspect(*selected, model=model_directory, prompt=prompt)
    assert shown.returncode == 0, shown.stderr
    done = inspect("--json", *selected, model=model_directory, prompt=prompt)
    record = json.loads(done.stdout)
    assert all(check["passed"] for check in record["verify"])
    config = ModelConfig.from_dict(record["model"]["config"])
    assert config == make_model(family, vocab_size=config.vocab_size).config
    assert {field.name for field in fields(ModelConfig)} == set(record["model"]["config"])
    windows = [config.window(layer) for layer in range(2)]
    heads = record["heads"]["heads"]
    for reports in (record["attention"], heads):
        assert [one["window"] for one in reports] == [w for w in windows for _ in range(4)]
    assert (record["heads"]["window_baseline"] is not None) == any(windows)
    text = " ".join(shown.stdout.decode().split())
    window = f"sliding window of {config.sliding_window} tokens"
    assert (f"layer 0, head 0, {window}" in text) == (windows[0] is not None)
    assert (f"layer 1, head 0, {window}" in text) == (windows[1] is not None)
    assert ("uniform, window" in text) == any(windows)
    phrases = {
        "classic": ["after each residual addition (post-norm)", "sinusoidal positions"],
        "gpt_neo": [f"{window} in layer 1", "attention 1"],
        "gpt_neox": ["attention and feed-forward, which run in parallel", "4 of 8 dimensions"],
        "phi3": ["6 of 8 dimensions", window],
        "gemma3": ["100 in layers with a sliding window", f"{window} in layer 0", "1 + weight",
                   "before each sublayer and on its output", "embedding 5.65685"],
        "olmo2": ["on each sublayer's output", "query and key norm over all heads"],
        "smollm3": ["rotary positions (base 10,000) in layer 0"],
        "granite": ["embedding 3, attention 0.4, residual 0.7, logits 1/5"],
    }  # fmt: skip
    for phrase in phrases.get(family, ["before each sublayer (pre-norm)"]):
        assert phrase in text
    page = inspect("--html", tmp_path / "page.html", model=model_directory, prompt=prompt)
    assert page.returncode == 0, page.stderr


def test_csv_has_every_weight(inspect, inspector):
    for view in ("attention", "rollout"):
        heads = ["--head=all"] if view == "attention" else []
        done = inspect("--view", view, "--layer=all", *heads, "--csv=-", "-q")
        if view == "attention":
            shape = inspector.config.n_layers, inspector.config.n_heads
            selected = [(la, h) for la in range(shape[0]) for h in range(shape[1])]
            expected = {(r.layer, r.head): r.weights for r in inspector.attention(selected)}
        else:
            expected = {(r.layer, "mean"): r.weights for r in inspector.rollout()}
        rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
        n = len(inspector.ids)
        assert len(rows) == len(expected) * n * (n + 1) // 2
        for row in rows:
            head = int(row["head"]) if row["head"].isdigit() else row["head"]
            value = expected[int(row["layer"]), head][int(row["query"]), int(row["key"])]
            assert np.float32(row["weight"]) == pytest.approx(value, abs=1e-6)


def test_files_are_written_and_reported(inspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["--csv=a.csv", "--vega=a.json", "--html=a.html", "--svg=a.svg"]
    done = inspect(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    for name in names:
        path = tmp_path / name.partition("=")[2]
        assert f"wrote {path.name}, {path.stat().st_size:,} bytes" in done.stderr.decode()


def test_pipe_gets_no_color_and_the_self_check(inspect):
    for cells in ("num", "block", "list"):
        assert b"\x1b" not in inspect("--cells", cells).stdout
    done = inspect("--cells", "num")
    assert "self-check passed: attention rows sum to 1" in " ".join(done.stdout.decode().split())


def test_comparison_shows_values_and_differences(inspect, trained, tmp_path):
    bundle = model_dir.load(trained)
    arrays = dict(bundle.arrays)
    arrays["blocks.0.attention.qkv_proj.weight"] *= 3
    model_dir.save(tmp_path / "other", bundle.config, bundle.tokenizer, arrays)
    models = ["-m", trained, "-m", tmp_path / "other", "--view", "heads"]
    record = json.loads(inspect(*models, "--json", model=None).stdout)
    assert record["text"]
    assert [all(check["passed"] for check in one) for one in record["verify"]] == [True, True]
    text = inspect(*models, model=None).stdout.decode()
    for a, b in zip(*(report["heads"] for report in record["heads"]), strict=True):
        line = next(li for li in text.splitlines() if li.startswith(f"{a['layer']}.{a['head']}"))
        for name, digits in [("effective_keys", 1), ("previous", 2), ("first", 2)]:
            assert f"{b[name]:.{digits}f} {b[name] - a[name]:+z.{digits}f}" in line
    assert any(a["previous"] != b["previous"] for a, b in zip(*(
        report["heads"] for report in record["heads"]), strict=True))  # fmt: skip
    model_dir.save(
        tmp_path / "wide",
        (wide := make_model("llama", vocab_size=bundle.config.vocab_size)).config,
        bundle.tokenizer,
        wide.to_arrays(),
    )
    other = ["-m", trained, "-m", tmp_path / "wide", "--view", "heads"]
    done = inspect(*other, model=None)
    assert (done.returncode, b"n_heads=4" in done.stderr) == (2, True), done.stderr


def test_width_tail_and_hide_first(inspect, inspector, monkeypatch):
    for width in (40, 120):
        # The command sets the width: restored at the end.
        monkeypatch.setattr(rich_console.out, "_width", None)
        done = inspect("--cells", "num", "--width", width, prompt="a b c d e f g h i j k l")
        text = done.stdout.decode()
        assert max(map(cell_len, text.splitlines())) <= width
        assert ("keys 1 to" not in text and " 11 " in text) or width == 40
    monkeypatch.setattr(rich_console.out, "_width", 80)
    long = "What is the king? " * 30
    assert b"--tail" in inspect(prompt=long).stderr
    record = json.loads(inspect("--tail", "--json", prompt=long).stdout)
    ids = inspector.tokenizer.encode(long.encode())
    assert [token["id"] for token in record["text"]] == ids[-inspector.config.context_length :]
    assert record["n_skipped"] == len(ids) - inspector.config.context_length
    shown = inspect("--tail", "--view", "tokens", prompt=long).stdout.decode()
    assert f"tokens skipped at the start of the text: {record['n_skipped']}; " in shown
    assert b"the first key is hidden" in inspect("--cells", "num", "--hide-first").stdout


def test_files_can_be_links_and_pipes(inspect, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert inspect("--csv", tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes().startswith(b"layer,head")
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert inspect("--csv", tmp_path / "pipe").returncode == 0
    assert os.read(read, 10) == b"layer,head"
    os.close(read)
    assert (tmp_path / "pipe").is_fifo()


def test_page_opens_at_the_most_focused_head_and_has_a_size_limit(inspect, monkeypatch):
    page = inspect("--html", "-").stdout.decode()
    assert page.count(AUTO_SELECTED) >= 1
    monkeypatch.setattr(attention_page, "_MAX_PAGE_BYTES", 100)
    done = inspect("--html", "-")
    assert (done.returncode, b"select fewer layers" in done.stderr) == (2, True)


def test_every_view_of_a_text_ends_with_the_self_check(inspect, tmp_path):
    others = {View.model, View.training, View.positions, View.verify, View.sources}
    for view in set(View) - others:
        shown = inspect("--view", view, *(PATCH if view is View.patch else ())).stdout.decode()
        assert shown.splitlines()[-1].startswith("self-check passed: attention rows sum to 1"), view
    assert json.loads(inspect("--view", "tokens", "--json").stdout)["verify"][0]["passed"]
    assert (
        b"self-check passed: attention rows sum to 1"
        in inspect("--csv", tmp_path / "x", "--view", "tokens").stderr
    )


def test_list_in_a_pipe_has_one_line_per_query(inspect, inspector):
    lines = inspect("--cells", "list", "--top", "9").stdout.decode().splitlines()
    assert [int(line.split()[0]) for line in lines[1 : 1 + len(inspector.ids)]] == [
        *range(len(inspector.ids))
    ]
    assert lines[1 + len(inspector.ids)].startswith("each query -> ")


def test_single_token_has_no_auto_selected_head_and_no_head_metrics(inspect, tmp_path):
    shown = inspect("--cells", "num", prompt="W")
    assert (shown.returncode, b"auto-selected" in shown.stdout) == (0, False)
    done = inspect("--view", "heads", prompt="W")
    assert (done.returncode, b"at least 2 tokens" in done.stderr) == (2, True)
    assert inspect("--html", tmp_path / "page", prompt="W").returncode == 0
    assert inspect("--html", tmp_path / "page", "--head", "mean").returncode == 0


def test_random_text_is_sampled_from_the_texts_tokens_if_there_are_16(inspector):
    assert inspector.heads().sampled_from.startswith("all ")
    rich = Inspector(inspector.bundle, bytes(range(97, 121)))
    assert len(set(rich.ids)) >= 16
    n = len(set(rich.ids))
    assert rich.heads().sampled_from == f"the {n} distinct tokens of this text"
    assert rich.heads().block_length == (rich.config.context_length - 1) // 2


def test_blocks_need_256_colors(inspect, monkeypatch):
    monkeypatch.setattr(rich_console.out, "_force_terminal", True)
    for system, has_blocks in [("standard", False), ("truecolor", True)]:
        monkeypatch.setattr(rich_console.out, "_color_system", ColorSystem[system.upper()])
        monkeypatch.setattr(rich_console.out, "no_color", False)
        shown = inspect("--cells", "block").stdout.decode()
        assert ("▀" in shown, "‘ ·:-=+*#%@’" in shown) == (has_blocks, not has_blocks)


def test_a_prompt_without_effect_is_named(inspect):
    note = b"note: --prompt has no effect on --view model, positions\n"
    assert note in inspect("--view", "model", "--view", "positions").stderr
    for more in (["--view", "tokens"], ["--json"]):
        assert b"note" not in inspect("--view", "model", *more).stderr
    assert b"note" not in inspect("--view", "model", "-q").stderr


def test_json_is_written_one_report_at_a_time(inspector):
    reports = inspector.attention([(0, head) for head in range(inspector.config.n_heads)])
    record = {"schema": "x\x9b", "attention": reports, "none": [], "text": {"a": [1, None]}}
    pieces = list(output.json_pieces(record))
    assert len(pieces) > len(reports) + 3
    assert json.loads("".join(pieces)) == json_value(record)
    assert "\x9b" not in "".join(pieces)


def test_attention_that_is_not_finite_is_null_in_json(inspector):
    [report] = inspector.attention([(0, 0)])
    weights = report.weights.copy()
    weights[1, 0] = np.nan
    assert json_value(replace(report, weights=weights))["weights"][1][0] is None


def test_rotary_positions_have_a_wide_picture_without_a_prompt(inspect, tmp_path, tokenizer):
    model = make_model("qwen3", vocab_size=tokenizer.vocab_size, context_length=300)
    model_dir.save(tmp_path / "long", model.config, tokenizer, model.to_arrays())
    shown = inspect("--view", "positions", model=tmp_path / "long", prompt=None)
    assert shown.returncode == 0, shown.stderr
    assert b"distances 0 to 63 of 300; --keys selects others" in shown.stdout
    later = inspect("--view=positions", "--keys=100:140", model=tmp_path / "long", prompt=None)
    assert b"distances 100 to 139 of 300" in later.stdout
    svg = tmp_path / "x.svg"
    done = inspect("--view=positions", "--svg", svg, model=tmp_path / "long", prompt=None)
    assert done.returncode == 0, done.stderr
    width, height = (int(n) for n in re.findall(r'="(\d+)"', svg.read_text())[:2])
    assert width > height
    rows = inspect("--view=positions", "--csv=-", model=tmp_path / "long", prompt=None).stdout
    assert len(rows.splitlines()) == 1 + 300 * model.config.n_rotated // 2


def test_activations_are_a_safetensors_file(inspect, inspector, tmp_path, trained):
    path = tmp_path / "x.safetensors"
    done = inspect("--activations", path, "--layer=1", "--parts=heads,logits", "--tail")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"self-check passed" in done.stderr
    entries = safetensors_file.read_header(path)
    arrays = safetensors_file.read_arrays(path, entries)
    expected = inspector.activations("1", "heads,logits")
    assert arrays.keys() == expected.keys() == {"heads.1", "logits"}
    returned = tgen.load(trained).activations("What is the king?", layer="1", parts="heads,logits")
    for name, array in arrays.items():
        assert np.allclose(array, expected[name], atol=1e-6)
        assert np.array_equal(returned[name], expected[name])
    metadata = safetensors_file.read_metadata(path)
    assert [token["id"] for token in json.loads(metadata["text"])] == inspector.ids
    assert metadata["model_sha256"] == model_dir.digest(inspector.bundle)
    assert json.loads(metadata["n_skipped"]) == 0
    piped = inspect("--activations=-", "--layer=1", "--parts=heads,logits").stdout
    assert piped == path.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    flags = ["--layer=1", "--parts=heads,logits"]
    assert inspect("--activations", tmp_path / "pipe", *flags).returncode == 0
    assert os.read(read, len(piped) + 1) == piped
    os.close(read)


def test_ablation_is_a_table_and_csv(inspect, inspector):
    (one,) = inspector.ablation("0.1+1", kind="mean").groups
    shown = inspect("--group", "0.1+1", "--ablate", "mean").stdout.decode()
    line = next(line for line in shown.splitlines() if line.startswith("0.1+1"))
    assert line.split()[1:4] == [f"{one.loss:.3f}", f"{one.cost:+z.3f}", f"{one.divergence:z.3f}"]
    assert f"{one.predictions[0].probability:.1%}" in line
    rows = inspect("--group", "0.1+1", "--ablate", "mean", "--csv=-").stdout.decode()
    rows = [*csv.DictReader(io.StringIO(rows))]
    assert [row["group"] for row in rows] == [""] * 3 + ["0.1+1"] * 3
    assert float(rows[3]["cost"]) == pytest.approx(one.cost, abs=1e-6)
    assert int(rows[3]["id"]) == one.predictions[0].id


def test_patching_is_a_heat_map_of_layers(inspect, inspector, tmp_path):
    residual, heads = inspector.patching(
        b"What is the king!", contrast=b"b", parts="residual,heads"
    )
    shown = inspect(*PATCH, "--parts=residual,heads", "--cells=num", "--width=200").stdout.decode()
    lines = shown.splitlines()
    assert lines[0].startswith("residual: share of the logit difference of ")
    assert lines[1].split() == [str(i) for i in range(len(inspector.ids))]
    assert lines[2].split()[-1] == "?|!"
    for layer in range(2):
        cells = lines[3 + layer].split()
        expected = [f"{100 * x:.0f}" if abs(x) >= 0.005 else "·" for x in residual.scores[layer]]
        assert cells == [str(layer), *expected]
    assert "heads: share" in shown
    rows = inspect(*PATCH, "--parts=residual,heads", "--csv=-").stdout.decode()
    rows = [*csv.DictReader(io.StringIO(rows))]
    assert len(rows) == residual.scores.size + heads.scores.size
    assert rows[len(inspector.ids) - 1]["other_token"] == "!"
    assert float(rows[-1]["score"]) == pytest.approx(heads.scores[-1, -1], abs=1e-6)
    for picture in ("--svg", "--vega"):
        assert inspect(*PATCH, picture, tmp_path / "x").returncode == 0
        assert "share of the logit difference" in (tmp_path / "x").read_text()
    wide = inspect(*PATCH, "--cells=list", "--top=2").stdout.decode()
    assert wide.splitlines()[1].startswith(f"   0 -> {residual.scores[0].argmax()} ")
    assert "rest " not in wide
    assert "each layer -> its largest positions" in wide
