"""A model that is trained on random text that repeats itself: does a head learn to look it up?

    python benchmarks/inspection/induction.py --family llama --minutes 10

Blocks of 8 to 32 random tokens, each followed by itself; the loss counts in the second block. The
score is the one of `tgen inspect --view heads`, on blocks that were never seen, beside the control
in which the second block is another one.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "learning"))

import record
from tgen.config import ModelConfig
from tgen.introspect.repeats import on_repeats
from tgen.model.transformer import Transformer

VOCABULARY, LONGEST, BATCH, RATE, EVERY = 64, 32, 64, 2e-3, 250


def main() -> None:
    """Trains, and prints the best head's scores as it goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="llama")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=1)
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


if __name__ == "__main__":
    main()
