"""The axes of a sweep: what is read, what is refused, and their product."""

from __future__ import annotations

from typing import Any

import pytest

from ghoffload.sweeping.settings import (
    AXES,
    Setting,
    parse_axes,
    parse_axis,
    parse_tokens,
    product,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bucket_bytes", "1MiB,4MiB, 16 MiB", (MIB, 4 * MIB, 16 * MIB)),
        ("bucket_bytes", "1MiB..8MiB", (MIB, 2 * MIB, 4 * MIB, 8 * MIB)),
        ("bucket_bytes", "1MiB..64MiB..x4", (MIB, 4 * MIB, 16 * MIB, 64 * MIB)),
        ("bucket_bytes", "1MB..3MB", (10**6, 2 * 10**6)),
        ("bucket_bytes", "8..32..x1.5", (8, 12, 18, 27)),
        ("bucket_bytes", "1MiB..2MiB,2MiB,1GB", (MIB, 2 * MIB, 10**9)),
        ("bucket_bytes", [MIB, "2MiB"], (MIB, 2 * MIB)),
        ("bucket_bytes", 4096, (4096,)),
        ("staging_buffers", "2..8", (2, 4, 8)),
        ("staging_buffers", range(2, 5), (2, 3, 4)),
        ("ctas", "0,4,8", (0, 4, 8)),
        ("transfer", "copy_engine,kernel", ("copy_engine", "kernel")),
        ("transfer", ("kernel", "copy_engine", "kernel"), ("kernel", "copy_engine")),
        ("activations", "none,all,40GiB", ("none", "all", 40 << 30)),
        ("activations", "1GiB..2GiB", (1 << 30, 2 << 30)),
        ("checkpoint", "none,layers", ("none", "layers")),
    ],
)
def test_values(name: str, value: Any, expected: tuple[Any, ...]) -> None:
    assert parse_axis(name, value) == expected


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("bucket_bytes", "64 miles", "bucket_bytes expects bytes such as 64MiB, got '64 miles'"),
        ("bucket_bytes", "8MiB..1MiB", "one that is not smaller"),
        ("bucket_bytes", "0..4", "from a number above 0"),
        ("bucket_bytes", "1..4..x1", "by a factor above 1"),
        ("bucket_bytes", "1..4..4", "expects a range such as"),
        ("bucket_bytes", "1..2..x2..x3", "expects a range such as"),
        ("bucket_bytes", [], "bucket_bytes expects one value or more, got none"),
        ("activations", "some", "expects none, all, or bytes such as 64MiB, got 'some'"),
        ("activations", "none..all", "from a number above 0"),
        ("staging_buffers", "two", "expects whole numbers, got 'two'"),
        ("staging_buffers", "-2", "expects whole numbers"),
        ("transfer", "kernal", "expects one of auto, copy_engine, kernel, got 'kernal'"),
        ("transfer", "auto..kernel", "expects words, not a range"),
        ("checkpoint", "", "expects one of none, layers, got ''"),
    ],
)
def test_what_is_no_value(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_axis(name, value)


@pytest.mark.parametrize("value", [1.5, True, [None]])
def test_what_is_no_axis(value: Any) -> None:
    with pytest.raises(TypeError, match="bucket_bytes expects text, numbers"):
        parse_axis("bucket_bytes", value)
    with pytest.raises(TypeError, match=r"a sweep expects axes of bucket_bytes, .* got 'buckets'"):
        parse_axes({"buckets": 1})


def test_the_product_has_every_combination_and_defaults_for_the_rest() -> None:
    axes = parse_axes({"bucket_bytes": "1MiB,2MiB", "moments": "fp32,int8", "ctas": None})
    settings = product(axes)
    assert [(s.bucket_bytes, s.moments) for s in settings] == [
        (MIB, "fp32"),
        (MIB, "int8"),
        (2 * MIB, "fp32"),
        (2 * MIB, "int8"),
    ]
    assert list(axes) == list(AXES)
    assert {s.ctas for s in settings} == {0}
    assert settings[0].config().to_dict()["bucket_bytes"] == MIB
    assert product(parse_axes({})) == [Setting()]


def test_a_range_may_go_beyond_what_an_optimizer_takes() -> None:
    (setting,) = product(parse_axes({"bucket_bytes": 64}))
    with pytest.raises(ValueError, match="bucket_bytes expects an int of 4096 or more, got 64"):
        setting.config()


@pytest.mark.parametrize(("value", "expected"), [("2x64", (2, 64)), ((3, 5), (3, 5))])
def test_tokens(value: Any, expected: tuple[int, int]) -> None:
    assert parse_tokens(value) == expected


@pytest.mark.parametrize("value", ["4096", "0x64", "1x2x3", (1, 2, 3), (1.0, 2), 7, None])
def test_what_are_no_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match="tokens expects batch x sequence"):
        parse_tokens(value)
