"""Formats numbers for display: units, percentages, changes."""

import math
from collections.abc import Mapping, Sequence

SPACE = "\N{NO-BREAK SPACE}"  # separates a number from its unit
SI = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def flops_unit(flops: float) -> tuple[float, str]:
    """Returns scale and name of the unit in which `flops` has one to three integer digits."""
    for scale, prefix in SI:
        if flops >= scale:
            return scale, f"{prefix}FLOP"
    return 1.0, "FLOP"


def format_flops(flops: float) -> str:
    """Returns e.g. `3.21 TFLOP`, three digits."""
    scale, unit = flops_unit(flops)
    number = flops / scale
    digits = 0 if scale == 1 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{SPACE}{unit}"


def format_count(count: int) -> str:
    """Returns e.g. `12 345`, with thin spaces."""
    return f"{count:,}".replace(",", "\u202f")


def format_seconds(seconds: float) -> str:
    """Returns e.g. `7.3 s`, `12 min 05 s` or `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min{SPACE}{rest:02d}{SPACE}s"
    return f"{minutes // 60}{SPACE}h{SPACE}{minutes % 60:02d}{SPACE}min"


def format_bytes(count: int) -> str:
    """Returns e.g. `812 MB` or `7.9 GB`."""
    return f"{count / 1e9:.1f}{SPACE}GB" if count >= 1e9 else f"{count / 1e6:.0f}{SPACE}MB"


def format_percent(fraction: float) -> str:
    """Returns e.g. `43 %`."""
    return f"{100 * fraction:.0f}{SPACE}%"


def format_rate(rate: float) -> str:
    """Returns e.g. `0.512`; a dash for NaN."""
    return "\N{EM DASH}" if math.isnan(rate) else f"{rate:.3f}"


def format_change(change: float) -> str:
    """Returns e.g. `+0.021` or `−0.021`, with a real minus sign."""
    return f"{change:+.3f}".replace("-", "\N{MINUS SIGN}")


def format_temperatures(temperatures: Sequence[float]) -> str:
    """Returns the temperatures of a round's iterations, e.g. `temperature 1.2 to 1.35`."""
    ends = dict.fromkeys(f"{each:g}" for each in (temperatures[0], temperatures[-1]))
    return f"temperature {' to '.join(ends)}"


def format_selection(counts: Mapping[str, int | float]) -> str:
    """Returns the selection counts of a round, e.g. `2.2 groups sampled per group kept`."""
    parts = []
    if counts["reused"] and counts["sampled"]:
        groups = format_count(int(counts["reused"]))
        parts.append(f"{groups} groups of the profile, then sampled ones")
    elif counts["reused"]:
        parts.append("rollouts of the profile")
    elif counts["oversampling_factor"] > 1:
        parts.append(f"{counts['oversampling_factor']:.1f} groups sampled per group kept")
    if counts["skipped"]:
        parts.append(f"{format_count(int(counts['skipped']))} candidates skipped")
    return ", ".join(parts)


def listed(parts: Sequence[str]) -> str:
    """Returns e.g. `a, b and c`."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
