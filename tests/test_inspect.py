"""`tgen inspect`: every view and output says what the reports say, whatever the tokens are."""

import csv
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from conftest import make_model
from tgen.checkpoint import directory
from tgen.cli import console, inspect_output
from tgen.cli.app import run
from tgen.cli.looking import TELLING
from tgen.cli.view import View
from tgen.cli.views.cells import draw
from tgen.cli.views.colours import colour, is_light
from tgen.cli.views.expected import lens_view, prediction_table, why_view
from tgen.cli.views.heatmap import HeatMap
from tgen.cli.views.heatmaps import attention_map
from tgen.cli.views.labels import label
from tgen.cli.views.spreadsheet import csv_rows, csv_text
from tgen.cli.views.text import text_view
from tgen.introspect.attention import AttentionRecorder
from tgen.introspect.look import Look
from tgen.reports import (
    AttentionReport,
    Contribution,
    LensReport,
    Prediction,
    TextReport,
    TokenReport,
    WhyReport,
    json_value,
)
from tgen.tokenizer import train_char

HOSTILE = [
    b"[/x]",
    b"[red]",
    b":smile:",
    b"\x1b[31m",
    "\u202e".encode(),
    "\u2028".encode(),
    b"\xe6\x97",
    "日本".encode(),
    "\u0301".encode(),
    b"</script>",
    b"<img onerror=x>",
    b"\0",
    b"",
    b"\n",
    b" \t\r",
]
N = len(HOSTILE)


def triangle(n, seed=0):
    weights = np.tril(np.random.default_rng(seed).random((n, n)).astype(np.float32) ** 4)
    return weights / weights.sum(axis=1, keepdims=True)


def report_of(weights, **values):
    usual = {"layer": 1, "head": 2, "kv_head": 2, "measure": "attention", "why": ""}
    return AttentionReport(weights=weights, **usual | values)


def printed(things, width=80, **options):
    console = Console(width=width, file=io.StringIO(), **options)
    console.print(*things, sep="\n")
    return console.file.getvalue()


def test_every_token_has_a_printable_label():
    for token in HOSTILE:
        shown = label(token)
        assert shown
        assert shown.isprintable()
    assert label(b" the\n") == "·the⏎"
    assert label(b"\xe6\x97") == "‹E6 97›"
    assert label("日本語".encode(), width=5) == "日本…"
    assert label("e\u0301".encode()) == "e\u0301"
    assert label("\u0301e".encode()) == "◌\u0301e"


def test_white_and_black_can_be_read_on_every_colour():
    def luminance(of):
        parts = [c / 255 for c in of]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for i in range(101):
        back = luminance(colour(i / 100))
        contrast = (back + 0.05) / 0.05 if is_light(colour(i / 100)) else 1.05 / (back + 0.05)
        assert contrast >= 4.5


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("cells", ["num", "block", "list"])
def test_hostile_tokens_survive_every_cell_at_every_width(width, cells):
    heat = attention_map(report_of(triangle(N)), HOSTILE, scale="sqrt")
    things = draw(heat, cells=cells, width=width, is_terminal=False)
    text = printed(things, width=width)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\u2028" not in text
    labels = [label(token) for token in HOSTILE]
    if cells == "list":
        flat = "".join(text.split("\n"))
        assert all(f"{i} {name} -> " in flat for i, name in enumerate(labels))
    else:
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "[/x]" in text
        assert ":smile" in text  # not an emoji


def test_views_of_tokens_survive_hostile_ones():
    tokens = [
        TokenReport(
            index=i, id=i, text=token, start=0, surprisal=1.5, rank=2, likeliest=1,
            likeliest_text=token, likeliest_probability=0.5,
        )
        for i, token in enumerate(HOSTILE)
    ]  # fmt: skip
    text = TextReport(
        tokens=tokens, n_bytes=9, nats_per_token=1.0, perplexity=2.7, bits_per_byte=None
    )
    candidates = [Prediction(id=i, text=t, probability=0.1, logit=1) for i, t in enumerate(HOSTILE)]
    lens = LensReport(
        layers=["embedding"],
        first=0,
        likeliest=[list(range(N))],
        likeliest_text=[HOSTILE],
        probabilities=np.full((1, N), 0.5, np.float32),
        query=0,
        candidates=[candidates],
        answer=0,
        answer_text=HOSTILE[0],
        ranks=[0],
        answer_probabilities=[0.5],
    )
    for token in HOSTILE:
        parts = [Contribution(part="layer 0, head 1", layer=0, head=1, logit=1.0)]
        why = WhyReport(
            query=0,
            target=1,
            target_text=token,
            probability=0.5,
            logit=1.0,
            parts=parts,
            difference=0.0,
        )
        views = [
            *text_view(text, rows=range(N)),
            prediction_table(candidates, after=label(token)),
            *lens_view(lens, HOSTILE, width=160),
            *why_view(why, token, top=3),
        ]
        shown = printed(views, width=160)
        assert not {"\x1b", "\u202e", "\u2028", "\0"} & set(shown)
        assert label(token, width=10) in shown
    record = json.loads(json.dumps(json_value(text), allow_nan=False))
    rows = list(csv.reader(io.StringIO(csv_text(csv_rows(text, HOSTILE)))))
    for i, token in enumerate(HOSTILE):
        assert rows[i + 1][2] == label(token)
        if i != 6:
            assert record["tokens"][i]["text"].encode() == token
    assert record["tokens"][6]["bytes"] == "5pc="


def test_digits_are_percent_and_what_is_cut_is_said():
    weights = triangle(60)
    tokens = [f"t{i}".encode() for i in range(60)]
    heat = attention_map(report_of(weights), tokens, scale="sqrt")
    text = printed(draw(heat, cells="num", width=80, is_terminal=False))
    lines = text.splitlines()
    last = next(line for line in lines if line.startswith("  59 "))
    shown = [last[14 + 3 * i : 17 + 3 * i].strip() for i in range(22)]
    assert shown == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[59, 38:]]
    held = weights[20:, 38:].sum() / 40
    flat = " ".join(text.split())
    assert f"keys 38 to 59 of 60 hold {held:.0%} of these rows' weight" in flat
    assert "queries 20 to 59 of 60" in flat


def test_hidden_keys_are_said_and_nothing_is_scaled_up():
    weights = triangle(5)
    heat = attention_map(report_of(weights), [b"a", b"b", b"c", b"d", b"e"], scale="sqrt")
    things = draw(heat, cells="num", width=80, is_terminal=False, columns=range(1, 5))
    text = printed(things)
    assert f"keys 1 to 4 of 5 hold {weights[:, 1:].sum() / 5:.0%}" in text
    row = next(line for line in text.splitlines() if line.startswith("   4 "))
    assert row.split()[2:] == [f"{w * 100:.0f}" if w >= 0.005 else "·" for w in weights[4, 1:]]


def test_a_list_leaves_nothing_out():
    weights = triangle(12)
    heat = attention_map(report_of(weights), [b"x"] * 12, scale="sqrt")
    lines = printed(draw(heat, cells="list", width=200, is_terminal=False), width=200).splitlines()
    for i, line in enumerate(lines[1:13]):
        numbers = [float(part) for part in line.split() if "." in part]
        assert sum(numbers) == pytest.approx(1, abs=0.03), line
        assert ("rest" in line) == (i >= 4)


def test_blocks_show_every_cell_and_pooled_ones_their_largest():
    weights = triangle(20)
    heat = attention_map(report_of(weights), [b"x"] * 20, scale="linear")
    options = {"cells": "block", "is_terminal": True}
    marks = printed(draw(heat, width=80, **options)).splitlines()[2:22]
    for i, line in enumerate(marks):
        cells = line[14:].ljust(20)
        assert cells[i + 1 :].strip() == ""
        for j in range(i + 1):
            level = round(float(weights[i, j]) * 63) * 10 // 64
            assert cells[j] == " ·:-=+*#%@"[level]
    # In colour two rows a line: foreground above, background below.
    text = printed(
        draw(heat, width=80, **options), force_terminal=True, color_system="truecolor"
    ).splitlines()
    assert len(text) == 1 + 1 + 10 + 1
    red, green, blue = colour(round(float(weights[18, 0]) * 63) / 63)
    assert f"38;2;{red};{green};{blue}" in text[11]
    pooled = printed(draw(heat, width=14 + 7, **options), width=200)
    assert "each cell is the largest of 3 x 3" in pooled
    first = pooled.splitlines()[2][14:]
    level = round(float(weights[:3, :3].max()) * 63) * 10 // 64
    assert first[0] == " ·:-=+*#%@"[level]
    assert len(first.rstrip()) == 1


def test_positions_are_drawn_with_their_sign():
    values = np.array([[-1, 0, 1], [1, 0, -1]], np.float32)
    heat = HeatMap(
        title="x", values=values, rows=["0", "1"], columns=["0", "1", "2"], low=-1, high=1,
        scale="linear", causal=False, percent=False,
    )  # fmt: skip
    lines = printed(draw(heat, cells="auto", width=80, is_terminal=False)).splitlines()
    assert lines[2][14:] == "    " + "++++" + "@@@@"
    assert lines[3][14:] == "@@@@" + "++++"


@pytest.fixture(scope="module")
def look(trained):
    return Look(directory.load(trained), b"What is the king?")


@pytest.fixture
def inspect(trained, capsysbinary):
    """Runs the command in this process, on a text and a model, unless others are given."""

    def run_here(*arguments, model=trained, prompt="What is the king?"):
        models = [] if model is None else ["-m", str(model)]
        status = run(["inspect", *models, "-p", prompt, *map(str, arguments)])
        out, err = capsysbinary.readouterr()
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return run_here


def test_the_json_is_what_the_reports_say(inspect, look):
    done = inspect(*(f"--view={view}" for view in View), "--layer", "0", "--head", "all")
    assert done.returncode == 0, done.stderr
    shown = inspect("--json", *(f"--view={view}" for view in View), "--layer", "0", "--head", "all")
    record = json.loads(shown.stdout)
    assert record["schema"] == "tgen.inspect/2"
    assert [token["id"] for token in record["text"]] == look.ids
    wanted = look.attention([(0, head) for head in range(look.config.n_heads)])
    for one, report in zip(record["attention"], wanted, strict=True):
        assert [len(row) for row in one["weights"]] == list(range(1, len(look.ids) + 1))
        assert one["weights"][-1] == pytest.approx(report.weights[-1].tolist(), abs=1e-6)
    heads = look.heads()
    assert len(record["heads"]["heads"]) == look.config.n_heads  # of the one layer
    assert record["heads"]["heads"][0]["previous"] == pytest.approx(heads.heads[0].previous, 1e-4)
    assert record["tokens"]["bits_per_byte"] == pytest.approx(look.text.bits_per_byte, 1e-5)
    assert record["predict"][0]["id"] == look.predictions()[0].id
    assert record["lens"]["answer"] == record["predict"][0]["id"] == record["why"]["target"]
    assert all(check["holds"] for check in record["verify"])
    assert record["training"][0]["kind"] == "PlanReport"


def test_every_csv_number_comes_back_exactly(inspect, look):
    for view in ("attention", "rollout"):
        done = inspect("--view", view, "--layer=all", "--head=all", "--csv=-", "-q")
        if view == "attention":
            shape = look.config.n_layers, look.config.n_heads
            places = [(la, h) for la in range(shape[0]) for h in range(shape[1])]
            wanted = {(r.layer, r.head): r.weights for r in look.attention(places)}
        else:
            wanted = {(r.layer, "mean"): r.weights for r in look.rollout()}
        rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
        n = len(look.ids)
        assert len(rows) == len(wanted) * n * (n + 1) // 2
        for row in rows:
            place = int(row["layer"]), int(row["head"]) if row["head"].isdigit() else row["head"]
            value = wanted[place][int(row["query"]), int(row["key"])]
            assert np.float32(row["weight"]) == pytest.approx(value, abs=1e-6)
    weights = triangle(30)
    text = csv_text(csv_rows([report_of(weights)], [b"x"] * 30))
    for row in csv.DictReader(io.StringIO(text)):
        assert np.float32(row["weight"]) == weights[int(row["query"]), int(row["key"])]


def test_files_are_written_and_said(inspect, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["--csv=a.csv", "--vega=a.json", "--html=a.html", "--svg=a.svg"]
    done = inspect(*names)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    for name in names:
        path = tmp_path / name.partition("=")[2]
        assert f"wrote {path.name}, {path.stat().st_size:,} bytes" in done.stderr.decode()


def test_a_pipe_gets_no_colour_and_a_footer(inspect):
    for cells in ("num", "block", "list"):
        assert b"\x1b" not in inspect("--cells", cells).stdout
    done = inspect("--cells", "num")
    assert "checked: rows sum to 1" in " ".join(done.stdout.decode().split())


def test_two_models_are_compared(inspect, trained, tmp_path):
    bundle = directory.load(trained)
    arrays = dict(bundle.arrays)
    arrays["blocks.0.attention.qkv_proj.weight"] *= 3
    directory.save(tmp_path / "other", bundle.config, bundle.tokenizer, arrays)
    models = ["-m", trained, "-m", tmp_path / "other", "--view", "heads"]
    record = json.loads(inspect(*models, "--json", model=None).stdout)
    text = inspect(*models, model=None).stdout.decode()
    for a, b in zip(*(report["heads"] for report in record["heads"]), strict=True):
        line = next(li for li in text.splitlines() if li.startswith(f"{a['layer']}.{a['head']}"))
        for name, digits in [("effective_keys", 1), ("previous", 2), ("first", 2)]:
            assert f"{b[name]:.{digits}f} {b[name] - a[name]:+.{digits}f}" in line
    assert any(a["previous"] != b["previous"] for a, b in zip(*(
        report["heads"] for report in record["heads"]), strict=True))  # fmt: skip
    directory.save(
        tmp_path / "wide",
        (wide := make_model("llama", vocab_size=bundle.config.vocab_size)).config,
        bundle.tokenizer,
        wide.to_arrays(),
    )
    other = ["-m", trained, "-m", tmp_path / "wide", "--view", "heads"]
    done = inspect(*other, model=None)
    assert (done.returncode, b"of 4 heads" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--layer", "9"], "--layer"),
        (["--head", "9"], "--head"),
        (["--query", "99"], "--query"),
        (["--keys", "99"], "--keys"),
        (["--view", "nothing"], "--view"),
        (["--view", "heads", "--svg", "x.svg"], "--svg"),
        (["--view", "model", "--csv", "x.csv"], "--csv"),
        (["--view", "heads", "--view", "tokens", "--csv", "x.csv"], "--csv"),
        (["--view", "heads", "--view", "heads"], "--view"),
        (["--layer", "all", "--head", "all", "--png", "x.png"], "--png"),
        (["--svg", "-", "--html", "-"], "stdout"),
        (["--svg", "x.svg", "--json"], "--json"),
        (["--view", "why", "--target", ""], "--target"),
        (["--query", "0:2", "--svg", "x.svg"], "--query"),
        (["--query", "0:2", "--csv", "x.csv"], "--query"),
        (["--keys", "0:2", "--json"], "--keys"),
        (["--view", "heads", "--html", "x.html"], "--html"),
        (["--target", "x"], "--target"),
        (["--ablate", "zero"], "--ablate"),
        (["--view", "tokens", "--measure", "value"], "--measure"),
        (["--view", "heads", "--head", "mean"], "--head"),
    ],
)
def test_what_does_not_go_together_is_refused(inspect, arguments, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = inspect(*arguments)
    said = done.stderr.decode()
    assert done.returncode == 2, said
    assert why in said
    assert len(said.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_a_check_that_fails_ends_in_an_error(inspect, monkeypatch):
    honest = AttentionRecorder.attention
    monkeypatch.setattr(
        AttentionRecorder,
        "attention",
        lambda self, layer, q, k, v, mixed: honest(self, layer, q * 2, k, v, mixed),
    )
    for view in ("attention", "verify", "heads"):
        done = inspect("--view", view)
        assert (done.returncode, b"checks fail" in done.stderr) == (1, True)


def test_a_check_that_failed_is_not_forgotten(inspect, monkeypatch):
    honest = AttentionRecorder.attention

    def wrong_below(self, layer, q, k, v, mixed):
        honest(self, layer, q * (2 if layer == 1 else 1), k, v, mixed)

    monkeypatch.setattr(AttentionRecorder, "attention", wrong_below)
    views = ["--view", "heads", "--view", "attention", "--layer", "0", "--head", "0"]
    for more in ([], ["--json"]):
        assert inspect(*views, *more).returncode == 1
    views[1] = "verify"
    assert inspect(*views).returncode == 1


def test_weights_that_are_not_numbers_are_no_success(inspect, trained, tmp_path):
    bundle = directory.load(trained)
    bundle.arrays["blocks.1.attention.qkv_proj.weight"][0, 0] = np.nan
    directory.save(tmp_path / "nan", bundle.config, bundle.tokenizer, bundle.arrays)
    done = inspect("--layer", "1", model=tmp_path / "nan")
    assert (done.returncode, b"checks fail" in done.stderr) == (1, True)


def test_width_tail_and_hidden_keys(inspect, look, monkeypatch):
    for width in (40, 120):
        lines = inspect("--cells", "num", "--width", width, prompt="a b c d e f g h i j k l")
        text = lines.stdout.decode()
        monkeypatch.setattr(console.out, "width", 80)
        assert max(map(cell_len, text.splitlines())) <= width
        assert ("keys 1 to" not in text and " 11 " in text) or width == 40
    long = "What is the king? " * 30
    assert b"--tail" in inspect(prompt=long).stderr
    record = json.loads(inspect("--tail", "--json", prompt=long).stdout)
    ids = look.tokenizer.encode(long.encode())
    assert [token["id"] for token in record["text"]] == ids[-look.config.context_length :]
    assert b"keys 1 to" in inspect("--cells", "num", "--hide-first").stdout


def test_only_models_of_one_tokenizer_are_compared(inspect, trained, tmp_path):
    other = train_char([b"What is the king?"])
    model = make_model("qwen3", vocab_size=300)
    directory.save(tmp_path / "other", model.config, other, model.to_arrays())
    two = ["-m", trained, "-m", tmp_path / "other", "--view", "heads"]
    done = inspect(*two, model=None)
    assert (done.returncode, b"different tokens" in done.stderr) == (2, True)


def test_a_pipe_and_a_link_are_written_to_as_they_are(inspect, tmp_path):
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


def test_a_page_opens_at_the_telling_head_and_has_a_limit(inspect, monkeypatch):
    page = inspect("--html", "-").stdout.decode()
    assert page.count(TELLING) >= 1
    monkeypatch.setattr(inspect_output, "_PAGE_LIMIT", 100)
    done = inspect("--html", "-")
    assert (done.returncode, b"--layer" in done.stderr) == (2, True)


def test_a_post_norm_model_says_why_it_has_no_lens(inspect, tmp_path, tokenizer):
    path = tmp_path / "classic"
    config = make_model("classic", vocab_size=tokenizer.vocab_size)
    directory.save(path, config.config, tokenizer, config.to_arrays())
    for view in ("lens", "why"):
        done = inspect("--view", view, model=path)
        assert done.returncode == 2
        assert b"classic" in done.stderr
    assert inspect("--html", tmp_path / "x", model=path).returncode == 0
