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
# "Supported Operators" in the release notes of neuronx-cc (aws-neuron-sdk, release-notes/components/compiler.rst, of
# 2026-05), by their names in HLO; without Customcall, which stands for whatever its target is.
SUPPORTED = set(
    """abs add all-gather all-reduce and atan2 batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert
    broadcast ceil clamp compare concatenate constant convert cosine divide dot dynamic-update-slice exponential floor
    gather get-tuple-element iota log maximum minimum multiply negate not pad parameter power reduce reshape reverse rng
    rng-bit-generator rsqrt scatter select select-and-scatter shift-right-logical sign sine slice sqrt subtract tanh
    transpose tuple""".split()
)
BEYOND = {  # not in the list, and in our graphs
    "erf",  # the exact GELU of BERT, RoBERTa and DistilBERT; AWS has trained BERT-large, whose activation it is
    "reduce-window",  # RoBERTa's position ids: a running sum of one operand
}
# Add, Max, Min and Mul are in the list; All is the logical "and" with which scaled_dot_product_attention looks for rows
# that are masked whole.
REDUCTIONS = ("Add", "Max", "Min", "Mul", "All")


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
            name not in SUPPORTED | BEYOND
            or "<=" in kind  # a size that is known at run time only
            or (name == "gather" and sizes is not None and set(sizes[1].split(",")) == {"1"})
            or (name == "scatter" and "update_window_dims={}" in rest)
            or (
                name in ("reduce", "reduce-window") and kind.startswith("(")
            )  # of two tensors at once
            or (name in ("scatter", "dot") and kind.startswith(("s", "u")))  # of whole numbers
            or (
                name == "reduce"
                and not re.search(f"to_apply=%({'|'.join(REDUCTIONS)})Computation", rest)
            )
            or (
                name == "dynamic-update-slice" and re.search(r"\[\] %(?!constant)", rest)
            )  # at an index to be computed
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
    # an operator of no list
    assert " erf-inv(" in rejected("%erf-inv.1 = f32[2]{0} erf-inv(f32[2]{0} %p0)")[0]
    assert any(" reduce(" in line for line in rejected(graph((scores > 0).any(-1))))
    assert rejected("%u.1 = f32[4]{0} dynamic-update-slice(f32[4]{0} %a, f32[1]{0} %b, s64[] %p3)")
    assert rejected("%nonzero.3 = (s32[<=4,1]{1,0}, s32[]) tuple(%a, %b)")
    assert not rejected(graph(*topk(scores, 3)))
    text = graph(*picked(states_at))
    assert not rejected(text) and " gather(" not in text and " scatter(" not in text


def mlm(run_dir, prepared, texts):
    return train_overrides(run_dir, prepared)


def classify(run_dir, prepared, texts):
    data = [
        "data=tweets",
        f"data.path={ROOT / 'tests/inputs/tweets.csv'}",
        "data.validation_fraction=0.3",
    ]
    return tuning(run_dir, prepared / "tokenizer", "task=classify", *data, "seq_len=32")


def qa(run_dir, prepared, texts):
    given = asking(run_dir.parent, texts, train=9, dev=9)
    return tuning(run_dir, prepared / "tokenizer", *given, "seq_len=48")


def ner(run_dir, prepared, texts):
    data = [
        "data=records",
        f"data.path={ROOT / 'tests/inputs/entities.conll'}",
        "data.validation_fraction=0.3",
    ]
    return tuning(run_dir, prepared / "tokenizer", "task=ner", *data, "seq_len=32")


@pytest.mark.slow
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
    short = [
        "max_steps=1",
        "optim.warmup_steps=0",
        "eval_every=1",
        "export=false",
        "model.num_layers=2",
    ]
    model = (
        []
        if architecture == "albert"
        else [f"model.architecture={architecture}", "model.embedding_size=null"]
    )
    trainium = ["backend=xla", "backend.precision=bf16"]  # its choices, on the CPU
    # so that random numbers are among them
    dropout = [
        "model.hidden_dropout=0.1",
        "model.attention_dropout=0.1",
    ]
    arguments = [*task(tmp_path / "run", prepared, texts), *short, *model, *trainium, *dropout]
    env = {"XLA_SAVE_TENSORS_FILE": str(tmp_path / "graphs"), "XLA_SAVE_TENSORS_FMT": "hlo"}
    done = run(arguments, env=env)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "graphs.0").read_text()
    step, *evaluations = [
        part for part in text.split("[ScheduleSyncTensorsGraph]") if " gather(" in part
    ]
    assert evaluations and " scatter(" in step and " scatter(" not in evaluations[-1]
    assert rejected(text) == [] and " rng-bit-generator(" in step
    # of tokens, positions and, mostly, segments
    lookups = 2 if architecture == "distilbert" else 3
    assert (
        step.count(" gather(")
        == step.count(" scatter(")
        == evaluations[-1].count(" gather(")
        == lookups
    )
