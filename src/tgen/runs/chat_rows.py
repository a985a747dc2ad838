"""Conversations to fine-tune on: their template, held-out rows, tokens, and notes for the plan."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np

from tgen import corpus, distributed
from tgen.chat.encode import ChatFormat
from tgen.chat.plain_template import PLAIN, plain_template
from tgen.chat.training_rows import Row, RowEncoder, RowError, own_system_text
from tgen.checkpoint import model_dir
from tgen.checkpoint.chat_template import (
    ChatTemplate,
    chat_template_source,
    read_chat_template,
    special_tokens,
)
from tgen.checkpoint.inherited_settings import InheritedSettings
from tgen.config.training import TrainConfig
from tgen.corpus import Corpus, Documents, Tokens, begin_of_document
from tgen.errors import CorpusError, ModelError, TgenError, UsageError
from tgen.reports.training import PhaseReport, RowPart, RowsReport
from tgen.runs.request import RunRequest
from tgen.runs.row_tokens import (
    MODULE,
    RowTask,
    RowTokens,
    read_line,
    read_row,
    tokenize_conversations,
)
from tgen.runs.run_record import ChatRecord
from tgen.runs.tokenizing import (
    TOKENIZER_BYTES,
    PhaseProgress,
    Phases,
    PreparedText,
    call_ranks,
    n_processes,
    replacement_notes,
    train_tokenizer,
)
from tgen.storage import files
from tgen.tokenizer import Tokenizer

_MAX_TEMPLATE_BYTES = 1 << 20
_SHORT_WINDOW = 32  # tokens
_PARALLEL_BYTES = 1 << 22  # from this size on, several processes are faster
_SHOWN = 100  # characters of a system message


def prepare_rows(
    request: RunRequest,
    source: model_dir.ModelBundle | None,
    text: Corpus,
    config: TrainConfig,
    *,
    context_length: int | None,
    longest: int,
    max_bytes: int,
    folder: Path | None,
) -> Phases[PreparedText]:
    """Split and tokenize conversations, and close the corpus.

    Without a `source` to fine-tune, the tokenizer is a new one, and the template is the plain one
    unless the user names another. `context_length` is the user's, `longest` the most tokens of a
    row without it. Raise CorpusError for a row that the template does not accept or if no row fits
    into a window, ModelError if there is no template.
    """
    check_no_bpe_dropout(config)
    limit = context_length or longest
    if source is None:
        yield PhaseReport(phase="training the tokenizer")
        train, val = corpus.split_rows(text, config.val_fraction)
        texts = _sample_texts(train)
        words = [*texts, *([] if request.unk else _sample_texts(val))]
        tokenizer, choice = train_tokenizer(
            request, texts, ((word, True) for word in words), train.n_bytes
        )
        given = _new_template(request.template or PLAIN, tokenizer)
        end_ids = [i for i in [tokenizer.end_of_text] if i is not None]
    else:
        tokenizer, choice = source.tokenizer, None
        given, end_ids = _choose_template(request.template, source), sorted(source.end_ids)
        limit = min(limit, source.config.context_length)
    record = ChatRecord(
        template=given.source,
        variables=given.variables,
        date=datetime.now().isoformat(timespec="seconds"),
        end_ids=end_ids,
    )
    rows = yield from tokenize_rows(
        text,
        record,
        tokenizer,
        config,
        context_length=limit,
        max_bytes=max_bytes,
        folder=folder,
        threads=request.threads,
    )
    if source is None:
        inherited = InheritedSettings(end_ids=end_ids, chat_template=given.source)
        rows = rows._replace(tokenizer_choice=choice or rows.tokenizer_choice)
    else:
        inherited = model_dir.inherited_settings(source)
        if request.template is not None:
            inherited = inherited.with_template(given.source)
    assert rows.chat is not None
    if rows.chat.end_id not in end_ids:
        inherited = inherited.with_end(rows.chat.end_id)
    if context_length is None:  # windows as long as the longest row: less padding
        assert rows.context_length is not None
        longest = 1 << (rows.context_length - 1).bit_length()
        limit = min(limit, max(_SHORT_WINDOW, longest))
    return rows._replace(inherited=inherited, context_length=limit)


def _sample_texts(rows: Documents) -> list[bytes]:
    """Return texts of rows as the plain template has them, to train a tokenizer on."""
    texts = []
    for (line,) in _subsample(rows, TOKENIZER_BYTES):
        for message in corpus.parse_conversation(line[:]).messages:
            begin = {"user": "Q: ", "assistant": "A: "}.get(message["role"], "")
            texts.append(f"{begin}{message['content']}\n".encode("utf-8", "surrogatepass"))
    return texts


def tokenize_rows(
    text: Corpus,
    record: ChatRecord,
    tokenizer: Tokenizer,
    config: TrainConfig,
    *,
    context_length: int,
    max_bytes: int,
    folder: Path | None,
    threads: int | None,
) -> Phases[PreparedText]:
    """Split and tokenize conversations as `record` says, and close the corpus.

    Many are tokenized by `threads` processes per rank, as `tokenize_split` does. The
    `context_length` of the result is the length of the longest row.
    """
    notes = [*text.notes]
    all_rows, held_out = corpus.split_rows(text, config.val_fraction)
    rows = _subsample(all_rows, max_bytes)
    if not held_out:
        notes.append("no held-out rows: the last weights are saved, not the best")
    if n_dropped := corpus.count_dropped(text, all_rows, held_out)[0]:
        notes.append(f"copies of held-out rows dropped: {n_dropped:,}")
    if len(rows) < len(all_rows):
        notes.append(
            f"trains on {len(rows):,} of {len(all_rows):,} rows, evenly spaced: more would "
            "exceed the time budget"
        )
    template = ChatTemplate(record.template, record.variables)
    loss_on_all = config.loss_on == "all"
    task = RowTask(template, record.date, record.end_ids, context_length, loss_on_all)
    line = read_line(rows, 0)
    chat, first = task.chat_format(tokenizer), read_row(line)
    try:
        encoder = RowEncoder(chat, tokenizer, record.end_ids, first)
    except RowError as error:
        raise CorpusError(f"{rows.describe(error.row)}: {error.message}", error.hint) from None
    progress = PhaseProgress("tokenizing", rows.n_bytes + held_out.n_bytes)
    is_large = rows.n_bytes >= _PARALLEL_BYTES
    if on_ranks := is_large and distributed.ranks().world_size > 1:
        call_ranks(MODULE, task.first_message(tokenizer, line), threads)
    train = yield from progress.report(
        tokenize_conversations(
            rows,
            task,
            encoder,
            tokenizer,
            folder,
            processes=n_processes(threads) if is_large else 1,
            on_ranks=on_ranks,
        )
    )
    val = yield from progress.report(
        tokenize_conversations(held_out, task, encoder, tokenizer, folder)
    )
    n_rows, n_held_out_rows = len(rows) - len(train.left_out), len(held_out) - len(val.left_out)
    if not n_rows:
        raise CorpusError(
            f"no row fits into a context of {context_length:,} tokens "
            f"(the first is {rows.describe(0)})",
            "shorten the conversations, or raise --set context_length up to the model's",
        )
    notes += _notes_on_template(chat, encoder, tokenizer, first)
    for documents, result in ((rows, train), (held_out, val)):
        notes += _notes_on_rows(documents, result, context_length)
    # A held-out question, which samples answer during training.
    documents, result = (held_out, val) if n_held_out_rows else (rows, train)
    i = next(i for i in range(len(documents)) if i not in result.left_out)
    row = read_row(read_line(documents, i))
    question, _ = encoder.clean(row.messages[: row.answers[0]])
    sample_ids = chat.encode(question)
    text.close()
    chat_record = replace(
        record,
        end_id=encoder.end_id,
        n_rows=n_rows,
        n_held_out_rows=n_held_out_rows,
        sample_ids=sample_ids,
    )
    return PreparedText(
        train.tokens,
        val.tokens,
        train.target_bytes,
        val.target_bytes,
        notes,
        tokenizer,
        question[-1]["content"].encode("utf-8", "surrogateescape"),
        chat=chat_record,
        context_length=max([*train.lengths, *val.lengths]) - 1,
        n_answers=len(train.lengths),
    )


def check_no_bpe_dropout(config: TrainConfig) -> None:
    """Raise UsageError for BPE-dropout, which rows of conversations do not have."""
    if config.bpe_dropout:
        raise UsageError("bpe_dropout cannot be combined with conversations", "remove bpe_dropout")


def rows_report(chat: ChatRecord, train: Tokens, tokenizer: Tokenizer) -> RowsReport:
    """Return what the plan says of the rows, and the first of them as it will be learned."""
    assert train.row_lengths is not None
    assert train.loss_mask is not None
    n = int(train.row_lengths[:1][0])
    parts: list[tuple[bytes, bool]] = []
    for i, in_loss in zip(train.ids[:n], train.loss_mask[:n], strict=True):
        text = tokenizer.token_bytes(int(i)) or (tokenizer.id_to_token(int(i)) or "").encode()
        if parts and parts[-1][1] == in_loss:
            text = parts.pop()[0] + text
        parts.append((text, bool(in_loss)))
    return RowsReport(
        rows=chat.n_rows,
        held_out_rows=chat.n_held_out_rows,
        examples=len(train.row_lengths),
        target_tokens=train.n_targets,
        end_token=tokenizer.id_to_token(chat.end_id) or "",
        first_row=[
            RowPart(text=text.decode("utf-8", "replace"), in_loss=in_loss)
            for text, in_loss in parts
        ],
    )


def _choose_template(given: str | None, source: model_dir.ModelBundle) -> ChatTemplate:
    """Return the template of --template, else the model's."""
    if given is not None:
        return _new_template(given, source.tokenizer, source.settings_path)
    if chat_template_source(source.settings_path) is None:
        raise ModelError(
            f"{str(source.settings_path)!r} has no usable chat template",
            "add --template plain, or --template FILE with a Jinja template",
        )
    return read_chat_template(source.settings_path)


def _new_template(given: str, tokenizer: Tokenizer, path: Path | None = None) -> ChatTemplate:
    """Return the template of --template for a tokenizer and the special tokens of the model at
    `path`, if any."""
    end_id = tokenizer.end_of_text
    end = "" if end_id is None else tokenizer.id_to_token(end_id) or ""
    variables = {"eos_token": end} if path is None else special_tokens(path)
    if given != PLAIN:
        try:
            content = files.read(Path(given), limit=_MAX_TEMPLATE_BYTES)
            return ChatTemplate(content.decode(), variables)
        except UnicodeDecodeError:
            raise UsageError(f"--template {given}: not UTF-8", "pass a Jinja template") from None
        except TgenError as error:
            raise UsageError(f"--template: {error.message}", error.hint) from None
    if end_id is None:
        what = "the tokenizer" if path is None else repr(str(path))
        raise ModelError(
            f"{what} has no end-of-text token for the plain chat template",
            "pass --template FILE with a Jinja template",
        )
    begin = "".join(tokenizer.id_to_token(i) or "" for i in begin_of_document(tokenizer))
    return ChatTemplate(plain_template(begin, end), variables)


def _subsample(rows: Documents, max_bytes: int) -> Documents:
    """Return evenly spaced rows of about `max_bytes` in total, or all."""
    n = max(1, len(rows) * max_bytes // max(1, rows.n_bytes))
    if n >= len(rows):
        return rows
    selected = np.linspace(0, len(rows) - 1, n).astype(np.int64)
    return rows.select(selected, np.zeros_like(selected), rows.sizes[selected])


def training_rows(text: Corpus, config: TrainConfig, max_bytes: int) -> Documents:
    """Return the conversations that a run trains on, as `tokenize_rows` does."""
    return _subsample(corpus.split_rows(text, config.val_fraction)[0], max_bytes)


def _notes_on_template(
    chat: ChatFormat, encoder: RowEncoder, tokenizer: Tokenizer, first: Row
) -> Iterator[str]:
    end = tokenizer.id_to_token(encoder.end_id)
    if encoder.adds_end:
        yield f"the chat template does not end answers: {end} is added to each"
    if first.messages[0]["role"] != "system" and (own := own_system_text(chat)):
        shown = own if len(own) <= _SHOWN else f"{own[:_SHOWN]}..."
        yield f"the chat template adds a system message of its own: {shown!r}"
    if "strftime_now" in chat.template.source:
        date = (chat.now or "").partition("T")[0]
        yield f"the chat template writes the date: that of this run is {date}"


def _notes_on_rows(documents: Documents, result: RowTokens, context_length: int) -> Iterator[str]:
    limit = f"too long for a context of {context_length:,} tokens"
    if result.cut:
        n, first = len(result.cut), documents.describe(result.cut[0])
        yield f"{n:,} row{'s lose their' if n > 1 else ' loses its'} last answers, {limit}: {first}"
    if result.left_out:
        n, first = len(result.left_out), documents.describe(result.left_out[0])
        yield f"{n:,} row{'s are' if n > 1 else ' is'} left out, {limit}: {first}"
    n_rows, n_examples = len(documents) - len(result.left_out), len(result.lengths)
    if n_examples > n_rows:
        yield (
            f"the chat template rewrites earlier turns: {n_rows:,} rows are {n_examples:,} examples"
        )
    yield from replacement_notes(result.n_replaced)
