"""A campaign of structures that mislead a converter: none may be wrong without saying so.

Each model of tests/convert/tricky_*.py is converted with an example. Then the outputs are those of
the BatchNorm model in both modes, every new layer is called and trained, no removed layer is, and
the conversion has changed nothing else.
"""

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from deepcontrol import to_agc
from deepcontrol.convert import Report
from deepcontrol.nn import AGC2d, AGCConv2d
from tests.convert import tricky_code, tricky_layers, tricky_references
from tests.convert.tricky import CASES, Case

MODULES = (tricky_code, tricky_layers, tricky_references)  # importing them fills CASES

SEED = 7


def trained(model: nn.Module) -> nn.Module:
    """Give the BatchNorms random values, as if the model were trained."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            with torch.no_grad():
                for p in norm.parameters():
                    if p.any():  # a gamma of zero stays
                        p.copy_(torch.rand_like(p) + 0.5)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return model


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors of an output."""
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def run(model: nn.Module, case: Case) -> Any:
    torch.manual_seed(SEED)
    random.seed(SEED)
    if case.run is not None:
        return case.run(model)
    if isinstance(case.example, dict):
        return model(**case.example)
    return model(*case.example) if isinstance(case.example, tuple) else model(case.example)


def observe(model: nn.Module, case: Case) -> dict[str, list[Tensor] | str]:
    """Run a model in both modes, its BatchNorms with running statistics."""
    found: dict[str, list[Tensor] | str] = {}
    for mode in ("evaluation", "training"):
        model.train(mode == "training")
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                norm.eval()
        try:
            with torch.set_grad_enabled(mode == "training"):
                found[mode] = tensors(run(model, case))
        except ValueError as error:
            found[mode] = str(error)
    return found


@contextlib.contextmanager
def calls() -> Iterator[set[nn.Module]]:
    """Collect every module that is called."""
    called = set[nn.Module]()
    hook = register_module_forward_pre_hook(lambda m, args: called.add(m))
    try:
        yield called
    finally:
        hook.remove()


def attributes(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep besides their parameters and layers: caches, and buffers."""
    own = {
        f"{name}.{key}": repr(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (Tensor, fx.Proxy, list, dict)) and not key.startswith("_")
        if "Conv2d" not in repr(value)  # references to layers are replaced
    }
    return own | {
        f"{name}.{key}": repr(value)
        for name, module in model.named_modules()
        if not isinstance(module, _BatchNorm)
        for key, value in module._buffers.items()
    }


def convert(model: nn.Module, case: Case, init: str) -> Report:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, report = to_agc(model, init=init, example=case.example, report=True)
    messages = [str(w.message) for w in caught if "trained statistics" not in str(w.message)]
    assert bool(messages) == case.warns, messages
    return report


@pytest.mark.parametrize("name", CASES)
def test_start_from_batchnorm_keeps_the_function(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = trained(case.make())
    expected = observe(model, case)
    removed = list(model.modules())
    statistics = {n: n.running_mean.clone() for n in removed if isinstance(n, _BatchNorm)}
    model.train()
    before = attributes(model)
    state = torch.get_rng_state(), random.getstate()

    report = convert(model, case, "bn")

    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    after = attributes(model)
    assert {key: before[key] for key in before if key in after} == {
        key: after[key] for key in before if key in after
    }
    for norm, mean in statistics.items():
        assert torch.equal(norm.running_mean, mean)
    assert report.count("skipped") == case.skipped, str(report)
    assert report.count("fused") == case.fused, str(report)
    with calls() as called:
        actual = observe(model, case)
    for mode, outputs in expected.items():
        if isinstance(outputs, str):
            assert actual[mode] == outputs
        else:
            torch.testing.assert_close(actual[mode], outputs, rtol=1e-4, atol=1e-4)
    own = set(model.modules())
    gone = [m for m in removed if m not in own and m in called]
    assert not gone, f"removed but still called: {gone}"
    reached = not isinstance(expected["training"], str)
    for module in own:
        if isinstance(module, (AGC2d, AGCConv2d)) and name not in DIRECT:
            unreached = any("not reached" in c.why for c in report)
            assert module in called or unreached, module
    if reached:
        check_gradients(model, case, report)


DIRECT = ("forward_called_directly", "bound_forward_of_the_norm")  # no hook sees these calls
FROZEN = ("frozen_network",)


def check_gradients(model: nn.Module, case: Case, report: Report) -> None:
    """Check that training reaches all parameters of the new layers."""
    model.train()
    random.seed(3)  # random_depth keeps its output
    with calls() as called:
        outputs = [t for t in outputs_with_grad(run(model, case)) if t.requires_grad]
    if CASES["frozen_network"] is case:
        assert not any(p.requires_grad for p in model.parameters())
        return
    sum((t * torch.randn_like(t)).sum() for t in outputs).backward()
    parameters = dict(model.named_parameters())
    for name in report.new_parameters:
        if model.get_submodule(name.rpartition(".")[0]) in called:
            assert parameters[name].requires_grad, f"{name} is not trainable"
            assert parameters[name].grad is not None, f"{name} has no gradient"


def outputs_with_grad(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    found = isinstance(value, (list, tuple))
    return [t for v in value for t in outputs_with_grad(v)] if found else []


@pytest.mark.parametrize("name", CASES)
def test_start_from_scratch_converts_the_same_layers(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    if name in FROZEN:
        return  # the untrained values would stay forever, so "scratch" refuses it
    as_trained = convert(trained(case.make()), case, "bn")
    model = case.make()
    removed = list(model.modules())
    report = convert(model, case, "scratch")
    assert [c.kind for c in report] == [c.kind for c in as_trained]
    with calls() as called:
        observe(model, case)
    own = set(model.modules())
    assert not [m for m in removed if m not in own and m in called]


def test_the_campaign_is_large_enough() -> None:
    assert len(CASES) >= 80
