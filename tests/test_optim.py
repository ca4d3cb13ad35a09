import numpy as np
import pytest
import torch

from train.config import OptimConfig, Plan
from train.optim import Lamb, build_optimizer, learning_rate


def plan(total=100, warmup=10, lr=1.0):
    return Plan(1, 8, 8, 1, 10, total_steps=total, warmup_steps=warmup, lr=lr)


def rates(total=100, warmup=10, **settings):
    return [learning_rate(s, cfg=OptimConfig(**settings), plan=plan(total, warmup)) for s in range(total)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial", "constant"])
def test_schedules_rise_to_the_peak_in_the_warmup_and_never_rest_at_zero(schedule):
    found = rates(schedule=schedule, power=2.0)
    assert found[0] == pytest.approx(0.1)
    assert found[9] == found[10] == max(found) == 1.0
    assert min(found) > 0
    assert found[10:] == sorted(found[10:], reverse=True)


def test_schedules_fall_as_their_names_say():
    assert rates()[55] == pytest.approx(0.5)
    assert rates(schedule="cosine")[55] == pytest.approx(0.5)
    assert rates(schedule="polynomial", power=2.0)[55] == pytest.approx(0.25)
    assert rates(schedule="constant")[99] == 1.0
    assert rates(final_lr_fraction=0.2)[99] == pytest.approx(0.2, abs=0.01)
    assert rates(warmup=0)[0] == 1.0


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
def test_lamb_is_googles(start):
    rng = np.random.default_rng(0)
    model = torch.nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(start * rng.normal(size=tuple(parameter.shape))))
    before = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    gradients = {name: rng.normal(size=(4, *value.shape)) for name, value in before.items()}
    optimizer = build_optimizer(OptimConfig(name="lamb", lr=0.01, weight_decay=0.1), model.parameters())
    for step in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.tensor(gradients[name][step], dtype=torch.float32)
        optimizer.step()
    common = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
    for name, parameter in model.named_parameters():
        is_weight = name == "weight"
        decay = 0.1 if is_weight else 0.0
        wanted = lamb_reference(before[name], gradients[name], decay=decay, trust=is_weight, **common)
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_biases_and_normalisation_do_not_decay_and_tied_weights_come_once(name):
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 7))
    model[2].weight = model[0].weight
    optimizer = build_optimizer(OptimConfig(name=name), model.parameters())
    decayed, plain = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == {id(model[0].weight)}
    assert plain == {id(model[1].weight), id(model[1].bias), id(model[2].bias)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_lamb_state_survives_a_round_trip():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    first = Lamb(model.parameters(), lr=0.1, betas=(0.9, 0.999), eps=1e-6)
    model(torch.ones(1, 3)).sum().backward()
    first.step()
    second = Lamb(model.parameters(), lr=0.1, betas=(0.9, 0.999), eps=1e-6)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[model.weight]["exp_avg"], first.state[model.weight]["exp_avg"])
