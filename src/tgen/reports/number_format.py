"""Numbers and sizes as a report shows them."""

MIB = 2**20  # bytes


def count(n: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2 tokens."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def format_number(number: float) -> str:
    """Format a quantity with two significant digits, or as a whole number from 10 on."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


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
