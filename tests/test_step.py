"""TrainingStep: all engines compute the same, and uncapturable steps run eagerly."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel

from deepcontrol import AGCConv2d, TrainingStep
from deepcontrol.step import (
    DDP_WARMUP_STEPS,
    MAX_GRAPHS,
    WARMUP_STEPS,
    Engine,
    _accepts_tensor_lr,
    _capture_obstacle,
    _ddp_obstacle,
    _Graph,
    _host_state,
    _LearningRates,
    _Watch,
    paused_garbage_collection,
)


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [AGCConv2d(3, 8, 3, padding=1), AGCConv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).to(device)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def batches(count: int, device: str, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(2, 3, size, size, generator=rng).to(device),
            torch.randint(0, 4, (2, size, size), generator=rng).to(device),
        )
        for _ in range(count)
    ]


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=name)


def test_cpu_steps_equal_a_plain_loop() -> None:
    model = network("cpu")
    peer = copy.deepcopy(model)
    step = TrainingStep(model, cross_entropy, sgd(model), "graph")
    optimizer = sgd(peer)
    for batch in batches(6, "cpu"):
        assert torch.equal(step(*batch), plain_step(peer, optimizer, batch))
        assert "CUDA" in str(step.why_eager)
    assert_same(model, peer, 0)


def all_at_once(model: nn.Module, engine: Engine, make_optimizer: Callable) -> list[str | None]:
    """Train with a schedule per step, bf16, accumulation, clipping and a moving average.

    The model ends with the average's weights. Returns why each step ran eagerly.
    """
    device = next(model.parameters()).device.type
    optimizer = make_optimizer(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 12)
    average = AveragedModel(model, use_buffers=True)

    def clip(loss: Tensor) -> Tensor:
        clip_grad_norm_(model.parameters(), 0.05)
        return loss

    def half(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) / 2

    step = TrainingStep(model, half, optimizer, engine, torch.bfloat16, clip, accumulate=2)
    reasons = []
    for batch in batches(12, device):
        step(*batch)
        scheduler.step()
        average.update_parameters(model)
        reasons.append(step.why_eager)
    model.load_state_dict(average.module.state_dict())
    return reasons


# A large eps: with Adam's default, rounding decides the direction of tiny gradients.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, eps=0.01, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, 0.01, eps=0.01, capturable=True),
    "adam single": lambda p: torch.optim.Adam(p, 0.01, eps=0.01, capturable=True, foreach=False),
}


def test_features_together_equal_a_plain_loop() -> None:
    model = network("cpu")
    peer, average = copy.deepcopy(model), AveragedModel(model)
    reasons = all_at_once(model, "graph", OPTIMIZERS["sgd"])
    assert all("need a CUDA device" in str(reason) for reason in reasons)
    optimizer = OPTIMIZERS["sgd"](peer.parameters())
    scheduler = CosineAnnealingLR(optimizer, 12)
    for x, labels in batches(12, "cpu"):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(2), labels.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(peer(a), b) / 2
            loss.backward()
        clip_grad_norm_(peer.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        average.update_parameters(peer)
    assert_same(model, average.module, 0)


@pytest.mark.parametrize("name", ["sgd", "sgd foreach", "sgd fused", "adamw fused"])
def test_learning_rates_in_tensors_give_the_same_update(name: str) -> None:
    model = network("cpu")
    peer = copy.deepcopy(model)
    mine, theirs = (OPTIMIZERS[name](net.parameters()) for net in (model, peer))
    schedulers = [CosineAnnealingLR(optimizer, 5) for optimizer in (mine, theirs)]
    rates = _LearningRates(mine, torch.device("cpu"))
    for batch in batches(5, "cpu"):
        plain_step(peer, theirs, batch)
        mine.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        before = [dict(group) for group in mine.param_groups]
        with rates.applied():
            assert all(isinstance(group["lr"], Tensor) for group in mine.param_groups)
            mine.step()
        assert [dict(group) for group in mine.param_groups] == before
        for scheduler in schedulers:
            scheduler.step()
    assert rates.tensors[0].item() == pytest.approx(before[0]["lr"])
    assert_same(model, peer, 1e-6)


def test_garbage_collection_pauses_until_the_last_capture_ends() -> None:
    """Threads capture at the same time: a capture's mode is thread-local."""
    assert gc.isenabled()
    first, second = paused_garbage_collection(), paused_garbage_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    with pytest.raises(RuntimeError), paused_garbage_collection():
        raise RuntimeError
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_scheduled_learning_rate_is_no_reason_for_a_new_capture() -> None:
    model = network("cpu")
    (batch,) = batches(1, "cpu")
    for optimizer, follows in (
        (sgd(model), True),
        (torch.optim.AdamW(model.parameters(), fused=True), True),
        (torch.optim.Adagrad(model.parameters()), False),  # bakes the learning rate in
    ):
        step = TrainingStep(model, cross_entropy, optimizer, "graph")
        plain_step(model, optimizer, batch)  # creates the optimizer's state
        step._update_state()
        optimizer.param_groups[0]["lr"] *= 0.5
        step._update_state()  # from the first change on the learning rate is a tensor
        state = step._current_state()
        watch = _Watch(model, cross_entropy, optimizer, step._tensor_lr)
        optimizer.param_groups[0]["lr"] *= 0.5
        assert step._tensor_lr == follows
        assert watch.is_unchanged() == follows
        assert (step._current_state() == state) == follows
        optimizer.param_groups[0]["weight_decay"] = 0.25
        assert not watch.is_unchanged()
        step._update_state()
        assert step._changed == ("weight_decay" if follows else "lr, weight_decay")


def test_sparse_gradients_and_other_optimizers_keep_their_learning_rate() -> None:
    """Fused SGD has no sparse kernel, and an optimizer need not have a learning rate."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    assert not _accepts_tensor_lr(optimizer)
    step = TrainingStep(model, cross_entropy, optimizer, "graph")
    del optimizer.param_groups[0]["lr"]
    step._update_state()
    step._tensor_lr = True
    assert step._current_state()
    assert _Watch(model, cross_entropy, optimizer, True).is_unchanged()


def test_groups_that_are_added_later_are_updated() -> None:
    model, (batch,) = network("cpu"), batches(1, "cpu")
    last = list(model.parameters())[-1]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not last], lr=0.1)
    step = TrainingStep(model, cross_entropy, optimizer, "graph")
    step._lrs = _LearningRates(optimizer, torch.device("cpu"))
    optimizer.add_param_group({"params": [last], "lr": 0.5})
    before = last.detach().clone()
    step(*batch)
    torch.testing.assert_close(last.detach(), before - 0.5 * last.grad)


def test_inputs_that_require_gradients_are_not_captured() -> None:
    """A graph would add to the .grad of the batch that it was captured with."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FakeTensorMode():  # a CUDA tensor without a device
        x = torch.empty(4, 8, device="cuda:0")
    assert _capture_obstacle((x,), model, optimizer) is None
    reason = _capture_obstacle((x.requires_grad_(),), model, optimizer)
    assert "requires a gradient" in str(reason)


def test_obstacles_of_distributed_steps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    ddp.__dict__.update(find_unused_parameters=True, process_group=None)
    backends = iter(["gloo", "nccl", "nccl"])
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: next(backends))
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=0" in str(_ddp_obstacle(ddp))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert "only with NCCL, got gloo" in str(_ddp_obstacle(ddp))
    assert "find_unused_parameters=False" in str(_ddp_obstacle(ddp))
    ddp.__dict__["find_unused_parameters"] = False
    assert _ddp_obstacle(ddp) is None


def test_unknown_engine_raises() -> None:
    model = network("cpu")
    with pytest.raises(ValueError, match=r"'fast'.*compile\+graph"):
        TrainingStep(model, cross_entropy, sgd(model), "fast")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compile_engine_on_cpu() -> None:
    model = network("cpu")
    peer = copy.deepcopy(model)
    step, optimizer = TrainingStep(model, cross_entropy, sgd(model), "compile"), sgd(peer)
    for batch in batches(2, "cpu"):
        step(*batch)
        plain_step(peer, optimizer, batch)
    assert_same(model, peer, 1e-4)


def test_optimizer_state_on_the_host_is_not_captured() -> None:
    model = network("cpu")
    (batch,) = batches(1, "cpu")
    for optimizer, reason in (
        (sgd(model), None),
        (torch.optim.Adagrad(model.parameters()), "'step'"),
        (torch.optim.Adam(model.parameters(), capturable=False), "'step'"),
    ):
        plain_step(model, optimizer, batch)
        for state in optimizer.state.values():  # on a GPU they would not be on the host
            state.pop("momentum_buffer", None)
        found = _host_state(optimizer)
        assert found is None if reason is None else reason in str(found)


def test_training_flags_of_submodules_are_compared() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5))
    step = TrainingStep(model, cross_entropy, sgd(model), "graph")
    before = step._current_state()
    assert step._current_state() == before
    model[1].eval()
    assert step._current_state() != before


def _replace(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 3, 3, 3))


def _move(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = torch.zeros(8, 3, 3, 3)


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].gain.requires_grad_(False)


def _swap_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Conv2d(8, 4, 1)


def _add_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].extra = nn.ReLU()


def _add_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].register_buffer("extra", torch.zeros(1))


def _evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].eval()


def _set_lr(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


def _set_tensor_lr(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)  # equal in value, but another address


def _add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def _drop_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def _set_momentum_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(iter(optimizer.state.values()))["momentum_buffer"] = torch.zeros(8, 3, 3, 3)


def _load_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _reset_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[next(model.parameters())] = {}


def _replace_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    p = next(model.parameters())
    optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}


def _replace_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.01}


def _replace_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.children()))
    first._parameters = {name: nn.Parameter(p.clone()) for name, p in first._parameters.items()
                         if p is not None}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        _reset_state, _replace_state, _replace_group, _replace_table,
        _replace, _move, _freeze, _swap_layer, _add_layer, _add_buffer, _evaluate, _set_lr,
        _set_tensor_lr, _add_group, _drop_parameter, _set_momentum_buffer, _load_state,
    ],
)  # fmt: skip
def test_changes_between_replays_are_noticed(
    change: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    (batch,) = batches(1, "cpu")
    plain_step(model, optimizer, batch)
    watch = _Watch(model, cross_entropy, optimizer)
    plain_step(model, optimizer, batch)  # in-place updates are no change
    optimizer.param_groups[0]["lr"].fill_(0.01)
    assert watch.is_unchanged()
    change(model, optimizer)
    assert not watch.is_unchanged()


def test_mode_of_a_loss_module_is_noticed() -> None:
    model, loss = network("cpu"), nn.CrossEntropyLoss()
    watch = _Watch(model, loss, sgd(model))
    assert watch.is_unchanged()
    loss.eval()
    assert not watch.is_unchanged()


def test_weights_of_a_loss_module_are_noticed() -> None:
    model, loss = network("cpu"), nn.CrossEntropyLoss(weight=torch.ones(5))
    step = TrainingStep(model, loss, sgd(model))
    watch, before = _Watch(model, loss, sgd(model)), step._current_state()
    loss.weight = torch.full((5,), 2.0)
    assert not watch.is_unchanged()
    assert step._current_state() != before


def test_replay_restores_gradients_that_others_replaced() -> None:
    model = network("cpu")
    optimizer = sgd(model)
    (batch,) = batches(1, "cpu")
    plain_step(model, optimizer, batch)
    graph = _Graph.__new__(_Graph)  # a capture needs a GPU
    graph.parameters = [*model.parameters()]
    graph.gradients = [p.grad for p in graph.parameters]
    assert graph.has_gradients()
    graph.parameters[-1].grad = None
    assert not graph.has_gradients()
    graph.set_gradients()
    assert graph.has_gradients()
    optimizer.zero_grad()
    assert not graph.has_gradients()


def test_every_step_has_its_own_code_object() -> None:
    model = network("cpu")
    first, second = (TrainingStep(model, cross_entropy, sgd(model)) for _ in range(2))
    assert first._forward.__code__ is not second._forward.__code__


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    r"ignore:\s*Online softmax is disabled:UserWarning",
)
@pytest.mark.parametrize("engine", ["eager", "compile", "graph", "compile+graph"])
def test_engines_agree(engine: Engine) -> None:
    model = network("cuda")
    peer = copy.deepcopy(model)
    step, optimizer = TrainingStep(model, cross_entropy, sgd(model), engine), sgd(peer)
    reasons = []
    for batch in batches(8, "cuda"):
        loss = step(*batch)
        torch.testing.assert_close(loss, plain_step(peer, optimizer, batch), rtol=1e-4, atol=1e-4)
        reasons.append(step.why_eager)
    assert_same(model, peer, 1e-3)
    for mine, theirs in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)
    captured = [reason is None for reason in reasons]
    assert captured == [engine.endswith("graph") and i >= WARMUP_STEPS for i in range(8)], reasons


@pytest.mark.gpu
def test_gradient_clipping_is_captured() -> None:
    model = network("cuda")
    peer, max_norm = copy.deepcopy(model), 0.01  # below the norm of every step

    def clipped(of: nn.Module) -> Callable[[Tensor], Tensor]:
        def clip(loss: Tensor) -> Tensor:
            clip_grad_norm_(of.parameters(), max_norm)
            return loss

        return clip

    step, plain = (
        TrainingStep(net, cross_entropy, sgd(net), engine, before_update=clipped(net))
        for net, engine in ((model, "graph"), (peer, "eager"))
    )
    for batch in batches(8, "cuda"):
        step(*batch)
        plain(*batch)
        lengths = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert torch.stack(lengths).norm().item() == pytest.approx(max_norm, rel=1e-3)
    assert step.why_eager is None
    assert_same(model, peer, 1e-4)


@pytest.mark.gpu
def test_changes_lead_to_a_new_capture() -> None:
    """A new learning rate, a loaded optimizer state, other shapes."""
    model = network("cuda")
    peer = copy.deepcopy(model)
    mine, theirs = sgd(model), sgd(peer)
    step = TrainingStep(model, cross_entropy, mine, "graph")
    small, large = batches(8, "cuda"), batches(8, "cuda", size=16)
    for i, (a, b) in enumerate(zip(small, large, strict=True)):
        if i == 4:
            for optimizer in (mine, theirs):
                optimizer.param_groups[0]["lr"] = 0.02
        if i == 6:
            for optimizer in (mine, theirs):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for batch in (a, a, b):
            loss = step(*batch)
            torch.testing.assert_close(loss, plain_step(peer, theirs, batch), rtol=1e-3, atol=1e-3)
    assert_same(model, peer, 1e-3)


@pytest.mark.gpu
def test_learning_rate_tensor_is_read_by_a_replay() -> None:
    """A schedule that changes the tensor in place keeps its graph."""
    model = network("cuda")
    peer = copy.deepcopy(model)
    lr = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    step, theirs = TrainingStep(model, cross_entropy, optimizer, "graph"), sgd(peer)
    for i, batch in enumerate(batches(8, "cuda")):
        theirs.param_groups[0]["lr"] = 0.1 / (1 + i)
        lr.fill_(0.1 / (1 + i))
        loss = step(*batch)
        torch.testing.assert_close(loss, plain_step(peer, theirs, batch), rtol=1e-4, atol=1e-4)
        assert (step.why_eager is None) == (i >= WARMUP_STEPS)
    assert_same(model, peer, 1e-3)


@pytest.mark.gpu
def test_number_of_graphs_is_limited() -> None:
    model = network("cuda")
    step = TrainingStep(model, cross_entropy, sgd(model), "graph")
    for size in range(8, 8 + MAX_GRAPHS + 1):
        for batch in batches(WARMUP_STEPS + 1, "cuda", size):
            step(*batch)
    assert f"{MAX_GRAPHS} other shapes" in str(step.why_eager)


@pytest.mark.gpu
def test_uncapturable_steps_run_eagerly() -> None:
    model = network("cuda")
    step = TrainingStep(model, cross_entropy, torch.optim.Adam(model.parameters()), "graph")
    (batch,) = batches(1, "cuda")
    for _ in range(5):
        step(*batch)
    assert "capturable=True" in str(step.why_eager)

    def reads_the_loss(logits: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(logits, labels)
        return loss * (2.0 if loss.item() > 100 else 1.0)

    peer = copy.deepcopy(model)
    stream = torch.cuda.current_stream()
    step, optimizer = TrainingStep(model, reads_the_loss, sgd(model), "graph"), sgd(peer)
    for i, other in enumerate(batches(6, "cuda")):
        if i == WARMUP_STEPS:
            with pytest.warns(UserWarning, match="eagerly: the capture failed"):
                step(*other)
        else:
            step(*other)
        plain_step(peer, optimizer, other)
    assert "the capture failed" in str(step.why_eager)
    assert_same(model, peer, 1e-3)
    assert torch.cuda.current_stream() == stream
    nn.functional.dropout(torch.ones(8, device="cuda"))  # the generator has left the capture
    before = torch.cuda.memory_allocated()
    large = torch.empty(1 << 24, device="cuda")
    del large
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_targets_on_the_cpu_are_not_captured() -> None:
    model = network("cuda")

    def weighted(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        return weight * cross_entropy(logits, labels)

    step = TrainingStep(model, weighted, sgd(model, lr=0.0), "graph")
    (batch,) = batches(1, "cuda")
    losses = [step(*batch, torch.tensor(float(i))).item() for i in range(6)]
    assert "not a tensor on cuda" in str(step.why_eager)
    torch.testing.assert_close(losses[5], 5 * losses[1], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedule_per_step_is_captured(name: str) -> None:
    model = network("cuda")
    peer = copy.deepcopy(model)
    reasons = all_at_once(model, "graph", OPTIMIZERS[name])
    all_at_once(peer, "eager", OPTIMIZERS[name])
    # The second step has another learning rate, and the warm-up begins again. Fused AdamW without
    # capturable=True has its learning rate in a tensor from the first step on.
    first = WARMUP_STEPS if name == "adamw fused" else WARMUP_STEPS + 1
    assert [reason is None for reason in reasons] == [i >= first for i in range(12)], reasons
    assert_same(model, peer, 2e-3)


@pytest.mark.gpu
def test_schedule_of_the_momentum_is_named() -> None:
    model = network("cuda")
    optimizer = sgd(model)
    step = TrainingStep(model, cross_entropy, optimizer, "graph")
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    for batch in batches(6, "cuda"):
        step(*batch)
        scheduler.step()
    assert "after a change of momentum" in str(step.why_eager)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # DDP has another stream
def test_distributed_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, with accumulation: the exchange is captured too."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = network("cuda")
        peer = copy.deepcopy(model)
        with torch.cuda.stream(torch.cuda.Stream()):
            wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        step = TrainingStep(wrapped, cross_entropy, sgd(model), "graph", accumulate=2)
        plain = TrainingStep(peer, cross_entropy, sgd(peer), "eager", accumulate=2)
        for i, batch in enumerate(batches(DDP_WARMUP_STEPS + 4, "cuda")):
            step(*batch)
            plain(*batch)
            assert (step.why_eager is None) == (i >= DDP_WARMUP_STEPS), step.why_eager
        assert_same(model, peer, 1e-3)
    finally:
        torch.distributed.destroy_process_group()
