"""A text tokenised by several processes has the tokens of one, and none of them is left behind."""

import json
import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest

from support.command import clean_environment
from support.models import TEXT
from support.tokenizer_files import files
from tgen import corpus
from tgen.config import TrainConfig
from tgen.corpus import parallel_tokenize
from tgen.errors import TgenError
from tgen.runs import data
from tgen.tokenizer import Tokenizer, train_bpe, train_char

STRAY = bytes(range(256)) * 40
DOCUMENTS = {
    "one text": [(TEXT * 3,)],
    "no lines": [(TEXT.replace(b"\n", b"").replace(b" ", b""),)],
    "bytes": [(STRAY, b"", STRAY[::-1])],
    "rows": [(b"What is %d?" % i, b" The king" * (i % 9)) for i in range(300)],
    "empty ones": [(), (b"",), (b"", b"a"), (b"a", b""), (TEXT[:90],), (b"",)],
    "none": [],
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """As of a text that is a thousand times as long."""
    monkeypatch.setattr("tgen.corpus.tokenize._PIECE", 1000)
    monkeypatch.setattr("tgen.corpus.tokenize._NEAR", 100)
    monkeypatch.setattr(parallel_tokenize, "_BATCH", 2500)


def tokens(documents, tokenizer, **how):
    steps, done = corpus.tokenising(documents, tokenizer, **how), []
    while True:
        try:
            done.append(next(steps))
        except StopIteration as end:
            return end.value, done


def made(kind):
    """The last puts a space before a text, but not before what continues one."""
    if kind == "mistral":
        return Tokenizer(json.dumps(files()[kind][0]))
    return train_char([TEXT]) if kind == "char" else train_bpe([TEXT], vocab_size=300)


@pytest.mark.parametrize("kind", ["char", "bpe", "mistral"])
def test_any_number_of_processes_gives_the_same_tokens(kind):
    tokenizer = made(kind)
    documents = [document for several in DOCUMENTS.values() for document in several]
    hows = [{}, {"loss_on": "all"}, {"open_end": True}]
    for n, how in zip((2, 3, 2), hows, strict=True):
        one, done = tokens(documents, tokenizer, **how)
        several, also_done = tokens(documents, tokenizer, processes=n, **how)
        assert several.tokens.dtype == one.tokens.dtype
        assert np.array_equal(several.tokens, one.tokens)
        assert np.array_equal(several.scored, one.scored)
        assert (several.scored_bytes, also_done) == (one.scored_bytes, done)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_their_tokens_and_ends(name):
    documents, tokenizer = DOCUMENTS[name], train_char([TEXT])
    found, done = tokens(documents, tokenizer)
    whole = [[*tokenizer.encode(b"".join(parts)), tokenizer.end_of_text] for parts in documents]
    assert found.tokens.tolist() == [i for ids in whole for i in ids]
    assert done[-1:] == [corpus.sizes(documents).sum()][: len(done)]


def test_processes_end_with_their_work_and_when_it_is_given_up(monkeypatch):
    tokenizer = train_char([TEXT])
    begun = []
    make = parallel_tokenize._Encoder
    monkeypatch.setattr(parallel_tokenize, "_Encoder", lambda t: begun.append(make(t)) or begun[-1])
    tokens([(TEXT * 3,)], tokenizer, processes=2)
    steps = corpus.tokenising([(TEXT * 3,)], tokenizer, processes=2)
    next(steps)
    steps.close()
    assert [encoder._child.returncode for encoder in begun] == [-signal.SIGKILL] * 4


def test_there_are_no_more_processes_than_batches(monkeypatch):
    begun = []
    make = parallel_tokenize._Encoder
    monkeypatch.setattr(parallel_tokenize, "_Encoder", lambda t: begun.append(make(t)) or begun[-1])
    tokens([(b"abc" * 1000,)], train_char([b"abc"]), processes=50)
    assert len(begun) == 1


def test_a_process_that_is_killed_is_an_error(monkeypatch):
    make = parallel_tokenize._Encoder

    def killed(tokenizer):
        encoder = make(tokenizer)
        os.kill(encoder._child.pid, signal.SIGKILL)
        return encoder

    monkeypatch.setattr(parallel_tokenize, "_Encoder", killed)
    with pytest.raises(TgenError, match="a process that tokenises has ended"):
        tokens([(TEXT * 3,)], train_char([TEXT]), processes=2)


def test_processes_end_with_one_that_is_killed(tmp_path):
    """Each of them notices that nobody reads or writes any more."""
    code = (
        "import sys; from tgen import corpus; from tgen.corpus import encoding, tokens\n"
        "from tgen.tokenizer import train_char\n"
        "tokens._PIECE = encoding._BATCH = 1000\n"
        "made = []; make = encoding._Encoder\n"
        "encoding._Encoder = lambda t: made.append(make(t)) or made[-1]\n"
        "steps = corpus.tokenising([(b'abc ' * 9000,)], train_char([b'abc ']), processes=2)\n"
        "next(steps)\n"
        "print(*(encoder._child.pid for encoder in made), flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=clean_environment(),
        cwd=tmp_path,
    ) as process:
        ends = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        assert len(ends) == 2
        process.kill()
    for end in ends:
        assert select.select([end], [], [], 60)[0] == [end]
        os.close(end)


def test_a_large_corpus_is_tokenised_by_as_many_processes_as_threads(monkeypatch, tmp_path):
    asked = []
    real = parallel_tokenize.encoded

    def seen(pieces, tokenizer, *, processes):
        asked.append(processes)
        return real(pieces, tokenizer, processes=processes)

    monkeypatch.setattr("tgen.corpus.tokenize.encoded", seen)
    monkeypatch.setattr(data, "_LARGE", 5000)
    monkeypatch.setattr(data, "n_processors", lambda: 3)
    tokenizer = train_char([TEXT])
    for n_bytes, threads in ((4000, None), (6000, None), (6000, 2), (6000, 64), (6000, 1)):
        path = tmp_path / "corpus.txt"
        path.write_bytes((TEXT * 9)[:n_bytes])
        config = TrainConfig(val_fraction=0.0)
        found = data.split(corpus.read([str(path)]), config, 1 << 30)
        for _ in data.tokenised(found, tokenizer, config, folder=None, threads=threads):
            pass  # how far it is
    assert asked[::2] == [1, 3, 2, 3, 1]
    assert set(asked[1::2]) == {1}  # what is held out is never large


def test_a_script_without_a_guard_trains_on_a_large_corpus(tmp_path):
    """The processes import nothing of the program that began them."""
    rows = [{"prompt": "What?", "completion": " The king."}] * 50
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('the wrong one')")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.pop(0)\n"
        "from tgen import corpus\n"
        "from tgen.tokenizer import train_char\n"
        "found = corpus.read(['rows.jsonl'])\n"
        "characters = train_char([b'What? The king.'])\n"
        "steps = corpus.tokenising(found.documents, characters, processes=2)\n"
        "print(sum(1 for _ in steps))\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=tmp_path,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (0, "100\n"), result.stderr
