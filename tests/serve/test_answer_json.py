"""The JSON of answers: names and offsets of tokens, and why a text ends."""

from typing import Any

import pytest

from support.chats import HERMES_TOOLS
from support.tools import NOW, request_of, with_template
from tgen.config import SamplingConfig
from tgen.generation.logprobs import TokenLogprobs
from tgen.generation.sequence import Request
from tgen.loaded_model import LoadedModel
from tgen.reports.generation import Token
from tgen.serve.answer_json import Answer
from tgen.serve.engine_thread import PromptScores
from tgen.serve.live_tokens import TokenAnswer, TokensRequest
from tgen.serve.preparation import PreparedTexts, find_call_form, prepare
from tgen.serve.text_request import CompletionRequest, parse

TOKENS = [b"", b" Hi", b" you", b"\xc3", b"\xa4", b"\xa5"]


def logprobs(scored: list[TokenLogprobs], echo: str) -> Any:
    """Return the log-probabilities in the answer to a request that echoes a prompt."""
    body = b'{"prompt": "x", "echo": true, "logprobs": 2, "max_tokens": 0}'
    request = parse(body, CompletionRequest, "m")
    ids = [token.id for token in scored]
    prepared = PreparedTexts([Request(ids, SamplingConfig())], len(ids), [echo], seed=0)
    answer = Answer(request, prepared, "m", "fp", TOKENS.__getitem__)
    answer.add([(0, PromptScores(scored, last=True))])
    return answer.whole()["choices"][0]["logprobs"]


def test_offsets_ignore_the_space_that_a_tokenizer_puts_before_a_text() -> None:
    scored = [TokenLogprobs(i, -1.0, []) for i in (0, 1, 2)]
    assert logprobs(scored, "Hi you")["text_offset"] == [0, 0, 2]
    assert logprobs(scored, " Hi you")["text_offset"] == [0, 0, 3]


def test_parts_of_characters_with_one_name_are_told_apart() -> None:
    scored = [TokenLogprobs(3, None, []), TokenLogprobs(4, -2.0, [(5, -1.0), (4, -2.0)])]
    form = logprobs(scored, "ä")
    assert form["tokens"] == ["\ufffd", "\ufffd"]
    assert form["token_logprobs"] == [None, -2.0]
    assert form["top_logprobs"] == [None, {"bytes:\\xa5": -1.0, "\ufffd": -2.0}]
    assert form["text_offset"] == [0, 0]


def test_tokens_that_a_stream_has_sent_are_not_stored() -> None:
    request = parse(b'{"prompt": "x"}', TokensRequest, "m")
    prepared = PreparedTexts([Request([1], SamplingConfig())], 1, [], seed=0)
    answer = TokenAnswer(request, prepared, "m", "fp", TOKENS.__getitem__)
    answer.add([(0, Token(0, 1, b" Hi", [], None, True))] * 3)
    assert answer.n_described == 3
    assert [len(chunk["tokens"]) for chunk in answer.new_chunks()] == [3]
    assert answer.n_described == 0


@pytest.mark.parametrize("complete", [True, False])
def test_complete_calls_at_the_limit_are_calls(loaded: LoadedModel, complete: bool) -> None:
    request = request_of(tools=[NOW], tool_choice="required", max_tokens=1)
    model = with_template(loaded, HERMES_TOOLS)
    prepared = prepare(model, request, 1, calls=find_call_form(model, request))
    text = '<tool_call>\n{"name": "now", "arguments": {' + "}}\n</tool_call>" * complete
    token = Token(
        sequence=0,
        id=0,
        text=text.encode(),
        logprob=0,
        rank=0,
        entropy=0,
        top_logprobs=[],
        removed=[],
        finish="length",
        complete=complete,
    )
    answer = Answer(request, prepared, "m", "f", loaded.vocabulary.bytes_of)
    answer.add([(0, token)])
    [choice] = answer.whole()["choices"]
    assert choice["finish_reason"] == ("tool_calls" if complete else "length")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    answer = Answer(request, prepared, "m", "f", loaded.vocabulary.bytes_of)
    answer.add([(0, token)])
    deltas = [chunk["choices"][0]["delta"] for chunk in answer.new_chunks()]
    [first], [second] = (delta["tool_calls"] for delta in deltas if delta)
    assert (first["function"]["name"], first["function"]["arguments"]) == ("now", "")
    assert second["function"] == {"arguments": "{}" if complete else "{"}
