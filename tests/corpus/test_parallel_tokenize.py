"""Several tokenizer processes give the tokens of one, and none outlives the run."""

import json
import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest

from support.command import PythonFork, clean_environment
from support.corpora import run_generator
from support.models import TEXT
from support.tokenizer_files import files
from support.vocabularies import smollm2_like, without_bytes
from tgen import corpus
from tgen.config.training import TrainConfig
from tgen.corpus import parallel_tokenize
from tgen.corpus.document_table import Document
from tgen.errors import CorpusError, TgenError, UsageError
from tgen.machine import worker_pool
from tgen.runs import tokenizing
from tgen.tokenizer import Tokenizer, train_bpe, train_char

STRAY = bytes(range(256)) * 40
DOCUMENTS: dict[str, list[Document]] = {
    "one text": [(TEXT * 3,)],
    "no lines": [(TEXT.replace(b"\n", b"").replace(b" ", b""),)],
    "bytes": [(STRAY, b"", STRAY[::-1])],
    "rows": [(b"What is %d?" % i, b" The king" * (i % 9)) for i in range(300)],
    "empty ones": [(), (b"",), (b"", b"a"), (b"a", b""), (TEXT[:90],), (b"",)],
    "none": [],
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Split texts as if they were a thousand times as long."""
    monkeypatch.setattr("tgen.corpus.tokenize._PIECE", 1000)
    monkeypatch.setattr("tgen.corpus.tokenize._SEARCH", 100)
    monkeypatch.setattr(parallel_tokenize, "_BATCH", 2500)


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork worker processes, which is faster than to start Python."""
    monkeypatch.setattr(subprocess, "Popen", PythonFork)


def tokenize(documents, tokenizer, **options):
    """The tokens with what is counted, and the reports of bytes done."""
    return run_generator(corpus.tokenize_documents(documents, tokenizer, **options))


def make_tokenizer(kind):
    if kind == "mistral":  # puts a space before a text, but not before the rest of one
        return Tokenizer(json.dumps(files()[kind][0]))
    return train_char([TEXT]) if kind == "char" else train_bpe([TEXT], vocab_size=300)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("kind", "n", "options"),
    [
        ("char", 2, {}),
        ("bpe", 3, {"loss_on": "all"}),
        ("mistral", 2, {}),
        ("mistral", 2, {"open_end": True}),
    ],
)
def test_any_number_of_processes_gives_the_same_tokens(kind, n, options):
    tokenizer = make_tokenizer(kind)
    documents = [document for several in DOCUMENTS.values() for document in several]
    (one, *counts), done = tokenize(documents, tokenizer, **options)
    (several, *also_counts), also_done = tokenize(documents, tokenizer, processes=n, **options)
    assert several.ids.dtype == one.ids.dtype
    assert np.array_equal(several.ids, one.ids)
    assert np.array_equal(several.loss_mask, one.loss_mask)
    assert (also_counts, also_done) == (counts, done)


@pytest.mark.usefixtures("forked_workers")
def test_replaced_characters_are_counted_with_any_number_of_processes():
    tokenizer = smollm2_like(train_bpe([TEXT], vocab_size=300))
    documents = [(b"one\x04 two\n" * 900,), (b"", b"\xff", "\U00040000é".encode() * 700)]
    (one, _, n_replaced), _ = tokenize(documents, tokenizer)
    (two, _, also_replaced), _ = tokenize(documents, tokenizer, processes=2)
    assert n_replaced == also_replaced == 900 + 1 + 700
    assert np.array_equal(one.ids, two.ids)
    clean = [[part.replace(b"\x04", "\ufffd".encode()) for part in documents[0]]]
    (expected, *_), _ = tokenize(clean, tokenizer)
    assert one.ids.tolist()[: 900 * 5] == expected.ids.tolist()[:4500]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("processes", [1, 2])
def test_text_that_the_tokenizer_cannot_encode_is_its_error_in_every_process(processes):
    file = without_bytes(json.loads(train_bpe([TEXT], vocab_size=300).json), b"\x04\xef")
    with pytest.raises(CorpusError, match="neither 0x04"):
        tokenize([(b"one two\n" * 900, b"a\x04")], Tokenizer(json.dumps(file)), processes=processes)
    few = Tokenizer(train_bpe([TEXT], vocab_size=300).json, n_rows=260)
    with pytest.raises(UsageError, match="the model has only 260 tokens"):
        tokenize([(TEXT,)], few, processes=processes)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_their_tokens_and_an_end(name):
    documents, tokenizer = DOCUMENTS[name], train_char([TEXT])
    (result, *_), done = tokenize(documents, tokenizer)
    whole = [
        [*tokenizer.encode(b"".join(part[:] for part in parts)), tokenizer.end_of_text]
        for parts in documents
    ]
    assert result.ids.tolist() == [i for ids in whole for i in ids]
    n_bytes = sum(len(part) for document in documents for part in document)
    assert done[-1:] == [n_bytes][: len(done)]


@pytest.fixture
def workers(monkeypatch):
    """All worker processes started."""
    started, make = [], worker_pool._Worker
    monkeypatch.setattr(
        worker_pool, "_Worker", lambda *args: started.append(make(*args)) or started[-1]
    )
    return started


def test_workers_end_with_their_work_and_when_it_is_abandoned(workers):
    tokenizer = train_char([TEXT])
    tokenize([(TEXT * 3,)], tokenizer, processes=2)
    steps = corpus.tokenize_documents([(TEXT * 3,)], tokenizer, processes=2)
    next(steps)
    steps.close()
    assert [worker._child.returncode for worker in workers] == [-signal.SIGKILL] * 4


def test_there_are_no_more_workers_than_batches(workers):
    tokenize([(b"abc" * 1000,)], train_char([b"abc"]), processes=50)
    assert len(workers) == 1


def test_killed_worker_is_an_error(monkeypatch):
    make = worker_pool._Worker

    def make_killed(*arguments):
        worker = make(*arguments)
        os.kill(worker._child.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(worker_pool, "_Worker", make_killed)
    with pytest.raises(TgenError, match="a tokenizer process exited unexpectedly"):
        tokenize([(TEXT * 3,)], train_char([TEXT]), processes=2)


def test_workers_exit_when_their_parent_is_killed(tmp_path):
    code = (
        "from tgen import corpus; from tgen.corpus import parallel_tokenize, tokenize\n"
        "from tgen.machine import worker_pool\n"
        "from tgen.tokenizer import train_char\n"
        "tokenize._PIECE = parallel_tokenize._BATCH = 1000\n"
        "started = []; make = worker_pool._Worker\n"
        "worker_pool._Worker = lambda *args: started.append(make(*args)) or started[-1]\n"
        "documents, tokenizer = [(b'abc ' * 9000,)], train_char([b'abc '])\n"
        "steps = corpus.tokenize_documents(documents, tokenizer, processes=2)\n"
        "next(steps)\n"
        "print(*(worker._child.pid for worker in started), flush=True); input()\n"
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


@pytest.mark.usefixtures("forked_workers")
def test_large_corpus_is_tokenized_by_as_many_processes_as_threads(monkeypatch, tmp_path):
    counts = []
    encode_pieces = parallel_tokenize.encode_pieces

    def record_processes(pieces, tokenizer, *, processes, on_ranks):
        counts.append(processes)
        return encode_pieces(pieces, tokenizer, processes=processes, on_ranks=on_ranks)

    monkeypatch.setattr("tgen.corpus.tokenize.encode_pieces", record_processes)
    monkeypatch.setattr(tokenizing, "_PARALLEL_BYTES", 5000)
    monkeypatch.setattr(tokenizing, "cpu_count", lambda: 3)
    tokenizer = train_char([TEXT])
    for n_bytes, threads in ((4000, None), (6000, None), (6000, 2), (6000, 64), (6000, 1)):
        path = tmp_path / "corpus.txt"
        path.write_bytes((TEXT * 9)[:n_bytes])
        config = TrainConfig(val_fraction=0.0)
        train, val, *_ = tokenizing.split_corpus(corpus.read([str(path)]), config, 1 << 30, 0, 1)
        run_generator(
            tokenizing.tokenize_split(train, val, tokenizer, config, folder=None, threads=threads)
        )
    assert counts[::2] == [1, 3, 2, 3, 1]
    assert set(counts[1::2]) == {1}  # the validation set is never large


def test_ranks_share_the_cpus_of_their_machine(monkeypatch):
    monkeypatch.setattr(tokenizing, "cpu_count", lambda: 6)
    for name, n in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(n))
    assert [tokenizing.n_processes(threads) for threads in (None, 2, 8)] == [3, 2, 3]


# Rank 0 prints the tokens, the others how many batches they tokenized.
RANK = """
import os
from support.corpora import run_generator
from tgen.corpus import parallel_tokenize as parallel, tokenize
from tgen.distributed import barrier, join_process_group
from tgen.errors import RankError
from tgen.machine import worker_pool as pool
from tgen.tokenizer import Tokenizer
tokenize._PIECE, tokenize._SEARCH, parallel._BATCH = 1000, 100, 2500
tokenizer_json, documents, processes = {tokenizer_json!r}, {documents!r}, {processes!r}
batches, receive = [], pool._Worker.receive
def action(worker): pass
{setup}
def count(worker):
    action(worker)
    batches.append(worker)
    return receive(worker)
try:
    with join_process_group(lambda *error: print("error:", *error, flush=True)) as own:
        given = {{"processes": processes[own.rank], "on_ranks": own.world_size > 1}}
        if own.rank:
            pool._Worker.receive = count
            first = parallel.first_message(Tokenizer(tokenizer_json))
            list(pool.map_messages((), parallel.MODULE, first, **given))
        else:
            (tokens, *counts), _ = run_generator(
                tokenize.tokenize_documents(documents, Tokenizer(tokenizer_json), **given)
            )
        barrier()
        print(len(batches) if own.rank else (counts, tokens.ids.tolist()))
except RankError as error:
    print("ended:", error)
"""


def tokenize_on_ranks(on_ranks, documents, tokenizer_json, processes, *, setup=""):
    """Return the lines that ranks with these numbers of processes print."""
    code = RANK.format(
        tokenizer_json=tokenizer_json, documents=documents, processes=processes, setup=setup
    )
    ranks = on_ranks(code=code, n=len(processes))
    assert not any(rank.err for rank in ranks)
    return [rank.out.decode().splitlines() for rank in ranks]


@pytest.mark.parametrize(
    ("documents", "processes", "n_batches"),
    [
        ([(TEXT * 3,), *DOCUMENTS["rows"], *DOCUMENTS["bytes"]], [1, 2, 1], [8, 4]),
        ([(b"two batches " * 300,)], [1, 3, 1], [1, 0]),
        ([], [1, 1], [0]),
    ],
)
def test_any_number_of_ranks_gives_the_same_tokens(on_ranks, documents, processes, n_batches):
    tokenizer = make_tokenizer("mistral")
    (tokens, *counts), _ = tokenize(documents, tokenizer)
    first, *others = tokenize_on_ranks(on_ranks, documents, tokenizer.json, processes)
    assert first == [str((counts, tokens.ids.tolist()))]
    assert others == [[str(n)] for n in n_batches]


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("", "the model's tokenizer can express neither 0x04"),
        (
            "def action(worker): os.kill(worker._child.pid, 9)",
            "a tokenizer process exited unexpectedly",
        ),
        (
            "def action(worker): own.rank == 1 and os.kill(os.getpid(), 9)",
            "a rank ended without an error message",
        ),
        (
            "def append(*_): raise OSError('no space left')\ntokenize.ArrayBuilder.append = append",
            "no space left",
        ),
    ],
)
def test_error_while_ranks_tokenize_ends_all(on_ranks, setup, message):
    file = without_bytes(json.loads(train_bpe([TEXT], vocab_size=300).json), b"\x04\xef")
    documents = [(b"one two\n" * 400,), (b"a\x04",), (b"one two\n" * 900,)]
    first, one, two = tokenize_on_ranks(
        on_ranks, documents, json.dumps(file), [1, 1, 1], setup=setup
    )
    assert first[0].startswith(f"error: {message}")
    assert first[1].startswith(f"ended: {message}")
    assert two == first[1:]
    assert one == two or ("getpid" in setup and not one)


def test_script_without_a_main_guard_can_use_workers(tmp_path):
    rows = [{"prompt": "What?", "completion": " The king."}] * 50
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tokenizers.py").write_text(
        "raise SystemExit('imported from the current directory')"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.pop(0)\n"
        "from tgen import corpus\n"
        "from tgen.tokenizer import train_char\n"
        "rows = corpus.read(['rows.jsonl'])\n"
        "characters = train_char([b'What? The king.'])\n"
        "steps = corpus.tokenize_documents(rows.documents, characters, processes=2)\n"
        "print(sum(1 for _ in steps))\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=tmp_path,
        check=False,
        timeout=900,
    )
    assert (result.returncode, result.stdout) == (0, "100\n"), result.stderr
