"""Several processes give the tokens of conversations that one gives."""

# ruff: noqa: F811  # fixtures are imported

import json
import subprocess

import numpy as np
import pytest

from support.chats import (  # noqa: F401
    CHATML,
    DATED,
    GEMMA,
    NO_END,
    assistant,
    model,
    plain_model,
    user,
)
from support.command import PythonFork
from support.corpora import run_generator
from tgen import corpus
from tgen.chat.training_rows import RowEncoder
from tgen.checkpoint.chat_template import ChatTemplate
from tgen.errors import CorpusError
from tgen.lora import model_with_adapter
from tgen.runs import row_tokens
from tgen.runs.row_tokens import RowTask, read_line, read_row, tokenize_conversations
from tgen.tokenizer import Tokenizer

LONG = "and so on, " * 40
ROWS = [
    row
    for i in range(20)
    for row in (
        [*user(f"What is {i}?"), assistant(f"It is {i}.")],
        [*user(f"Who are {i}?"), assistant("We."), *user("Why?"), assistant(LONG)],
        [*user(LONG * (i + 1)), assistant("Yes.")],
        [*user("\U0001f600 \x04?"), assistant("é" * i + ".")],
    )
]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Fork the workers, and send them a few rows at a time."""
    monkeypatch.setattr(subprocess, "Popen", PythonFork)
    monkeypatch.setattr(row_tokens, "_BATCH_ROWS", 7)


@pytest.fixture
def tokenize(model, tmp_path):
    """Tokenize rows with a number of processes; the progress is that of batches."""

    def run(rows, processes, *, template=CHATML, loss_on_all=False):
        source = model(template)
        bundle = model_with_adapter.load(source)
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        documents = corpus.read([str(path)]).documents
        task = RowTask(
            ChatTemplate(template, {"eos_token": "</s>", "bos_token": "<s>"}),
            "2001-01-01T00:00:00",
            sorted(bundle.end_ids),
            60,
            loss_on_all,
        )
        known = bundle.tokenizer
        end_id = known.added_tokens["</s>"]
        tokenizer = Tokenizer(known.json, end_ids=[end_id], n_rows=known.vocab_size)
        assert tokenizer.end_of_text == end_id
        chat, first = task.chat_format(tokenizer), read_row(read_line(documents, 0))
        encoder = RowEncoder(chat, tokenizer, task.end_ids, first)
        steps = tokenize_conversations(
            documents, task, encoder, tokenizer, None, processes=processes
        )
        return run_generator(steps)

    return run


@pytest.mark.parametrize("loss_on_all", [False, True])
@pytest.mark.parametrize("template", [CHATML, GEMMA, DATED, NO_END])
def test_any_number_of_processes_gives_the_same_rows(tokenize, template, loss_on_all):
    options = {"template": template, "loss_on_all": loss_on_all}
    one, done = tokenize(ROWS, 1, **options)
    several, also_done = tokenize(ROWS, 3, **options)
    assert one.cut
    assert one.left_out
    for name in ("ids", "loss_mask", "row_lengths"):
        ours, theirs = getattr(several.tokens, name), getattr(one.tokens, name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert several[1:] == one[1:]
    assert also_done == done


@pytest.mark.parametrize("processes", [1, 2])
def test_row_that_the_template_rejects_is_named_by_every_process(tokenize, processes):
    rows = [*ROWS[:30:4], [*user("a"), *user("b"), assistant("c")], ROWS[0]]
    with pytest.raises(CorpusError, match=r"rows.jsonl, line 9: .* roles must alternate"):
        tokenize(rows, processes, template=GEMMA)
