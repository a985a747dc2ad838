"""A workload in llama-bench's terms (pp512, tg128, @ d4096).

It processes `n_prompt` tokens in one pass, then `n_gen` tokens one per pass, on top of `n_depth`
tokens in the KV cache.
"""

from dataclasses import dataclass

from tgen.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Numbers of tokens to process."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    batch: int = 1  # sequences, each with this many tokens

    @property
    def label(self) -> str:
        """The name in llama-bench's notation."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens per sequence at the end, including the depth."""
        return self.n_depth + self.n_prompt + self.n_gen

    def check(self, context_length: int) -> None:
        """Raise UsageError if the workload is empty or does not fit the context."""
        if self.batch < 1:
            raise UsageError(f"--batch: must be at least 1 (got {self.batch})", "use --batch 1")
        if self.n_prompt + self.n_gen == 0:
            raise UsageError("the benchmark has no tokens", "set -p or -n above 0")
        if self.n_tokens > context_length:
            raise UsageError(
                f"{self.label} needs {self.n_tokens:,} tokens, but the model's context has "
                f"{context_length:,}",
                "use a smaller -p, -n or -d",
            )
