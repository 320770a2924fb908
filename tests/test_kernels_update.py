"""Prepared updates: what stays from launch to launch, what is looked at, what is written anew."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from ghoffload.kernels import adam, cuda
from ghoffload.kernels.adam_cuda import Block

FORMATS = {
    "fp32": ({"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, torch.float32),
    "master": (
        {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master": torch.float32},
        torch.float16,
    ),
    "int8": (
        {
            "exp_avg": torch.int8,
            "exp_avg_sq": torch.uint8,
            "rest": torch.int16,
            "exp_avg_scale": torch.float32,
            "exp_avg_sq_scale": torch.float32,
        },
        torch.bfloat16,
    ),
}
COUNT = 1024
KINDS = pytest.mark.parametrize("ctas", [None, 3], ids=["load/store", "stream"])


class Started:
    """Stands for ``cuda.Start``; keeps what each start was given, and the bytes it would copy."""

    starts: list[tuple[Any, ...]]
    made: int

    def __init__(self, *what: Any, parameters: Any, **how: Any) -> None:
        Started.made += 1
        self._what, (self._parameter,) = (*what, *sorted(how.items())), parameters

    def __call__(self, stream: int) -> None:
        Started.starts.append((stream, *self._what, self._parameter.tobytes()))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    Started.starts, Started.made = [], 0
    monkeypatch.setattr(cuda, "Start", Started)
    monkeypatch.setattr(cuda, "device_index", lambda tensor: 0)
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "shared_memory", lambda device: 227 << 10)
    return Started.starts


class Case:
    """A table of four tensors, one of them empty, one of them in two pieces."""

    def __init__(self, form: str, ctas: int | None) -> None:
        dtypes, self.dtype = FORMATS[form]
        self.state = {n: torch.zeros(5 * COUNT, dtype=dtype) for n, dtype in dtypes.items()}
        self.how: dict[str, Any] = {
            "state": self.state,
            "scalars": torch.zeros(4, adam.SCALARS),
            "ctas": ctas,
        }
        half = COUNT // 2
        self.table = adam.PieceTable(
            [
                (0, 0, COUNT, 0, 0),
                (1, 0, half, COUNT, 1),
                (2, 0, 0, 2 * COUNT, 2),
                (1, half, half, 2 * COUNT, 1),
                (3, 0, COUNT, 4 * COUNT, 3),
            ]
        )
        self.update = adam.Update(self.table, **self.how)
        self.weights = self.tensors(self.dtype)
        self.grads = self.tensors(self.dtype)

    def tensors(self, dtype: torch.dtype, shift: int = 0) -> list[Tensor]:
        return [torch.zeros(COUNT + shift, dtype=dtype)[shift:] for _ in range(4)]

    def fresh(self) -> adam.Launch:
        return adam.update(self.table, weights=self.weights, grads=self.grads, **self.how)


@KINDS
@pytest.mark.parametrize("form", FORMATS)
def test_a_prepared_launch_is_that_of_a_fresh_one(
    starts: list[tuple[Any, ...]], form: str, ctas: int | None
) -> None:
    case = Case(form, ctas)

    def one_gradient() -> None:
        case.grads[1] = torch.zeros(COUNT, dtype=case.grads[1].dtype)

    def one_weight() -> None:
        case.weights[3] = torch.zeros(COUNT, dtype=case.dtype)

    def all_gradients() -> None:
        case.grads = case.tensors(case.dtype)

    def unaligned() -> None:
        case.grads = case.tensors(case.dtype, shift=1)

    def one_dtype() -> None:
        case.grads[0] = torch.zeros(COUNT)

    def longer() -> None:
        case.grads[2] = torch.zeros(2 * COUNT, dtype=case.dtype)

    def same_address() -> None:  # and another dtype
        case.grads[0] = torch.zeros(2 * COUNT, dtype=torch.int16).view(torch.float32)
        check()
        case.grads[0] = case.grads[0].view(torch.bfloat16)

    def check() -> None:
        case.update.launch(case.weights, case.grads).device(5)
        case.fresh().device(5)
        assert starts[-2] == starts[-1]

    changes = (one_gradient, one_weight, all_gradients, unaligned, one_dtype, longer, same_address)
    check()
    for change in (*changes, all_gradients, *reversed(changes)):
        change()
        check()
        check()


@KINDS
def test_nothing_is_made_or_bound_again_where_nothing_changed(
    starts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, ctas: int | None
) -> None:
    case = Case("master", ctas)
    case.update.launch(case.weights, case.grads).device(1)
    bound = []
    original = Block.bind
    monkeypatch.setattr(
        Block, "bind", lambda self, operands: (bound.append(1), original(self, operands))
    )
    for _ in range(3):
        case.update.launch(case.weights, case.grads).device(1)
    assert (Started.made, bound) == (1, [])
    case.grads = case.tensors(case.dtype)
    case.update.launch(case.weights, case.grads).device(1)
    assert (Started.made, len(bound), len(starts)) == (1, 1, 5)


@KINDS
def test_each_launch_keeps_its_own_operands(
    starts: list[tuple[Any, ...]], ctas: int | None
) -> None:
    case = Case("fp32", ctas)
    first, early = case.fresh(), case.update.launch(case.weights, case.grads)
    before = list(case.grads)
    case.grads = case.tensors(torch.bfloat16)
    second, late = case.fresh(), case.update.launch(case.weights, case.grads)
    for launch in (first, early, second, late, early):
        launch.device(2)
    assert starts[0] == starts[1] == starts[4] != starts[2] == starts[3]
    assert [tensor.data_ptr() for tensor in early.reads[1:]] == [g.data_ptr() for g in before]


def test_the_host_form_keeps_the_codes_of_its_launch() -> None:
    case = Case("fp32", None)
    case.how["scalars"][:, 1] = 1.0  # the gradient counts as it is
    case.how["scalars"][:, 5] = 1.0  # exp_avg becomes it
    for grad in case.grads:
        grad.fill_(2.0)
    early = case.update.launch(case.weights, case.grads)
    case.update.launch(case.weights, case.tensors(torch.bfloat16))
    early.run_on_host()
    assert case.state["exp_avg"][:COUNT].tolist() == [2.0] * COUNT


def test_weights_and_gradients_are_not_kept_alive(starts: list[tuple[Any, ...]]) -> None:
    case = Case("master", None)
    case.update.launch(case.weights, case.grads).device(0)
    known = [weakref.ref(tensor) for tensor in (*case.weights, *case.grads)]
    case.weights, case.grads = [], []
    assert [ref() for ref in known] == [None] * 8
    update = weakref.ref(case.update)
    del case
    assert update() is None  # nor itself, by a cycle


@pytest.mark.parametrize("before", [False, True], ids=["at once", "after good ones"])
@pytest.mark.parametrize(
    ("index", "tensor", "said"),
    [
        (1, torch.zeros(COUNT - 1), r"grads\[1\] expects 1024 elements or more, got 1023"),
        (0, torch.zeros(COUNT, dtype=torch.float64), "grads expects float32, .*got torch.float64"),
        (3, torch.zeros(COUNT, device="meta"), r"grads\[3\] expects to be on cpu .*got meta"),
    ],
)
def test_what_does_not_fit_is_refused_whenever_it_comes(
    starts: list[tuple[Any, ...]], before: bool, index: int, tensor: Tensor, said: str
) -> None:
    case = Case("fp32", None)
    good = list(case.grads)
    if before:
        case.update.launch(case.weights, good)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            case.update.launch(
                case.weights, [tensor if k == index else g for k, g in enumerate(good)]
            )
    case.update.launch(case.weights, good).device(0)
    case.fresh().device(0)
    assert starts[0] == starts[1]


def test_other_numbers_and_weights_are_refused_after_good_ones(
    starts: list[tuple[Any, ...]],
) -> None:
    case = Case("int8", None)
    case.update.launch(case.weights, case.grads)
    with pytest.raises(ValueError, match="grads expects 4 tensors as weights, got 3"):
        case.update.launch(case.weights, case.grads[:3])
    with pytest.raises(ValueError, match="weights expects 4 tensors or more, got 3"):
        case.update.launch(case.weights[:3], case.grads[:3])
    with pytest.raises(ValueError, match="weights with a split master expect bfloat16, got float1"):
        case.update.launch(case.tensors(torch.float16), case.grads)
    case.grads[0] = torch.zeros(COUNT, dtype=case.dtype)
    case.update.launch(case.weights, case.grads).device(0)
    case.fresh().device(0)
    assert starts[0] == starts[1]


@KINDS
def test_a_table_without_pieces_starts_nothing(
    starts: list[tuple[Any, ...]], ctas: int | None
) -> None:
    case = Case("fp32", ctas)
    for update in (adam.Update(adam.PieceTable([]), **case.how),) * 2:
        update.launch([], []).device(0)
        update.launch(case.weights, case.grads).device(0)
    assert starts == []
