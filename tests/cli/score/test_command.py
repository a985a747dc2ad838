"""`tgen score`: the same numbers as a table, as JSON, from stdin and from Python."""

import json
import math

import pytest

from support.adapters import save_adapter
from support.command import tgen
from support.models import TEXT, make_model
from tgen.checkpoint import model_dir
from tgen.cli.app import run
from tgen.python_api import load

ROWS = [{"text": f"What is a crown? The king said {i}."} for i in range(12)]


@pytest.fixture
def score(trained, tmp_path, capsysbinary):
    """Run `tgen score` in this process; return its status, records or text, and stderr."""
    (tmp_path / "plays.txt").write_bytes(TEXT[:3000])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def run_score(*arguments):
        named = [tmp_path / one if one in ("plays.txt", "rows.jsonl") else one for one in arguments]
        status = run(["score", "-m", str(trained), "--threads", "1", *map(str, named)])
        out, err = capsysbinary.readouterr()
        if "--json" in arguments:
            return status, [json.loads(line) for line in out.splitlines()], err.decode()
        return status, out.decode(), err.decode()

    return run_score


@pytest.fixture
def other(tokenizer, tmp_path):
    """Return a random model, whose tokens are not those of the trained model."""
    model = make_model("gpt2", vocab_size=tokenizer.vocab_size)
    model_dir.save(tmp_path / "other", model.config, tokenizer, model.to_arrays())
    return tmp_path / "other"


def test_json_equals_the_score_in_python(score, trained):
    status, (document, total), err = score("plays.txt", "--json", "--stride", 8)
    assert status == 0, err
    model = load(trained, threads=1)
    text = TEXT[:3000]
    assert total["bits_per_byte"] == document["bits_per_byte"] == model.score(text, stride=8)
    assert total["n_tokens"] == len(model.encode(text))
    assert total["perplexity"] == pytest.approx(math.exp(total["nats"] / total["n_tokens"]))
    assert total["stride"] == 8
    assert total["context_length"] == 32
    assert total["start_ids"] == [model.tokenizer.end_of_text]
    assert {"schema": "tgen.score/1", "kind": "total", "unit": "blocks"}.items() <= total.items()
    assert total["n_units"] == 3000 // (4 * 32)
    assert total["standard_error"] == document["standard_error"] > 0
    assert "predicted from 25 to 32 tokens" in err


def test_tokens_add_up_to_their_document(score):
    status, records, err = score("rows.jsonl", "--json", "--per-token")
    assert status == 0, err
    assert "standard error" not in err
    for i, row in enumerate(ROWS):
        tokens = [one for one in records if one["kind"] == "token" and one["document"] == i]
        (document,) = [o for o in records if o["kind"] == "document" and o["document"] == i]
        assert "".join(token["text"] for token in tokens) == row["text"]
        assert document["n_tokens"] == len(tokens)
        assert document["nats"] == pytest.approx(-sum(token["logprob"] for token in tokens))
        assert document["name"].endswith(f"rows.jsonl#{i + 1}")
    total = records[-1]
    documents = [one for one in records if one["kind"] == "document"]
    assert total["nats"] == pytest.approx(sum(one["nats"] for one in documents))
    assert total["n_bytes"] == sum(len(row["text"]) for row in ROWS)
    assert (total["unit"], total["n_units"]) == ("documents", 12)


def test_table_has_the_numbers_of_the_json(score):
    _, records, _ = score("rows.jsonl", "plays.txt", "--json")
    status, out, err = score("rows.jsonl", "plays.txt")
    assert status == 0, err
    assert "\ncolumn error: standard error of bits/byte, from 13 documents\n" in err
    header, *lines = out.splitlines()
    assert header.split() == ["bits/byte", "error", "perplexity", "tokens", "bytes", "document"]
    assert len(lines) == len(records) == 14
    for line, record in zip(lines, records, strict=True):
        cells = line.replace(",", "").split()
        assert cells[0] == f"{record['bits_per_byte']:.4f}"
        error = record["standard_error"]
        assert cells[1] == ("–" if error is None else f"{error:.4f}")
        assert cells[3:5] == [str(record["n_tokens"]), str(record["n_bytes"])]
    assert lines[-1].endswith("total of 13 documents")
    _, tokens, _ = score("plays.txt", "--per-token")
    header, *lines = tokens.splitlines()
    assert header.split() == ["token", "id", "bits", "rank", "text"]
    n_tokens = records[-2]["n_tokens"]
    assert [int(line.split()[0]) for line in lines[:-2]] == list(range(n_tokens))
    assert lines[-1].split()[3].replace(",", "") == str(n_tokens)


def test_stdin_and_a_file_have_the_same_score(trained, tmp_path):
    (tmp_path / "text").write_bytes(TEXT[:500])
    command = ["score", "-m", trained, "-q", "--json"]
    piped = tgen(*command, "-", stdin=TEXT[:500])
    assert piped.returncode == 0, piped.stderr
    assert piped.stderr == b""
    named = tgen(*command, tmp_path / "text")
    assert piped.stdout.replace(b'"-"', b"") == named.stdout.replace(
        json.dumps(str(tmp_path / "text")).encode(), b""
    )


def test_an_adapter_is_named_by_its_own_path(score, trained, tmp_path):
    adapter = save_adapter(tmp_path / "kb", trained)
    status, out, err = score("plays.txt", "--compare", adapter)
    assert status == 0, err
    assert f"\n{adapter} · context 32" in err
    assert out.splitlines()[-1].startswith(f"{trained} is better than {adapter} by ")
    assert "\ncolumns error and p: of the difference" in err


def test_two_models_side_by_side(score, other, trained):
    status, (document, total), err = score("plays.txt", "--compare", other, "--json")
    assert status == 0, err
    alone = [load(path, threads=1).score(TEXT[:3000]) for path in (trained, other)]
    assert [total["bits_per_byte"], total["other"]["bits_per_byte"]] == alone
    difference = total["difference"]
    assert difference["bits_per_byte"] == pytest.approx(alone[0] - alone[1])
    assert difference["p_value"] < 0.001
    assert difference["n_units"] == 3000 // (4 * 48)  # the longer context
    assert document["difference"] == difference
    assert total["compare"]["context_length"] == 48
    _, out, _ = score("plays.txt", "--compare", other)
    assert f"{trained} is better than {other} by" in out
    _, out, _ = score("rows.jsonl", "--compare", trained)
    assert "no difference" in out


def test_wrong_options_are_usage_errors(score, trained, capsysbinary):
    status, _, err = score("plays.txt", "--stride", 33)
    assert status == 2
    assert "--stride: 33 is more than the context" in err
    assert run(["score", "-m", str(trained)]) == 2
    assert b"error: no text\nhint: name a file, or - for stdin" in capsysbinary.readouterr().err
    assert score("plays.txt", "--stride", 0)[0] == 2
    assert score("plays.txt", "--per-token", "--compare", trained)[0] == 2
    assert score("missing.txt")[0] == 1
