"""Names of several layers, as text."""

from collections.abc import Collection


def name_layers(layers: Collection[int]) -> str:
    """Return "layer 3" or "layers 0-4, 6"; at least one layer, in order."""
    firsts = (i for i in layers if i - 1 not in layers)
    lasts = (i for i in layers if i + 1 not in layers)
    ranges = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True)]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(ranges)}"
