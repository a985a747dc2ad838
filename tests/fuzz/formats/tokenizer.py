"""tokenizer.json: tgen's own, and small ones like those of known models."""

import json
from pathlib import Path
from random import Random

from fuzz.models import save_model, use_model
from fuzz.mutations import Mutator, dump
from support import tokenizer_files
from support.vocabularies import without_bytes
from tgen.tokenizer import Tokenizer, train_bpe, train_char

_TEXT = b"the king's 12345 \xe6\x97\xa5 \xff\n\n <|endoftext|></s>"


class TokenizerJson:
    """A model directory whose tokenizer.json is changed."""

    prints = starts_processes = False

    def __init__(self, folder: Path) -> None:
        text = tokenizer_files.mixed(3000).encode()
        own = {"char": train_char([text[:200]]), "bpe": train_bpe([text], vocab_size=300)}
        documents = {name: json.loads(tokenizer.json) for name, tokenizer in own.items()}
        documents |= {name: _shorten(file) for name, (file, *_) in tokenizer_files.files().items()}
        documents["holes"] = without_bytes(documents["gpt2"])
        documents["openai-gpt"] = tokenizer_files.openai_gpt()
        self._models: list[tuple[Path, Mutator]] = []
        for name, document in documents.items():
            tokenizer = Tokenizer(json.dumps(document))
            save_model(folder / name, "llama", tokenizer=tokenizer)
            self._models.append((folder / name, Mutator(document)))

    def change(self, i: int, rng: Random) -> str:
        """Change the file of one model."""
        self._path, mutator = self._models[i % len(self._models)]
        document, what = mutator.change(i // len(self._models), rng)
        (self._path / "tokenizer.json").write_bytes(dump(document))
        return f"{self._path.name}: {what}"

    def read(self) -> None:
        """Load the model, generate, encode and decode."""
        tokenizer = use_model(self._path).tokenizer
        tokenizer.encode_with_special(_TEXT.decode("utf-8", "surrogateescape"))
        _ = tokenizer.merge_pairs
        tokenizer.decode(tokenizer.encode_corpus(_TEXT)[0].tolist())
        tokenizer.decode(tokenizer.encode_prompt(_TEXT))


def _shorten(file: dict) -> dict:
    """Return the file with few merges, for speed."""
    model = file["model"]
    merged = {"".join(pair) for pair in model["merges"]}
    few = model["merges"][:20]
    keep = {token for token in model["vocab"] if token not in merged} | {
        "".join(pair) for pair in few
    }
    few = [pair for pair in few if set(pair) <= keep]
    old = sorted((i, token) for token, i in model["vocab"].items() if token in keep)
    vocab = {token: i for i, (_, token) in enumerate(old)}
    ids: dict[int, int] = {i: vocab[token] for i, token in old}
    for token in file["added_tokens"]:
        ids.setdefault(token["id"], len(ids))
    added = [token | {"id": ids[token["id"]]} for token in file["added_tokens"]]
    text = json.dumps(file["post_processor"])
    for token in file["added_tokens"]:
        text = text.replace(f'"ids": [{token["id"]}]', f'"ids": [{ids[token["id"]]}]')
    return file | {
        "added_tokens": added,
        "post_processor": json.loads(text),
        "model": model | {"vocab": vocab, "merges": few},
    }
