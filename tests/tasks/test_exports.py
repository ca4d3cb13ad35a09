"""Exports in the pipelines of transformers: they answer as baretrain predict does, for each task and architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from finetuning import byte_tokenizer, task_of, tuning, write_rows
from running import TINY, train_overrides
from tokenizers import processors
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from train.tasks.predictor import Predictor, trained_task

SIZES = ["model.hidden_size=16", "model.num_heads=2"]
WORDS = "the a cat dog sat ran good bad on mat what did do".split()
SPECIAL = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
    "<cls>",
    "<sep>",
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
]
OF_PIECES = ["AlbertTokenizer", "RemBertTokenizer", "DebertaV2Tokenizer", "XLMRobertaTokenizer"]
ARCHITECTURES = {  # and the class of the tokenizer in transformers; None: the generic one
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "modernbert": None,
    "mpnet": "MPNetTokenizer",
    "rembert": "RemBertTokenizer",
    "roberta": "RobertaTokenizer",
    "roformer": None,
    "xlm-roberta": "XLMRobertaTokenizer",
}
LONG = "the cat sat on the mat " * 10
TEXTS = ["The cat sat", "a dog", LONG, "good on bad", "a bad DOG ran"]
LABELS: dict[str, list[Any]] = {
    "classify": ["x", "y", "z", "x", "y"],
    "multilabel": [["x"], ["y", "z"], ["x", "z"], [], ["z"]],
    "regress": [1.0, 5.0, 9.0, 2.0, 3.0],
}


def write_tokenizer(name: str | None, folder: Path) -> Path:
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *WORDS])}
    if name == "RobertaTokenizer":
        made = byte_tokenizer()
    elif name in OF_PIECES:
        pieces = [*SPECIAL, *(f"▁{word}" for word in WORDS), "▁"]
        made = getattr(transformers, name)(
            vocab=[(piece, -float(number)) for number, piece in enumerate(pieces)]
        )
    else:
        made = getattr(transformers, name or "BertTokenizer")(vocab=vocabulary)
    if name is None:
        names = {
            f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")
        }
        made = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **names)
    # transformers 5.23 leaves the separator of the published one out
    if name == "RemBertTokenizer":
        ends = [
            (token, made.convert_tokens_to_ids(token))
            for token in (made.sep_token, made.cls_token)
        ]
        made.backend_tokenizer.post_processor = processors.BertProcessing(*ends)
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(ARCHITECTURES[architecture], tmp_path_factory.mktemp("tokenizer"))


def model_of(architecture: str) -> list[str]:
    few = ["model.num_layers=1", "model.max_positions=64"]
    return ["model=any", f"model.architecture={architecture}", *SIZES, *few]


def exported(settings: list[str], folder: Path, chosen: dict[str, Any] | None = None) -> Any:
    """Export an untrained model whose outputs depend much on each input. Returns the task."""
    task, generator = task_of(settings), torch.Generator().manual_seed(1)
    model = task.build_model()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.4, generator=generator)
    task.adopt(chosen or {})
    folder.mkdir()
    task.export(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert ("token_type_ids" in config["model_input_names"]) == model.has_segments
    return task


def settings_for(
    kind: str, architecture: str, tokenizer: Path, folder: Path, rows: list[dict[str, Any]]
) -> list[str]:
    for name in ("train", "validation"):
        write_rows(folder / f"{name}.jsonl", rows)
    data = [
        "data=records",
        f"data.path={folder}",
        "data.train=train.jsonl",
        "data.validation=validation.jsonl",
    ]
    given = tuning(
        folder / "run", tokenizer, *model_of(architecture), *data, f"task={kind}", "seq_len=32"
    )
    return given[len(TINY) :]


def predicted(export: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    predictor = Predictor(trained_task(str(export), None))
    return predictor.predict(
        [{"id": str(number), **row} for number, row in enumerate(rows)], batch_size=1
    )


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_and_scores(architecture, tokenizer, kind, pairs, tmp_path):
    texts = [
        {"text": text, **({"text_pair": TEXTS[-1 - n]} if pairs else {})}
        for n, text in enumerate(TEXTS)
    ]
    rows = [{**row, "label": label} for row, label in zip(texts, LABELS[kind], strict=True)]
    settings = settings_for(kind, architecture, tokenizer, tmp_path, rows)
    chosen = {"threshold": [0.3, 0.5, 0.6]} if kind == "multilabel" else {}
    task = exported(
        [*settings, *(["data.columns.text_pair=text_pair"] if pairs else [])],
        tmp_path / "export",
        chosen,
    )
    answer = pipeline("text-classification", model=str(tmp_path / "export"), device="cpu")
    theirs = answer(texts, top_k=None, truncation=True)
    for ours, scores in zip(predicted(tmp_path / "export", texts), theirs, strict=True):
        given = {each["label"]: each["score"] for each in scores}
        if kind == "regress":
            assert given["label"] == pytest.approx(ours["prediction"], abs=1e-4)
            continue
        assert given == pytest.approx(ours["probabilities"], abs=1e-4)
        if kind == "classify":
            assert scores[0]["label"] == ours["prediction"]
        else:
            limits = zip(task.labels, chosen["threshold"], strict=True)
            assert [label for label, limit in limits if given[label] >= limit] == ours[
                "prediction"
            ]


def test_tags(architecture, tokenizer, tmp_path):
    tags = ["O", "B-X", "I-X"]
    rows = [
        {"tokens": text.split(), "tags": [tags[n % 3] for n, _ in enumerate(text.split())]}
        for text in TEXTS
    ]
    exported(settings_for("ner", architecture, tokenizer, tmp_path, rows), tmp_path / "export")
    answer = pipeline(
        "token-classification", model=str(tmp_path / "export"), device="cpu", ignore_labels=[]
    )
    for row, ours in zip(
        rows,
        predicted(tmp_path / "export", [{"tokens": row["tokens"]} for row in rows]),
        strict=True,
    ):
        theirs, begin = answer(" ".join(row["tokens"])), 0
        for word, tag in zip(row["tokens"], ours["prediction"], strict=True):
            first = next((each for each in theirs if each["end"] > begin), None)
            assert first is None or first["start"] > begin + len(word) or first["entity"] == tag
            begin += len(word) + 1
        assert len(theirs) <= 32


def test_answers(architecture, tokenizer, tmp_path):
    answers = {"text": ["cat"], "answer_start": [4]}
    # The windows behind the first have other segments in RoBERTa's tokenizers, which published RoBERTas do not read.
    contexts = ["the cat sat on a mat", *([] if "roberta" in architecture else [LONG])]
    asked = [{"question": "a cat", "context": text} for text in contexts]
    settings = settings_for(
        "qa", architecture, tokenizer, tmp_path, [{**row, "answers": answers} for row in asked]
    )
    exported([*settings, "task.stride=8"], tmp_path / "export")
    read = AutoTokenizer.from_pretrained(tmp_path / "export")
    model = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "export").eval()
    for row, ours in zip(asked, predicted(tmp_path / "export", asked), strict=True):
        how = {
            "truncation": "only_second",
            "stride": 8,
            "return_overflowing_tokens": True,
        }
        windows = read(row["question"], row["context"], return_offsets_mapping=True, **how)
        best = (-np.inf, "")
        for number, ids in enumerate(windows["input_ids"]):
            fed = {name: torch.tensor([windows[name][number]]) for name in read.model_input_names}
            with torch.no_grad():
                output = model(**fed)
            inside = [
                place for place, side in enumerate(windows.sequence_ids(number)) if side == 1
            ]
            offsets = windows["offset_mapping"][number]
            for start in inside:
                for end in (each for each in inside if start <= each < start + 30):
                    score = float(output.start_logits[0, start] + output.end_logits[0, end])
                    text = row["context"][offsets[start][0] : offsets[end][1]].strip()
                    best = max(best, (score, text)) if text else best
            assert len(ids) <= 32
        assert (ours["answer"], ours["score"]) == (best[1], pytest.approx(best[0], abs=1e-3))


def test_masks(architecture, prepared, tmp_path):
    given = train_overrides(tmp_path / "run", prepared, "task=mlm", *model_of(architecture))
    task = exported(given[len(TINY) - 1 :], tmp_path / "export")
    model = task.build_model()
    answer = pipeline("fill-mask", model=str(tmp_path / "export"), device="cpu")
    text = f"ba {answer.tokenizer.mask_token} be"
    ids = torch.tensor([answer.tokenizer(text)["input_ids"]])
    at = (ids == answer.tokenizer.mask_token_id).nonzero()[:, 1][None]
    model.network.load_state_dict(answer.model.state_dict())
    with torch.no_grad():
        shares = model.eval()(ids, torch.zeros_like(ids), at)[0, 0].softmax(-1)
    for each in answer(text, top_k=3):
        assert each["score"] == pytest.approx(float(shares[each["token"]]), abs=1e-4)
    assert len(answer(f"{text} {'ba ' * 99}", tokenizer_kwargs={"truncation": True})) == 5
