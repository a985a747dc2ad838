"""Send the HTTP requests that Open WebUI and Continue send, and use the answers as they do.

    python scripts/clients_replay.py "Open WebUI" "OpenAI API" http://127.0.0.1:8000

Both are applications, which have no program to install and run here. Requests, their order and the
fields that are read follow the source of Open WebUI 0.12.4 (main.py, routers/, utils/) and Continue
1.3.40 (core/llm/, core/autocomplete/, packages/openai-adapters/). A failed assertion means that the
application could not use an answer.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any
from urllib.request import Request, urlopen

KEY = "none"
USER = {"role": "user", "content": "What is the weather in Rome?"}
SYSTEM = {"role": "system", "content": "Answer with one sentence."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
TOOLS = [
    {"type": "function", "function": function}
    for function in (
        {"name": "weather", "description": "Get the weather in a city.", "parameters": CITY},
        {"name": "get_current_timestamp", "description": "Get the time.", "parameters": NOTHING},
    )
]
# Open WebUI's tasks after an answer, and the key of the JSON that it looks for in the text.
TASKS = {
    "title": "Generate a concise title summarizing the chat history.",
    "tags": "Generate 1-3 broad tags categorizing the main themes of the chat history.",
    "follow_ups": "Predict 3-5 useful messages this user might send next.",
}
# Continue's text for completing code, and its stops, for a model whose name it does not know.
CODE = "<fim_prefix># main.py\ndef weather(city):\n    return <fim_suffix>\n<fim_middle>"
STOPS = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>"]
STOPS += ["</fim_middle>", "</code>", "/src/", "#- coding: utf-8", "```"]


def send(url: str, body: object = None) -> Iterator[bytes]:
    """Yield the lines of an answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, headers)) as response:
        yield from response


def load(url: str, body: object = None) -> Any:
    """Return the JSON of an answer."""
    return json.loads(b"".join(send(url, body)))


def choose_openai_model(root: str) -> str:
    """Return the id of the first model that OpenAI's API lists."""
    return str(load(f"{root}/v1/models")["data"][0]["id"])


def choose_ollama_model(root: str) -> str:
    """Return the name of the first model that Ollama's API lists."""
    return str(load(f"{root}/api/tags")["models"][0]["model"])


def read_events(url: str, body: object) -> list[Any]:
    """Return the chunks of a stream of server-sent events, which [DONE] must end."""
    events = [line[6:].strip() for line in send(url, body) if line.startswith(b"data: ")]
    end = events.pop()
    assert end == b"[DONE]"
    return [json.loads(event) for event in events]


def read_lines(url: str, body: object) -> list[Any]:
    """Return the chunks of a stream of Ollama's, whose last line has the counts."""
    chunks = [json.loads(line) for line in send(url, body)]
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert not any("error" in chunk for chunk in chunks)
    return chunks


def join_deltas(chunks: Iterable[Any]) -> dict[str, Any]:
    """Return the message of a stream of OpenAI's; calls come in pieces with an index."""
    text, calls = "", dict[int, Any]()
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or []:
            if (call := calls.setdefault(piece["index"], piece)) is not piece:
                call["function"]["arguments"] += piece["function"]["arguments"]
    return {"role": "assistant", "content": text, "tool_calls": [*calls.values()]}


def join_messages(chunks: Iterable[Any]) -> dict[str, Any]:
    """Return the message of a stream of Ollama's; calls come whole."""
    parts = [chunk["message"] for chunk in chunks]
    assert {part["role"] for part in parts} == {"assistant"}
    calls = [call for part in parts for call in part.get("tool_calls") or []]
    text = "".join(part["content"] for part in parts)
    return {"role": "assistant", "content": text, "tool_calls": calls}


def print_calls(message: dict[str, Any]) -> None:
    """Print the calls of a message."""
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        print("call", call["function"]["name"], arguments)
        assert isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)


def answer_calls(message: dict[str, Any], **fields: str) -> list[dict[str, Any]]:
    """Return a message with a result per call, with the call's id if it has one."""
    ids = [{"tool_call_id": call["id"]} if "id" in call else {} for call in message["tool_calls"]]
    return [message | fields, *({"role": "tool", "content": "Sunny."} | known for known in ids)]


def use_open_webui_with_openai(root: str) -> None:
    """List the models, stream a chat, and run the tasks that follow an answer."""
    name = choose_openai_model(root)
    body: dict[str, Any] = {"stream": True, "model": name, "messages": [USER]}
    usage = {"stream_options": {"include_usage": True}}
    chunks = read_events(f"{root}/v1/chat/completions", body | usage)
    print(answer := join_deltas(chunks)["content"])
    assert answer
    assert chunks[-1]["usage"]["total_tokens"] > chunks[-1]["usage"]["completion_tokens"] > 0
    for key, words in TASKS.items():
        task = {"role": "user", "content": describe_task(key, words, answer)}
        body = {"model": name, "messages": [task], "stream": False, "max_tokens": 1000}
        print_task(load(f"{root}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def describe_task(key: str, words: str, answer: str) -> str:
    """Return the prompt of a task."""
    history = f"<chat_history>\nUSER: {USER['content']}\nASSISTANT: {answer}\n</chat_history>"
    form = f'### Output:\nJSON format: {{ "{key}": ... }}'
    return f"### Task:\n{words}\n{form}\n### Chat History:\n{history}"


def print_task(text: str) -> None:
    """Print the JSON in the answer to a task; Open WebUI skips a task without JSON."""
    print(text[text.find("{") : text.rfind("}") + 1] or f"no JSON in {text!r}")


def use_open_webui_with_ollama(root: str) -> None:
    """Read the version, the models and the loaded ones; stream a chat, run the tasks, unload."""
    version = load(f"{root}/api/version")["version"]
    assert len([int(n) for n in version.split(".")]) == 3
    name = choose_ollama_model(root)
    (loaded,) = load(f"{root}/api/ps")["models"]
    assert loaded["model"] == name
    datetime.fromisoformat(loaded["expires_at"])
    shown = load(f"{root}/api/show", {"model": name})
    assert shown["details"]["family"]
    unset = dict.fromkeys(("temperature", "top_k", "num_ctx", "mirostat_eta", "use_mmap"))
    body: dict[str, Any] = {"model": name, "messages": [USER], "stream": True, "options": unset}
    chunks = read_lines(f"{root}/api/chat", body)
    print(answer := join_messages(chunks)["content"])
    assert answer
    for count in ("prompt_eval_count", "eval_count", "eval_duration", "total_duration"):
        assert chunks[-1][count] > 0, count
    for key, words in TASKS.items():
        task = {"role": "user", "content": describe_task(key, words, answer)}
        body |= {"messages": [task], "stream": False, "options": {"num_predict": 1000}}
        print_task(load(f"{root}/api/chat", body)["message"]["content"])
    unload = {"model": name, "keep_alive": 0, "prompt": ""}
    chunks = read_lines(f"{root}/api/generate", unload)
    assert chunks[-1]["response"] == ""


def call_open_webui_tools_with_openai(root: str) -> None:
    """Call a tool, and send its result: every chat has tools unless the model's settings say no."""
    name = choose_openai_model(root)
    body = {"stream": True, "model": name, "messages": [USER], "tools": TOOLS}
    message = join_deltas(read_events(f"{root}/v1/chat/completions", body))
    print_calls(message)
    body["messages"] = [USER, *answer_calls(message)]
    print(join_deltas(read_events(f"{root}/v1/chat/completions", body))["content"])


def call_open_webui_tools_with_ollama(root: str) -> None:
    """Call a tool over Ollama's API, and send its result; calls get an index and an id."""
    name = choose_ollama_model(root)
    body: dict[str, Any] = {"model": name, "messages": [USER], "stream": True}
    body |= {"tools": TOOLS, "options": {}}
    message = join_messages(read_lines(f"{root}/api/chat", body))
    print_calls(message)
    for i, call in enumerate(message["tool_calls"]):
        call |= {"index": i, "id": f"call_{i}"}
    body["messages"] = [USER, *answer_calls(message, content="")]
    print(join_messages(read_lines(f"{root}/api/chat", body))["content"])


def use_continue_with_openai(root: str) -> None:
    """List the models, stream a chat, ask for a title, and complete code."""
    name = choose_openai_model(root)
    body: dict[str, Any] = {"messages": [SYSTEM, USER], "model": name, "max_tokens": 4096}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = read_events(f"{root}/v1/chat/completions", body)
    assert chunks[-1]["usage"]["prompt_tokens"] > 0
    print(join_deltas(chunks)["content"])
    body |= {"max_tokens": 16, "messages": [USER | {"content": "Reply with a title: Rome"}]}
    print(join_deltas(read_events(f"{root}/v1/chat/completions", body))["content"])
    code = {"model": name, "max_tokens": 4096, "temperature": 0.01, "stream": True}
    code |= {"stop": STOPS, "prompt": CODE}
    chunks = read_events(f"{root}/v1/completions", code)
    check_code("".join(chunk["choices"][0]["text"] for chunk in chunks))


def check_code(text: str) -> None:
    """Print completed code, which must end before a stop."""
    print(repr(text))
    assert not any(stop in text for stop in STOPS)


def use_continue_with_ollama(root: str) -> None:
    """Stream a chat and complete code over Ollama's API."""
    name = choose_ollama_model(root)
    shown = load(f"{root}/api/show", {"name": name})
    assert ".Suffix" not in shown.get("template", "")  # else it would send a suffix
    options: dict[str, Any] = {"num_predict": 4096, "num_ctx": 8192}
    body: dict[str, Any] = {"model": name, "options": options, "keep_alive": 1800}
    print(join_messages(read_lines(f"{root}/api/chat", body | {"messages": [SYSTEM, USER]})))
    options |= {"temperature": 0.01, "stop": STOPS}
    chunks = read_lines(f"{root}/api/generate", body | {"prompt": CODE, "raw": True})
    check_code("".join(chunk["response"] for chunk in chunks))


def call_continue_tools_with_openai(root: str) -> None:
    """Call a tool, and send its result; an assistant's message is never empty."""
    name = choose_openai_model(root)
    body: dict[str, Any] = {"messages": [SYSTEM, USER], "model": name, "max_tokens": 4096}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"tools": TOOLS, "parallel_tool_calls": False}
    message = join_deltas(read_events(f"{root}/v1/chat/completions", body))
    print_calls(message)
    body["messages"] += answer_calls(message, content=message["content"] or " ")
    print(join_deltas(read_events(f"{root}/v1/chat/completions", body))["content"])


def call_continue_tools_with_ollama(root: str) -> None:
    """Call a tool over Ollama's API, and send its result, which has no id; tools come with a user's
    message only."""
    name = choose_ollama_model(root)
    body: dict[str, Any] = {"model": name, "messages": [SYSTEM, USER], "keep_alive": 1800}
    message = join_messages(read_lines(f"{root}/api/chat", body | {"tools": TOOLS}))
    print_calls(message)
    body["messages"] += answer_calls(message)
    print(join_messages(read_lines(f"{root}/api/chat", body))["content"])


PROGRAMS = {
    ("Open WebUI", "OpenAI API"): use_open_webui_with_openai,
    ("Open WebUI", "OpenAI API, tools"): call_open_webui_tools_with_openai,
    ("Open WebUI", "Ollama API"): use_open_webui_with_ollama,
    ("Open WebUI", "Ollama API, tools"): call_open_webui_tools_with_ollama,
    ("Continue", "OpenAI API"): use_continue_with_openai,
    ("Continue", "OpenAI API, tools"): call_continue_tools_with_openai,
    ("Continue", "Ollama API"): use_continue_with_ollama,
    ("Continue", "Ollama API, tools"): call_continue_tools_with_ollama,
}


def main() -> None:
    """Run the program of a client."""
    _, client, what, root = sys.argv
    if (client, what) not in PROGRAMS:
        raise SystemExit(f"{client} has no program {what!r}")
    PROGRAMS[client, what](root)


if __name__ == "__main__":
    main()
