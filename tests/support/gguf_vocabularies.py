"""Small tokenizer.json files like sentencepiece's, which GGUF can store exactly."""

from support.tokenizer_files import LEGACY, metaspace, sentencepiece

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
KINDS = [  # arguments of `sentencepiece`; none: `make_file`
    {},
    {"normalizer": REPLACE},
    {"splitter": metaspace("never")},
]


def with_all_splits(file):
    """Return the file with every split of every token as a merge, as sentencepiece merges; without
    tokens that llama.cpp cannot read."""
    model = file["model"]
    readable = [name for name in model["vocab"] if "\0" not in name]
    vocab, ranks = {name: i for i, name in enumerate(readable)}, {}
    for rank, (left, right) in enumerate(model["merges"]):
        if left + right in vocab:
            ranks.setdefault(left + right, rank)
    splits = [
        (ranks[token], vocab[token[:k]], vocab[token[k:]], token[:k], token[k:])
        for token in ranks
        for k in range(1, len(token))
        if token[:k] in vocab and token[k:] in vocab
    ]
    merges = [list(split[-2:]) for split in sorted(splits)]
    return file | {"model": model | {"vocab": vocab, "merges": merges}}


def make_file(**other):
    """Return a file like Llama 2's, with tokens for runs of spaces."""
    file = sentencepiece(normalizer=LEGACY, **other)
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    for half in ("▁", "▁▁"):
        vocab[half + half] = len(vocab)
        merges.append([half, half])
    return with_all_splits(file)
