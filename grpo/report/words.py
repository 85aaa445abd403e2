"""Numbers as a person reads them: units, percentages, intervals."""

from collections.abc import Sequence

SI = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def flops_unit(flops: float) -> tuple[float, str]:
    """Returns the unit in which `flops` has one to three digits before the point."""
    for scale, prefix in SI:
        if flops >= scale:
            return scale, f"{prefix}FLOP"
    return 1.0, "FLOP"


def say_flops(flops: float) -> str:
    """Returns e.g. `3.21 TFLOP`."""
    scale, unit = flops_unit(flops)
    return f"{flops / scale:.3g} {unit}"


def say_count(count: int) -> str:
    """Returns e.g. `12 345`, with thin spaces."""
    return f"{count:,}".replace(",", "\u202f")


def say_seconds(seconds: float) -> str:
    """Returns e.g. `7.3 s`, `12 min 05 s` or `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def say_bytes(count: int) -> str:
    """Returns e.g. `812 MB` or `7.9 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def say_percent(fraction: float) -> str:
    """Returns e.g. `43 %`."""
    return f"{100 * fraction:.0f} %"


def say_rate(rate: float) -> str:
    """Returns e.g. `0.512`."""
    return f"{rate:.3f}"


def say_change(change: float) -> str:
    """Returns e.g. `+0.021` or `−0.021`, with a real minus sign."""
    return f"{change:+.3f}".replace("-", "\N{MINUS SIGN}")


def say_list(names: Sequence[str]) -> str:
    """Returns e.g. `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
