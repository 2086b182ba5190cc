"""DistributedOptimizer on one rank: what it is, what it refuses, what it leaves alone."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

import ringdl
import ringdl.torch as hvd


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    ringdl.init()
    yield
    ringdl.shutdown()


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(5, 3)).pow(2).mean().backward()


def test_import_of_ringdl_leaves_torch_alone() -> None:
    program = "import sys, ringdl; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_is_the_same_object_and_still_of_its_class() -> None:
    model, optimizer = make()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.AdamW)
    assert repr(wrapped).startswith("AdamW")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_as_the_bare_optimizer(set_to_none: bool) -> None:
    (model, optimizer), (bare_model, bare) = make(), make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for seed in range(4):
        for one, its_optimizer in ((model, optimizer), (bare_model, bare)):
            its_optimizer.zero_grad(set_to_none=set_to_none)
            backward(one, seed)
            its_optimizer.step()
    for parameter, expected in zip(model.parameters(), bare_model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_state_dict_goes_both_ways() -> None:
    (model, optimizer), (_, bare) = make(), make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    backward(model)
    optimizer.step()
    bare.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.state_dict()["param_groups"] == bare.state_dict()["param_groups"]
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_gradients_stay_in_their_views() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    backward(model)
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model)
        assert addresses == [parameter.grad.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_schedulers(is_wrapped_first: bool) -> None:
    model, optimizer = make()
    if is_wrapped_first:
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    if not is_wrapped_first:
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for expected in (0.05, 0.025):
        backward(model)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_unused_parameters_have_no_gradient() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[1].weight)


def test_a_copied_model_is_free_of_hooks() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    average = copy.deepcopy(model)
    backward(average)
    assert model[0].weight.grad is None


def test_a_copied_or_pickled_optimizer_is_bare() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    backward(model)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is torch.optim.AdamW
        other.step()
        assert str(other.state_dict()["param_groups"]) == str(
            optimizer.state_dict()["param_groups"]
        )


def test_copies_do_not_alias_the_buckets() -> None:
    """Copied parameters have no gradients, as in torch; copied gradients own their memory."""
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    backward(model)
    addresses = {parameter.grad.data_ptr() for parameter in model.parameters()}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        *(torch.nn.ParameterList(group["params"]) for group in copied_groups(optimizer)),
    ):
        assert all(parameter.grad is None for parameter in other.parameters())
        others = torch.optim.SGD(other.parameters(), lr=0.1)
        other.requires_grad_()
        sum(parameter.sum() for parameter in other.parameters()).backward()
        hvd.DistributedOptimizer(others)
        own = {parameter.grad.data_ptr() for parameter in other.parameters()}
        assert not own & addresses
    gradient = model[0].weight.grad
    for other in (copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))):
        assert torch.equal(other, gradient)
        assert other.untyped_storage().nbytes() == gradient.nbytes
        other.zero_()
        assert gradient.count_nonzero() > 0


def copied_groups(optimizer: torch.optim.Optimizer) -> list[dict]:
    return (
        copy.deepcopy(optimizer).param_groups + pickle.loads(pickle.dumps(optimizer)).param_groups
    )


def test_a_model_and_its_optimizer_are_copied_together() -> None:
    """The pair goes on training by itself, and leaves the wrapped one alone."""
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    backward(model)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    other, others = copy.deepcopy((model, optimizer))
    backward(other, 1)
    others.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, other.state_dict()[name])
    hvd.DistributedOptimizer(others, other.named_parameters())


def test_hooks_go_with_the_optimizer() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())


def test_sum_and_average_on_one_rank_are_the_gradient() -> None:
    for op in (hvd.Sum, hvd.Average):
        model, optimizer = make()
        hvd.DistributedOptimizer(optimizer, op=op)
        bare = copy.deepcopy(model)
        backward(bare)
        backward(model)
        for parameter, expected in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(parameter.grad, expected.grad)


def refused(text: str, optimizer: torch.optim.Optimizer, *args: object, **options: object) -> None:
    with pytest.raises(ringdl.UsageError, match=text):
        hvd.DistributedOptimizer(optimizer, *args, **options)


def test_wrapping_twice() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert len(type(optimizer).__mro__) == len(torch.optim.AdamW.__mro__) + 3
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    other = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()))
    backward(model)
    other.step()
    with pytest.raises(ringdl.UsageError, match=r"'0\.weight' was wrapped again.*step that one"):
        optimizer.step()
    assert [*other._parameter_names.values()] == [f"group0.{index}" for index in range(4)]
    assert other._parameter_names[model[1].bias] == "group0.3"


def test_names() -> None:
    model, optimizer = make()
    parameters = list(model.named_parameters())
    refused("lacks 1 of the optimizer's 4", optimizer, parameters[1:])
    refused("'x' to different", optimizer, [("x", parameter) for parameter in model.parameters()])
    refused("pairs", optimizer, model.parameters())
    more = [*parameters, ("other", torch.nn.Parameter(torch.zeros(1))), ("tied", model[0].weight)]
    hvd.DistributedOptimizer(optimizer, iter(more))


def test_arguments() -> None:
    model, optimizer = make()
    refused("not a Sequential", model)
    refused("Average, Sum or Adasum", optimizer, op=hvd.Max)
    refused("at least 1", optimizer, backward_passes_per_step=0)
    model.requires_grad_(False)
    refused("nothing to average", optimizer)
    with torch.device("meta"):
        elsewhere = torch.nn.Linear(2, 2, dtype=torch.complex64)
    refused("'group0.0' is torch.complex64 on meta", torch.optim.SGD(elsewhere.parameters()))
    integers = torch.zeros(2, dtype=torch.int32)
    refused("nothing to average", torch.optim.SGD([integers]))


def test_parameters_added_later() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(ringdl.UsageError, match="before wrapping"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_a_callback_that_raises_is_seen_by_backward() -> None:
    model, optimizer = make()
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    ringdl.shutdown()
    with pytest.raises(ringdl.Error):
        backward(model)
    ringdl.init()
