"""Vocabularies with holes: tokenizers without a token for some bytes."""

import json

from tgen.tokenizer import BYTE_CHARACTERS, Tokenizer

# SmolLM2's vocabulary has no token for these 21 bytes.
SMOLLM2_MISSING = bytes([*b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2", *range(0xF5, 0x100)])


def without_bytes(file: dict, missing: bytes = SMOLLM2_MISSING) -> dict:
    """Return a byte-level tokenizer.json without the tokens that spell one of `missing`; the ids
    of the others move up."""
    model = file["model"]
    absent = {BYTE_CHARACTERS[byte] for byte in missing}
    kept = [t for t in sorted(model["vocab"], key=model["vocab"].get) if not absent & set(t)]
    vocab = {token: i for i, token in enumerate(kept)}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    outside = [t for t in file["added_tokens"] if t["content"] not in vocab]
    moved = {token["content"]: len(vocab) + i for i, token in enumerate(outside)} | vocab
    added = [token | {"id": moved[token["content"]]} for token in file["added_tokens"]]
    return file | {"added_tokens": added, "model": model | {"vocab": vocab, "merges": merges}}


def smollm2_like(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer without the 21 bytes that SmolLM2's lacks."""
    return Tokenizer(json.dumps(without_bytes(json.loads(tokenizer.json))))
