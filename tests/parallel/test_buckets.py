"""Gradients in buckets: where they lie, and what all ranks get from rank 0."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from train.parallel.buckets import BucketSync, flatten
from train.parallel.ranks import World


class Transposed(nn.Module):
    """A weight whose rows are columns in memory, and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3).t() / 10)
        self.bias = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, inputs):
        return ((inputs @ self.weight + self.bias) * self.scale).tanh().sum()


@pytest.mark.parametrize("layout", ["transposed", "rows"])
def test_an_update_of_gradients_in_buckets_is_that_of_autograds_own(layout):
    def train(in_buckets):
        model = Transposed()
        if layout == "rows":
            model.weight = nn.Parameter(model.weight.detach().contiguous())
        weights = list(model.parameters())
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
        if in_buckets:
            bucket = flatten(weights)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(5, 3)).backward()
            if in_buckets:
                assert bucket.norm() == pytest.approx(nn.utils.get_total_norm(grads(weights)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_buckets)
        return model.state_dict()

    torch.testing.assert_close(train(in_buckets=True), train(in_buckets=False))


def grads(weights):
    return [weight.grad for weight in weights]


def test_all_ranks_get_the_weights_and_buffers_of_rank_0(monkeypatch):
    def broadcast(tensor, src):
        assert src == 0 and tensor.is_contiguous()
        tensor.fill_(7.0)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    model = Transposed()
    BucketSync(model, torch.device("cpu"), World(), compresses=False)
    assert {float(value) for each in model.state_dict().values() for value in each.unique()} == {7}


def test_a_bucket_counts_as_sent_as_soon_as_it_is(monkeypatch):
    """A step that has sent gradients cannot begin again when memory runs out: it would send them twice."""
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: None)
    sync = BucketSync(Transposed(), torch.device("cpu"), World(), compresses=False)
    sync.buckets = [torch.ones(1), torch.ones(1)]
    sent = []

    def all_reduce(tensor, **_):
        if sent:
            raise torch.OutOfMemoryError("out of memory")
        sent.append(tensor)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(torch.OutOfMemoryError):
        sync.send(2)
    assert sync.num_sent == 1
