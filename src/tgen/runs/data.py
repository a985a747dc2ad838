"""Tokenize a corpus for a run that exists: the same again, or another."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgen import corpus
from tgen.errors import CorpusError, TrainingError
from tgen.reports.training import PhaseReport
from tgen.runs import saved_state
from tgen.runs.chat_rows import tokenize_rows
from tgen.runs.run_record import RunRecord
from tgen.runs.tokenizing import PreparedText, split_corpus, tokenize_split
from tgen.tokenizer import Tokenizer


def retokenize(
    out: Path,
    text: corpus.Corpus,
    record: RunRecord,
    tokenizer: Tokenizer,
    tokens_entry: Mapping[str, Any],
) -> Generator[PhaseReport, None, None]:
    """Replace the damaged tokens of the run in `out` from the same corpus.

    Raise TrainingError if the tokens do not match run.json.
    """
    again = yield from _tokenize_again(out, text, record, tokenizer)
    name = tokens_entry.get("name", saved_state.TOKENS_FILE)
    if saved_state.save_tokens(out, record.to_dict(), again.tokens, name=name) != tokens_entry:
        raise TrainingError(
            f"the corpus does not produce the tokens that the run in {out} started with",
            "check the version of the tokenizers library; " + saved_state.recovery_hint(out),
        )


def _tokenize_again(
    out: Path, text: corpus.Corpus, record: RunRecord, tokenizer: Tokenizer
) -> Generator[PhaseReport, None, PreparedText]:
    """Tokenize a corpus as the run in `out` did."""
    config, folder = record.plan.train, saved_state.folder(out)
    if record.chat is not None:
        return (
            yield from tokenize_rows(
                text,
                record.chat,
                tokenizer,
                config,
                context_length=record.plan.context_length,
                max_bytes=record.read_bytes,
                folder=folder,
            )
        )
    split = split_corpus(text, config, record.read_bytes)
    begin_ids = () if record.begin_of_text is None else corpus.begin_of_document(tokenizer)
    again = yield from tokenize_split(
        split, tokenizer, config, folder=folder, threads=record.threads, begin_ids=begin_ids
    )
    return again._replace(sample_prompt=record.sample_prompt)


def tokenize_new_corpus(
    out: Path, text: corpus.Corpus, names: list[str], record: RunRecord, tokenizer: Tokenizer
) -> Generator[PhaseReport, None, tuple[RunRecord, dict[str, Any]]]:
    """Tokenize another corpus for the run in `out`; return its record and tokens entry.

    The tokens are written beside the old ones, which stay in use until the record is saved. Raise
    CorpusError if the corpus is too short.
    """
    if text.is_chat != (record.chat is not None):
        raise CorpusError(
            f"the run in {out} trains on {'text' if text.is_chat else 'conversations'}, but the "
            f"new corpus has {'conversations' if text.is_chat else 'text'}",
            "start a new run with another --out",
        )
    again = yield from _tokenize_again(out, text, record, tokenizer)
    n_tokens = len(again.tokens["train"])
    is_short = n_tokens <= record.plan.context_length
    if record.chat is None and (is_short or again.train_bytes == 0):
        raise CorpusError(
            f"the new corpus is too short ({n_tokens:,} training tokens; the run in "
            f"{out} needs more than {record.plan.context_length:,})",
            "name a longer text, or start a new run with another --out",
        )
    record = replace(
        record,
        corpus=names,
        corpus_sha256=text.sha256,
        corpus_bytes=text.n_bytes,
        corpus_changes=record.corpus_changes + 1,
        train_bytes=again.train_bytes,
        held_out_bytes=again.held_out_bytes,
        baselines={},
        chat=again.chat,
        sample_prompt=again.sample_prompt,
        plan=replace(record.plan, notes=again.notes),
    )
    name = f"tokens-{record.corpus_changes}.safetensors"
    return record, saved_state.save_tokens(out, record.to_dict(), again.tokens, name=name)
