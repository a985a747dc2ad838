"""Corpora: JSONL rows and text, from the file to tokens."""

from pathlib import Path
from random import Random

from fuzz.models import TOKENIZER
from fuzz.mutations import Mutator, dump
from tgen import corpus

_ROWS = [
    [{"text": "the king"}, {"text": "a\nb\u2028c\x1b[2J"}, {"text": "the king", "meta": [1, None]}],
    [{"prompt": "who?", "completion": " the king"}, {"prompt": "", "completion": "x", "id": 1.5}],
    [
        {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "I"}]},
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c", "weight": 0},
                {"role": "tool", "content": "d"},
                {"role": "assistant", "content": "e", "name": None},
            ]
        },
    ],
]
_TEXT = (
    b"the king\r\n\n<|endoftext|>said <|endoftext|><|endoftext|> \xff\xfe \xe6\x97\xa5 \0 \x85\n"
    * 3
)


class CorpusFile:
    """A corpus whose rows or bytes are changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mutators = [Mutator(rows) for rows in _ROWS]
        self._path = folder / "corpus.jsonl"

    def change(self, i: int, rng: Random) -> str:
        """Change rows, or cut, repeat and swap bytes."""
        if i % 4 < 3:
            mutator = self._mutators[i % len(self._mutators)]
            document, what = mutator.change(i // len(self._mutators), rng)
            rows = document if isinstance(document, list) else [document]
            content = rng.choice((b"\n", b"\n", b"\r\n", b"\n\n \n")).join(map(dump, rows))
            content = rng.choice((b"", b"", b"\xef\xbb\xbf", b"\n")) + content
        else:
            text, what = bytearray(_TEXT), "bytes"
            for _ in range(rng.randrange(1, 9)):
                at = rng.randrange(len(text))
                noise = rng.randbytes(rng.randrange(3)) * rng.choice((1, 1, 500))
                text[at : at + rng.randrange(5)] = noise
                text = text or bytearray(b"x")
            content = bytes(text)
        self._path.unlink(missing_ok=True)
        name = "corpus.txt" if i % 4 == 3 else rng.choice(("corpus.jsonl", "corpus.ndjson"))
        self._path = self._folder / name
        self._path.write_bytes(content)
        return f"{name}: {what}"

    def read(self) -> None:
        """Read, split and tokenize the corpus."""
        text = corpus.read([str(self._path)])
        if text.is_chat:
            for documents in corpus.split_rows(text, 0.1):
                for (line,) in documents:
                    corpus.parse_conversation(line[:])
            text.close()
            return
        for documents in corpus.split_train_val(text, 0.1):
            for _ in corpus.tokenize_documents(documents, TOKENIZER):
                pass
        text.close()
