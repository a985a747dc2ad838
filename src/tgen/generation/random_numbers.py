"""Random numbers without state: each is a function of a seed, a position and a purpose."""

import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

TOKEN, XTC, ROW, SAMPLE = 0, 1, 2, 3  # purposes; `sampling_kernels` computes those of tokens, too
_BLOCK = 64  # positions whose random numbers are generated together


def new_seed() -> int:
    """Return a seed below 2^32 from the operating system."""
    return int.from_bytes(os.urandom(4), "little")  # `secrets` takes 5 ms to import


def row_seed(seed: int, row: int) -> int:
    """Return the seed of one of several prompts; the first one's is `seed` itself.

    Others are random and below 2^53, so that JSON represents them exactly.
    """
    return seed if row == 0 else _random(seed, row, ROW) >> 11


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one of several samples of a prompt; see `row_seed`."""
    return seed if sample == 0 else _random(seed, sample, SAMPLE) >> 11


def _random(seed: int, position: int, purpose: int) -> int:
    """Return 64 bits of a counter-based generator (Philox, Salmon et al. 2011)."""
    return _block(seed, position // _BLOCK, purpose)[position % _BLOCK]


@lru_cache(maxsize=1 << 12)
def _block(seed: int, block: int, purpose: int) -> list[int]:
    generator = np.random.Philox(key=[seed, purpose], counter=[block * _BLOCK, 0, 0, 0])
    four_per_position: list[int] = generator.random_raw(4 * _BLOCK).tolist()
    return four_per_position[::4]


def uniforms(seeds: Sequence[int], positions: Sequence[int], purpose: int) -> list[float]:
    """Return a uniform random number in [0, 1) per sequence."""
    return [
        (_random(seed, position, purpose) >> 11) * 2.0**-53
        for seed, position in zip(seeds, positions, strict=True)
    ]
