"""The index of a text: the same longest matches as a naive search, in bounded time and space."""

import random
import re
from itertools import pairwise

import numpy as np
import pytest

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.corpus import suffix_array, text_index
from tgen.corpus.steps import finish
from tgen.errors import CorpusError
from tgen.inspection.sources import find_sources
from tgen.storage import sealed_file

WORD = re.compile(rb"[0-9A-Za-z_]+|[\x80-\xfe][\x80-\xbf]*|[^\s\xff]")
FILES = {
    "verse.txt": "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind\n"
    "to suffer, or not to suffer_it, the_slings; to be sure\n" * 3,
    "words/übung.txt": "Die königliche Straße, 日本語のテキスト、テキスト。 naïve été 😀😀\n\nend",
    "two.txt": "first of two\ndocuments<|endoftext|>\n\nsecond of two\ndocuments: to be\n",
    "code.py": "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return f(x) + 1\n",
}
AS_BYTES = Reading(read_as="bytes")
BYTES = bytes(range(256)) + b"\0\0\0 \x80\x80 \xc3\xa9\xc3 a\xffb a\xff" + bytes(20)


def read_index(folder, contents, **options):
    """Write files, and return an index of them and the texts of their documents."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = corpus.read([str(folder / name) for name in contents], **options)
    documents = [b"".join(part[:] for part in document) for document in text.documents]
    new = finish(text_index.build_index(text.documents, text.sha256, lambda name: name))
    new.save(folder / "index")
    return text_index.open_index(folder / "index"), documents


def spans(text):
    return [match.span() for match in WORD.finditer(text)]


def naive_sources(documents, phrase):
    """Return (start, end, occurrences) of the whole-word passages that are not in a longer one."""
    begins = {(i, start) for i, text in enumerate(documents) for start, _ in spans(text)}
    ends = {(i, end) for i, text in enumerate(documents) for _, end in spans(text)}
    words = spans(phrase)
    found = []
    for start, _ in words:
        for end in sorted({end for _, end in words if end > start}, reverse=True):
            passage = phrase[start:end]
            places = [
                (i, match.start())
                for i, text in enumerate(documents)
                for match in re.finditer(b"(?=" + re.escape(passage) + b")", text)
                if (i, match.start()) in begins and (i, match.start() + len(passage)) in ends
            ]
            if places and b"\xff" not in passage:
                if not any(a <= start and end <= b for a, b, _ in found):
                    found.append((start, end, len(places)))
                break
    return sorted(found, key=lambda one: (one[0] - one[1], one[0]))


def phrases(documents, rng):
    """Yield random cuts, joined, changed and cut ones, and those at and across borders."""
    words = [text[a:b] for text in documents for a, b in spans(text)]
    for _ in range(14):
        text = rng.choice(documents)
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        yield text[a : min(b, a + 120)]
        changed = bytearray(text[a : min(b, a + 120)] + b"x")
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield bytes(changed)
        yield b" ".join(rng.choices(words, k=12))
        first, second = rng.choices(documents, k=2)
        yield first[-30:] + second[:30]
        yield first[-30:] + b"\xff" + second[:30]
        yield text[:40]
        yield text[-40:]
    yield from ("nothing of it: qqq", "日本語 のテキスト😀", "to b", "o be, or", " \n ", "_it", "é")


@pytest.mark.parametrize("block", [3, 1 << 20])
@pytest.mark.parametrize("by_bytes", [0, 22])
def test_passages_are_those_of_a_naive_search(tmp_path, monkeypatch, block, by_bytes):
    monkeypatch.setattr(suffix_array, "_BLOCK", block)
    monkeypatch.setattr(text_index, "_SCANNED", block + 4)
    monkeypatch.setattr(suffix_array, "_BY_BYTES", by_bytes)
    rng = random.Random(block + by_bytes)
    n_phrases = n_found = 0
    for contents, options in ((FILES, {}), ({"b.bin": BYTES * 2}, {"reading": AS_BYTES})):
        index, documents = read_index(tmp_path, contents, **options)
        for phrase in phrases(documents, rng):
            text = phrase.encode() if isinstance(phrase, str) else phrase
            expected = naive_sources(documents, text)
            report = find_sources(index, text, top=1000)
            found = [(one.start, one.end, one.occurrences) for one in report.passages]
            assert found == expected, text
            n_phrases, n_found = n_phrases + 1, n_found + len(found)
    assert n_phrases >= 200
    assert n_found > 500


def test_places_have_file_line_and_context(tmp_path):
    index, _ = read_index(tmp_path, FILES)
    (found,) = find_sources(index, "Straße, 日本語".encode()).passages
    (place,) = found.places
    assert (place.file, place.line) == (str(tmp_path / "words/übung.txt"), 1)
    assert (place.before, place.after.decode()[:12]) == (
        b"Die k\xc3\xb6nigliche ",
        "のテキスト、テキスト。 ",
    )
    (found,) = find_sources(index, b"second of two").passages
    assert [(place.line, place.before) for place in found.places] == [(4, b"\n\n")]
    found = find_sources(index, b"the_slings; to be sure", places=2).passages[0]
    assert [place.line for place in found.places] == [3, 6]
    assert found.occurrences == 3


def test_context_has_whole_characters_of_its_document(tmp_path):
    contents = {"a.txt": "ä" * 50 + " middle " + "ö" * 50, "b.txt": "after"}
    index, _ = read_index(tmp_path, contents)
    (place,) = find_sources(index, b"middle").passages[0].places
    assert (place.before.decode(), place.after.decode()) == ("ä" * 29 + " ", " " + "ö" * 29)
    (place,) = find_sources(index, b"after").passages[0].places
    assert (place.before, place.after) == (b"", b"")


def test_rows_count_lines_of_their_file(tmp_path):
    rows = [
        '{"text": "one\\ntwo three"}',
        "",
        '{"prompt": "a question", "completion": " answered"}',
    ]
    index, _ = read_index(tmp_path, {"rows.jsonl": "\n".join(rows) + "\n"})
    found = find_sources(index, b"two three; question answered").passages
    assert [(one.text, one.places[0].line) for one in found[:2]] == [
        (b"question answered", 3),
        (b"two three", 1),
    ]


def test_messages_of_a_conversation_are_apart(tmp_path):
    row = '{"messages": [{"role": "user", "content": "your name?"}, '
    row += '{"role": "assistant", "content": "My name"}]}\n'
    index, _ = read_index(tmp_path, {"chats.jsonl": row * 2})
    found = find_sources(index, b"your name?My name").passages
    assert [(one.text, one.occurrences, one.places[1].line) for one in found] == [
        (b"your name?", 2, 2),
        (b"My name", 2, 2),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "word by word, as in English. " * 3000,
        "日本語のテキスト" * 3000,
        ".,;" * 20000,
        "a b" * 20000,
    ],
    ids=["words", "characters", "punctuation", "letters"],
)
def test_an_index_has_at_most_five_bytes_per_byte(tmp_path, text):
    read_index(tmp_path, {"a.txt": text})
    fixed = 1 << 16  # the header's page
    assert (tmp_path / "index").stat().st_size <= 5 * len(text.encode()) + fixed + 1024


@pytest.mark.parametrize(
    "text",
    [
        b"The same line, again.\n" * 2000,
        bytes(20000),
        b"ab" * 10000 + b" ",
        (b"a" * 999 + b"\n") * 50,
    ],
    ids=["lines", "zeros", "one word", "long words"],
)
def test_repetitive_text_takes_few_rounds(monkeypatch, text):
    sorted_sizes = []
    refine = suffix_array._Sorter.refine

    def count(self, firsts, sizes):
        sorted_sizes.append(int(sizes.sum()))
        return refine(self, firsts, sizes)

    monkeypatch.setattr(suffix_array._Sorter, "refine", count)
    text = bytearray(text + b"\xff")
    starts = text_index.word_starts(text)
    positions = finish(suffix_array.sort_suffixes(text, starts)).tolist()
    assert sorted(positions) == starts.tolist()
    assert all(text[a:] < text[b:] for a, b in pairwise(positions))
    assert sum(sorted_sizes) <= max(len(starts) * 30, len(text))


def test_a_damaged_index_is_none_or_answers(tmp_path):
    read_index(tmp_path, FILES)
    path, rng = tmp_path / "index", random.Random(0)
    whole = path.read_bytes()
    n_opened = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 50])):
            damaged[rng.choice([rng.randrange(1 << 16, len(whole)), rng.randrange(400)])] ^= 255
        path.write_bytes(damaged)
        if (index := text_index.open_index(path)) is not None:
            n_opened += 1
            find_sources(index, b"or not to be: documents")
    assert n_opened
    for content in (b"", b"x", whole[:-1], whole[: len(whole) // 2], whole + b"x", b"x" * 200_000):
        path.write_bytes(content)
        assert text_index.open_index(path) is None
    path.unlink()
    assert text_index.open_index(path) is None


def test_files_of_other_kinds_are_no_index(tmp_path):
    read_index(tmp_path, FILES)
    path = tmp_path / "index"
    sealed = sealed_file.open_sealed(path)
    assert sealed is not None
    header, content = sealed.header, bytes(sealed.content)
    sizes = header["sizes"]
    n_names = sizes[-1]
    names = content[-(-(-n_names // 8) * 8) :][:n_names]
    changes: list[dict[str, object]] = [{name: None} for name in header]
    changes += [{"sizes": sizes[1:]}, {"sizes": [8, *sizes[1:]]}, {"sizes": [-8, *sizes[1:]]}]
    changes += [{"sizes": [str(n) for n in sizes]}, {"sizes": [*sizes[:4], n_names - 1]}]
    changes += [{"sizes": [*sizes[:3], sizes[3] - 8, n_names + 8]}, {"byteorder": "middle"}]
    contents = [
        content.replace(names, b"[]".ljust(n_names)),
        content.replace(names, b"x" * n_names),
    ]
    contents += [content.replace(names, b"3".ljust(n_names)), b""]
    assert text_index.open_index(path) is not None
    for new_header, new in [
        *((header | change, content) for change in changes if "corpus_sha256" not in change),
        *((header, one) for one in contents),
    ]:
        path.unlink()
        sealed_file.publish_sealed(path, sealed_file.encode_header(new_header), [new])
        assert text_index.open_index(path) is None, new_header


def test_adjacent_pieces_of_a_text_are_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two\nthree four\nfive six\n")
    text = corpus.read([str(path)])
    pieces = text.documents.select(*np.array([[0, 0, 0], [0, 4, 19], [4, 14, 27]]))
    index = finish(text_index.build_index(pieces, "", lambda name: name)).open()
    found = find_sources(index, b"one two\nthree four\nfive six").passages
    assert [(one.text, one.places[0].line) for one in found] == [
        (b"one two\nthree", 1),
        (b"five six", 3),
    ]


def test_sources_that_changed_are_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before\n")
    text = corpus.read([str(path)])
    path.write_text("after it was read\n")
    with pytest.raises(CorpusError, match=r"a\.txt changed"):
        finish(text_index.build_index(text.documents, text.sha256, lambda name: name))
