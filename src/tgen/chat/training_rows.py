"""Conversations -> token ids and loss masks: training sees what generation will see.

For every answer, the template renders the messages before it up to the start of the answer, as for
generation, and the messages with it. The second text must begin with the first; what follows is the
answer, up to and including the token that ends it. It is tokenized apart, since generation cannot
change the tokens of its prompt either.

If the next answer's context begins with these ids, both answers are in one example. Some templates
rewrite earlier turns, for example to remove their reasoning; then each answer is an example.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tgen.chat.encode import MAX_CHARACTERS, ChatFormat
from tgen.chat.render import FailedTemplateError, Message, RejectedMessagesError
from tgen.errors import CorpusError, ModelError, TgenError
from tgen.tokenizer import Tokenizer

_BLOCK = 256  # rows in progress
_REQUEST = 1 << 21  # characters of messages per request
_OTHER_TEMPLATE = "use another chat template: --template FILE"
_ASSISTANT = "assistant"


class Row(NamedTuple):
    """A conversation and the indices of the answers to learn."""

    messages: Sequence[Message]
    answers: Sequence[int]


class Example(NamedTuple):
    """One text to learn; the first token is never in the loss."""

    ids: list[int]
    loss_mask: list[bool]


class EncodedRow(NamedTuple):
    """The examples of a row; `cut` if some answers are too long for the context."""

    examples: list[Example]
    cut: bool
    n_replaced: int  # characters that the tokenizer cannot express, replaced by U+FFFD


class RowError(CorpusError):
    """A conversation that cannot be learned: row number `row` of those passed."""

    def __init__(self, error: TgenError, row: int) -> None:
        super().__init__(error.message, _hint(error))
        self.row = row


class _Render(NamedTuple):
    """A conversation to render, up to the start of the next answer if `is_prompt`."""

    messages: Sequence[Message]
    is_prompt: bool


_Encoding = Generator[list[_Render], list[str], EncodedRow]


class RowEncoder:
    """The encoder of rows for one model.

    `end_id` ends an answer: the first of the model's `end_ids` that the template writes after one,
    else the first control token. If it writes neither, the tokenizer's end-of-text token is added
    to each answer, and `adds_end` is true.
    """

    def __init__(
        self, chat: ChatFormat, tokenizer: Tokenizer, end_ids: Collection[int], first: Row
    ) -> None:
        """`first` is any row. Raises RowError if the template does not accept it."""
        self._chat, self._tokenizer = chat, tokenizer
        n = first.answers[0]
        answers = [{"role": _ASSISTANT, "content": text} for text in ("2", "3")]
        chats = [_Render([*first.messages[:n], answer], False) for answer in answers]
        try:
            texts = self._render(chats)
        except TgenError as error:
            raise RowError(error, 0) from None
        self._after = _common_end(*texts)
        ids = chat.to_ids([self._after], {}, continuation=True)
        ends = [i for i in ids if i in end_ids or i in chat.end_ids] or chat.controls(ids)
        self.adds_end = not ends
        end = ends[0] if ends else tokenizer.end_of_text
        if end is None:
            raise ModelError("the chat template does not end its answers", _OTHER_TEMPLATE)
        self.end_id = end

    def encode(self, rows: Iterable[Row], max_tokens: int) -> Iterator[EncodedRow]:
        """Yield the examples of each row, in order, of at most `max_tokens` tokens each.

        Raises RowError for the first row that cannot be encoded.
        """
        rows, n_done = iter(rows), 0
        while block := list(islice(rows, _BLOCK)):
            yield from self._encode_block(block, max_tokens, n_done)
            n_done += len(block)

    def clean(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Return the messages up to the limit of `ChatFormat`, in which U+FFFD replaces what the
        tokenizer cannot express, and the number of replacements."""
        cleaned: list[Message] = []
        n_characters = n_replaced = 0
        for message in messages:
            content, n = self._tokenizer.expressible.replace_holes(message["content"])
            n_characters += len(content)
            if n_characters > MAX_CHARACTERS:
                break
            n_replaced += n
            cleaned.append({**message, "content": content})
        return cleaned, n_replaced

    def _encode_block(self, rows: list[Row], max_tokens: int, n_before: int) -> list[EncodedRow]:
        """Encode rows together: the texts that they wait for are rendered in one request."""
        done: dict[int, EncodedRow] = {}
        active = {i: self._encode_row(row, max_tokens) for i, row in enumerate(rows)}
        replies: dict[int, list[str] | None] = dict.fromkeys(active)
        while replies:
            requests: dict[int, list[_Render]] = {}
            for i, texts in replies.items():
                try:
                    requests[i] = next(active[i]) if texts is None else active[i].send(texts)
                except StopIteration as end:
                    done[i] = end.value
                except TgenError as error:
                    raise RowError(error, n_before + i) from None
            replies = {}
            for group in _groups(requests):
                replies |= self._render_group(group, n_before)
        return [done[i] for i in range(len(rows))]

    def _render_group(
        self, group: dict[int, list[_Render]], n_before: int
    ) -> dict[int, list[str] | None]:
        owners = [i for i, renders in group.items() for _ in renders]
        try:
            texts = iter(self._render([one for renders in group.values() for one in renders]))
        except (RejectedMessagesError, FailedTemplateError) as error:
            raise RowError(error, n_before + owners[error.at]) from None
        except ModelError as error:  # too slow or too large: find the row
            if len(group) == 1:
                raise RowError(error, n_before + owners[0]) from None
            parts = [self._render_group({i: one}, n_before) for i, one in group.items()]
            return {i: texts for part in parts for i, texts in part.items()}
        return {i: list(islice(texts, len(renders))) for i, renders in group.items()}

    def _render(self, renders: Sequence[_Render]) -> list[str]:
        return self._chat.render(
            [one.messages for one in renders], [one.is_prompt for one in renders]
        )

    def _encode_row(self, row: Row, max_tokens: int) -> _Encoding:
        """Yield what to render, receive the texts, and return the examples."""
        messages, n_replaced = self.clean(row.messages)
        if not messages:  # the first one is longer than the limit
            return EncodedRow([], True, n_replaced)
        versions = self._chat.prepare(messages)
        examples: list[Example] = []
        ids: list[int] = []
        loss_mask: list[bool] = []
        cut = False
        for n in row.answers:
            if n >= len(messages):
                cut = True
                break
            before, after = versions.head(n), versions.head(n + 1)
            texts = yield [
                *(_Render(one, True) for one in before.conversations),
                *(_Render(one, False) for one in after.conversations),
            ]
            contexts = texts[: len(before.conversations)]
            with_answer = texts[len(before.conversations) :]
            if not all(map(self._chat.fits, texts)):
                cut = True
                break
            context = self._chat.to_ids(contexts, versions.originals)
            answers = [
                self._answer(contexts[min(k, len(contexts) - 1)], text)
                for k, text in enumerate(with_answer)
            ]
            answer = self._until_end(
                self._chat.to_ids(answers, versions.originals, continuation=True)
            )
            if not context:
                raise CorpusError("the chat template renders nothing before an answer")
            if len(context) + len(answer) > max_tokens:
                cut = True
                break
            if ids and context[: len(ids)] != ids:
                examples.append(Example(ids, loss_mask))
                ids, loss_mask = [], []
            loss_mask = loss_mask + [False] * (len(context) - len(ids)) + [True] * len(answer)
            ids = context + answer
        if ids:
            examples.append(Example(ids, loss_mask))
        return EncodedRow(examples, cut, n_replaced)

    def _answer(self, context: str, text: str) -> str:
        """Return what follows the context in the text of a conversation with the answer."""
        if not text.startswith(context):
            raise CorpusError(
                "the chat template does not begin the answer as it begins one for generation"
            )
        answer = text[len(context) :]
        return answer.removesuffix(self._after) if self.adds_end else answer

    def _until_end(self, ids: list[int]) -> list[int]:
        if self.adds_end:
            return [*ids, self.end_id]
        if self.end_id not in ids:
            name = self._tokenizer.id_to_token(self.end_id)
            raise CorpusError(f"the chat template does not end the answer with {name!r}")
        return ids[: ids.index(self.end_id) + 1]


def own_system_text(chat: ChatFormat) -> str:
    """Return the system text that a template writes if no message has one; "" if it writes none."""
    system, user = "\x1fsystem\x1f", {"role": "user", "content": "\x1fuser\x1f"}
    try:
        without, given = chat.render([[user], [{"role": "system", "content": system}, user]])
    except TgenError:  # the template rejects system messages, or messages like these
        return ""
    head, found, tail = given.partition(system)
    if not found or not without.startswith(head) or not without.endswith(tail):
        return ""
    # The template may also write a text before the user's system message.
    text = without[: len(without) - len(tail)]
    for name in sorted(chat.control_names, key=len, reverse=True):
        text = text.replace(name, "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip() not in ("", "system")]
    return " ".join(lines)


def _common_end(one: str, other: str) -> str:
    n = 0
    while n < min(len(one), len(other)) and one[-1 - n] == other[-1 - n]:
        n += 1
    return one[len(one) - n :]


def _groups(requests: dict[int, list[_Render]]) -> Iterator[dict[int, list[_Render]]]:
    """Split requests into groups of limited size."""
    group: dict[int, list[_Render]] = {}
    size = 0
    for i, renders in requests.items():
        n = sum(len(m["content"]) for one in renders for m in one.messages)
        if group and size + n > _REQUEST:
            yield group
            group, size = {}, 0
        group[i] = renders
        size += n
    if group:
        yield group


def _hint(error: TgenError) -> str:
    if isinstance(error, RejectedMessagesError):
        return f"change the row, or {_OTHER_TEMPLATE}"
    if isinstance(error, ModelError) or not error.hint:
        return _OTHER_TEMPLATE
    return error.hint
