"""A model that is trained on random text that repeats itself: does a head learn to look it up?

    python benchmarks/inspection/induction.py --family llama --minutes 10 --model repeats
    tgen inspect --model ./repeats --view heads < repeats/text.txt

Blocks of 8 to 32 random tokens, each followed by itself; the loss counts in the second block. The
score is the one of `tgen inspect --view heads`, on blocks that were never seen, beside the control
in which the second block is another one.
"""

import argparse
import string
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from tgen.checkpoint import model_dir
from tgen.config import ModelConfig
from tgen.inspection.repeated_sequences import on_repeats
from tgen.model.transformer import Transformer
from tgen.tokenizer import train_char

LETTERS = string.ascii_letters + string.digits + "-_"
VOCABULARY, LONGEST, BATCH, RATE, EVERY = len(LETTERS), 32, 64, 2e-3, 250


def main() -> None:
    """Trains, and prints the best head's scores as it goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a directory to write the model to")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_layers": 2, "d_model": 64, "n_heads": 4}
    model = Transformer(ModelConfig.of(options.family, **shape, context_length=2 * LONGEST))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    random = torch.Generator().manual_seed(1)
    begin, step, rows = time.perf_counter(), 0, []
    while time.perf_counter() - begin < options.minutes * 60:
        n = int(torch.randint(8, LONGEST + 1, (1,), generator=random))
        block = torch.randint(VOCABULARY, (BATCH, n), generator=random)
        text = torch.cat([block, block], dim=1)
        logits = model(text[:, :-1])[:, n:]
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, n + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            row = scores(model) | {"step": step, "loss": round(float(loss.detach()), 3)}
            rows.append(row)
            print(*(f"{name} {value}" for name, value in row.items()), sep=" · ", flush=True)
            if row["induction"] > 0.97:
                break
    if options.model:
        write(options.model, model)
    if options.out:
        record.write(options.out, record.origin() | {"family": options.family, "scores": rows})


def scores(model: Transformer) -> dict[str, float]:
    """Of the head with the highest induction score."""
    found = on_repeats(model, range(VOCABULARY), [])
    assert found.induction is not None
    repeated, control = (values.mean(dim=0) for values in found.induction)
    best = repeated.argmax()
    return {
        "induction": round(float(repeated.flatten()[best]), 3),
        "control": round(float(control.flatten()[best]), 3),
        "gain": round(found.gain or 0.0, 2),
    }


def write(path: Path, model: Transformer) -> None:
    """The model as a directory, its tokens letters, with a text of a block that comes twice.

    The tokenizer knows all bytes: those that never came have embeddings of 0.
    """
    tokenizer = train_char([])
    ids = tokenizer.encode(LETTERS.encode())
    arrays = model.to_arrays()
    learnt = arrays["token_embedding.weight"]
    arrays["token_embedding.weight"] = np.zeros((tokenizer.vocab_size, learnt.shape[1]), np.float32)
    arrays["token_embedding.weight"][ids] = learnt
    config = replace(model.config, vocab_size=tokenizer.vocab_size)
    model_dir.save(path, config, tokenizer, arrays)
    order = np.random.default_rng(0).permutation(VOCABULARY)[:LONGEST]
    text = "".join(LETTERS[i] for i in order)
    (path / "text.txt").write_text(2 * text, encoding="utf-8")


if __name__ == "__main__":
    main()
