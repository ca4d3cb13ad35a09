"""How well a tokenizer reads a text: no marks are lost by default, and what is lost or unknown is said."""

import re
from string import ascii_lowercase

import pytest
from finetuning import task_of, tuning
from rejections import rejects
from running import prepare_config, train_config
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from train.config import TrainConfig
from train.data.text.tokenizer import load_tokenizer, normalizer
from train.run import compose as cli
from train.tasks import build_task
from train.tools import prepare, records

# Japanese dakuten, Hindi vowel signs and nukta, Thai vowels and tones, Arabic, Korean, German, mathematics
MARKED = "がっこう पढ़ो किताब น้ำ ปู่ मेरी مُحَمَّد 한국어 über x² ``a``"


def test_lower_case_drops_no_mark_unless_that_is_asked_for():
    kept, stripped = (normalizer(lowercase=True, strip_accents=strips) for strips in (False, True))
    plain = normalizer(lowercase=False, strip_accents=False)
    for rule in (kept, plain):
        assert rule.normalize_str(MARKED) == plain.normalize_str(MARKED)
        assert len(rule.normalize_str(MARKED)) >= len(MARKED)
    assert kept.normalize_str("Über  ÜBER\n") == "über über"
    assert stripped.normalize_str("Über がく किताब ``x''") == 'uber かく कतब "x"'


def test_text_that_the_tokenizer_cannot_read_is_rejected_and_some_is_said(
    corpus, prepared, tmp_path, capsys
):
    ready = f"tokenizer.pretrained={prepared / 'tokenizer'}"
    lines = corpus.read_text().splitlines()
    (tmp_path / "text.txt").write_text(
        "\n".join(f"{line}\n{'我们' * 30 if line else ''}" for line in lines)
    )
    config = prepare_config(tmp_path / "out", tmp_path / "text.txt", ready)
    assert prepare.run(config) == 0
    assert "warning: the tokenizer reads the corpus with" in capsys.readouterr().out
    task = build_task(train_config(tmp_path / "run", tmp_path / "out"))
    assert task.remarks[0].startswith(
        f"warning: data.path={tmp_path / 'out'}: the tokenizer reads"
    )
    (tmp_path / "text.txt").write_text(corpus.read_text().replace("a", "我").replace("e", "们"))
    config = prepare_config(tmp_path / "none", tmp_path / "text.txt", ready, "rows_per_shard=16")
    rejects(
        "% unknown tokens, too many to learn from; choose a tokenizer", prepare.prepare, config
    )
    assert not list((tmp_path / "none").glob("*-*"))


@pytest.mark.parametrize(
    ("text", "has_remark"), [("ba be bi", False), ("ba be bi na no 😀 ba be", True)]
)
def test_records_and_train_say_the_share_of_unknown_tokens(
    text, has_remark, tokenizer_folder, tmp_path, capsys
):
    rows = "\n".join(f"{text} {number % 9 * 'na '},{'xy'[number % 2]}" for number in range(40))
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}\n")
    settings = [
        "task=classify",
        "data=csv",
        "seq_len=32",
        f"data.path={tmp_path / 't.csv'}",
        "data.validation_fraction=0.3",
    ]
    settings = tuning(tmp_path / "run", tokenizer_folder, *settings)
    remark = next(remark for remark in task_of(settings).remarks if "train: " in remark)
    assert remark.startswith("warning: ") == has_remark and "unknown tokens" in remark
    assert records.show(cli.load_config(TrainConfig, settings)) == 0
    assert remark in capsys.readouterr().out
    (tmp_path / "t.csv").write_text(f"text,label\n{re.sub('[aeio]', '我', rows)}\n")
    rejects("train: tokenizer .* unknown tokens, too many to learn from", task_of, settings)


@pytest.fixture
def dropping(tmp_path):
    """A BPE tokenizer of small letters without an unknown token, which drops all else."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    trainer = trainers.BpeTrainer(
        special_tokens=list(names), initial_alphabet=list(ascii_lowercase), vocab_size=60
    )
    backend.train_from_iterator(["ba be bi na no"] * 9, trainer)
    special = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token"), names, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(
        tmp_path / "dropping"
    )
    return tmp_path / "dropping"


def test_a_tokenizer_that_leaves_out_what_it_does_not_know_is_rejected(dropping):
    rejects("leaves out characters that it does not know", load_tokenizer, str(dropping))
