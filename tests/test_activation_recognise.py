"""Which saved tensors stay, in small programs, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ghoffload.activations import recognise
from ghoffload.activations.recognise import Recogniser
from ghoffload.activations.report import REASONS
from ghoffload.machine.virtual import VirtualMachine

LEAST = 256
MOVES = None
Run = Callable[["Case"], Any]


class Case:
    """What programs are made of. ``h`` is an activation [16, 16], as large as the weights."""

    def __init__(self) -> None:
        self.h = torch.randn(16, 16, requires_grad=True) * 2
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(256)
        self.frozen = nn.Linear(16, 32).requires_grad_(False)
        self.embedding = nn.Embedding(64, 16)
        self.conv, self.frozen_conv = (nn.Conv2d(4, 4, 3) for _ in range(2))
        self.frozen_conv.requires_grad_(False)
        self.image = torch.randn(2, 4, 8, 8, requires_grad=True) * 2
        self.owner = nn.Module()
        self.owner.register_buffer("scale", torch.ones(16, 16))
        self.a, self.b = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)
        self.model = nn.ModuleList(
            [self.linear, self.norm, self.frozen, self.embedding, self.frozen_conv, self.owner]
        )


def saved(run: Run, *, model: bool = False, autocast: bool = False) -> list[str | None]:
    """What is said of each tensor a program saves, in order; without what is small."""
    case = Case()
    recogniser = Recogniser(VirtualMachine(), model=case.model if model else None, min_bytes=LEAST)
    return verdicts(lambda: run(case), recogniser, autocast=autocast)


def verdicts(
    run: Callable[[], Any], recogniser: Recogniser, *, autocast: bool = False
) -> list[str | None]:
    found: list[str | None] = []

    def pack(tensor: Tensor) -> Tensor:
        with torch.no_grad():
            found.append(recogniser.kept(tensor))
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        run()
    assert all(why is None or why in REASONS for why in found)
    return [why for why in found if why != "small"]


PROGRAMS: dict[str, tuple[Run, list[str | None]]] = {
    "linear": (lambda c: c.linear(c.h), [MOVES, "parameter"]),
    "frozen linear": (lambda c: c.frozen(c.h), ["parameter"]),
    "layer norm": (
        lambda c: c.norm(c.h.expand(2, 16, 16).flatten(1)),
        ["parameter", MOVES, "parameter"],
    ),
    "embedding": (lambda c: c.embedding(torch.arange(64)), [MOVES]),
    "embedding, then linear": (
        lambda c: c.linear(c.embedding(torch.arange(64))),
        [MOVES, MOVES, "parameter"],
    ),
    "convolution": (lambda c: c.conv(c.image), [MOVES, "parameter"]),
    "frozen convolution": (lambda c: c.frozen_conv(c.image), [MOVES, "parameter"]),
    "tied weights": (
        lambda c: c.embedding(torch.arange(64)) @ c.embedding.weight.t(),
        [MOVES, "parameter", MOVES],
    ),
    "weight.t() @ x": (lambda c: c.linear.weight.t() @ c.h, [MOVES, "parameter"]),
    "slice": (lambda c: c.h[:, :14] @ c.linear.weight[2:], ["parameter", MOVES]),
    "frozen slice": (lambda c: c.h[:, :14] @ c.frozen.weight[18:], ["parameter"]),
    "view of a view": (
        lambda c: c.h.view(4, 4, 16)[:2] * c.linear.weight.view(4, 4, 16).transpose(0, 1)[:2],
        [MOVES, "parameter"],
    ),
    "cast by hand": (lambda c: c.h.half() * c.linear.weight.half().t(), ["parameter", MOVES]),
    "double of a weight": (lambda c: c.h * (c.linear.weight * 2), [MOVES, MOVES]),
    "lora": (
        lambda c: c.frozen(c.h)[:, :16] + c.b(c.a(c.h)),
        ["parameter", MOVES, "parameter", MOVES, "parameter"],
    ),
    "activation": (lambda c: c.h * c.h.exp(), [MOVES, MOVES, MOVES]),
    "view of an activation": (lambda c: c.h.t().view(4, 4, 16)[1:].exp().sin(), [MOVES, MOVES]),
    "expanded": (lambda c: c.h * c.h[:, :1].expand(16, 16), [MOVES, MOVES]),
    "leaf input": (lambda c: torch.randn(16, 16, requires_grad=True).sin(), ["parameter"]),
    "input": (lambda c: c.linear(torch.randn(16, 16)), [MOVES]),
    "buffer": (lambda c: c.h * c.owner.scale, [MOVES]),
    "sparse": (lambda c: torch.sparse.mm(torch.eye(16).to_sparse(), c.h), ["layout"]),
    "conjugated": (lambda c: torch.view_as_complex(c.h.view(16, 8, 2)).conj().sin(), ["layout"]),
    "small": (lambda c: c.h[:1].exp().sin(), []),
}  # fmt: skip

WITH_MODEL: dict[str, tuple[Run, list[str | None]]] = {
    "linear": PROGRAMS["linear"],
    "frozen linear": PROGRAMS["frozen linear"],
    "buffer": (lambda c: c.h * c.owner.scale, ["buffer"]),
    "view of a buffer": (lambda c: c.h[:15] * c.owner.scale[1:].detach(), ["buffer"]),
    "detached weight": (lambda c: c.h * c.linear.weight.detach(), ["parameter"]),
    "activation": PROGRAMS["activation"],
    "input": PROGRAMS["input"],
}

AUTOCAST: dict[str, tuple[Run, list[str | None]]] = {
    "linear": (lambda c: c.linear(c.h), [MOVES, "parameter"]),
    "convolution": (lambda c: c.conv(c.image), [MOVES, "parameter"]),
    # A cast of a frozen weight looks like any other tensor.
    "frozen linear": (lambda c: c.frozen(c.h), [MOVES]),
    "frozen convolution": (lambda c: c.frozen_conv(c.image), [MOVES, MOVES]),
}

AUTOCAST_WITH_MODEL: dict[str, tuple[Run, list[str | None]]] = {
    "linear": AUTOCAST["linear"],
    "frozen linear": (lambda c: c.frozen(c.h), ["parameter"]),
    "frozen convolution": (lambda c: c.frozen_conv(c.image), [MOVES, "parameter"]),
    "lora": (
        lambda c: c.frozen(c.h)[:, :16] + c.b(c.a(c.h)),
        ["parameter", MOVES, "parameter", MOVES, "parameter"],
    ),
    "input of another shape": (lambda c: c.linear(torch.randn(24, 16)), [MOVES]),
    "activation": (lambda c: c.h.bfloat16().exp().sin(), [MOVES, MOVES]),
}


def in_any_order(found: list[str | None]) -> list[str | None]:
    return sorted(found, key=str)  # the order in which an operation saves is torch's affair


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    run, expected = PROGRAMS[name]
    assert in_any_order(saved(run)) == in_any_order(expected)


@pytest.mark.parametrize("name", WITH_MODEL)
def test_program_with_its_model_known(name: str) -> None:
    run, expected = WITH_MODEL[name]
    assert in_any_order(saved(run, model=True)) == in_any_order(expected)


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str) -> None:
    run, expected = AUTOCAST[name]
    assert in_any_order(saved(run, autocast=True)) == in_any_order(expected)


@pytest.mark.parametrize("name", AUTOCAST_WITH_MODEL)
def test_autocast_with_its_model_known(name: str) -> None:
    run, expected = AUTOCAST_WITH_MODEL[name]
    assert in_any_order(saved(run, model=True, autocast=True)) == in_any_order(expected)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "movedim": lambda w: w.movedim(0, 1),
    "mT": lambda w: w.mT,
    "view": lambda w: w.view(4, 64),
    "flatten": lambda w: w.flatten(),
    "slice": lambda w: w[2:],
    "select": lambda w: w.view(2, 8, 16)[1],
    "narrow": lambda w: w.narrow(0, 1, 12),
    "split": lambda w: w.split(12)[0],
    "split with sizes": lambda w: w.split([12, 4])[0],
    "chunk": lambda w: w.view(1, 16, 16).chunk(2, 1)[1],
    "unbind": lambda w: w.view(2, 8, 16).unbind()[0],
    "diagonal": lambda w: w.view(1, 16, 16).expand(32, 16, 16).diagonal(),
    "expand": lambda w: w.expand(2, 16, 16),
    "unsqueeze and squeeze": lambda w: w[None].squeeze(0)[None].squeeze(),
    "as_strided": lambda w: w.as_strided((8, 16), (16, 1)),
    "unfold": lambda w: w.unfold(0, 8, 8),
    "another cast": lambda w: w.float(),
    "complex": lambda w: torch.view_as_real(torch.view_as_complex(w.view(16, 8, 2))),
    "alias": torch.ops.aten.alias.default,
    "reshape": lambda w: torch.ops.aten._reshape_alias(w, [4, 64], [64, 1]),
    "unsafe view": lambda w: torch.ops.aten._unsafe_view(w, [4, 64]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_cast_weight_stay_and_those_of_activations_move(view: str) -> None:
    """The base of such a view is the cast, so it is the nodes that tell."""

    def run(of: Callable[[Case], Tensor]) -> Run:
        return lambda c: VIEWS[view](of(c).double()).sin()

    assert saved(run(lambda c: c.linear.weight)) == ["parameter"]
    assert saved(run(lambda c: c.h)) == [MOVES]


def test_a_long_chain_of_views_is_no_cast_of_a_frozen_weight() -> None:
    def run(case: Case) -> None:
        h = case.h.bfloat16().expand(2, 16, 16).reshape(32, 16).exp()
        for _ in range(10):
            h = h.t()
        h.sin()

    assert saved(run, model=True) == [MOVES, MOVES]


# -- more than a line


def test_checkpoint_shows_its_input_alone() -> None:
    run: Run = lambda c: checkpoint(c.linear, c.h, use_reentrant=False)  # noqa: E731
    # Older releases of torch save something empty beside it.
    assert [why for why in saved(run) if why != "layout"] == [MOVES]


def test_compiled_program() -> None:
    def run(case: Case) -> None:
        torch.compile(lambda h: case.linear(h).sin(), backend="aot_eager")(case.h)

    try:
        found = saved(run)
    finally:
        torch._dynamo.reset()
    assert in_any_order(found) == in_any_order([MOVES, "parameter", MOVES])


def of(tensor: Tensor, *, model: nn.Module | None = None) -> str | None:
    return Recogniser(VirtualMachine(), model=model, min_bytes=LEAST).kept(tensor)


class Marked(Tensor):
    """A subclass."""


class Packed4Bit(nn.Parameter):
    """A subclass, as quantizing libraries have them."""


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(16, 16)


@pytest.mark.filterwarnings("ignore")  # prototypes and deprecations
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.randn(16, 16).as_subclass(Marked), "subclass"),
        (lambda: Packed4Bit(torch.randn(16, 16)), "subclass"),
        (_fake, "subclass"),
        (lambda: torch.empty(16, 16, device="meta"), "device"),
        (lambda: torch.eye(64).to_sparse(), "layout"),
        (lambda: torch.eye(64).to_sparse_csr(), "layout"),
        (lambda: torch.nested.nested_tensor([torch.randn(64, 64), torch.randn(6, 64)]), "layout"),
        (lambda: torch.quantize_per_tensor(torch.randn(16, 16), 0.1, 0, torch.qint8), "layout"),
        (lambda: torch.randn(64, dtype=torch.complex64).conj(), "layout"),
        (lambda: torch._neg_view(torch.randn(16, 16)), "layout"),
        (lambda: torch._efficientzerotensor(16, 16), "layout"),
        (lambda: torch._to_functional_tensor(torch.randn(16, 16)), "layout"),
        (lambda: torch.empty(0, 16), "layout"),
        (lambda: torch.zeros(1).expand(16, 16), "small"),
        (lambda: torch.randn(63), "small"),
        (lambda: torch.randn(1000)[:63], "small"),
        (lambda: torch.randn(64), None),
        (lambda: torch.randn(64).expand(16, 64), None),
        (lambda: nn.Parameter(torch.randn(2)), "parameter"),
        (lambda: nn.Parameter(torch.arange(64), requires_grad=False), "parameter"),
    ],
)
def test_kind_of_tensor(make: Callable[[], Tensor], expected: str | None) -> None:
    assert of(make()) == expected


def test_wrappers_of_vmap_stay() -> None:
    found: list[str | None] = []
    torch.vmap(lambda tensor: (found.append(of(tensor)), tensor)[1])(torch.randn(4, 16, 16))
    assert found == ["layout"]


def test_dtensors_stay() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        spread = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()])
        layer = nn.Module()
        layer.weight = nn.Parameter(spread)
        assert of(spread, model=layer) == "subclass"
        assert of(layer.weight) == "subclass"
        assert of(torch.randn(16, 16), model=layer) is None
    finally:
        dist.destroy_process_group()


def test_what_shares_a_parameters_storage_stays_while_it_lives() -> None:
    recogniser = Recogniser(VirtualMachine(), model=None, min_bytes=LEAST)
    weight = nn.Parameter(torch.randn(16, 16))
    other = weight.detach().view(torch.int32)  # its base is no parameter
    assert recogniser.kept(other) is None
    assert recogniser.kept(weight) == "parameter"
    assert recogniser.kept(other) == "parameter"
    del weight, other
    assert [recogniser.kept(torch.randn(16, 16)) for _ in range(20)] == [None] * 20


def test_what_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "_KNOWN", 8)
    recogniser = Recogniser(VirtualMachine(), model=None, min_bytes=LEAST)
    living = [nn.Parameter(torch.randn(2)) for _ in range(20)]
    for weight in living:
        recogniser.kept(weight)
    for _ in range(100):
        recogniser.kept(nn.Parameter(torch.randn(2)))
    assert len(recogniser._storages) <= 42
    assert all(recogniser.kept(weight.detach()) == "parameter" for weight in living)


@pytest.mark.parametrize("what", ["buffer", "parameter"])
def test_a_model_with_other_storages_is_read_again(what: str) -> None:
    case = Case()
    model = case.owner if what == "buffer" else case.frozen
    recogniser = Recogniser(VirtualMachine(), model=model, min_bytes=LEAST)
    tensor = next(model.buffers() if what == "buffer" else model.parameters())
    before = tensor.data_ptr()
    model._apply(torch.clone)  # what ``to`` does
    tensor = next(model.buffers() if what == "buffer" else model.parameters())
    assert tensor.data_ptr() != before
    assert recogniser.kept(tensor.detach()) == what


def test_a_model_is_not_read_twice_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, reads = Case(), []
    read = Recogniser._read
    monkeypatch.setattr(Recogniser, "_read", lambda self, m: (reads.append(m), read(self, m))[1])
    recogniser = Recogniser(VirtualMachine(), model=case.model, min_bytes=LEAST)
    verdicts(lambda: case.h * torch.rand(16, 16), recogniser)
    assert len(reads) == 1


def test_a_weight_that_autocast_need_not_cast_is_no_cast() -> None:
    layer = nn.Linear(16, 16).requires_grad_(False)
    half = torch.randn(16, 16, dtype=torch.bfloat16)
    assert of(half, model=layer) == "parameter"
    assert of(half, model=layer.bfloat16()) is None
    assert of(half.half(), model=layer.float()) is None  # not autocast's dtype
    assert of(half, model=layer.float().requires_grad_()) is None
