"""llama.cpp's endpoints, and the page at /, over HTTP on a real port."""

from typing import Any

import pytest

from support.servers import ServerProcess
from tgen.loaded_model import LoadedModel

TEXT = "What is <|im_end|> 🤴?"


def test_text_and_tokens_are_converted_both_ways(
    served: ServerProcess, loaded: LoadedModel
) -> None:
    ids = loaded.tokenizer.encode(TEXT.encode())
    answer = served.post("/tokenize", {"content": TEXT}).json()
    assert answer == {"tokens": ids}
    assert served.post("/detokenize", answer).json() == {"content": TEXT}
    assert served.post("/tokenize", {"content": ""}).json() == {"tokens": []}
    start = served.post("/tokenize", {"content": "", "add_special": True}).json()
    assert start == {"tokens": loaded.encode("")} != {"tokens": []}
    pieces = served.post("/tokenize", {"content": TEXT, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    texts = [piece["piece"] for piece in pieces]
    parts = [text.encode() if isinstance(text, str) else bytes(text) for text in texts]
    assert b"".join(parts).decode() == TEXT
    assert any(isinstance(text, list) for text in texts)


def test_template_is_applied_and_shown(served: ServerProcess, loaded: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = served.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt == loaded.chat_format.render([messages])[0]
    assert prompt.count("<|im_start|>") == 2
    properties = served.http.get("/props").json()
    assert properties["chat_template"] == loaded.chat_format.template.source
    assert properties["default_generation_settings"]["n_ctx"] == 2048
    assert properties["model_alias"] == served.model


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"content": 5}, "content: invalid value 5"),
        ("/tokenize", {"content": "x", "parse_special": True}, "true, expected false"),
        ("/tokenize", {"content": "\ud800"}, "surrogates"),
        ("/detokenize", {"tokens": [10**9]}, "tokens: invalid token id"),
        ("/detokenize", {"tokens": ["x"]}, "a list of token ids"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "model": "y"}, "'y'"),
        ("/v1/embeddings", {"input": "x"}, "/v1/embeddings is not supported"),
    ],
)
def test_errors_name_the_field(served: ServerProcess, path: str, body: Any, words: str) -> None:
    answer = served.post(path, body)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_front_page_has_requests_that_work(served: ServerProcess) -> None:
    page = served.http.get("/")
    assert page.headers["content-type"].startswith("text/plain")
    assert f"serves {served.model}" in page.text
    assert f"{served.url}/v1/completions" in page.text
    for line in page.text.splitlines():
        method, *paths = line.replace(",", " ").split() or [""]
        if method in ("GET", "POST"):
            for path in paths:
                assert served.http.request(method, path).status_code in (200, 400), path
    assert served.http.head("/").status_code == 200
