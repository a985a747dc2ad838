"""Successive halving on simulated runs."""

import numpy as np
import pytest

from tgen.experiments.halving import best_cells, make_rungs, total_share


def test_rungs_halve_the_cells_and_double_the_time():
    rungs = make_rungs(9, halving=True)
    assert [(rung.n_cells, rung.share) for rung in rungs] == [
        (9, 1 / 8),
        (5, 1 / 4),
        (3, 1 / 2),
        (2, 1),
    ]
    assert [rung.n_cells for rung in make_rungs(2, halving=True)] == [2]
    assert [(rung.n_cells, rung.share) for rung in make_rungs(9, halving=False)] == [(9, 1)]
    assert total_share(make_rungs(9, halving=False)) == 9
    assert total_share(make_rungs(3, halving=True)) == 2.5  # 3 for a half, 2 for the rest


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_halving_finds_the_best_of_nine_in_half_the_time(n_seeds):
    n_found, n_trials = 0, 200
    for trial in range(n_trials):
        random = np.random.default_rng([trial, n_seeds])
        # A loss of a power of the time, as scaling laws have it, and noise of the seeds
        final = 1.8 + 0.04 * random.permutation(9)
        speed = random.uniform(0.25, 0.35, 9)
        noise = random.normal(0, 0.01, (9, n_seeds))
        rungs, cells, spent = make_rungs(9, halving=True), list(range(9)), 0.0
        for rung, later in zip(rungs, [*rungs[1:], None], strict=True):
            losses = {c: final[c] + rung.share ** -speed[c] - 1 + noise[c] for c in cells}
            cells = best_cells(losses, later.n_cells if later else 1)
        spent = total_share(rungs)
        assert spent <= 9 / 2
        n_found += cells == [int(final.argmin())]
    assert n_found >= 0.9 * n_trials


def test_failed_runs_are_the_last():
    assert best_cells({0: [None, 1.0], 3: [2.0, 2.5], 5: [1.0, 1.5]}, 2) == [3, 5]
