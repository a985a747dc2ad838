"""Compare activations, ablation and activation patching with TransformerLens on two GPT-2s.

    pip install transformer_lens==2.18.0
    python -m versus.inspection.transformer_lens

The models have random weights and are saved by transformers. The result file has TransformerLens'
figures; with --quick, tgen's are compared with these, so that TransformerLens is not needed.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgen.checkpoint import model_dir
from tgen.config.index_ranges import PARTS, PATCHED_PARTS
from tgen.errors import TgenError
from tgen.inspection.ablation import ablate_groups, parse_groups
from tgen.inspection.activations import record_activations
from tgen.inspection.patching import patch_activations
from tgen.model.transformer import Transformer
from tgen.tokenizer import Tokenizer, train_char
from versus import harness

SHAPES = (
    {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    {"n_embd": 96, "n_layer": 4, "n_head": 6, "n_positions": 128},
)
N_TOKENS = 9
TARGET, CONTRAST = 65, 66
GROUPS: dict[str, list[tuple[str, int | None]]] = {  # hooks of TransformerLens, with heads
    "0.1+1.2": [("blocks.0.attn.hook_z", 1), ("blocks.1.attn.hook_z", 2)],
    "1": [("blocks.1.hook_attn_out", None), ("blocks.1.hook_mlp_out", None)],
}
_LIMIT = 1e-5
_HOOKS = {
    "residual": "hook_resid_pre",
    "attention": "hook_attn_out",
    "feed_forward": "hook_mlp_out",
    "heads": "attn.hook_z",
    "queries": "attn.hook_q",
    "keys": "attn.hook_k",
    "values": "attn.hook_v",
    "attention_weights": "attn.hook_pattern",
}
Figures = dict[str, NDArray[Any]]


def make_theirs(shape: dict[str, int], vocab_size: int) -> Any:
    """Return a model of transformers with the same random weights everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **shape, **no_ends)).eval()
    random = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = random.standard_normal(tuple(parameter.shape), dtype=np.float32)
            is_scale = ".ln_" in name and name.endswith("weight")
            parameter.copy_(torch.from_numpy(values * 0.15) + is_scale)
    return model


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Return the tokens of a prompt and of the other one, which differ in three."""
    prompt, other = np.random.default_rng(1).integers(0, vocab_size, (2, N_TOKENS)).tolist()
    return [prompt, [*prompt[:3], *other[3:6], *prompt[6:]]]


@torch.no_grad()
def measure_ours(theirs: Any, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> Figures:
    """Return tgen's figures of the model that transformers saved."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        (Path(folder) / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
        bundle = model_dir.load(Path(folder))
    model = Transformer.from_arrays(bundle.config, bundle.arrays)
    prompt, other = prompts
    figures: Figures = dict(
        record_activations(model, prompt, range(bundle.config.n_layers), PARTS)[0]
    )
    for report in patch_activations(
        model, tokenizer, prompt, other, PATCHED_PARTS, target=TARGET, contrast=CONTRAST
    ):
        figures[f"patched {report.part}"] = report.scores
    groups = parse_groups(",".join(GROUPS), bundle.config)
    for kind in ("zero", "mean"):
        ablation = ablate_groups(model, tokenizer, prompt, groups, kind, top=1)
        figures[f"{kind} ablation"] = np.array([ablation.loss, *(g.loss for g in ablation.groups)])
    return figures


@torch.no_grad()
def measure_lens(theirs: Any, prompts: Sequence[Sequence[int]]) -> Figures:
    """Return TransformerLens' figures."""
    from transformer_lens import (  # type: ignore[import-not-found]
        HookedTransformer,
        HookedTransformerConfig,
        patching,
    )
    from transformer_lens.pretrained.weight_conversions import (  # type: ignore[import-not-found]
        convert_gpt2_weights,
    )

    own = theirs.config
    config = HookedTransformerConfig(
        n_layers=own.n_layer,
        d_model=own.n_embd,
        n_ctx=own.n_positions,
        d_head=own.n_embd // own.n_head,
        n_heads=own.n_head,
        d_mlp=4 * own.n_embd,
        d_vocab=own.vocab_size,
        act_fn="gelu_new",
        normalization_type="LN",
        eps=own.layer_norm_epsilon,
        device="cpu",
    )
    model = HookedTransformer(config)
    model.load_state_dict(convert_gpt2_weights(theirs, config), strict=False)
    tokens, other = (torch.tensor([prompt]) for prompt in prompts)
    logits, cache = model.run_with_cache(tokens)
    figures: Figures = {"logits": logits[0].numpy()}
    for layer in range(own.n_layer):
        for part, hook in _HOOKS.items():
            figures[f"{part}.{layer}"] = cache[f"blocks.{layer}.{hook}"][0].numpy()
    figures[f"residual.{own.n_layer}"] = cache[f"blocks.{layer}.hook_resid_post"][0].numpy()
    figures["final_norm"] = cache["ln_final.hook_normalized"][0].numpy()

    def compare(logits: torch.Tensor) -> torch.Tensor:
        return (logits[0, -1, TARGET] - logits[0, -1, CONTRAST]).double()

    clean, corrupted = compare(logits), compare(model(other))
    for part, patch in {
        "residual": patching.get_act_patch_resid_pre,
        "attention": patching.get_act_patch_attn_out,
        "feed_forward": patching.get_act_patch_mlp_out,
        "heads": patching.get_act_patch_attn_head_out_all_pos,
    }.items():
        scores = patch(
            model, other, cache, lambda one: (compare(one) - corrupted) / (clean - corrupted)
        )
        figures[f"patched {part}"] = scores.numpy()

    def replace(values: torch.Tensor, hook: Any, head: int | None, kind: str) -> torch.Tensor:
        where = slice(None) if head is None else head
        mean = cache[hook.name].mean(dim=1, keepdim=True)
        values[:, :, where] = mean[:, :, where] if kind == "mean" else 0
        return values

    for kind in ("zero", "mean"):
        losses = [float(model(tokens, return_type="loss"))]
        for members in GROUPS.values():
            hooks = [(name, partial(replace, head=head, kind=kind)) for name, head in members]
            losses.append(float(model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)))
        figures[f"{kind} ablation"] = np.array(losses)
    return figures


def difference(ours: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the largest difference, relative to the largest number where that exceeds 1."""
    return float(np.abs(ours - expected).max() / max(1, np.abs(expected).max()))


def measure(options: argparse.Namespace) -> None:
    """Compare the figures, print the largest differences and write the results."""
    path = harness.RESULTS / options.result
    recorded = json.loads(path.read_bytes())["models"] if options.quick else None
    tokenizer = train_char([])
    prompts = make_prompts(tokenizer.vocab_size)
    models: list[dict[str, Any]] = []
    largest: dict[str, float] = {}
    for i, shape in enumerate(SHAPES):
        theirs = make_theirs(shape, tokenizer.vocab_size)
        ours = measure_ours(theirs, tokenizer, prompts)
        if recorded is None:
            expected = measure_lens(theirs, prompts)
        else:
            expected = {name: np.array(value) for name, value in recorded[i]["figures"].items()}
        differences = {name: difference(ours[name], expected[name]) for name in expected}
        kept = [name for name in expected if " " in name]  # not the activations, which are many
        models.append(
            {
                "shape": shape,
                "largest_differences": differences,
                "figures": {name: expected[name].tolist() for name in kept},
            }
        )
        for name, value in differences.items():
            kind = name.partition(".")[0]
            largest[kind] = max(largest.get(kind, 0.0), value)
    harness.save(options, {"prompts": prompts, "models": models})
    rows = [[name, f"{value:.1e}"] for name, value in largest.items()]
    print(harness.format_table([["", "largest difference"], *rows]))
    name, worst = max(largest.items(), key=lambda pair: pair[1])
    if not worst <= _LIMIT:
        raise TgenError(
            f"{name}: differs by {worst:.1e} (limit {_LIMIT:.0e})", "compare both codes"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and measure."""
    parser = harness.make_parser(__doc__, "transformer_lens.json")
    harness.run(measure, harness.parse(parser, arguments, {}))


if __name__ == "__main__":
    main()
