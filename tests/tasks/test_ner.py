"""Tags of words: words to tokens, the loss, entities by seqeval, what a run writes, and what is rejected."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from finetuning import (
    FP32,
    byte_tokenizer,
    read_rows,
    task_of,
    train_with,
    tuning,
    word_tokenizer,
    write_rows,
)
from rejections import rejects
from running import ROOT, lines
from transformers import AutoTokenizer

from train.config import ColumnsConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.files.errors import BadRow
from train.data.records.conll import conll_rows
from train.data.records.spans import words_of
from train.tasks.ner import NERFeaturizer, first_tokens, scores, tables
from train.tools import predict

ENTITIES = ROOT / "tests" / "inputs" / "entities.conll"
STEPS = 60
score = partial(scores, has_entities=True)


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory):
    """A tokenizer that knows each word of the sentences."""
    lines = ENTITIES.read_text().splitlines()
    folder = tmp_path_factory.mktemp("words")
    word_tokenizer(dict.fromkeys(line.split()[0] for line in lines if line)).save_pretrained(
        str(folder)
    )
    return folder


@pytest.fixture(scope="module")
def overrides(words_folder, tmp_path_factory):
    """Of a run that learns to find the entities, in batches of two lengths."""
    cache = tmp_path_factory.mktemp("cache")
    task = f"""task=ner data=records data.path={ENTITIES} data.validation_fraction=0.3 seq_len=48
        data.lengths=[24] data.cache_dir={cache} optim.lr=1e-2 model.hidden_dropout=0
        max_steps={STEPS} eval_every=30 micro_batch_size=4 log_every=10 best.metric=f1""".split()
    return lambda run_dir, *others: tuning(run_dir, words_folder, *task, *others)


@pytest.fixture(scope="module")
def trained(overrides, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    train_with(overrides(run_dir, "samples=4", "checkpoint.best=true"))
    return run_dir


@pytest.fixture(scope="module")
def predictions(trained):
    return read_rows(trained / "predictions/validation.jsonl")


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_the_first_token_of_a_word_has_its_tag(prepared, kind):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    if kind == "bytes":
        tokenizer = byte_tokenizer()
    words = ["sitting", "in", "na", "remona", "in", "bebo"]
    features = NERFeaturizer(tokenizer, seq_len=40).features(
        {"tokens": [words], "tags": [[5, 4, 3, 2, 1, 0]]}, [7], split="x"
    )
    (labels,), (ids,) = features["labels"], features["input_ids"]
    assert features["row"] == [7] and features["words"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert labels[labels != IGNORE_INDEX].tolist() == [5, 4, 3, 2, 1, 0] and len(labels) == len(
        ids
    ) > len(words)
    begins = [*np.flatnonzero(labels != IGNORE_INDEX), len(ids)]
    for word, first, end in zip(words, begins, begins[1:], strict=False):
        decoded = tokenizer.decode(ids[first:end], skip_special_tokens=True)
        assert decoded.replace(" ", "").lower() == word.lower(), (word, decoded)


def test_words_without_a_token_have_no_label(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")

    def encode(words, most):
        return tokenizer(" ".join(words), truncation=True, max_length=most).encodings[0]

    read, tokens = first_tokens(
        encode(["in", "\u200d" * 3, "San"], 20), ["in", "\u200d" * 3, "San"]
    )
    assert set(read) >= {0, 2} and len(set(tokens)) == len(tokens)
    words = ["in"] * 30
    read, tokens = first_tokens(encode(words, 10), words)
    assert read.tolist() == list(range(len(read))) and 0 < len(read) < 10
    assert [each.tolist() for each in first_tokens(encode([""], 10), ["x"])] == [[], []]


def test_entities_are_right_as_a_whole():
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-ORG"]]
    assert score(truth, predicted) == pytest.approx(
        {"precision": 1 / 3, "recall": 0.5, "f1": 0.4, "accuracy": 0.6}
    )
    scores = tables(truth, predicted)
    assert scores["labels"] == ["LOC", "ORG", "PER"]
    assert scores["per_class"]["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
    assert [scores["per_class"][kind]["support"] for kind in ("ORG", "PER")] == [0, 1]
    assert score([["O"]], [["O"]])["f1"] == 0 and not tables([["O"]], [["O"]])["per_class"]
    bilou = [["B-PER", "L-PER", "U-LOC", "U-LOC"], ["B-PER", "I-PER", "L-PER"]]
    assert score(bilou, bilou) == dict.fromkeys(("precision", "recall", "f1", "accuracy"), 1.0)
    assert tables(bilou, bilou)["per_class"]["LOC"]["support"] == 2  # side by side
    bioes = [["B-PER", "E-PER", "S-LOC", "S-LOC"], ["B-PER", "I-PER", "E-PER"]]
    assert score(bioes, bioes) == dict.fromkeys(("precision", "recall", "f1", "accuracy"), 1.0)
    assert tables(bioes, bioes)["per_class"]["LOC"]["support"] == 2  # side by side


def test_it_learns(trained, predictions):
    last = lines(trained, "eval")[-1]
    assert last["f1"] > 0.6, last  # the most frequent tag, O, has 0
    truth, predicted = ([line[name] for line in predictions] for name in ("tags", "prediction"))
    evaluation = json.loads((trained / "evaluation.json").read_text())
    scores = evaluation["splits"]["validation"]
    assert {name: scores[name] for name in score(truth, predicted)} == score(truth, predicted)
    assert set(scores["per_class"]) >= {"LOC", "ORG", "PER"}
    (answer, *_) = json.loads((trained / "samples.json").read_text())["samples"][0]["answers"]
    assert "/B-" in answer["truth"] or not answer["truth"]
    labels = json.loads((trained / "export/config.json").read_text())["id2label"].values()
    assert set(labels) == {
        "O",
        *(f"{place}-{kind}" for place in "BI" for kind in ("LOC", "ORG", "PER")),
    }
    card = (trained / "export/README.md").read_text()
    assert (
        "pipeline_tag: token-classification" in card
        and "AutoModelForTokenClassification" not in card
    )


def test_new_words_are_tagged(trained, predictions, tmp_path, capsys):
    rows = [{"id": line["id"], "tokens": line["tokens"]} for line in predictions]
    files = [f"data.path={write_rows(tmp_path / 'new.jsonl', rows)}"]
    files += ["--output", str(tmp_path / "out.jsonl")]
    assert predict.main([str(trained), *FP32, *files]) == 0
    found = read_rows(tmp_path / "out.jsonl")
    assert [line["prediction"] for line in found] == [line["prediction"] for line in predictions]
    capsys.readouterr()
    assert predict.main([str(trained), *FP32, "--tokens", "Anna Meier lives in Bonn ."]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["prediction"]) == 6
    for entity in answer["entities"]:
        assert entity["text"] == " ".join(answer["tokens"][entity["first"] : entity["last"] + 1])
        assert 0 < entity["probability"] <= 1


def sentence_of(*lines, end="\n\n"):
    return "\n".join(lines) + end


GERMAN = (
    sentence_of("1\tAnna\tB-PER\tO", "2\t99\tO\tO", "3\tUni\tB-ORG\tO", "4\tBonn\tI-ORG\tB-LOC")
    * 4
)
UNIVERSAL = "# text = in 99\n" + "".join(
    f"{number}\t{word}\t_\t{tag}" + "\t_" * 6 + "\n"
    for number, word, tag in [
        ("1-2", "im", "_"),
        ("1", "in", "ADP"),
        ("2", "dem", "DET"),
        ("2.1", "x", "X"),
        ("3", "#", "SYM"),
    ]
)
COMMENTED = (
    "# id 0\tdomain=en\n# a b\n# O\n"
    + sentence_of("Anna B-PER", "# O")
    + "# id 1\n# O\nBonn S-LOC\n\n"
)
IN_COLUMNS = {  # a file, settings, and its words with their tags
    "german": (GERMAN, {"tokens": "1", "tags": "2"}, "Anna/B-PER 99/O Uni/B-ORG Bonn/I-ORG"),
    "german, the last": (GERMAN, {"tokens": "1"}, "Anna/O 99/O Uni/O Bonn/B-LOC"),
    "universal": (UNIVERSAL, {"tokens": "1", "tags": "-7"}, "in/ADP dem/DET #/SYM"),
    "commented": (COMMENTED, {}, "#/O Anna/B-PER #/O"),
    "few numbers": ("2024 O\n", {}, "2024/O"),
    "phrases": (
        sentence_of("Anna NNP B-NP B-PER", "rests VBZ I-VP O"),
        {},
        "Anna/B-PER rests/O",
    ),  # CoNLL-2003's
}


@pytest.mark.parametrize("case", IN_COLUMNS)
def test_words_and_tags_are_in_the_columns_of_the_settings(case):
    content, columns, wanted = IN_COLUMNS[case]
    rows = [
        row
        for _, row in conll_rows(
            content.splitlines(True), "a.conll", "utf-8", ColumnsConfig(**columns)
        )
    ]
    assert " ".join(map("/".join, zip(rows[0]["tokens"], rows[0]["tags"], strict=True))) == wanted
    if case == "commented":
        assert rows[1] == {"tokens": ["#", "Bonn"], "tags": ["O", "S-LOC"]}


NO_COLUMNS = [
    ({"tokens": "4"}, r"a\.conll:1: data.columns.tokens=4 is not a column: columns are 0 to 3"),
    ({"tags": "x"}, "data.columns.tags=x is not a column"),
    ({"tokens": "-1"}, "both column 3"),
]


@pytest.mark.parametrize(("columns", "message"), NO_COLUMNS)
def test_columns_that_a_file_lacks_are_rejected_with_the_setting(columns, message):
    rows = conll_rows(GERMAN.splitlines(True), "a.conll", "utf-8", ColumnsConfig(**columns))
    rejects(message, list, rows)


TEXT = "Mira Lund, Bonn: $5"
SPANS = {
    "lists": [[0, 9, "PER"], [11, 15, "LOC"]],
    "in any order": [[11, 15, "LOC"], [0, 9, "PER"]],
    "objects": [
        {"start": 0, "end": 9, "label": "PER"},
        {"start": 11, "end": 15, "label": "LOC"},
    ],
    "next to blanks": [[0, 9, "PER"], [10, 15, "LOC"]],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_spans_of_characters_become_tags_of_words(spans):
    words, tags = words_of(TEXT, spans, "label")
    if spans == SPANS["next to blanks"]:
        assert dict(zip(words, tags, strict=True))["Bonn"] == "B-LOC"
    else:
        assert (
            words == ["Mira", "Lund", ",", "Bonn", ":", "$5"]
            and tags == "B-PER I-PER O B-LOC O O".split()
        )
    assert words_of(TEXT, [], "label") == (TEXT.split(), ["O"] * 4)


BAD_SPANS = [
    ([[0, 4, "PER"], [3, 9, "PER"]], "two spans overlap at character 3"),
    ([[0, 99, "PER"]], r"not \[first, last, type\] in a text of 19 characters"),
    ([[4, 4, "PER"]], "holds the span"),
    ([["PER", 0, 4]], "holds the span"),
    (["B-PER"], "holds the span 'B-PER'"),
    ([{"start": 0}], "holds the span"),
    ("B-PER", r"if each row is a word, join sentences: pandas\.read_csv.*data\.format=conll"),
]


@pytest.mark.parametrize(("spans", "message"), BAD_SPANS, ids=str)
def test_spans_that_mark_no_words_are_bad_rows(spans, message):
    rejects(message, words_of, TEXT, spans, "label", error=BadRow)


def test_texts_with_spans_are_learnt_and_types_may_have_blanks(overrides, tmp_path):
    names = [" ".join(["Anna"] * size) for size in range(1, 21)]
    rows = [
        {"text": f"{name} lives in Bonn", "label": [[0, len(name), "Person Name"]]}
        for name in names
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    given = overrides(tmp_path / "run", f"data.path={tmp_path}/a.json")
    task = task_of([*given, "data.columns.tokens=text", "data.columns.tags=label"])
    assert task.labels == ["B-Person Name", "I-Person Name", "O"]
    read = [row for split in ("train", "validation") for row in task.tables.examples(split)]
    tags = {len(row["tokens"]): [task.labels[tag] for tag in row["tags"]] for row in read}
    assert tags[5] == ["B-Person Name", "I-Person Name", "O", "O", "O"] and len(tags) == 20


def test_a_token_beyond_the_vocabulary_of_the_model_is_rejected_before_the_first_step(
    overrides, words_folder, tmp_path
):
    content = json.loads((words_folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    far = len(vocabulary) + 3
    vocabulary["Bonn"] = far
    shutil.copytree(words_folder, tmp_path / "gap")
    (tmp_path / "gap/tokenizer.json").write_text(json.dumps(content))
    given = overrides(
        tmp_path / "run", f"model.tokenizer={tmp_path}/gap", f"data.cache_dir={tmp_path}"
    )
    rejects(
        f"the data has the token id {far}, but the model has {far - 3} tokens; set model.vocab_size above it",
        task_of,
        given,
    )
    assert task_of([*given, f"model.vocab_size={far + 1}"]).train_rows > 0


def test_tags_without_prefixes_are_scored_by_the_word(words_folder, tmp_path, capsys):
    tags = ["PROPN AUX ADP PROPN PUNCT", "PRON AUX ADP PROPN PUNCT"]
    words = ["Anna lives in Bonn .", "She sings in Paris ."]
    pairs = [zip(words[n % 2].split(), tags[n % 2].split(), strict=True) for n in range(40)]
    (tmp_path / "pos.conll").write_text(
        "".join(sentence_of(*map(" ".join, pair)) for pair in pairs)
    )
    shutil.copy(tmp_path / "pos.conll", tmp_path / "dev.conll")
    words = f"""task=ner task.scheme=none data=records data.path={tmp_path} data.train=pos.conll
        data.validation=dev.conll seq_len=16 data.cache_dir={tmp_path}/cache optim.lr=1e-2
        max_steps=30 eval_every=30 micro_batch_size=8 best.metric=accuracy samples=1""".split()
    train_with(tuning(tmp_path / "run", words_folder, *words, "checkpoint.best=true"))
    scores = json.loads((tmp_path / "run/evaluation.json").read_text())["splits"]["validation"]
    assert scores["accuracy"] > 0.8 and "f1" not in scores
    assert (
        scores["labels"] == ["ADP", "AUX", "PRON", "PROPN", "PUNCT"]
        and scores["per_class"]["AUX"]["support"] == 40
    )
    (sample,) = json.loads((tmp_path / "run/samples.json").read_text())["samples"]
    assert sample["answers"][0]["truth"] == "Anna/PROPN lives/AUX in/ADP Bonn/PROPN ./PUNCT"
    for source in ("run", "run/export"):  # with the run's settings, and without
        assert predict.main([str(tmp_path / source), *FP32, "--tokens", "Anna " * 20]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (
            set(answer) - {"tokens_cut"} == {"id", "tokens", "prediction"}
            and len(answer["prediction"]) == 20
        )


GOOD = "Anna B-PER\nsings O\n\nBonn B-LOC\n\n"


@pytest.mark.parametrize(
    ("content", "says"),  # of the training data, or a row of the validation data
    [
        (GOOD + "Tom x B-PER\n", r"a\.conll:6: 3 columns where the first word has 2"),
        (
            GOOD + "he O\nTom X-PER\n",
            r"a\.conll:6: word 2, 'Tom': the tag X-PER is neither O nor a type with a prefix.*scheme=none",
        ),
        (GOOD + "To\0m O\n", r"a\.conll:6: a NUL character"),
        ("Anna\nsings\n", r"a\.conll:1: no column tags"),
        ("", r"train: no row is left: of .*a\.conll"),
        (
            {"tokens": ["Tom"], "tags": [["O"]]},
            r"dev\.jsonl:1: word 1, 'Tom': \['O'\] instead of a tag: task=ner learns one for each word",
        ),
        ("he O\n" * 10_001, r"a\.conll:10001: a sentence of more than 10,000 words"),
        (
            {"tokens": ["Tom"], "tags": ["B-ORG"]},
            r"dev\.jsonl:1: word 1, 'Tom': unknown label B-ORG",
        ),
        ({"tokens": ["Tom"], "tags": ["O", "O"]}, r"dev\.jsonl:1: 1 words need a list of 1 tags"),
        ({"tokens": ["Tom", " "], "tags": ["O", "O"]}, r"dev\.jsonl:1: tokens: item 2 is empty"),
        (
            {"tokens": "Tom", "tags": ["O"]},
            r"dev\.jsonl:1: tokens holds 'Tom', not a list of strings",
        ),
    ],
)
def test_what_is_no_sentence_is_rejected_in_one_line(overrides, tmp_path, content, says):
    is_row = isinstance(content, dict)
    (tmp_path / "a.conll").write_text(GOOD if is_row else content)
    (tmp_path / "dev.jsonl").write_text(
        json.dumps(content if is_row else {"tokens": ["Anna"], "tags": ["B-PER"]})
    )
    given = [f"data.path={tmp_path}", "data.train=a.conll", "data.validation=dev.jsonl"]
    words = [
        word for word in overrides(tmp_path / "run", *given) if "validation_fraction" not in word
    ]
    rejects(says, task_of, words)
