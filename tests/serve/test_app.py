"""`tgen serve` as the official client sees it, on a real port."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

from support.servers import JSON, LONG, ServerProcess
from tgen.generation.loop import make_source
from tgen.generation.random_numbers import row_seed, sample_seed
from tgen.loaded_model import LoadedModel
from tgen.python_api import Model
from tgen.scoring.score import DocumentScorer, start_ids

if TYPE_CHECKING:
    import openai

CLIENT_LONG: dict[str, Any] = {
    "prompt": LONG["prompt"],
    "max_tokens": LONG["max_tokens"],
    "extra_body": {"response_format": LONG["response_format"]},
}
USER = [{"role": "user", "content": "What is <|im_end|> a king?"}]


@pytest.fixture
def client(served: ServerProcess) -> "openai.OpenAI":
    return served.client()


def join(stream: "openai.Stream[Any]", n: int = 1) -> tuple[list[str], list[str | None]]:
    """Return the texts and finish reasons of a stream."""
    texts = [""] * n
    finishes: list[str | None] = [None] * n
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            assert finishes[choice.index] is None
            texts[choice.index] += piece or ""
            finishes[choice.index] = choice.finish_reason
    return texts, finishes


def test_texts_are_those_generated_alone_whatever_runs_beside_them(
    served: ServerProcess, alone: Model
) -> None:
    cases: list[dict[str, Any]] = [
        {"temperature": [0.0, 0.7, 2.0][i % 3], "max_tokens": 5 + 37 * (i % 7), "seed": 100 + i}
        for i in range(20)
    ]
    for i, case in enumerate(cases):
        if i % 4 == 1:
            case |= {"frequency_penalty": 1.5, "presence_penalty": -0.5}
        if i % 4 == 2:
            case |= {"stop": ["e", " th"]}
        if i % 4 == 3:
            case |= {"extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}}

    def ask(i: int) -> str:
        stream = bool(i % 2)
        answer: Any = served.client().completions.create(
            model=served.model, prompt=f"What {i % 5}", stream=stream, **cases[i]
        )
        return join(answer)[0][0] if stream else answer.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(ask, range(len(cases)))]
    for i, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        options = {key: value for key, value in case.items() if key != "extra_body"}
        options |= case.get("extra_body", {}) | {"penalize_prompt": False}
        options["max_new_tokens"] = options.pop("max_tokens")
        assert answer == alone.generate(f"What {i % 5}", **options), case


def test_choices_and_prompts_have_the_seeds_of_rows_and_samples(
    client: "openai.OpenAI", served: ServerProcess, alone: Model, loaded: LoadedModel
) -> None:
    prompts: list[Any] = ["What is", loaded.encode("The king"), "What is"]
    options = {"model": served.model, "n": 3, "seed": 7, "max_tokens": 20}
    answer = client.completions.create(prompt=["What is", "The king", "What is"], **options)
    ids = client.completions.create(prompt=loaded.encode("What is"), **options | {"n": 1})
    assert [choice.index for choice in answer.choices] == [*range(9)]
    for choice in answer.choices:
        row, sample = divmod(choice.index, 3)
        seed = sample_seed(row_seed(7, row), sample)
        expected = alone.generate(["What is", "The king"][row % 2], seed=seed, max_new_tokens=20)
        assert choice.text == expected
    assert ids.choices[0].text == answer.choices[0].text
    assert answer.usage
    assert answer.usage.prompt_tokens == sum(
        len(loaded.encode(p) if isinstance(p, str) else p) for p in prompts
    )
    stream = client.completions.create(prompt=prompts[0], stream=True, **options)
    assert join(stream, 3)[0] == [choice.text for choice in answer.choices[:3]]


def test_chat_answers_by_the_template_whole_and_as_a_stream(
    client: "openai.OpenAI", served: ServerProcess, alone: Model
) -> None:
    options: dict[str, Any] = {"model": served.model, "messages": USER, "seed": 3}
    expected = alone.chat(USER, seed=3, max_new_tokens=40)
    whole = client.chat.completions.create(max_completion_tokens=40, **options)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    options["messages"] = parts
    chunks = [
        *client.chat.completions.create(
            max_tokens=40, n=2, stream=True, stream_options={"include_usage": True}, **options
        )
    ]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]
    assert join(iter(chunks), 2)[0][0] == expected
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    with client.chat.completions.stream(max_tokens=5, n=3, **options) as events:
        snapshots = [event.snapshot for event in events if event.type == "chunk"]
    assert [choice.index for choice in snapshots[-1].choices] == [0, 1, 2]


def test_logprobs_are_the_models_own(
    client: "openai.OpenAI", served: ServerProcess, loaded: LoadedModel
) -> None:
    sampling = loaded.sampling({"seed": 5, "max_new_tokens": 12, "logprobs": 2})
    request = loaded.request(loaded.encode("What is"), sampling)
    tokens = [*loaded.complete(make_source([request]), batch_size=1)]
    options: dict[str, Any] = {"model": served.model, "seed": 5, "max_tokens": 12}
    answer = client.completions.create(prompt="What is", logprobs=2, **options)
    form = answer.choices[0].logprobs
    assert form
    assert form.token_logprobs == pytest.approx([token.logprob for token in tokens])
    names = [loaded.vocabulary.bytes_of(token.id).decode(errors="replace") for token in tokens]
    assert form.tokens == names
    assert form.text_offset[0] == 0
    for token, name, top in zip(tokens, names, form.top_logprobs, strict=True):
        assert top[name] == pytest.approx(token.logprob)
        assert len(top) in (1, 2, 3)
    pieces: list[Any] = []
    for chunk in client.chat.completions.create(
        messages=USER, logprobs=True, top_logprobs=2, stream=True, **options
    ):
        if chunk.choices[0].logprobs:
            pieces += chunk.choices[0].logprobs.content
    chat = loaded.chat_request(USER, sampling)
    tokens = [*loaded.complete(make_source([chat]), batch_size=1)]
    tokens = [token for token in tokens if loaded.vocabulary.bytes_of(token.id)]
    assert [piece.logprob for piece in pieces] == pytest.approx([t.logprob for t in tokens])
    assert [bytes(piece.bytes) for piece in pieces] == [
        loaded.vocabulary.bytes_of(token.id) for token in tokens
    ]
    assert all(len(piece.top_logprobs) == 2 for piece in pieces)


def test_echo_has_the_log_probabilities_of_score(
    client: "openai.OpenAI", served: ServerProcess, loaded: LoadedModel
) -> None:
    text = "What is a king?\nÄ 👑 is " * 8  # more than a block of positions
    start = start_ids(loaded)
    scored = [*DocumentScorer(loaded, (text.encode(),)).tokens()]
    ids = [*start, *(token.id for token in scored)]
    assert len(scored) > 100
    create = partial(client.completions.create, model=served.model, echo=True)
    answer = create(prompt=[ids, ids[:9]], logprobs=2, max_tokens=0)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids) + 9, 0)
    form: Any = choice.logprobs
    assert form.token_logprobs == [None, *(token.logprob for token in scored)]
    assert form.top_logprobs[0] is None
    assert form.text_offset == [0] + [
        len(loaded.tokenizer.decode(ids[:i]).decode(errors="ignore")) for i in range(1, len(ids))
    ]
    for token, value, top in zip(
        scored, form.token_logprobs[1:], form.top_logprobs[1:], strict=True
    ):
        assert (token.rank == 0) == (value == max(top.values())), token
    short: Any = answer.choices[1].logprobs
    assert short.token_logprobs == form.token_logprobs[:9]
    # With new tokens, and as a stream.
    options: dict[str, Any] = {"prompt": ids, "logprobs": 1, "seed": 1, "max_tokens": 3, "n": 2}
    longer: Any = create(**options).choices[1]
    plain: Any = client.completions.create(model=served.model, **options).choices[1]
    assert longer.text == text + plain.text
    assert longer.logprobs.token_logprobs[: len(ids)] == form.token_logprobs
    assert longer.logprobs.token_logprobs[len(ids) :] == plain.logprobs.token_logprobs
    chunks = [chunk.choices[0] for chunk in create(**options | {"n": 1}, stream=True)]
    values = [
        value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs
    ]
    assert values[: len(ids)] == form.token_logprobs
    assert len(values) == len(ids) + 3
    many: Any = create(prompt=ids, logprobs=0, max_tokens=0, n=1000 // len(ids) + 1)
    for one in many.choices:
        assert one.logprobs.token_logprobs == form.token_logprobs
    [end] = loaded.vocabulary.ends  # clients drop the last token, whatever it is
    ended: Any = create(prompt=ids, logprobs=1, max_tokens=1, logit_bias={f"{end}": 100})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].logprobs.token_logprobs[:-1] == form.token_logprobs
    whole = client.completions.create(model=served.model, prompt="Hi", max_tokens=0, echo=True)
    assert whole.choices[0].text == "Hi"


def test_best_of_returns_the_most_likely_texts(
    client: "openai.OpenAI", served: ServerProcess
) -> None:
    options: dict[str, Any] = {"model": served.model, "prompt": ["What", "The"], "logprobs": 0}
    options |= {"seed": 4, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    every = client.completions.create(n=5, **options)
    best = client.completions.create(n=2, best_of=5, **options)
    expected = []
    for start in (0, 5):
        texts: list[Any] = every.choices[start : start + 5]
        texts.sort(key=lambda one: -sum(one.logprobs.token_logprobs))  # of equal lengths
        expected += [one.text for one in texts[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [*range(4)]
    assert best.usage == every.usage


def test_parameters_of_other_servers_reach_the_text(
    client: "openai.OpenAI", served: ServerProcess, alone: Model, loaded: LoadedModel
) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "typical_p": 0.7, "xtc_probability": 0.3}
    options |= {"top_n_sigma": 2.0, "dry_multiplier": 0.8, "no_repeat_ngram": 3}
    options |= {"samplers": ["typical_p", "temperature", "xtc"], "logit_bias": {"9": 4.5}}
    options |= {"stop": ["zq"] * 9, "min_tokens": 3, "penalty_window": 8}
    body = {"model": served.model, "prompt": "What is", "seed": 3}
    text = client.completions.create(**body, max_tokens=30, extra_body=options).choices[0].text
    expected = alone.generate(
        "What is", seed=3, max_new_tokens=30, penalize_prompt=False, **options
    )
    assert text == expected
    for given in (
        {"structured_outputs": {"regex": "[ab]{4}"}},
        {"guided_choice": ["abba"]},
        {"guided_choice": ["abba"], "structured_outputs": {"choice": ["abba"]}},
        {"grammar": "root ::= [ab] [ab] [ab] [ab]"},
        {"json_schema": {"enum": [True]}},
    ):
        text = client.completions.create(**body, max_tokens=-1, extra_body=given).choices[0].text
        assert re.fullmatch("[ab]{4}|true", text)
    [end] = loaded.vocabulary.ends
    bias: dict[str, Any] = {"logit_bias": {f"{end}": 100}, "max_tokens": 5}
    ended = client.completions.create(**body, **bias)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")
    whole = client.completions.create(**body, **bias, extra_body={"ignore_eos": True})
    assert whole.choices[0].finish_reason == "length"


class Person(pydantic.BaseModel):
    """A person, in the form that the client requests."""

    kind: Literal["king", "queen"]
    age: Literal[1, 22, 333]


def test_response_format_constrains_the_text(
    client: "openai.OpenAI", served: ServerProcess
) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=served.model, messages=USER, response_format=Person, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = client.completions.create(
        model=served.model, prompt="x", max_tokens=99, extra_body={"response_format": form}
    )
    assert isinstance(json.loads(text.choices[0].text)["a"], bool)
    # The forms of llama.cpp and of huggingface_hub.
    for kind, name in (("object", "schema"), ("schema", "schema"), ("object", "value")):
        extra = {"response_format": {"type": f"json_{kind}", name: schema}}
        text = client.completions.create(
            model=served.model, prompt="x", max_tokens=99, extra_body=extra
        )
        assert isinstance(json.loads(text.choices[0].text)["a"], bool)


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": "x"}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 128, "prompt": ["x"] * 10}, "n"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"seed": -2}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"logprobs": 6}, "logprobs"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": "\udc80"}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "x " * 3000}, "prompt"),
    ({"prompt": "x " * 400_000}, "prompt"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop_token_ids": [99_999]}, "stop_token_ids"),
    ({"typical_p": 2}, "typical_p"),
    ({"xtc_probability": "x"}, "xtc_probability"),
    ({"samplers": ["mirostat"]}, "samplers"),
    ({"guided_regex": "(", "max_tokens": 5}, "guided_regex"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
    ({"json_schema": {"type": "nothing"}}, "json_schema"),
    ({"choices": []}, "choices"),
    ({"temprature": 1}, "temprature"),
    ({"stream_options": {}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "strct": True}}, "response_format.strct"),
    ({"response_format": {"type": "json_object", "value": "x"}}, "response_format.value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}},
        "response_format.json_schema.foo",
    ),
    ({"x" * 900_000: 1}, "x" * 60),
]


@pytest.mark.parametrize(("fields", "param"), NAMED, ids=lambda value: str(value)[:40])
def test_errors_name_the_field(served: ServerProcess, fields: dict[str, Any], param: str) -> None:
    body = {"model": served.model, "prompt": "x", "max_tokens": 4} | fields
    answer = served.post("/v1/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0] in error["message"] or "context" in error["message"]


CHAT_ERRORS: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "x"},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "<|im_start|>", "content": "x"}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": USER, "tools": [{"type": "function"}]},
    {"messages": USER, "chat_template": "x"},
    {"messages": USER, "chat_template_kwargs": {"a": 1}},
    {"messages": USER, "top_logprobs": 1},
    {"messages": [*USER, {"role": "user", "content": "x " * 3000}]},
]


@pytest.mark.parametrize("fields", CHAT_ERRORS, ids=lambda value: str(value)[:60])
def test_chat_errors(served: ServerProcess, fields: dict[str, Any]) -> None:
    answer = served.post("/v1/chat/completions", {"max_tokens": 2} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_conversation_that_is_too_long_has_a_code(served: ServerProcess) -> None:
    for n in (3000, 400_000):
        messages = [{"role": "user", "content": "x " * n}]
        answer = served.post("/v1/chat/completions", {"messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_malformed_bodies_are_errors(served: ServerProcess, body: bytes) -> None:
    answer = served.http.post("/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


GRAMMARS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "http://localhost/x"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "(" * 5000},
    {"type": "string", "pattern": "(a{0,1000}){0,1000}"},
    {"properties": {f"x{i}": {"type": "string"} for i in range(2000)}},
    {"minimum": -(10**30)},
    {"type": "nothing"},
    {"enum": []},
    json.loads('{"items": ' * 400 + "{}" + "}" * 400),
]


def test_failing_grammars_are_client_errors_and_harm_nobody(
    served: ServerProcess, client: "openai.OpenAI", alone: Model
) -> None:
    options: dict[str, Any] = {"prompt": "What", "max_tokens": 2000, "seed": 1}
    stream = client.completions.create(model=served.model, stream=True, **options)
    for grammar in GRAMMARS:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": grammar}}
        body = {"prompt": "x", "max_tokens": 500, "response_format": form}
        answer = served.post("/v1/completions", body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == "response_format", grammar
        else:  # the grammar is fine after all
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
    assert join(stream)[0][0] == alone.generate("What", seed=1, max_new_tokens=2000)


def test_client_raises_its_own_exceptions(client: "openai.OpenAI", served: ServerProcess) -> None:
    import openai

    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).id == served.model
    for name in ("other", "../x"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=served.model, prompt="x", max_tokens=-2)
    assert bad.value.param == "max_tokens"


def test_other_paths_methods_and_types_are_errors(served: ServerProcess) -> None:
    assert served.http.get("/v1/nothing").status_code == 404
    assert served.http.get("/v1/completions").status_code == 405
    assert served.http.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    for kind in ({}, {"Content-Type": "text/plain"}):  # as web pages can send without asking
        for origin in ("null", "https://evil.example"):
            headers = kind | {"Origin": origin}
            answer = served.http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 415
        answer = served.http.post("/v1/completions", content=body, headers=kind)
        assert answer.status_code == 200
    for path in ("/health", "/health/", "/health//"):
        assert served.http.get(path).json() == {"status": "ok"}
    answer = served.post("/v1/completions/", {"prompt": "x", "max_tokens": 2})
    assert answer.status_code == 200  # no redirect, which might lead from https to http
    for path in ("//v1/models", "/v1//models", f"/v1/models//{served.model}"):
        assert served.http.get(served.url + path).status_code == 200
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        line = f"GET {served.url.replace('http', 'HTTP')}/health?x HTTP/1.1\r\n"
        client.sendall(f"{line}Host: localhost\r\nConnection: close\r\n\r\n".encode())
        with client.makefile("rb") as answer_bytes:
            assert answer_bytes.read().endswith(b'{"status":"ok"}')
    for host, status in ((b"", b"200"), (b"Host:\r\n", b"403"), (b"Host: x\r\n", b"403")):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n" + host + b"\r\n")
            with client.makefile("rb") as answer_bytes:
                assert answer_bytes.read().split()[1] == status
    other = served.http.get("/health", headers={"Host": "evil.example"})
    assert other.status_code == 403
    assert (
        served.http.get("/health", headers={"Host": f"localhost:{served.port}"}).status_code == 200
    )


@pytest.mark.parametrize("how", ["stream", "whole", "samples", "queued"])
def test_client_that_leaves_frees_its_row(
    served: ServerProcess, client: "openai.OpenAI", how: str
) -> None:
    n = {"samples": 16}.get(how, 1)
    body = json.dumps(LONG | {"n": n, "stream": how in ("stream", "samples")})
    if how == "queued":  # behind texts that fill the batch
        stream = client.completions.create(model=served.model, stream=True, n=4, **CLIENT_LONG)
        next(iter(stream))
    submitted, cancelled = served.metric("texts_total"), served.metric("texts_cancelled_total")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        if how in ("stream", "samples"):
            assert connection.recv(1)
        while served.metric("texts_total") == submitted:
            pass
    if how == "queued":
        stream.close()
        n += 4
    served.wait_until_free()
    assert served.metric("texts_cancelled_total") == cancelled + n


def test_metrics_are_valid_and_count(served: ServerProcess, client: "openai.OpenAI") -> None:
    before = served.metric("generation_tokens_total")
    answer = client.completions.create(model=served.model, prompt="x", max_tokens=3)
    assert answer.usage
    new = answer.usage.completion_tokens
    assert served.metric("generation_tokens_total") == before + new
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in response.text.splitlines():
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2
    assert 'tgen_time_to_first_token_seconds_bucket{le="+Inf"}' in response.text
    assert served.http.head("/metrics").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_notes_about_a_schema_are_in_a_header(served: ServerProcess, stream: bool) -> None:
    schema = {"type": "string", "format": "phone", "maxLength": 3}
    body = {"prompt": "x", "max_tokens": 5, "seed": 1, "stream": stream}
    answer = served.post("/v1/completions", body | {"guided_json": schema})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.headers["x-schema-notes"]) == [
        'guided_json: format: "phone" is not checked'
    ]
    assert "x-schema-notes" not in served.post("/v1/completions", body).headers
