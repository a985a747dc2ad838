"""The endpoints of the live page: what they answer equals what the model and the reports say."""

import base64
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command import start
from support.models import make_model
from support.servers import ServerProcess, serving
from tgen.checkpoint import model_dir
from tgen.checkpoint.model_dir import load
from tgen.inspection.inspector import Inspector
from tgen.inspection.logit_attribution import attribute_logit
from tgen.loaded_model import LoadedModel
from tgen.machine.child import Child
from tgen.serve.http_error import HttpError
from tgen.serve.inspection import InspectionProcess
from tgen.tokenizer import train_char

TEXT = "What is a tree?"


def ask(server: ServerProcess, view: str, **body: Any) -> dict[str, Any]:
    answer = server.post(f"/tgen/{view}", body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def unpack(weights: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(weights), "<u2") / 65535


def test_tokens_are_those_of_the_prompt_with_their_probabilities(
    served: ServerProcess, loaded: LoadedModel
) -> None:
    answer = ask(served, "tokens", bytes=encoded(TEXT), top=3)
    expected = loaded.score_prompt(loaded.encode(TEXT), 3)
    for token, scored in zip(answer["tokens"], expected, strict=True):
        assert token["id"] == scored.id
        assert base64.b64decode(token["bytes"]) == loaded.vocabulary.bytes_of(scored.id)
        assert token["logprob"] == pytest.approx(scored.logprob, abs=1e-9)
        assert [one["id"] for one in token["top"]] == [i for i, _ in scored.top_logprobs]
    again = ask(served, "tokens", ids=[token["id"] for token in answer["tokens"]], top=3)
    assert again == answer
    messages = [{"role": "user", "content": TEXT}]
    chat = ask(served, "tokens", messages=messages, top=0)
    assert [token["id"] for token in chat["tokens"]] == loaded.chat_format.encode(messages)
    assert set(loaded.chat_format.end_ids) <= set(chat["ends"])


def test_a_model_without_a_template_refuses_messages_without_its_path(tmp_path: Path) -> None:
    tokenizer = train_char([b"a b"])
    plain = make_model("llama", vocab_size=tokenizer.vocab_size, context_length=32)
    model_dir.save(tmp_path / "plain", plain.config, tokenizer, plain.to_arrays())
    with serving(tmp_path / "plain") as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        error = server.post("/tgen/tokens", body).json()["error"]
    assert error["code"] == "no_template"
    assert str(tmp_path) not in error["message"]


def test_generated_tokens_are_those_of_the_completion(
    served: ServerProcess, loaded: LoadedModel
) -> None:
    body = {"prompt": TEXT, "max_tokens": 12, "seed": 4, "ignore_eos": True}
    completion = served.post("/v1/completions", body).json()
    whole = ask(served, "generate", **body, logprobs=2)
    data = b"".join(base64.b64decode(token["bytes"]) for token in whole["tokens"])
    assert data.decode(errors="replace") == completion["choices"][0]["text"]
    assert whole["tokens"][-1]["finish"] == "length"
    assert (whole["seed"], whole["prompt_tokens"]) == (4, len(loaded.encode(TEXT)))
    streamed = served.post("/tgen/generate", body | {"logprobs": 2, "stream": True}).text
    lines = re.findall(r"^data: (.*)$", streamed, re.MULTILINE)
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert events[0] == {name: whole[name] for name in ("model", "seed", "prompt_tokens")}
    assert [token for event in events[1:] for token in event["tokens"]] == whole["tokens"]


def test_attention_and_reasons_are_those_of_the_inspector(
    served: ServerProcess, loaded: LoadedModel, chat_model: Path
) -> None:
    ids = loaded.encode(TEXT)
    inspector = Inspector(load(chat_model), TEXT.encode())
    assert inspector.ids == ids
    (report,) = inspector.attention([(1, 0)])
    answer = ask(served, "attention", ids=ids, layer=1, head=0)
    triangle = report.weights[np.tril_indices(len(ids))]
    assert np.abs(unpack(answer["weights"]) - triangle).max() < 1e-5
    heads = ask(served, "heads", ids=ids)
    assert heads["side"] == len(ids)
    assert np.abs(unpack(heads["pictures"][1][0]) - triangle).max() < 1e-5
    query = len(ids) - 2
    why = ask(served, "why", ids=ids, query=query, target=ids[-1])
    expected = attribute_logit(
        inspector.model, inspector.tokenizer, ids, query=query, target=[ids[-1]]
    )
    assert why["logit"] == pytest.approx(expected.logit, abs=1e-4)
    by_position = {token.position: token for token in expected.tokens}
    for token in why["tokens"]:
        one = by_position[token["index"]]
        assert token["attention"] == pytest.approx(one.logit, abs=1e-4)
        assert one.logit_without is not None
        difference = one.logit_without - expected.logit
        assert token["without"] == pytest.approx(difference, abs=1e-4)
    assert sum(why["sums"].values()) + why["all_tokens"] == pytest.approx(why["logit"], abs=1e-4)
    first = ask(served, "why", ids=ids, query=query, target=ids[-1], left_out=0)
    assert first["parts"] == why["parts"]
    assert all(token["without"] is None for token in first["tokens"])
    lens = ask(served, "lens", ids=ids, query=query)
    last = inspector.logit_lens(query=query)
    assert lens["answer_ranks"] == last.answer_ranks


@pytest.mark.parametrize(
    ("view", "body", "status", "part"),
    [
        ("tokens", {}, 400, "one of bytes, ids and messages"),
        ("tokens", {"bytes": "?"}, 400, "base64"),
        ("tokens", {"ids": []}, 400, "a list of token ids"),
        ("tokens", {"ids": [10**9]}, 400, "invalid token id"),
        ("tokens", {"ids": [1], "more": 1}, 400, "more is not supported"),
        ("tokens", {"ids": [1] * 3000}, 400, "3,000 tokens (limit 2,048)"),
        ("next", {"ids": [1] * 3000}, 400, "3,000 tokens (limit 2,048)"),
        ("next", {"ids": "1"}, 400, "a list of token ids"),
        ("cache", {"ids": [1], "length": 1}, 400, "length"),
        ("cache", {"ids": [1], "length": 2049}, 400, "2,048"),
        ("attention", {"ids": [1], "layer": 99}, 400, "layer: invalid value 99"),
        ("attention", {"ids": [1], "head": -1}, 400, "head"),
        ("lens", {"ids": [1], "query": 1}, 400, "query: invalid value 1"),
        ("why", {"ids": [1, 2], "target": 10**9}, 400, "invalid token id"),
        ("why", {"ids": [1, 2], "left_out": 33}, 400, "left_out"),
        ("heads", {"ids": [1], "model": "gone"}, 404, "does not exist"),
        ("heads", {"ids": [1], "model": 1}, 400, "model: expected a string"),
        ("sources", {"text": "a"}, 404, "train with --index"),
        ("sources", {"text": ""}, 400, "text"),
        ("sources", {"text": "a" * 9999}, 400, "text"),
        ("generate", {"prompt": "a", "logprobs": 51}, 400, "at most 50"),
        ("page/../app.py", {}, 404, ""),
    ],
)
def test_a_body_that_cannot_be_answered_is_an_error_with_its_field(
    served: ServerProcess, view: str, body: dict[str, Any], status: int, part: str
) -> None:
    answer = served.post(f"/tgen/{view}", body)
    assert answer.status_code == status, answer.text
    assert part in answer.json()["error"]["message"]


def test_static_files_need_no_key_but_a_local_host_and_allow_only_themselves(
    chat_model: Path,
) -> None:
    with serving(chat_model, key="secret") as server:
        plain = {"Authorization": "", "Accept": "text/html"}
        page = server.http.get("/", headers=plain)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (
            re.search(r"<script(?! src=| type=\"module\" src=)| style=| on\w+=", page.text) is None
        )
        names = re.findall(r'(?:src|href)="(tgen/page/[^"]+)"', page.text)
        assert names
        for name in names:
            assert server.http.get(f"/{name}", headers=plain).status_code == 200
        assert server.http.get("/", headers={"Authorization": ""}).status_code == 401
        for view in ("model", "tokens", "heads"):
            answer = server.http.post(f"/tgen/{view}", json={"ids": [1]}, headers=plain)
            assert answer.status_code == 401
    with serving(chat_model) as server:
        for path in ("/", "/tgen/page/app.js"):
            headers = {"Host": "evil.example", "Accept": "text/html"}
            assert server.http.get(path, headers=headers).status_code == 403
        sent = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        answer = server.http.options("/tgen/tokens", headers=sent)
        assert "access-control-allow-origin" not in answer.headers


def test_sources_are_shown_on_this_machine_or_with_the_option(
    indexed_model: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(indexed_model, tmp_path / "m")
    with serving(out) as server:
        answer = ask(server, "sources", text="So a rare line of words, he said")
        assert answer["passages"][0]["text"] == "rare line of words"
        assert answer["passages"][0]["count"] == 1
        place = answer["passages"][0]["places"][0]
        assert (place["file"], place["line"]) == ("verses.txt", 2)
    for more, status in (([], 403), (["--sources"], 200)):
        with serving(out, "--host", "0.0.0.0", *more, key="k") as server:
            assert server.post("/tgen/sources", {"text": "a rare line"}).status_code == status
    record, index = out / "training" / "run.json", out / "training" / "text.index"
    with serving(out) as server:
        of_another = json.loads(record.read_text()) | {"corpus_sha256": "0" * 64}
        record.write_text(json.dumps(of_another))
        for problem in ("belongs to another corpus", "is damaged"):
            refusal = server.post("/tgen/sources", {"text": "a rare line"})
            assert refusal.status_code == 404
            assert f"an index that {problem}" in refusal.json()["error"]["message"]
            index.write_bytes(index.read_bytes()[:-9])


@pytest.mark.parametrize("view", ["lens", "tokens", "sources"])
def test_a_deeply_nested_body_is_an_error(served: ServerProcess, view: str) -> None:
    nested = '{"ids":' + "[" * 900 + "]" * 900 + "}"
    headers = {"Content-Type": "application/json"}
    answer = served.http.post(f"/tgen/{view}", content=nested.encode(), headers=headers)
    assert answer.status_code == 400


def test_a_model_that_has_changed_is_not_inspected(chat_model: Path, tmp_path: Path) -> None:
    shutil.copytree(chat_model, tmp_path / "m")
    with serving(tmp_path / "m") as server:
        weights = tmp_path / "m" / "model.safetensors"
        os.utime(weights, ns=(0, 10**18))
        answer = server.post("/tgen/heads", {"ids": [5, 6]})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_not_loaded"
        weights.unlink()
        answer = server.post("/tgen/heads", {"ids": [5, 6]})
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text


def test_closing_ends_an_inspection_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    inspection = InspectionProcess()
    silent = Child("-c", "import sys; sys.stdin.read()")
    monkeypatch.setattr(inspection, "_child", silent)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(inspection._ask, "{}")
        while silent.process is None:
            pass
        inspection.close()
        with pytest.raises(HttpError, match="memory"):
            answer.result()


def test_an_inspection_that_takes_too_much_cpu_time_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inspection = InspectionProcess()
    program = "import tgen.machine.resource_limit as r; r.limit_cpu_time(0)\nwhile 1: pass"
    monkeypatch.setattr(inspection, "_child", Child("-c", program))
    with pytest.raises(HttpError, match="CPU time") as raised:
        inspection._ask("{}")
    assert (raised.value.status, raised.value.code) == (503, "timeout")
    inspection.close()


@pytest.mark.parametrize("command", ["serve", "inspect"])
def test_the_page_is_opened_with_key_and_text_in_the_fragment(
    chat_model: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    os.mkfifo(opened)
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho \"$1\" > '{opened}'\n")
    browser.chmod(0o755)
    more = ["--port", 0, "--open"] if command == "serve" else ["--live", "--prompt", "a & b"]
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setenv("TGEN_API_KEY", "a#b")
    with start(command, "-m", chat_model, *more, stderr=subprocess.PIPE) as process:
        address = opened.read_text().strip()
        process.terminate()
        process.communicate(timeout=900)
    text = "" if command == "serve" else "&text=a%20%26%20b"
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/#key=a%23b{text}", address)
