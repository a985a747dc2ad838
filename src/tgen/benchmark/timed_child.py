"""The process that `end_to_end` times: it generates a text as `tgen generate` does.

It reads one JSON object from stdin and writes one line of JSON to stdout, with the
time.monotonic_ns at the end of each phase. Errors are one line on stderr.
"""

import sys
import time

_STARTED = time.monotonic_ns()  # before any other import


def main() -> None:
    """Generate a text and write the end time of each phase; a failure sets the exit status."""
    import json
    from importlib import import_module

    from tgen.errors import TgenError

    request = json.loads(sys.stdin.buffer.read())
    for name in request.pop("modules"):
        import_module(name)
    try:
        answer = _generate(**request)
    except TgenError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(answer) + "\n")


def _generate(
    *,
    path: str,
    prompt: str,
    n_gen: int,
    device: str,
    threads: int | None,
    dtype: str | None,
    draft: str,
) -> dict[str, object]:
    """`prompt` and the returned text are bytes decoded as Latin-1."""
    from dataclasses import replace
    from functools import partial
    from pathlib import Path
    from typing import Any

    from tgen.benchmark.machine import peak_memory_bytes
    from tgen.checkpoint.model_dir import load
    from tgen.checkpoint.ngram_tables import load as load_ngrams
    from tgen.config import SamplingConfig
    from tgen.engine.open_engine import open_engine
    from tgen.errors import UsageError
    from tgen.generation.loop import generate_requests
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
    token_bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    encode = partial(tokenizer.encode, continuation=True)
    vocabulary = Vocabulary(token_bytes, bundle.end_ids, encode)
    ends["load"] = time.monotonic_ns()
    stored: Any = dtype  # checked by the engine
    engine = open_engine(bundle, device=device, threads=threads, dtype=stored)
    bundle = replace(bundle, arrays={})  # free them: the engine has its own copy
    ends["engine"] = time.monotonic_ns()
    ids = tokenizer.encode_prompt(prompt.encode("latin-1"))
    if not ids:
        raise UsageError("the prompt is empty", "add text: this model has no start token")
    request = Request(ids, SamplingConfig(temperature=0.0, max_new_tokens=n_gen))
    check_request(request, vocabulary, engine.context_length)
    requests = iter([request])
    tokens = generate_requests(
        engine, lambda _: next(requests, None), batch_size=1, vocabulary=vocabulary, drafts=drafts
    )
    ids_out = [next(tokens).id]
    ends["prefill"] = time.monotonic_ns()
    ids_out += [token.id for token in tokens]
    ends["decode"] = time.monotonic_ns()
    stream = TextStream()
    text = b"".join(stream.feed(vocabulary.bytes_of(i)) for i in ids_out) + stream.flush()
    ends["detokenize"] = time.monotonic_ns()
    return {
        "phase_ends": ends,
        "n_prompt": len(ids),
        "n_gen": len(ids_out),
        "text": text.decode("latin-1"),
        "peak_memory_bytes": peak_memory_bytes(),
    }


if __name__ == "__main__":
    main()
