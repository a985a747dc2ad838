"""Train a model on repeated random text: does a head learn to look up the repetition?

    python -m versus.inspection.induction --family llama --minutes 10 --model repeats
    tgen inspect --model ./repeats --view heads < repeats/text.txt

Each text is a block of 8 to 32 random tokens, repeated once; only the second block contributes to
the loss. The score is that of `tgen inspect --view heads`, on unseen blocks, with the control in
which the second block differs.
"""

import argparse
import string
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.inspection.heads import score_repeats
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_char
from versus import harness

LETTERS = string.ascii_letters + string.digits + "-_"
VOCAB_SIZE, MIN_BLOCK, MAX_BLOCK = len(LETTERS), 8, 32
BATCH_SIZE, LEARNING_RATE = 64, 2e-3
_LEARNED = 0.97  # induction score at which training stops


def measure(options: argparse.Namespace) -> None:
    """Train, print the best head's scores during training, and write the results."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = ModelConfig.of(
        options.family,
        vocab_size=VOCAB_SIZE,
        n_layers=2,
        d_model=64,
        n_heads=4,
        context_length=2 * MAX_BLOCK,
    )
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    start, step, scores = time.perf_counter(), 0, []
    learned = False
    while step == 0 or (time.perf_counter() - start < options.minutes * 60 and not learned):
        n = int(torch.randint(MIN_BLOCK, MAX_BLOCK + 1, (1,), generator=generator))
        block = torch.randint(VOCAB_SIZE, (BATCH_SIZE, n), generator=generator)
        text = torch.cat([block, block], dim=1)
        logits = model(text[:, :-1])[:, n:]
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, n + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if step % options.score_every == 0:
            row = score(model) | {"step": step, "loss": round(float(loss.detach()), 3)}
            scores.append(row)
            print(*(f"{name} {value}" for name, value in row.items()), sep=" · ", flush=True)
            learned = row["induction"] > _LEARNED
    if options.model:
        write_model(options.model, model)
    options.result = f"induction_{options.family}.json"
    harness.save(options, {"family": options.family, "scores": scores})


def score(model: Transformer) -> dict[str, float]:
    """Return the scores of the head with the highest induction score."""
    result = score_repeats(model, range(VOCAB_SIZE), [])
    assert result is not None
    repeated, control = (values.mean(dim=0) for values in result.induction)
    best = repeated.argmax()
    return {
        "induction": round(float(repeated.flatten()[best]), 3),
        "control": round(float(control.flatten()[best]), 3),
        "gain": round(result.gain, 2),
    }


def write_model(path: Path, model: Transformer) -> None:
    """Write a model directory with letters as tokens, and a text with a repeated block.

    The tokenizer has all bytes: the embeddings of those that were not trained are 0.
    """
    tokenizer = train_char([])
    ids = tokenizer.encode(LETTERS.encode())
    arrays = model.to_arrays()
    trained = arrays["token_embedding.weight"]
    embedding = np.zeros((tokenizer.vocab_size, trained.shape[1]), np.float32)
    embedding[ids] = trained
    arrays["token_embedding.weight"] = embedding
    config = replace(model.config, vocab_size=tokenizer.vocab_size)
    model_dir.save(path, config, tokenizer, arrays)
    order = np.random.default_rng(0).permutation(VOCAB_SIZE)[:MAX_BLOCK]
    text = "".join(LETTERS[i] for i in order)
    (path / "text.txt").write_text(2 * text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "induction_FAMILY.json")
    parser.add_argument("--family", default="llama")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="directory for the trained model")
    parser.set_defaults(score_every=250)
    harness.run(measure, harness.parse(parser, arguments, {"minutes": 0.01, "score_every": 1}))


if __name__ == "__main__":
    main()
