"""Chats with tools: the tools, the requests, and models with other templates."""

import json
from typing import Any

from tgen.chat.encode import ChatFormat
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.loaded_model import LoadedModel
from tgen.serve.text_request import ChatRequest, parse

USER = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}
UNIT = {"enum": ["C", "F"]}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": CITY, "unit": UNIT},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "description": "Get the time."}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def request_of(**fields: Any) -> ChatRequest:
    """Return a chat with the two tools and other fields."""
    body = json.dumps({"messages": USER, "tools": [WEATHER, NOW]} | fields).encode()
    request = parse(body, ChatRequest, "m")
    assert isinstance(request, ChatRequest)
    return request


def with_template(model: LoadedModel, source: str) -> LoadedModel:
    """Return the model with another chat template."""
    other = LoadedModel(model.bundle, model.engine)
    template = ChatTemplate(source, model.chat_format.template.variables)
    other.__dict__["chat_format"] = ChatFormat(template, model.tokenizer, 2048)
    return other
