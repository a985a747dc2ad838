"""Conversations -> tokens and loss masks, with several worker processes if there are many.

A worker's first message is the tokenizer.json, a JSON object with the `RowTask` and the other
arguments of `Tokenizer`, and any conversation. Every later message is a batch of conversations, a
line of JSON each. The answer is JSON, the ids, uint32, and whether each is in the loss, bool. The
JSON has per conversation the lengths of its examples, whether it is cut, and the number of replaced
characters; the bytes of target tokens; and an error: the row, the message and the hint.
"""

import json
from array import array
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tgen import corpus
from tgen.chat.encode import ChatFormat
from tgen.chat.training_rows import Row, RowEncoder, RowError
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.corpus import ArrayBuilder, Documents, Tokens
from tgen.errors import CorpusError
from tgen.machine.worker_pool import Message, answer_messages, map_messages
from tgen.tokenizer import Tokenizer

MODULE = "tgen.runs.row_tokens"  # of the workers
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 20


class RowTask(NamedTuple):
    """The settings, besides the tokenizer, that determine the tokens of conversations."""

    template: ChatTemplate
    date: str  # that the template sees
    end_ids: Sequence[int]
    context_length: int
    loss_on_all: bool

    def chat_format(self, tokenizer: Tokenizer) -> ChatFormat:
        """Return the encoder of conversations."""
        return ChatFormat(self.template, tokenizer, self.context_length, now=self.date)

    def first_message(self, tokenizer: Tokenizer, line: bytes) -> Message:
        """Return the first message to a worker; `line` is any conversation."""
        end = tokenizer.end_of_text
        others = {
            "end_of_text": [] if end is None else [end],
            "n_tokens": tokenizer.vocab_size,
            "template": [self.template.source, self.template.variables, self.template.tool_source],
            "task": self[1:],
        }
        return [tokenizer.json.encode(), json.dumps(others).encode(), line]


class RowTokens(NamedTuple):
    """Rows as tokens, and the indices of those that are not learned whole."""

    tokens: Tokens
    lengths: Sequence[int]  # tokens of each example
    target_bytes: int
    n_replaced: int  # characters that the tokenizer cannot express
    cut: list[int]  # rows without their last answers
    left_out: list[int]  # rows without any answer


def read_line(documents: Documents, i: int) -> bytes:
    """Return the line of a conversation."""
    (line,) = documents[i]
    return line[:]


def read_row(line: bytes) -> Row:
    """Return the conversation of a line, which was checked when the corpus was read."""
    return Row(*corpus.parse_conversation(line))


def tokenize_conversations(
    documents: Documents,
    task: RowTask,
    encoder: RowEncoder,
    tokenizer: Tokenizer,
    folder: Path | None,
    *,
    processes: int = 1,
    on_ranks: bool = False,
) -> Generator[int, None, RowTokens]:
    """Yield the number of bytes done; return the tokens of all rows.

    Arrays too large for RAM go to unnamed files in `folder`. The number of `processes` does not
    change the tokens, nor does `on_ranks`: see `map_messages`. Raises CorpusError for a row that
    cannot be encoded.
    """
    answers: Iterator[Message]
    if processes == 1 and not on_ranks:
        answers = map(partial(_encode_batch, task, encoder, tokenizer), _batches(documents))
    else:
        first = task.first_message(tokenizer, read_line(documents, 0))
        messages = _batches(documents)
        answers = map_messages(messages, MODULE, first, processes=processes, on_ranks=on_ranks)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tokens, mask = ArrayBuilder(dtype, folder), ArrayBuilder(np.dtype(np.bool_), folder)
    lengths = array("q")
    cut: list[int] = []
    left_out: list[int] = []
    i = n_done = target_bytes = n_replaced = 0
    sizes = documents.sizes
    for counts, ids, in_loss in answers:
        answer: dict[str, Any] = json.loads(counts)
        if answer["error"]:
            row, message, hint = answer["error"]
            raise CorpusError(f"{documents.describe(i + row)}: {message}", hint)
        tokens.append(np.frombuffer(ids, np.uint32).astype(dtype))
        mask.append(np.frombuffer(in_loss, np.bool_))
        for own_lengths, is_cut, n in answer["rows"]:
            if is_cut:
                (cut if own_lengths else left_out).append(i)
            lengths.extend(own_lengths)
            n_replaced += n
            n_done += int(sizes[i])
            i += 1
        target_bytes += answer["target_bytes"]
        yield n_done
    result = Tokens(tokens.build(), mask.build(), np.array(lengths, np.int64))
    return RowTokens(result, lengths, target_bytes, n_replaced, cut, left_out)


def _batches(documents: Documents) -> Iterator[Message]:
    batch: list[bytes] = []
    n_bytes = 0
    for i in range(len(documents)):
        batch.append(read_line(documents, i))
        n_bytes += len(batch[-1])
        if len(batch) == _BATCH_ROWS or n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _encode_batch(
    task: RowTask, encoder: RowEncoder, tokenizer: Tokenizer, lines: Message
) -> Message:
    """Return the answer to a batch; a window predicts `context_length` tokens from as many, so that
    a row may have one more."""
    rows: list[tuple[list[int], bool, int]] = []
    ids: list[int] = []
    in_loss: list[bool] = []
    error: tuple[int, str, str] | None = None
    try:
        for row in encoder.encode(map(read_row, lines), task.context_length + 1):
            for example in row.examples:
                ids += example.ids
                every = [False] + [True] * (len(example.ids) - 1)
                in_loss += every if task.loss_on_all else example.loss_mask
            rows.append(([len(example.ids) for example in row.examples], row.cut, row.n_replaced))
    except RowError as failed:
        error = failed.row, failed.message, failed.hint
    target_bytes = sum(
        len(tokenizer.token_bytes(i)) for i, k in zip(ids, in_loss, strict=True) if k
    )
    counts = {"rows": rows, "target_bytes": target_bytes, "error": error}
    arrays = np.array(ids, np.uint32), np.array(in_loss, np.bool_)
    return [json.dumps(counts).encode(), *(one.tobytes() for one in arrays)]


def _make_encoder(first: Message) -> partial[Message]:
    content, others, line = first[0].decode(), json.loads(first[1]), first[2]
    tokenizer = Tokenizer(content, end_ids=others["end_of_text"], n_rows=others["n_tokens"])
    task = RowTask(ChatTemplate(*others["template"]), *others["task"])
    encoder = RowEncoder(task.chat_format(tokenizer), tokenizer, task.end_ids, read_row(line))
    return partial(_encode_batch, task, encoder, tokenizer)


if __name__ == "__main__":
    answer_messages(_make_encoder)
