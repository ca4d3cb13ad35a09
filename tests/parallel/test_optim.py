import numpy as np
import pytest
import torch
from rejections import rejects
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.config import OptimConfig, Plan
from train.parallel.optim import (
    build_optimizer,
    learning_rate,
    load_state,
    set_learning_rate,
)


def plan(total=100, warmup=10):
    return Plan(1, 1, 8, 8, 1, 8, 10, total_steps=total, warmup_steps=warmup)


def rates(total=100, warmup=10, **settings):
    return [
        learning_rate(s, cfg=OptimConfig(lr=1.0, **settings), plan=plan(total, warmup))
        for s in range(total)
    ]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "wsd"])
def test_schedules_rise_to_the_peak_in_the_warmup_and_never_rest_at_zero(schedule):
    result = rates(schedule=schedule, warmup_steps=10)
    assert result[0] == pytest.approx(0.1)
    assert result[9] == result[10] == max(result) == 1.0
    assert min(result) > 0
    assert result[10:] == sorted(result[10:], reverse=True)


def test_wsd_is_stable_up_to_its_last_part_wherever_the_length_ends():
    wsd = {"schedule": "wsd", "warmup_steps": 10}
    result = rates(**wsd)
    assert result[10:91] == [1.0] * 81
    assert result[91:] == pytest.approx([1 - (done / 10) ** 0.5 for done in range(1, 10)])
    assert rates(67, **wsd)[:61] == result[:61] and rates(67, **wsd)[61] < 1
    assert rates(decay_fraction=0.5, final_lr_fraction=0.1, **wsd)[75] == pytest.approx(
        0.1 + 0.9 * (1 - 0.5**0.5)
    )
    assert set(rates(decay_fraction=0.0, **wsd)[10:]) == {1.0} and rates(5, 1, **wsd)[-1] == 1.0


def test_a_decay_from_the_start_is_that_of_google():
    """optimization.py of google-research/albert: the decay over all steps, replaced by the ramp during the warm-up."""
    total, warmup, peak = 125_000, 3125, 1.76e-3
    recipe = OptimConfig(lr=peak, schedule="linear_from_start")
    ours = [learning_rate(step, cfg=recipe, plan=plan(total, warmup)) for step in range(total)]
    theirs = [peak * (1 - step / total) for step in range(total)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12)
    assert ours[warmup - 1] == peak and ours[warmup] == pytest.approx(0.975 * peak)
    from_warmup = learning_rate(warmup, cfg=OptimConfig(lr=peak), plan=plan(total, warmup))
    assert from_warmup / ours[warmup] == pytest.approx(1.0256, abs=1e-4)


def lamb_reference(weight, gradients, *, lr, beta1, beta2, eps, decay, trust):
    """Google's lamb_optimizer.py in numpy, one tensor."""
    weight = weight.astype(np.float64)
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for gradient in gradients:
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        update = m / (np.sqrt(v) + eps) + decay * weight
        w_norm, u_norm = np.linalg.norm(weight), np.linalg.norm(update)
        ratio = w_norm / u_norm if trust and w_norm > 0 and u_norm > 0 else 1.0
        weight = weight - lr * ratio * update
    return weight


@pytest.mark.parametrize("start", [1.0, 0.0], ids=["weights", "zero weights"])
@pytest.mark.parametrize("lr", [0.01, torch.tensor([0.01])], ids=["number", "on the device"])
@pytest.mark.parametrize("is_fused", [False, True], ids=["separate", "fused, as on GPUs"])
def test_lamb_is_googles(start, lr, is_fused):
    rng = np.random.default_rng(0)
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(start * rng.normal(size=tuple(parameter.shape))))
    before = {
        name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()
    }
    gradients = {name: rng.normal(size=(4, *value.shape)) for name, value in before.items()}
    optimizer = build_optimizer(
        OptimConfig(name="lamb", lr=0.01, weight_decay=0.1), model.parameters()
    )
    optimizer.is_fused = is_fused
    for group in optimizer.param_groups:
        group["lr"] = lr
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensor(gradients[name][step], dtype=torch.float32)
        optimizer.step()
    common = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
    for name, parameter in model.named_parameters():
        is_weight = name == "weight"
        decay = 0.1 if is_weight else 0.0
        wanted = lamb_reference(
            before[name], gradients[name], decay=decay, trust=is_weight, **common
        )
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


class Traffic(TorchDispatchMode):
    """The bytes that operations read and write, with every tensor of a list counted."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for argument, value in zip(function._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # only with a loss scale does fused Adam write gradients
            is_written &= argument.name != "grads"
            self.num_bytes += (1 + is_written) * bytes_of(value)
        if not any(each.alias_info for each in function._schema.returns):
            self.num_bytes += bytes_of(result)
        return result


def bytes_of(value):
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("skips", [None, 0.0])
def test_lamb_on_a_gpu_moves_56_bytes_for_each_weight(skips):
    model = torch.nn.Linear(1000, 500, bias=False)
    optimizer = build_optimizer(OptimConfig(name="lamb", weight_decay=0.1), model.parameters())
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.is_fused = True
    if skips is not None:
        optimizer.found_inf = torch.tensor(skips)
    with Traffic() as traffic:
        optimizer.step()
    assert traffic.num_bytes / model.weight.numel() == pytest.approx(56, abs=0.1)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_biases_and_normalisation_do_not_decay_and_tied_weights_come_once(name):
    model = torch.nn.Sequential(
        torch.nn.Embedding(7, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 7)
    )
    model[2].weight = model[0].weight
    optimizer = build_optimizer(OptimConfig(name=name), model.parameters())
    decayed, plain = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == {id(model[0].weight)}
    assert plain == {id(model[1].weight), id(model[1].bias), id(model[2].bias)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "plain": {"foreach": True},
}


def encoder_and_head(kind="fused"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
    )
    if kind == "capturable":  # which torch knows on devices only
        model.to(pytest.importorskip("torch_xla").device())
    return model, list(model[2].parameters())


def rates_of(optimizer, parameters):
    """{rate: number of parameters}"""
    result, wanted = {}, {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        rate = round(float(group["lr"]), 7)
        result[rate] = result.get(rate, 0) + len(
            {id(parameter) for parameter in group["params"]} & wanted
        )
    return result


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_the_head_follows_the_schedule_at_its_own_rate(kind):
    model, head = encoder_and_head(kind)
    cfg = OptimConfig(lr=1e-3, head_lr=5e-3)
    optimizer = build_optimizer(cfg, model.parameters(), adamw=IMPLEMENTATIONS[kind], head=head)
    for step, share in ((0, 0.1), (9, 1.0), (55, 0.5)):
        lr = learning_rate(step, cfg=cfg, plan=plan())
        set_learning_rate(optimizer, lr)
        assert lr == pytest.approx(share * 1e-3)
        assert rates_of(optimizer, head) == {round(lr, 7): 0, round(5 * lr, 7): 2}
        assert rates_of(optimizer, model.parameters()) == {round(lr, 7): 4, round(5 * lr, 7): 2}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_learning_rate(optimizer, 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # Adam's first step is the rate, but for the decay
    moved = [
        (old - new).mean().item() for old, new in zip(before, model.parameters(), strict=True)
    ]
    assert moved == pytest.approx([1e-3] * 4 + [5e-3] * 2, rel=0.02)


def saved(optimizer):
    """As a checkpoint holds it."""
    state = optimizer.state_dict()
    return {
        **state,
        "param_groups": [{"params": group["params"]} for group in state["param_groups"]],
    }


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
def test_a_saved_state_is_loaded_with_a_rate_for_the_head_and_without(kind):
    """Each parameter gets its own moments back: the groups are the same, whatever the rates."""
    model, head = encoder_and_head(kind)
    first = build_optimizer(
        OptimConfig(), model.parameters(), adamw=IMPLEMENTATIONS[kind], head=head
    )
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    first.step()
    cfg = OptimConfig(head_lr=5e-3)
    second = build_optimizer(cfg, model.parameters(), adamw=IMPLEMENTATIONS[kind], head=head)
    load_state(second, saved(first))
    set_learning_rate(second, 1e-3)
    for number, parameter in enumerate(model.parameters()):
        torch.testing.assert_close(
            second.state[parameter]["exp_avg"], torch.full_like(parameter, 0.1 * (number + 1))
        )
    assert rates_of(second, head) == {1e-3: 0, 5e-3: 2}


def test_a_state_of_other_frozen_parts_is_rejected():
    model, head = encoder_and_head()
    state = saved(build_optimizer(OptimConfig(), model.parameters(), head=head))
    frozen = build_optimizer(OptimConfig(), head, head=head)
    assert [len(group["params"]) for group in frozen.param_groups] == [1, 1]
    rejects(
        "optimizer has 6 parameters, but this run trains 2: other weights are frozen",
        load_state,
        frozen,
        state,
    )
