"""The least time that a test can take on a machine, by what must be read and computed.

A pass must read every weight once, and the keys and values of all tokens before; and it must do two
operations for each weight and token (for the output matrix, and the last token of a row alone), and
four for each query, key and number of a head. Whichever of both takes longer at the machine's best
is the least time that there is: a roofline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tgen.benchmark.throughput import Workload
from tgen.config import STORED_BYTES, ModelConfig, StoredAs
from tgen.reports import Limits

_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """What a model asks of a machine."""

    weights: int  # that every token is multiplied with
    output_weights: int  # that only the last token of a pass is multiplied with, for its logits
    weight_bytes: float  # of both
    key_flops: int  # for each token and key
    key_bytes: float  # of each token's keys and values

    def least(self, test: Workload, limits: Limits) -> tuple[float, str]:
        """The least seconds of a test, and what bounds most of them."""
        first = test.n_depth
        passes = [(test.n_prompt, first)] if test.n_prompt else []
        passes += [(1, first + test.n_prompt + i) for i in range(test.n_gen)]
        taken = {"memory": 0.0, "arithmetic": 0.0}
        for n, before in passes:
            seen = n * before + n * (n + 1) / 2  # keys, of all queries
            multiplied = 2 * (n * self.weights + self.output_weights)
            flops = test.batch * (multiplied + seen * self.key_flops)
            read = self.weight_bytes + test.batch * (before + n) * self.key_bytes
            slower = max(
                (read / limits.bytes_per_second, "memory"), (flops / limits.flops, "arithmetic")
            )
            taken[slower[1]] += slower[0]
        return sum(taken.values()), max(taken, key=lambda name: taken[name])


def work_of(
    config: ModelConfig,
    arrays: Mapping[str, NDArray[Any]],
    stored: StoredAs,
    *,
    narrow_cache: bool = False,
) -> PassCost:
    """What a model's passes come to. `narrow_cache`: keys and values are bfloat16."""
    output = "token_embedding.weight" if config.tied_embeddings else _OUTPUT
    looked_up = {"position_embedding.weight", "token_embedding.weight", output}
    weights = sum(a.size for name, a in arrays.items() if a.ndim == 2 and name not in looked_up)
    output_weights = arrays[output].size
    return PassCost(
        weights=weights,
        output_weights=output_weights,
        weight_bytes=(weights + output_weights) * STORED_BYTES[stored],
        key_flops=4 * config.n_layers * config.n_heads * config.head_dim,
        key_bytes=config.cache_bytes_per_token / (2 if narrow_cache else 1),
    )
