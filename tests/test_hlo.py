"""What PyTorch/XLA sends to the compiler, step and evaluation of every task, holds nothing that Trainium's rejects or
does one number at a time. The graphs are those of the CPU; Trainium's compiler never saw them.
"""

import re

import pytest
import torch
from finetuning import asking, tuning
from running import ROOT, run, train_overrides

from train.models.encoder import states_at
from train.tasks.topk import topk

torch_xla = pytest.importorskip("torch_xla")

INSTRUCTION = re.compile(r"%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<name>[\w-]+)\((?P<rest>.*)")
REJECTED = {"sort", "topk", "custom-call", "while", "conditional", "dynamic-slice", "dynamic-reshape"}


def rejected(text):
    """The instructions of graphs that Trainium's compiler has no way, or no fast way, for."""
    result = []
    for line in text.splitlines():
        match = INSTRUCTION.search(line)
        if not match:
            continue
        kind, name, rest = match["type"], match["name"], match["rest"]
        sizes = re.search(r"slice_sizes=\{([\d,]*)\}", rest)
        if (
            name in REJECTED
            or "<=" in kind  # a size that is known at run time only
            or (name == "gather" and sizes is not None and set(sizes[1].split(",")) == {"1"})
            or (name == "scatter" and "update_window_dims={}" in rest)
            or (name in ("reduce", "reduce-window") and kind.startswith("("))  # of two tensors at once
            or (name in ("scatter", "dot") and kind.startswith(("s", "u")))  # of whole numbers
        ):
            result.append(line.strip())
    return result


def graph(*tensors):
    text = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))
    assert "HloModule" in text
    return text


def picked(pick):
    """Hidden states at positions, and their gradient."""
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 4).to(torch_xla.device()).requires_grad_()
    states = pick(hidden, torch.tensor([[0, 5], [2, 2], [0, 0]]).to(torch_xla.device()))
    (grad,) = torch.autograd.grad(states.square().sum(), hidden)
    return states, grad


def plain(hidden, positions):
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.size(-1)))


def test_what_is_rejected_is_found():
    scores = torch.randn(2, 9).to(torch_xla.device())
    result = rejected(graph(*picked(plain)))
    assert len(result) == 2 and " gather(" in result[0] and " scatter(" in result[1]
    assert " sort(" in rejected(graph(*scores.topk(3)))[0]
    assert " reduce(" in rejected(graph(scores.argmax(-1)))[0]
    assert rejected("%nonzero.3 = (s32[<=4,1]{1,0}, s32[]) tuple(%a, %b)")
    assert not rejected(graph(*topk(scores, 3)))
    text = graph(*picked(states_at))
    assert not rejected(text) and " gather(" not in text and " scatter(" not in text


def mlm(run_dir, prepared, texts):
    return train_overrides(run_dir, prepared)


def classify(run_dir, prepared, texts):
    data = ["data=tweets", f"data.path={ROOT / 'tests/data/tweets.csv'}", "data.validation_fraction=0.3"]
    return tuning(run_dir, prepared / "tokenizer", "task=classify", *data, "seq_len=32")


def qa(run_dir, prepared, texts):
    given = asking(run_dir.parent, texts, train=9, dev=9)
    return tuning(run_dir, prepared / "tokenizer", *given, "task.n_best=3", "seq_len=48")


def ner(run_dir, prepared, texts):
    data = ["data=records", f"data.path={ROOT / 'tests/data/entities.conll'}", "data.validation_fraction=0.3"]
    return tuning(run_dir, prepared / "tokenizer", "task=ner", *data, "seq_len=32")


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        (ner, "albert"),
        (mlm, "albert"),
        (classify, "albert"),
        (classify, "roberta"),
        (classify, "distilbert"),
        (qa, "bert"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_step_and_the_evaluation_of_a_task(task, architecture, prepared, texts, tmp_path):
    short = ["max_steps=1", "optim.warmup_steps=0", "eval_every=1", "export=false", "model.num_layers=2"]
    model = [] if architecture == "albert" else [f"model.architecture={architecture}", "model.embedding_size=null"]
    arguments = [*task(tmp_path / "run", prepared, texts), *short, *model, "backend=xla", "backend.layers=unrolled"]
    env = {"XLA_SAVE_TENSORS_FILE": str(tmp_path / "graphs"), "XLA_SAVE_TENSORS_FMT": "hlo"}
    done = run(arguments, env=env)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "graphs.0").read_text()
    step, *evaluations = [part for part in text.split("[ScheduleSyncTensorsGraph]") if " gather(" in part]
    assert evaluations and " scatter(" in step and " scatter(" not in evaluations[-1]
    assert rejected(text) == []
    lookups = 2 if architecture == "distilbert" else 3  # of tokens, positions and, mostly, segments
    assert step.count(" gather(") == step.count(" scatter(") == evaluations[-1].count(" gather(") == lookups
