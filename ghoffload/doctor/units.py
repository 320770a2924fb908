"""Bytes and rates as text."""

from __future__ import annotations


def gb(nbytes: float) -> str:
    """Decimal gigabytes: ``"141 GB"``, ``"0.9 GB"``."""
    value = nbytes / 1e9
    return f"{value:,.0f} GB" if value >= 10 else f"{value:.1f} GB"


def size(nbytes: int) -> str:
    """A power of two as people write it: ``"64 KiB"``, ``"512 MiB"``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.4g} {unit}"
    return f"{nbytes} bytes"


def rate(bytes_per_second: float) -> str:
    """``"54.9 GB/s"``."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def version(numbers: tuple[int, int] | None) -> str:
    """``"13.0"``; ``"unknown"`` for ``None``."""
    return "unknown" if numbers is None else f"{numbers[0]}.{numbers[1]}"


def age(seconds: float) -> str:
    """``"just now"``, ``"5 minutes ago"``, ``"3 days ago"``."""
    for unit, scale in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= scale:
            count = int(seconds // scale)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
