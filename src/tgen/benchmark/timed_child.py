"""What `end_to_end` times: a process that writes a text as `tgen generate` does, with a clock.

It reads one JSON object from stdin and writes one line of JSON to stdout: when each phase ended, by
time.monotonic_ns, which all processes of a machine share. What it cannot do is one line on stderr.
"""

import sys
import time

_STARTED = time.monotonic_ns()  # our first line: whatever else is imported comes after it


def main() -> None:
    """Writes one text and when what was done; after a failure the exit status is not 0."""
    import json
    from importlib import import_module

    from tgen.errors import TgenError

    request = json.loads(sys.stdin.buffer.read())
    for name in request.pop("modules"):
        import_module(name)
    try:
        answer = _write_text(**request)
    except TgenError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(answer) + "\n")


def _write_text(
    *,
    path: str,
    prompt: str,
    n_gen: int,
    device: str,
    threads: int | None,
    weights: str | None,
    draft: str,
) -> dict[str, object]:
    """`prompt` and the text in the answer are bytes as Latin-1."""
    from dataclasses import replace
    from functools import partial
    from pathlib import Path
    from typing import Any

    from tgen.benchmark.memory import peak_memory_bytes
    from tgen.checkpoint.model_dir import load
    from tgen.checkpoint.ngram_tables import load as load_ngrams
    from tgen.config import SamplingConfig
    from tgen.engine import open_engine
    from tgen.errors import UsageError
    from tgen.generation.loop import generate_rows
    from tgen.generation.ngram_drafter import NgramDrafter
    from tgen.generation.sequence import Request, check_request
    from tgen.generation.token_bytes import Vocabulary
    from tgen.tokenizer import TextStream

    ends = {"start": _STARTED, "import": time.monotonic_ns()}
    bundle = load(Path(path))
    tokenizer, vocab_size = bundle.tokenizer, bundle.config.vocab_size
    drafts = (
        NgramDrafter(load_ngrams(bundle.path, vocab_size), vocab_size) if draft == "auto" else None
    )
    known = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    encode = partial(tokenizer.encode, continues=True)
    vocabulary = Vocabulary(known, bundle.end_ids, encode)
    ends["load"] = time.monotonic_ns()
    stored: Any = weights  # checked by the engine
    engine = open_engine(bundle, device=device, threads=threads, weights=stored)
    bundle = replace(bundle, arrays={})  # the engine has them, perhaps in fewer bits
    ends["engine"] = time.monotonic_ns()
    ids = tokenizer.encode_prompt(prompt.encode("latin-1"))
    if not ids:
        raise UsageError("the prompt is empty", "this model needs at least one character")
    request = Request(ids, SamplingConfig(temperature=0.0, max_new_tokens=n_gen))
    check_request(request, vocabulary, engine.context_length)
    requests = iter([request])
    tokens = generate_rows(
        engine, lambda _: next(requests, None), n_rows=1, vocabulary=vocabulary, drafts=drafts
    )
    written = [next(tokens).id]
    ends["prefill"] = time.monotonic_ns()
    written += [token.id for token in tokens]
    ends["decode"] = time.monotonic_ns()
    stream = TextStream()
    text = b"".join(stream.feed(vocabulary.bytes_of(i)) for i in written) + stream.flush()
    ends["detokenise"] = time.monotonic_ns()
    return {
        "ends": ends,
        "n_prompt": len(ids),
        "n_gen": len(written),
        "text": text.decode("latin-1"),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    main()
