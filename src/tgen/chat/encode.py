"""Messages -> ids, such that no text of a message becomes a control token.

The ids are those of the template's whole text, as in transformers, unless a message spells a
control token. If a message has a character that control tokens start or end with, the text is
rendered twice: as it is, and with stand-ins for these characters. If both have the same control
tokens, all are the template's. Otherwise the control tokens of the second text are the template's,
and everything between them is encoded as plain text.

Marking where each message starts and ends would not do: a template may test, cut or reverse a
message, and then the marks are lost or change its branches.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from tgen.chat.call_syntax import PLAIN, CallSyntax, find_call_syntax, read_arguments
from tgen.chat.dropped_messages import check_complete
from tgen.chat.render import Message, Sandbox, Tools
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.errors import ContextError, UsageError
from tgen.tokenizer import Tokenizer
from tgen.tokenizer.expressible import any_of

MAX_CHARACTERS = 1 << 20  # over all messages
_MAX_COMPOSED = 4  # maximum number of characters that NFC composes into one
_STAND_INS = range(0xF0000, 0xFFFFE)  # private-use code points
_INVALID_UTF8 = "surrogateescape"  # error handler that keeps invalid bytes
_ASSISTANT = "assistant"
_CUT = chr(0x10FFFD)  # private use; at the end of a message that is continued
# Role -> keys that messages of it may have, too.
_KEYS = {_ASSISTANT: {"tool_calls"}, "tool": {"tool_call_id", "name"}}
_OF_CALLS = set().union(*_KEYS.values())
_TOO_LONG_HINT = "shorten the messages or start a new conversation"
_EXAMPLE = 'pass, for example, [{"role": "user", "content": "Who are you?"}]'
_Span = tuple[int, int, int]  # an id, and its start and end in the text


class Versions(NamedTuple):
    """A conversation as it is and, if that differs, with stand-ins for some characters."""

    conversations: list[list[Message]]  # one or two
    originals: dict[int, str]  # stand-in -> the character that it stands for
    tools: Sequence[Tools] | None = None  # of each conversation

    def head(self, n: int) -> "Versions":
        """Return the versions of the first `n` messages."""
        heads = [messages[:n] for messages in self.conversations]
        return Versions(heads[:1] if heads[0] == heads[-1] else heads, self.originals)


class ChatFormat:
    """The encoder of conversations for one model.

    `end_ids` are the tokens that end an answer, `control_names` the texts of all control tokens.
    `now` is the time in ISO format that the template sees; None: the current time.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        context_length: int,
        *,
        now: str | None = None,
    ) -> None:
        self._context_length, self.now = context_length, now
        self.template, self._tokenizer = template, tokenizer
        self._sandbox = Sandbox()
        added = {name: i for name, i in tokenizer.added_tokens.items() if name.strip()}
        special = {name for name, i in added.items() if not tokenizer.token_bytes(i)}
        # An added token that is not special is the template's if the template names it.
        sources = template.source + template.tool_source
        named = {name for name in added if name in sources and len(name) > 1}
        self._special_pattern = re.compile(any_of(special))
        self._named_pattern = re.compile(f"(?={any_of(named - special)})")  # overlapping, too
        self.control_names = special | named
        self._control_ids = {added[name] for name in self.control_names}
        self._edge_characters = {c for name in special | named for c in (name[0], name[-1])}
        names = tokenizer.spec.vocab.keys() | added.keys()
        self._max_characters = context_length * _MAX_COMPOSED * max(map(len, names))
        self._takes_spaces = any(t.lstrip or t.rstrip for t in tokenizer.spec.added_tokens)
        eos = tokenizer.added_tokens.get(template.variables.get("eos_token", ""))
        self.end_ids = frozenset() if eos is None else frozenset([eos])

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """The syntax of tool calls; None if tgen does not know the template's.

        Raises ModelError if the template uses too much time or memory.
        """

        def render(
            messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
        ) -> str:
            conversation = [dict(message) for message in messages]
            return self.render([conversation], [False], [[*map(dict, tools)]])[0]

        return find_call_syntax(render, self.template.for_tools.source)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools = None,
        *,
        prompt: bool = True,
        continued: bool = False,
    ) -> list[int]:
        """Return the ids up to the start of the model's answer, which may call `tools`.

        Without `prompt`, they end with the messages; if the answer is `continued`, within the last
        message, at the end of its text. Messages may have calls (`tool_calls`, in OpenAI's form)
        and results (`tool_call_id`, `name`).

        Raises UsageError for malformed messages and messages that the template rejects or that the
        tokenizer cannot express, ModelError for a template that fails or uses too much time or
        memory.
        """
        texts, originals = self._write(messages, tools, prompt=prompt, continued=continued)
        ids = self.to_ids(texts, originals)
        if not ids:
            raise UsageError("the chat template renders these messages as ''", "add a message")
        if len(ids) > self._context_length:  # do not drop the first messages silently
            size = f"{len(ids):,} tokens (limit {self._context_length:,})"
            raise ContextError(f"the conversation has {size}", _TOO_LONG_HINT)
        return ids

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools = None,
        *,
        prompt: bool = True,
        continued: bool = False,
    ) -> str:
        """Return the text of which `encode` returns the ids, with control tokens by their names.

        Raises what `encode` raises.
        """
        texts, _ = self._write(messages, tools, prompt=prompt, continued=continued)
        return texts[0]

    def _write(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, prompt: bool, continued: bool
    ) -> tuple[list[str], dict[int, str]]:
        """Return the text in its versions, and the characters that stand-ins stand for."""
        versions = self.prepare(messages, tools)
        conversations, prompts = versions.conversations, [prompt] * len(versions.conversations)
        if continued:
            conversations = [
                [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + _CUT}]
                for chat in conversations
            ]
        texts = self.render(conversations, prompts, versions.tools)

        def render(conversation: list[Message]) -> str:
            return self.render([conversation], [prompt], [tools])[0]

        check_complete(conversations[0], texts[0], render)
        if continued:
            texts = [text.rpartition(_CUT)[0] for text in texts]
        for text in texts:
            self._check_length(text)
        return texts, versions.originals

    def prepare(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> Versions:
        """Check messages, and return them with stand-ins; raises UsageError as `encode` does."""
        checked = [self._write_calls(message) for message in _check_messages(messages, tools)]
        for role in {message["role"] for message in checked}:
            if self._special_pattern.search(role) or self._named_pattern.search(role):
                raise UsageError(
                    f"the role {role[:40]!r} contains a control token",
                    "use a role such as user or assistant",
                )
        others = [{key: message[key] for key in _OF_CALLS & message.keys()} for message in checked]
        contents = (message["content"] for message in checked)
        stand_ins = self._choose_stand_ins((*contents, *_strings([others, tools])))
        marked = [self._replace_edges(message, stand_ins) for message in checked]
        marked_tools = _translate(tools, stand_ins)
        originals = {ord(new): chr(old) for old, new in stand_ins.items()}
        if marked == checked and marked_tools == tools:
            return Versions([checked], originals, [tools])
        return Versions([checked, marked], originals, [tools, marked_tools])

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        prompts: Sequence[bool] | None = None,
        tools: Sequence[Tools] | None = None,
    ) -> list[str]:
        """Return the text of each conversation; see `Sandbox.render`.

        If `tools` are given, perhaps None for each, a first conversation with tools, calls or
        results chooses the template of chats with tools.
        """
        with_tools = tools and (tools[0] or any(map(_is_of_tools, conversations[0])))
        template = self.template.for_tools if with_tools else self.template
        return self._sandbox.render(
            template, conversations, prompts=prompts, tools=tools, now=self.now
        )

    def _write_calls(self, message: Message) -> Message:
        """Return a message whose calls the template writes, or that has them in its text."""
        if "tool_calls" not in message:
            return message
        calls = [call["function"] for call in message["tool_calls"]]
        syntax = self.call_syntax or PLAIN
        if syntax.rendered:
            return message
        text = syntax.write([(call["name"], call["arguments"]) for call in calls])
        content = f"{message['content']}\n{text}" if message["content"] else text
        return {"role": message["role"], "content": content}

    def to_ids(
        self, texts: Sequence[str], originals: Mapping[int, str], *, continuation: bool = False
    ) -> list[int]:
        """Return the ids of a text, given in all its versions, or with `continuation` of the rest
        of one. Raises UsageError for a character that the tokenizer cannot express."""
        tokenizer = self._tokenizer
        tokenizer.check_expressible(texts[0], with_special=True)
        spans = [tokenizer.encode_with_special(text, continuation=continuation) for text in texts]
        controls = [self.controls(i for i, _, _ in each) for each in spans]
        # The texts differ if the template tests the content of a message.
        same_text = texts[0] == texts[-1].translate(originals)
        if same_text and controls[0] == controls[-1]:
            return [i for i, _, _ in spans[0]]
        return self._encode_between_controls(
            texts[1], spans[1], originals, continuation=continuation
        )

    def controls(self, ids: Iterable[int]) -> list[int]:
        """Return those of the ids that are control tokens."""
        return [i for i in ids if i in self._control_ids]

    def fits(self, text: str) -> bool:
        """Return whether a text may fit the context, without encoding it."""
        return self._count_characters(text) <= self._max_characters

    def _count_characters(self, text: str) -> int:
        return len("".join(text.split()) if self._takes_spaces else text)

    def _check_length(self, text: str) -> None:
        """Raise ContextError for a text that cannot fit the context, before encoding it."""
        if not self.fits(text):
            size = f"{self._count_characters(text):,} characters"
            limit = f"a context of {self._context_length:,} tokens"
            raise ContextError(f"the conversation has {size}, too many for {limit}", _TOO_LONG_HINT)

    def _choose_stand_ins(self, contents: Iterable[str]) -> dict[int, str]:
        """Map the messages' characters that may start or end a control token to stand-ins."""
        characters = set().union(*contents)
        used = characters | set(self.template.source + self.template.tool_source)
        unused = (chr(i) for i in _STAND_INS if chr(i) not in used)
        edges = sorted(
            c for c in characters if not self._edge_characters.isdisjoint(_normalized_forms(c))
        )
        return dict(zip(map(ord, edges), unused, strict=False))

    def _replace_edges(self, message: Message, stand_ins: Mapping[int, str]) -> Message:
        content = message["content"]
        if message["role"] == _ASSISTANT:  # templates cut the model's answer at </think>
            content = self._special_pattern.sub(lambda m: m[0].translate(stand_ins), content)
        else:
            content = content.translate(stand_ins)
        others = {key: _translate(message[key], stand_ins) for key in _OF_CALLS & message.keys()}
        return {**message, **others, "content": content}

    def _encode_between_controls(
        self,
        text: str,
        spans: Iterable[_Span],
        originals: Mapping[int, str],
        *,
        continuation: bool = False,
    ) -> list[int]:
        """Keep the control tokens, all of them the template's; encode the rest as plain text."""
        ids: list[int] = []
        start, at_start = 0, not continuation
        for i, begin, end in spans:
            if i in self._control_ids:
                ids += [*self._encode_plain(text[start:begin].translate(originals), at_start), i]
                start, at_start = end, False
        return ids + self._encode_plain(text[start:].translate(originals), at_start)

    def _encode_plain(self, text: str, at_start: bool) -> list[int]:
        """Encode text that may spell control tokens; `at_start` of the conversation."""
        # Tokens that are not special would match: cut each after its first character.
        cuts = [0, *(match.start() + 1 for match in self._named_pattern.finditer(text)), len(text)]
        prefix = at_start or self._tokenizer.spec.prefix == "always"
        ids: list[int] = []
        for start, end in pairwise(cuts):
            part = text[start:end].encode("utf-8", _INVALID_UTF8)
            ids += self._tokenizer.encode(part, continuation=start > 0 or not prefix)
        return ids


def _check_messages(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UsageError("messages: not a list of messages", _EXAMPLE)
    for message in messages:
        texts = message if isinstance(message, Mapping) else {}
        more = _KEYS.get(str(texts.get("role")), set())
        valid = set(texts) - more == {"role", "content"}
        if not valid or not all(
            isinstance(texts[key], str) for key in texts.keys() - {"tool_calls"}
        ):
            raise UsageError("a message must have exactly two strings, role and content", _EXAMPLE)
        calls = texts.get("tool_calls", [])
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise UsageError("tool_calls must be a list of calls, in OpenAI's form", _EXAMPLE)
    checked = [_read_calls(message) for message in messages]
    contents = [message["content"] for message in checked]
    others = [{key: message[key] for key in _OF_CALLS & message.keys()} for message in checked]
    strings = [*contents, *_strings([others, tools])]
    try:
        "".join(strings).encode("utf-8", _INVALID_UTF8)
    except UnicodeEncodeError:
        raise UsageError("a message contains an unpaired surrogate", "remove it") from None
    length = sum(map(len, strings))
    if length > MAX_CHARACTERS:
        size = f"{length:,} characters, limit {MAX_CHARACTERS:,}"
        raise ContextError(f"the messages are too long ({size})", _TOO_LONG_HINT)
    return checked


def _read_calls(message: Mapping[str, Any]) -> Message:
    """Return a copy of a message whose calls have arguments as templates expect them."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        read = {**function, "arguments": read_arguments(function["arguments"])}
        calls.append({**call, "function": read})
    return {**message, "tool_calls": calls}


def _is_of_tools(message: Message) -> bool:
    return bool(message.get("tool_calls")) or message["role"] == "tool"


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return False
    return isinstance(function.get("name"), str) and "arguments" in function


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value."""
    if isinstance(value, str):
        yield value
    for one in value if isinstance(value, list) else ():
        yield from _strings(one)
    for key, one in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _strings(one)


def _translate(value: Any, characters: Mapping[int, str]) -> Any:
    """Return a JSON value in whose strings characters are replaced."""
    if isinstance(value, str):
        return value.translate(characters)
    if isinstance(value, list):
        return [_translate(one, characters) for one in value]
    if isinstance(value, dict):
        return {
            _translate(key, characters): _translate(one, characters) for key, one in value.items()
        }
    return value


@lru_cache(maxsize=1 << 16)
def _normalized_forms(character: str) -> frozenset[str]:
    """Return the characters that normalization or a change of case may turn it into."""
    return frozenset(
        unicodedata.normalize("NFKC", character) + character.lower() + character.upper()
    )
