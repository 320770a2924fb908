"""``OffloadConfig``: objects, mappings, TOML files, the environment; bad values by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_tools import Place, everywhere, parameters, same_weights, train

import ghoffload
from ghoffload import OffloadAdam, OffloadAdamW, OffloadConfig
from ghoffload.config import parse_bytes
from ghoffload.kernels import pool


def _config(given: Any) -> OffloadConfig:
    return OffloadAdamW(parameters((3,)), config=given).config


def test_every_form(tmp_path: Path) -> None:
    fields = {"bucket_bytes": 8 << 20, "staging_buffers": 3, "master": "none", "pin_memory": False}
    expected = OffloadConfig(**fields)
    assert _config(None) == OffloadConfig()
    assert _config(expected) is expected
    assert _config(fields) == expected
    assert _config(expected.to_dict()) == expected
    text = 'bucket_bytes = "8 MiB"\nstaging_buffers = 3\nmaster = "none"\npin_memory = false\n'
    for name, content in (("flat", text), ("table", f"other = 1\n[ghoffload]\n{text}")):
        path = tmp_path / f"{name}.toml"
        path.write_text(content)
        assert _config(path) == _config(str(path)) == expected
    assert OffloadAdam(parameters((3,)), config=fields).config == expected


def test_it_is_frozen_and_says_what_it_is() -> None:
    config = OffloadConfig(bucket_bytes="64MB")
    assert config.bucket_bytes == 64 * 10**6
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bucket_bytes = 1
    assert "bucket_bytes=64000000" in repr(config)
    with pytest.raises(TypeError):
        OffloadConfig("cuda")


def test_the_environment_overrides_mappings_files_and_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GHOFFLOAD_BUCKET_BYTES", "2MiB")
    monkeypatch.setenv("GHOFFLOAD_MASTER", "none")
    monkeypatch.setenv("GHOFFLOAD_PIN_MEMORY", "false")
    monkeypatch.setenv("GHOFFLOAD_CPU_THREADS", "3")
    path = tmp_path / "some.toml"
    path.write_text('bucket_bytes = "8 MiB"\n')
    for given in (None, {"bucket_bytes": 4096}, path):
        config = _config(given)
        assert (config.bucket_bytes, config.master) == (2 << 20, "none")
        assert (config.pin_memory, config.cpu_threads) == (False, 3)
    assert _config(OffloadConfig()) == OffloadConfig()


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        (
            "GHOFFLOAD_MASTER",
            "half",
            "master expects one of 'auto', 'split', 'fp32', 'none', got 'half'",
        ),
        ("GHOFFLOAD_BUCKET_BYTES", "big", "GHOFFLOAD_BUCKET_BYTES expects bytes .*, got 'big'"),
        ("GHOFFLOAD_PIN_MEMORY", "maybe", "GHOFFLOAD_PIN_MEMORY expects 0, 1, true or false"),
    ],
)
def test_bad_environment(name: str, text: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=match):
        _config(None)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"bucket_byte": 4096}, ValueError, "unknown option 'bucket_byte'; the options are step"),
        ({"a": 1, "b": 2}, ValueError, "unknown option 'a', 'b'"),
        ({"step_device": "gpu"}, ValueError, "step_device expects one of .*, got 'gpu'"),
        ({"memory_kind": "tape"}, ValueError, "memory_kind expects one of .*, got 'tape'"),
        ({"transfer": "pigeon"}, ValueError, "transfer expects one of .*, got 'pigeon'"),
        (
            {"moments": "int3"},
            ValueError,
            "moments expects one of 'fp32', 'bf16', 'int8', got 'int3'",
        ),
        ({"overlap": "never"}, ValueError, "overlap expects one of .*, got 'never'"),
        ({"master": ["fp32"]}, ValueError, r"master expects one of .*, got \['fp32'\]"),
        ({"bucket_bytes": 100}, ValueError, "bucket_bytes expects an int of 4096 or more, got 100"),
        ({"bucket_bytes": -1}, ValueError, "non-negative number of bytes, got -1"),
        ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes expects bytes .*, got 1.5"),
        ({"bucket_bytes": "64 parsec"}, ValueError, "got '64 parsec'"),
        ({"staging_buffers": 1}, ValueError, "staging_buffers expects an int of 2 or more, got 1"),
        ({"staging_buffers": "2"}, ValueError, "staging_buffers expects an int of 2 or more"),
        ({"staging_buffers": True}, ValueError, "staging_buffers expects an int"),
        ({"cpu_threads": -1}, ValueError, "cpu_threads expects an int of 0 or more, got -1"),
        ({"pin_memory": 1}, ValueError, "pin_memory expects True or False, got 1"),
        (3, TypeError, "config expects an OffloadConfig, a mapping, .*, got int"),
        ("no/such/file.toml", ValueError, "config file 'no/such/file.toml' cannot be read"),
    ],
    ids=str,
)
def test_bad_values(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        _config(given)


@pytest.mark.parametrize(
    "content", ["bucket_bytes = ", "[ghoffload]\ncolour = 1\n", "master = 1\n"]
)
def test_bad_files(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"cannot be read|unknown option 'colour'|got 1"):
        _config(path)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("1.5kb", 1500), ("64 MiB", 64 << 20), ("2GB", 2 * 10**9)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == parse_bytes(nbytes) == nbytes


@everywhere
@pytest.mark.parametrize("threads", [1, 5])
def test_threads_are_those_of_the_config(
    threads: int, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    seen = set()
    run = pool.run
    monkeypatch.setattr(pool, "run", lambda *a, **k: (seen.add(pool.get_threads()), run(*a, **k)))
    params = parameters((5000,), dtype=torch.bfloat16)
    train(OffloadAdamW(params, config=place.config(cpu_threads=threads)))
    assert threads in seen or place.step_device == "cuda"  # there the GPU's kernels step


def test_threads_change_no_bit() -> None:
    first, second = parameters((70_000,)), parameters((70_000,))
    train(OffloadAdamW(first, config={"cpu_threads": 1}))
    train(OffloadAdamW(second, config={"cpu_threads": 7}))
    assert same_weights(first, second)


@everywhere
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_default_dtype_is_not_ours(default: torch.dtype, place: Place) -> None:
    params, expected = parameters(), parameters()
    torch.set_default_dtype(default)
    try:
        optimizer = OffloadAdamW(params, config=place.config())
        train(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state[params[0]]["step"] = 3
        train(OffloadAdamW(expected))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for s in optimizer.state.values() for t in s.values()} == {torch.float32}
    assert same_weights(params, expected)


def test_torchs_default_device_is_not_ours() -> None:
    ours, theirs = parameters(), parameters()
    base = torch.ones(6, 8)
    ours += [torch.nn.Parameter(base[:, :3]), torch.nn.Parameter(base[:, 3::2])]
    for p in ours:
        p.grad = torch.ones_like(p)
    with torch.device("meta"):
        optimizer = OffloadAdamW(ours)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state[ours[0]]["step"] = 1
    plain = OffloadAdamW(theirs)
    for p in theirs:
        p.grad = torch.ones_like(p)
    plain.step()
    assert same_weights(ours[:-2], theirs)


@pytest.mark.parametrize(
    ("fields", "measured"),
    [
        ({}, True),
        ({"transfer": "kernel"}, True),
        ({"transfer": "kernel", "ctas": 3}, True),
        ({"transfer": "kernel", "ctas": 3, "memory_kind": "pinned"}, False),
        ({"transfer": "copy_engine", "memory_kind": "pinned"}, False),
        ({"memory_kind": "managed", "ctas": 3, "transfer": "kernel"}, False),
        ({"memory_kind": "device"}, False),
        ({"step_device": "cpu"}, False),
    ],
    ids=str,
)
def test_the_link_is_measured_only_where_something_depends_on_it(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], measured: bool
) -> None:
    asked = []
    monkeypatch.setattr("ghoffload.measure.rates_of", asked.append)
    with ghoffload.use_machine("virtual") as machine:
        OffloadAdamW(parameters((8,)), config=fields)
    assert asked == [machine] * measured
