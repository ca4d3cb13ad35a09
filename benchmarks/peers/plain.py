"""Training and scoring in plain transformers, for benchmarks.real: `python -m benchmarks.peers.plain SETTINGS`.

SETTINGS is a JSON object for `train`, which trains with the Trainer. `score` scores an exported model. For one of our
runs, `baretrain predict` can answer the same rows. The scores then include the share of its answers that equal those of
plain transformers, and the largest difference between scores (probabilities or values).
"""

from __future__ import annotations

import collections
import json
import re
import string
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness

harness.hide_torch_xla()

import numpy as np
import torch
import transformers

Row = dict[str, Any]
HEADS = {"ner": "TokenClassification", "qa": "QuestionAnswering", "mlm": "MaskedLM"}
MASKED = 0.15  # share of tokens
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PROBLEMS = {"multilabel": "multi_label_classification", "regress": "regression"}


def read(data: Path, side: str) -> list[Row]:
    """Return the rows of one split (`side`) that the benchmark has written."""
    path = data / f"{side}.jsonl"
    if path.exists():
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows = []
    for article in json.loads(path.with_suffix(".json").read_text())["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            rows += [{"context": context, **question} for question in paragraph["qas"]]
    return rows


def labels_of(task: str, rows: list[Row]) -> list[str]:
    """Return the labels, sorted; a placeholder for regression, none for question answering."""
    if task == "regress":
        return ["LABEL_0"]
    if task == "qa":
        return []
    if task == "classify":
        return sorted({row["label"] for row in rows})
    key = "tags" if task == "ner" else "label"
    return sorted({label for row in rows for label in row[key]})


def encoded(task: str, row: Row, tokenizer: Any, seq_len: int) -> Any:
    if task == "ner":
        return tokenizer(
            row["tokens"], is_split_into_words=True, truncation=True, max_length=seq_len
        )
    if task == "qa":
        return tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            max_length=seq_len,
            return_offsets_mapping=True,
        )
    texts = [row[name] for name in ("text", "text_pair") if name in row]
    return tokenizer(*texts, truncation=True, max_length=seq_len)


def features(task: str, row: Row, tokenizer: Any, labels: list[str], seq_len: int) -> Row:
    """Return the tokens and targets of a row, in the form that transformers' models expect."""
    tokens = encoded(task, row, tokenizer, seq_len)
    result: Row = {name: tokens[name] for name in INPUTS if name in tokens}
    if task == "classify":
        result["labels"] = labels.index(row["label"])
    elif task == "multilabel":
        result["labels"] = [float(label in row["label"]) for label in labels]
    elif task == "regress":
        result["labels"] = float(row["label"])
    elif task == "ner":
        result["labels"] = []
        before = None
        for word in tokens.word_ids():
            is_first = word is not None and word != before
            label = labels.index(row["tags"][word]) if is_first else -100
            result["labels"].append(label)
            before = word
    else:
        answer = row["answers"][0]
        begin = answer["answer_start"]
        end = begin + len(answer["text"])
        within = []
        spans = zip(tokens.sequence_ids(), tokens["offset_mapping"], strict=True)
        for number, (of, span) in enumerate(spans):
            if of == 1 and begin <= span[0] < end:
                within.append(number)
        within = within or [0]
        result["start_positions"] = within[0]
        result["end_positions"] = within[-1]
    return result


def model_of(task: str, folder: str | Path, **sizes: Any) -> Any:
    auto = getattr(transformers, f"AutoModelFor{HEADS.get(task, 'SequenceClassification')}")
    return auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, **sizes)


def blocks(path: Path, tokenizer: Any, seq_len: int) -> list[Row]:
    """Return the tokens of a text in blocks of `seq_len`, as transformers' run_mlm.py makes them."""
    lines = [line for line in path.read_text().splitlines() if line]
    tokens = [token for ids in tokenizer(lines)["input_ids"] for token in ids]
    starts = range(0, len(tokens) - seq_len + 1, seq_len)
    return [{"input_ids": tokens[start : start + seq_len]} for start in starts]


class Clock(transformers.TrainerCallback):
    """The CPU time of the training loop, and the collator's tokens without padding."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens = 0
        self.cpu_s = 0.0

    def collate(self, rows: list[Row]) -> Any:
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        return self.collator(rows)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.cpu_s = -time.process_time()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.cpu_s += time.process_time()


def collator_of(task: str, tokenizer: Any) -> Any:
    if task == "mlm":
        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED)
    if task == "ner":
        return transformers.DataCollatorForTokenClassification(tokenizer)
    return transformers.DataCollatorWithPadding(tokenizer)


def train(
    task: str,
    data: str,
    begin: str,
    seen: str,
    export: str,
    seq_len: int,
    best: bool,
    arguments: Row,
) -> None:
    """Train as transformers' examples do, and save the model with its tokenizer, and seconds and tokens in `seen`."""
    transformers.set_seed(arguments["seed"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(begin, trust_remote_code=False)
    sizes: Row = {"problem_type": PROBLEMS[task]} if task in PROBLEMS else {}
    if task == "mlm":
        rows = blocks(Path(data) / "train.txt", tokenizer, seq_len)
    else:
        read_rows = read(Path(data), "train")
        labels = labels_of(task, read_rows)
        rows = [features(task, row, tokenizer, labels, seq_len) for row in read_rows]
        if labels:
            numbers = {label: n for n, label in enumerate(labels)}
            sizes |= {"id2label": dict(enumerate(labels)), "label2id": numbers}
    model = model_of(task, begin, **sizes)
    clock = Clock(collator_of(task, tokenizer))
    if best:
        arguments |= {"bf16": True, "train_sampling_strategy": "group_by_length"}
    with tempfile.TemporaryDirectory() as folder:
        transformers.Trainer(
            model,
            transformers.TrainingArguments(folder, use_cpu=True, **arguments, **harness.QUIET),
            data_collator=clock.collate,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
    model.save_pretrained(export)
    tokenizer.save_pretrained(export)
    Path(seen).write_text(json.dumps({"train_cpu_s": clock.cpu_s, "tokens": clock.tokens}))


def nats(data: Path, export: Path, seq_len: int = 128) -> Row:
    """Return the loss per token of held-out text, of which always the same tokens are masked."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    model = model_of("mlm", export).eval()
    rows = blocks(data / "validation.txt", tokenizer, seq_len)
    tokens = torch.tensor([row["input_ids"] for row in rows])
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < MASKED
    drawn &= (tokens != tokenizer.cls_token_id) & (tokens != tokenizer.sep_token_id)
    losses = []
    for ids, masked in zip(tokens.split(8), drawn.split(8), strict=True):
        with torch.no_grad():
            logits = model(ids.masked_fill(masked, tokenizer.mask_token_id)).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits[masked], ids[masked], reduction="none")
        )
    return {"nats": float(torch.cat(losses).mean())}


def answers(
    task: str, rows: list[Row], export: Path, seq_len: int = 128
) -> tuple[list[Any], list[Any]]:
    """Return the answers of plain transformers in fp32, and their scores (probabilities or a value)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=False)
    model = model_of(task, export).eval()
    least = 0.5
    kept = export / "baretrain_task.json"  # in our exports
    if kept.is_file():
        least = json.loads(kept.read_text())["settings"].get("threshold", least)
    found = []
    scores = []
    for row in rows:
        tokens = encoded(task, row, tokenizer, seq_len)
        inputs = {name: torch.tensor([tokens[name]]) for name in INPUTS if name in tokens}
        with torch.no_grad():
            output = model(**inputs)
        if task == "qa":
            answer, score = best_span(output, tokens, row["context"])
        else:
            logits = output.logits[0].double()
            answer, score = answer_of(task, logits, tokens, row, model.config, least)
        found.append(answer)
        scores.append(score)
    return found, scores


def answer_of(
    task: str, logits: Any, tokens: Any, row: Row, config: Any, least: Any
) -> tuple[Any, Any]:
    names = config.id2label
    if task == "classify":
        return names[int(logits.argmax())], logits.softmax(-1).tolist()
    if task == "multilabel":
        scores = logits.sigmoid().tolist()
        limits = least if isinstance(least, list) else [least] * len(names)
        return [names[n] for n, share in enumerate(scores) if share >= limits[n]], scores
    if task == "regress":
        return round(float(logits[0]), 3), [float(logits[0])]
    tags = ["O"] * len(row["tokens"])
    words = list(enumerate(tokens.word_ids()))
    for number, word in reversed(words):  # the first token of a word comes last
        if word is not None:
            tags[word] = names[int(logits[number].argmax())]
    return tags, None


def best_span(output: Any, tokens: Any, context: str, most: int = 30) -> tuple[str, float]:
    """Return the text of the span with the largest sum of start and end logits, and that sum."""
    start = output.start_logits[0].numpy()
    end = output.end_logits[0].numpy()
    inside = [n for n, of in enumerate(tokens.sequence_ids()) if of == 1]
    sums = {}
    for a in inside:
        for b in inside:
            if a <= b < a + most:
                sums[a, b] = float(start[a] + end[b])
    a, b = max(sums, key=sums.__getitem__)
    spans = tokens["offset_mapping"]
    return context[spans[a][0] : spans[b][1]], sums[a, b]


def words_of(text: str) -> list[str]:
    """Return the words of an answer as SQuAD compares them, https://arxiv.org/abs/1606.05250 section 6.1."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def overlap(ones: list[str], others: list[str]) -> float:
    """Return the F1 of the words of two answers."""
    both = collections.Counter(ones) & collections.Counter(others)
    if not both:
        return 0.0
    return 2 * both.total() / (len(ones) + len(others))


def measured(task: str, rows: list[Row], found: list[Any]) -> Row:
    """Return the metrics of answers, computed by scikit-learn, by seqeval or by this module."""
    if task == "qa":
        exact = []
        f1 = []
        for row, text in zip(rows, found, strict=True):
            ours = words_of(text)
            theirs = words_of(row["answers"][0]["text"])
            exact.append(ours == theirs)
            f1.append(overlap(ours, theirs))
        return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(f1))}
    if task == "ner":
        from seqeval.metrics import f1_score

        return {"f1": float(f1_score([row["tags"] for row in rows], found))}
    from sklearn.metrics import f1_score

    truth = [row["label"] for row in rows]
    if task == "classify":
        return {"f1_macro": float(f1_score(truth, found, average="macro"))}
    if task == "regress":
        ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (truth, found)]
        return {"spearman": float(np.corrcoef(*ranks)[0, 1])}
    from sklearn.preprocessing import MultiLabelBinarizer

    flags = MultiLabelBinarizer().fit(truth)
    f1 = f1_score(flags.transform(truth), flags.transform(found), average="macro", zero_division=0)
    return {"f1_macro": float(f1)}


def predicted(task: str, data: Path, run: Path) -> tuple[list[Any], list[Any]]:
    """Return the answers and scores of `baretrain predict` for the validation rows, in the form of `answers`."""
    path = next(data.glob("validation.*"))
    output = run / "predicted.jsonl"
    harness.run(
        sys.executable,
        "-m",
        "train",
        "predict",
        str(run),
        f"data.path={path}",
        "--output",
        str(output),
    )
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    key = "answer" if task == "qa" else "prediction"
    found = [row[key] for row in rows]
    if task == "regress":
        return [round(value, 3) for value in found], [[value] for value in found]
    if task in ("qa", "ner"):
        return found, []
    scores = []
    for row in rows:
        by_name = sorted(row["probabilities"].items())
        scores.append([value for _, value in by_name])
    return found, scores


def score(task: str, data: Path, folder: Path, *, predicts: bool) -> Row:
    """Return the scores of `folder`/export, and of `baretrain predict` if it `predicts`."""
    if task == "mlm":
        return nats(data, folder / "export")
    rows = read(data, "validation")
    found, scores = answers(task, rows, folder / "export")
    result = measured(task, rows, found)
    if predicts:
        ours, our_scores = predicted(task, data, folder)
        result["predict_equal"] = float(
            np.mean([a == b for a, b in zip(ours, found, strict=True)])
        )
        if our_scores:
            result["predict_far"] = float(np.abs(np.array(our_scores) - np.array(scores)).max())
    return result


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
