"""The schedule under every order that streams and events allow, and each of its waits removed."""

from __future__ import annotations

import pytest

import ghoffload
from ghoffload.check.programs import everything, many_layers, same_bits, wide_linear
from ghoffload.machine.virtual import VirtualMachine

STEP_DEVICES = ("cuda", "cpu")


@pytest.mark.parametrize("step_device", STEP_DEVICES)
@pytest.mark.parametrize("order", ["earliest", "latest"])
def test_extreme_orders_give_the_bits_of_the_plain_cpu(order: str, step_device: str) -> None:
    for run in (wide_linear, many_layers):
        machine = VirtualMachine(order=order, check=True)
        assert same_bits(run(machine, step_device), run(None))


@pytest.mark.parametrize("step_device", STEP_DEVICES)
def test_adversarial_seeds_give_the_bits_of_the_plain_cpu(step_device: str) -> None:
    wide, small = wide_linear(None), many_layers(None)
    for seed in range(50):
        machine = VirtualMachine(order="adversarial", seed=seed, check=True)
        assert same_bits(wide_linear(machine, step_device), wide), f"seed {seed}"
        machine = VirtualMachine(order="adversarial", seed=seed + 100, check=True)
        assert same_bits(many_layers(machine, step_device), small), f"seed {seed + 100}"


def test_a_transfer_heavy_layer_at_full_size() -> None:
    expected = wide_linear(None, outputs=131072)
    for seed in range(200):
        machine = VirtualMachine(order="adversarial", seed=seed, check=True)
        assert same_bits(wide_linear(machine, outputs=131072), expected), f"seed {seed}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step_device", STEP_DEVICES)
def test_each_wait_removed_is_reported(step_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks small enough that one bucket's write-back takes both d2h streams.
    monkeypatch.setattr("ghoffload.transfer.link.CHUNK_BYTES", 8192)
    clean = VirtualMachine(check=True)
    everything(clean, step_device)
    assert len(clean.labels) >= 5
    missed = []
    for label in clean.labels:
        machine = VirtualMachine(check=True)
        machine.dropped_waits.add(label)
        try:
            everything(machine, step_device)
        except ghoffload.OrderingError:
            continue
        missed.append(label)
    assert missed == []
