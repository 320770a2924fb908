"""Profiles: those that come with the package, those of users, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ghoffload.bandwidth.profile import to_toml
from ghoffload.bandwidth.results import Results, latency, rate
from ghoffload.machine.simulated import SimulatedMachine, load_profile, profiles
from ghoffload.machine.simulated.profile import parse_profile

LEAST = """
machine = "a machine"
hbm_bytes = 1000
host_bytes = 2000
""" + "".join(
    f"""
[{name}]
value = {value}
unit = "GB/s"
source = "a test"
"""
    for name, value in (
        ("h2d_engine", 50),
        ("d2h_engine", 40),
        ("both_engine", 80),
        ("hbm", 3000),
        ("host_read_write", 100),
    )
)


def test_the_packages_profiles_have_every_figure_with_its_source() -> None:
    assert profiles() == [
        *("gb200", "gb300", "gh200-120", "gh200-144", "gh200-480", "h100-pcie5", "h200-pcie5"),
    ]
    for name in profiles():
        profile = load_profile(name)
        assert "none given" not in " ".join(
            figure.origin for key, figure in profile.figures.items() if key != "eager_call"
        ), name
        assert profile["h2d_engine"] < profile["hbm"] < profile["bf16"]
        assert profile["both_engine"] <= profile["h2d_engine"] + profile["d2h_engine"]
        assert (
            10e9 < profile.hbm_bytes < profile.host_bytes
            or "PCIe" in profile.title
            or (name.startswith("gb"))
        )


def test_figures_that_are_missing_are_as_others_or_said_to_be_assumed() -> None:
    profile = parse_profile(LEAST, "least")
    assert (profile.name, profile.title) == ("least", "a machine")
    assert (profile.hbm_bytes, profile.host_bytes) == (1000, 2000)
    assert profile["d2h_kernel"] == profile["d2h_engine"] == 40e9
    assert profile.figures["d2h_kernel"].origin == "as d2h_engine"
    assert profile["copy_call"] == pytest.approx(8e-6)
    assert "none given" in profile.figures["copy_call"].origin


def test_a_users_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(LEAST)
    assert SimulatedMachine(path).profile == load_profile(str(path))
    assert load_profile(path).name == "mine"


def test_what_bandwidth_saves_is_a_profile() -> None:
    nbytes = 1 << 30
    rows = []
    for direction in ("h2d", "d2h", "both"):
        for by, blocks in (("engine", 0), ("bulk", 4)):
            rows.append(
                rate(
                    [0.02],
                    nbytes,
                    what="copy",
                    memory="pinned",
                    direction=direction,
                    by=by,
                    nbytes=nbytes,
                    blocks=blocks,
                )
            )
    rows += [
        rate([0.0005], nbytes, what="hbm", memory="device", direction="copy", by="words"),
        rate([0.01], nbytes, what="host", memory="system", direction="update", by="cpu", threads=8),
        latency([7e-6], what="latency", memory="", direction="launch", by="call"),
    ]
    about = {"gpu": "H200", "hbm_bytes": 141 * 10**9, "host_bytes": 10**11, "date": "2026-12-01"}
    profile = parse_profile(to_toml(Results(environment=about, rows=rows)), "saved")
    assert profile["h2d_engine"] == pytest.approx(nbytes / 0.02, rel=1e-3)
    assert profile["launch_call"] == pytest.approx(7e-6)
    assert "copy engine" in profile.figures["h2d_engine"].origin


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[hbm]", "[hbn]", "profile bad has no hbm"),
        ("value = 50", "value = 0", "bad: h2d_engine expects a value above 0, got 0"),
        ("value = 50", "value = true", "h2d_engine expects a value above 0, got True"),
        ('unit = "GB/s"', 'unit = "GiB/s"', "expects a unit of GB/s, TFLOP/s, us, B, got 'GiB/s'"),
        ('source = "a test"', "", "expects a source, or how it was found"),
        ("hbm_bytes = 1000", "", "expects hbm_bytes in bytes, got None"),
        ("[hbm]", "[hbm", "profile bad is not TOML"),
    ],
)
def test_bad_profiles_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_profile(LEAST.replace(old, new), "bad")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expects one of gb200, .* or a \.toml file, got gh300"):
        load_profile("gh300")
