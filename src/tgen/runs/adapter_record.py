"""The part of a run's record that describes its LoRA adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tgen.config import ModelConfig
from tgen.lora.adapter import adapter_layout
from tgen.model.lora_layout import NewAdapter, Pair, Shape, parameter_shapes
from tgen.training.plan.param_shapes import FrozenModel


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """The base model of a LoRA run, and the shapes of its adapter."""

    base: str  # name or path, as adapter_config.json has it
    base_path: str
    base_digest: str  # see `adapter.base_digest`
    alpha: float
    ranks: dict[str, int]  # by transformers' name of the matrix
    scales: dict[str, float]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The rank and scale of each pair."""
        return {name: Shape(rank, self.scales[name]) for name, rank in self.ranks.items()}

    def new_adapter(
        self, config: ModelConfig, pairs: Mapping[str, Pair] | None = None
    ) -> NewAdapter:
        """Return the adapter before the first step, with `pairs` or new ones."""
        return NewAdapter(adapter_layout(config), self.shapes, pairs)

    def frozen_model(self, config: ModelConfig, arrays: Mapping[str, NDArray[Any]]) -> FrozenModel:
        """Return the sizes that the plan needs."""
        layout = adapter_layout(config)
        narrow = [a.size for a in arrays.values() if len(a.shape) == 2 and a.dtype.itemsize < 4]
        return FrozenModel(
            sum(array.size * array.dtype.itemsize for array in arrays.values()),
            4 * max(narrow, default=0),
            tuple(parameter_shapes(layout, self.shapes).values()),
        )
