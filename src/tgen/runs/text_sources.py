"""The training text of a run as an index: stored by --index, or made again from its corpus."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.corpus import Corpus, Documents
from tgen.corpus.steps import Steps, as_part, finish
from tgen.corpus.text_index import NewIndex, TextIndex, build_index, open_index
from tgen.errors import ModelError, TgenError, UsageError
from tgen.runs import saved_state
from tgen.runs.chat_rows import training_rows
from tgen.runs.output_folder import own_files
from tgen.runs.run_record import RunRecord
from tgen.runs.tokenizing import PhaseProgress, Phases, training_texts

_HINT = "run tgen where the training ran, with the same files, or train again with --index"
_READ = 0.3  # of the time to index a corpus


def check_index_is_supported() -> None:
    """Raise UsageError on systems that cannot map a private file."""
    if not hasattr(os, "pread"):
        raise UsageError("--index is not supported on this system", "remove --index")


def read_as_recorded(
    record: RunRecord, paths: Sequence[str], reading: Reading | None
) -> Steps[corpus.Corpus]:
    """Read a corpus as the run of the record did, but with these paths and options."""
    return corpus.read_in_steps(
        paths,
        chat=record.chat is not None,
        own_files=own_files,
        reading=reading,
        known_encodings=record.detected_encodings,
    )


def index_training_text(record: RunRecord, documents: Documents) -> Phases[NewIndex]:
    """Index what a run trains on; raise CorpusError if it is too large or has changed, ModelError
    if memory is too small."""
    steps = build_index(documents, record.corpus_sha256, _relative_names(record.corpus))
    return (yield from PhaseProgress("indexing the training text", 1).report(steps))


def training_documents(text: Corpus, record: RunRecord) -> Documents:
    """Return the part of a corpus that a run trains on."""
    train, max_bytes = record.plan.train, record.read_bytes
    if record.chat is not None:
        return training_rows(text, train, max_bytes)
    return training_texts(text, train, max_bytes, record.sample_pieces)


def stored_index(out: Path, corpus_sha256: str) -> tuple[TextIndex | None, str]:
    """Return the index that --index stored for the run in `out`, or None and the problem with the
    file, which is empty without one."""
    path = saved_state.index_path(out)
    index = open_index(path)
    if index is None:
        return None, "is damaged" if os.path.lexists(path) else ""
    if index.corpus_sha256 != corpus_sha256:
        return None, "belongs to another corpus"
    return index, ""


def open_training_text(
    out: Path, warn: Callable[[str], None], progress: Callable[[float], None] = lambda _: None
) -> TextIndex:
    """Return the index of the run in `out`, or index its corpus in memory if that is unchanged.

    `warn` gets a line about an index that cannot be used, `progress` the fraction indexed. Raise
    ModelError if the training text is not there.
    """
    return finish(_open(out, warn), progress)


def _open(out: Path, warn: Callable[[str], None]) -> Steps[TextIndex]:
    if not saved_state.has_run(out):
        hint = "name a model that tgen trained, with its training directory"
        raise ModelError(f"{out} has no run of tgen, so its training text is not known", hint)
    record = RunRecord.from_dict(saved_state.load_record(out)[0])
    index, problem = stored_index(out, record.corpus_sha256)
    if index is not None:
        return index
    missing = "has no index of its training text"
    if problem:
        warn(f"{saved_state.index_path(out)} {problem} and is ignored")
        missing = "has no intact index"
    if "-" in record.corpus:
        raise ModelError(f"{out} {missing}, and its corpus came from stdin", "train with --index")
    try:
        steps = read_as_recorded(record, record.corpus, record.reading)
        text = yield from as_part(steps, 0.0, _READ)
    except TgenError as error:
        raise ModelError(f"{out} {missing}, and {error.message}", _HINT) from None
    if text.sha256 != record.corpus_sha256:
        raise ModelError(f"{out} {missing}, and its corpus has changed since", _HINT)
    documents = training_documents(text, record)
    index_steps = build_index(documents, text.sha256, _relative_names(record.corpus))
    return (yield from as_part(index_steps, _READ, 1.0)).open()


def _relative_names(paths: list[str]) -> Callable[[str], str]:
    """Return a function that shows a file's name without the directories of the path that named
    it, if these say where the corpus is."""
    fixed = [re.split(r"[*?\[]", path, maxsplit=1) for path in paths]  # before a wildcard
    bases = [os.path.dirname(s if rest else os.path.normpath(s)) for s, *rest in fixed]

    def shown(name: str) -> str:
        if not os.path.isabs(name) and ".." not in Path(name).parts:
            return name
        below = [base for base in bases if name.startswith(f"{base}{os.sep}")]
        base = max(below, key=len, default=os.path.dirname(name))
        return os.path.relpath(name, base) if base != os.sep else name.lstrip(os.sep)

    return shown
