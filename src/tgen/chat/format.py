"""Messages -> ids, so that nothing that is said in them becomes a control token.

The ids are those of the template's whole text, as transformers has them, unless a message spells a
control token. To know that, the text is made twice: as it is, and with stand-ins in the messages
for the characters that control tokens begin and end with. Where both have the same control tokens,
they are all the template's. Otherwise the second text tells the template's from the messages' own,
which are then encoded as any other text is.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from tgen.chat.sandbox import Message, Sandbox
from tgen.chat.template import ChatTemplate
from tgen.errors import UsageError
from tgen.tokenizer import Tokenizer

_LONGEST = 1 << 20  # characters of all messages
_STAND_INS = range(0xF0000, 0xFFFFE)  # code points that mean nothing
_STRAYS = "surrogateescape"  # how bytes that are no UTF-8 stand in a text
_MODEL = "assistant"
_Span = tuple[int, int, int]  # an id, and where in the text it begins and ends


class ChatFormat:
    """How one model's conversations are written."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, context_length: int) -> None:
        self._context_length = context_length
        self._template, self._tokenizer = template, tokenizer
        self._sandbox = Sandbox()
        added = {name: i for name, i in tokenizer.added.items() if name.strip()}
        special = {name for name, i in added.items() if not tokenizer.token_bytes(i)}
        # Others are the template's where it names them.
        named = {name for name in added if name in template.source and len(name) > 1}
        self._special = re.compile(_any_of(special))
        self._others = re.compile(f"(?={_any_of(named - special)})")  # also where they overlap
        self._controls = {added[name] for name in special | named}
        self._edges = {c for name in special | named for c in (name[0], name[-1])}
        end = tokenizer.added.get(template.variables.get("eos_token", ""))
        self.ends = frozenset() if end is None else frozenset([end])  # a turn ends with these too

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids up to where the model is to answer.

        Raises UsageError for messages that are none or that the template refuses, ModelError for a
        template that fails or takes too much.
        """
        given = _checked(messages)
        for role in {message["role"] for message in given}:
            if self._special.search(role) or self._others.search(role):
                raise UsageError(
                    f"the role {role[:40]!r} spells a control token", "name it plainly"
                )
        stand_ins = self._stand_ins(message["content"] for message in given)
        marked = [self._marked(message, stand_ins) for message in given]
        both = [given] if marked == given else [given, marked]
        texts = self._sandbox.render(self._template, both)
        spans = [self._tokenizer.encode_with_added(text) for text in texts]
        as_said = {ord(new): old for old, new in stand_ins.items()}
        alike = texts[0] == texts[-1].translate(as_said)  # a template may look into its messages
        if alike and self._control_ids(spans[0]) == self._control_ids(spans[-1]):
            ids = [i for i, _, _ in spans[0]]
        else:
            ids = self._apart(texts[1], spans[1], as_said)
        if not ids:
            raise UsageError("the chat template makes nothing of the messages", "say something")
        if len(ids) > self._context_length:  # what was said first must not slide away unnoticed
            raise UsageError(
                f"the conversation has {len(ids):,} tokens, the context {self._context_length:,}",
                "say less, or begin a new one",
            )
        return ids

    def _stand_ins(self, contents: Iterable[str]) -> dict[int, str]:
        """For the characters of the messages that look like a control token's first or last."""
        said = set().union(*contents)
        used = said | set(self._template.source)
        free = (chr(i) for i in _STAND_INS if chr(i) not in used)
        alike = sorted(c for c in said if _forms(c) & self._edges)
        return dict(zip(map(ord, alike), free, strict=False))

    def _marked(self, message: Message, stand_ins: Mapping[int, str]) -> Message:
        content = message["content"]
        if message["role"] == _MODEL:  # templates look into what the model said, at its </think>
            content = self._special.sub(lambda found: found[0].translate(stand_ins), content)
        else:
            content = content.translate(stand_ins)
        return {**message, "content": content}

    def _control_ids(self, spans: Iterable[_Span]) -> list[int]:
        return [i for i, _, _ in spans if i in self._controls]

    def _apart(self, text: str, spans: Iterable[_Span], as_said: Mapping[int, int]) -> list[int]:
        """The ids of a text in which control tokens are all the template's."""
        ids: list[int] = []
        start = 0
        for i, begin, end in spans:
            if i in self._controls:
                ids += [*self._plain(text[start:begin].translate(as_said), not start), i]
                start = end
        return ids + self._plain(text[start:].translate(as_said), not start)

    def _plain(self, text: str, first: bool) -> list[int]:
        """Those of a text without control tokens, also where it spells some; `first` where it
        begins the whole."""
        # Those that are not special would be found: each is cut behind its first character.
        cuts = [0, *(found.start() + 1 for found in self._others.finditer(text)), len(text)]
        ids: list[int] = []
        for a, b in pairwise(cuts):
            continues = a > 0 or not (first or self._tokenizer.anew)
            part = text[a:b].encode("utf-8", _STRAYS)
            ids += self._tokenizer.encode(part, continues=continues)
        return ids


def _checked(messages: Sequence[Mapping[str, str]]) -> list[Message]:
    wanted = 'for example [{"role": "user", "content": "Who are you?"}]'
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UsageError("messages is not a list of messages", wanted)
    for message in messages:
        sound = isinstance(message, Mapping) and set(message) == {"role", "content"}
        if not sound or not all(isinstance(value, str) for value in message.values()):
            raise UsageError("a message needs a role and a content, both text", wanted)
    try:
        "".join(message["content"] for message in messages).encode("utf-8", _STRAYS)
    except UnicodeEncodeError:
        raise UsageError("a message has half of a surrogate pair", "give whole ones") from None
    length = sum(len(message["content"]) for message in messages)
    if length > _LONGEST:
        most = f"a conversation may have {_LONGEST:,}"
        raise UsageError(f"the messages have {length:,} characters", most)
    return [dict(message) for message in messages]


def _any_of(names: Iterable[str]) -> str:
    """A pattern for the longest of them that fits; for nothing where there are none."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


def _forms(character: str) -> set[str]:
    """What normalisation may make of it."""
    return set(unicodedata.normalize("NFKC", character) + character.lower() + character.upper())
