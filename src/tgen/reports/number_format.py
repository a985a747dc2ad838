"""Numbers and sizes as a report shows them."""

MIB = 2**20  # bytes
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(n: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2 tokens."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def format_number(number: float) -> str:
    """Format a quantity with two significant digits, or as a whole number from 10 on."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def format_amount(number: float) -> str:
    """Format a count with three digits and a prefix: 38.4k."""
    # 999,500 and more would be rounded to 1e+03k.
    size, prefix = next((one for one in _PREFIXES if number >= 0.9995 * one[0]), (1, ""))
    return f"{number / size:.3g}{prefix}"


def format_bytes(n_bytes: float) -> str:
    """Format a size in GB, MB or KB, each 1000 times the next."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes / 1e3:,.1f} KB"


def format_duration(seconds: float) -> str:
    """Format a duration as minutes:seconds or hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
