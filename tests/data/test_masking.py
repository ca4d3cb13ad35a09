import hashlib

import numpy as np
import pytest
from finetuning import byte_tokenizer, word_tokenizer
from rejections import rejects
from running import SEQ_LEN, train_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast

from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.text.words import WordEdges, word_edges
from train.tasks import build_task

V, S, B = 2000, 64, 500
WORD_START = np.random.default_rng(3).random(V) < 0.6
WORDS = WordEdges(WORD_START, np.zeros(V, bool))


def masker(**changes):
    settings = {
        "seed": 1,
        "mask_rate": 0.15,
        "max_predictions": 12,
        "max_ngram": 3,
        "vocab_size": V,
    }
    return Masker(mask_id=4, special_ids=(0, 1, 2, 3, 4), **(settings | changes))


@pytest.fixture(scope="module")
def tokens():
    # as the shards hold them
    result = np.random.default_rng(0).integers(5, V, (B, S)).astype(np.uint16)
    result[:, 0], result[:, 20], result[:, -1] = 2, 3, 3
    return result


def draw(tokens, epoch=0, first_row=0, **changes):
    rows = first_row + np.arange(len(tokens))
    return masker(**changes)(tokens, np.full(len(tokens), epoch), rows)


@pytest.mark.parametrize(
    ("seq_len", "changes", "digest"),
    [
        (S, {}, "7be078895dfd"),
        (S, {"words": WORDS, "max_predictions": S}, "296e38589c13"),
        (7, {"max_ngram": 1, "max_predictions": 2}, "ad37a0c8ca58"),
        (3000, {"mask_rate": 0.4, "max_predictions": 1000}, "32735151103a"),
    ],
)
def test_masks_are_those_of_earlier_versions(seq_len, changes, digest):
    """A resumed run would read others."""
    tokens = np.random.default_rng(0).integers(5, V, (20, seq_len)).astype(np.uint16)
    tokens[:, 0] = 2
    result = draw(tokens, epoch=3, first_row=10**6, **changes)
    content = b"".join(
        part.tobytes() for part in (result.input_ids, result.positions, result.labels)
    )
    assert hashlib.sha256(content).hexdigest()[:12] == digest


@pytest.mark.parametrize("words", [None, WORDS], ids=["tokens", "words"])
@pytest.mark.parametrize("max_ngram", [1, 3])
def test_labels_are_the_hidden_tokens_and_everything_else_is_untouched(tokens, words, max_ngram):
    result = draw(tokens, words=words, max_ngram=max_ngram)
    used = result.labels != IGNORE_INDEX
    assert result.input_ids.shape == tokens.shape
    assert result.positions.shape == result.labels.shape == (B, 12)
    lines, _ = np.nonzero(used)
    assert (tokens[lines, result.positions[used]] == result.labels[used]).all()
    restored = result.input_ids.copy()
    restored[lines, result.positions[used]] = result.labels[used]
    assert (restored == tokens).all()
    for positions, in_use in zip(result.positions, used, strict=True):
        assert (np.diff(positions[in_use]) > 0).all()
    assert not np.isin(result.positions[used], [0, 20, S - 1]).any()  # those of special tokens
    put_in = result.input_ids[lines, result.positions[used]]
    assert set(put_in[put_in < 5]) == {4}
    if words is None:
        assert (used.sum(1) == round(0.15 * (S - 3))).all()
        capped = draw(tokens, max_predictions=5, max_ngram=max_ngram)
        assert ((capped.labels != IGNORE_INDEX).sum(1) == 5).all()


def test_of_the_hidden_tokens_80_percent_are_masked_10_replaced_10_kept(tokens):
    result = draw(np.concatenate([tokens] * 8))
    original = np.concatenate([tokens] * 8)
    number = (result.labels != IGNORE_INDEX).sum()
    masked = (result.input_ids == 4).sum() / number
    kept = 1 - (result.input_ids != original).sum() / number
    # 36,000 draws: three standard deviations are 0.006 and 0.005.
    assert masked == pytest.approx(0.8, abs=0.007)
    assert kept == pytest.approx(0.1, abs=0.006)


def neighbours(tokens, **changes):
    """Share of the hidden tokens before which the token is hidden too."""
    result = draw(tokens, max_predictions=60, **changes)
    is_used = result.labels != IGNORE_INDEX
    positions = np.where(is_used, result.positions, -9 * np.arange(1, 61))
    return (np.diff(positions) == 1).sum() / is_used.sum()


def test_run_lengths_follow_one_over_n():
    """Of a run of n tokens n - 1 follow another, with p(n) ~ 1/n for n up to 3: 7 of 18 tokens. A token that begins a
    run follows another by chance, at the rate of masking.
    """
    long = np.random.default_rng(0).integers(5, V, (B, 1000))
    chance = neighbours(long, max_ngram=1, mask_rate=0.05)
    assert chance == pytest.approx(0.05, abs=0.005)
    assert neighbours(long, max_ngram=3, mask_rate=0.05) == pytest.approx(
        7 / 18 + 11 / 18 * chance, abs=0.01
    )


def test_whole_words_are_hidden_whole(tokens):
    result = draw(tokens, words=WORDS)
    number = 0
    for row, positions, labels in zip(tokens, result.positions, result.labels, strict=True):
        hidden = set(positions[labels != IGNORE_INDEX].tolist())
        for position in hidden:
            after = position + 1
            if row[after] >= 5 and not WORD_START[row[after]]:
                assert after in hidden
            if not WORD_START[row[position]] and row[position - 1] >= 5:
                assert position - 1 in hidden
        number += len(hidden)
    assert 0.135 < number / (B * (S - 3)) <= 0.152  # a word that does not fit any more is left out


def test_of_a_word_that_is_longer_than_the_budget_a_part_is_hidden_anywhere_in_it(tokens):
    result = draw(
        np.concatenate([tokens] * 4), words=WordEdges(np.zeros(V, bool), np.zeros(V, bool))
    )
    is_used = result.labels != IGNORE_INDEX
    assert (is_used.sum(1) == round(0.15 * (S - 3))).all()
    assert all(
        (np.diff(row[used]) == 1).all()
        for row, used in zip(result.positions, is_used, strict=True)
    )
    counts = np.bincount(result.positions[is_used], minlength=S)
    assert set(np.flatnonzero(counts)) == {*range(1, 20), *range(21, S - 1)}


@pytest.mark.parametrize("kind", ["byte-level", "suffix", "words", "word pieces", "unigram"])
def test_words_are_those_of_the_tokenizers_encodings(kind, tokenizer, tmp_path):
    text = "ba be, na) x1.5 我们 ばか no! ba-be" if kind != "suffix" else "ba be, na bob"
    if kind == "unigram":
        fast = tokenizer
    elif kind == "word pieces":
        (tmp_path / "vocab.txt").write_text(
            "\n".join(["[UNK]", *"bendo我们", *(f"##{letter}" for letter in "aetsn")])
        )
        fast = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    else:
        fast = byte_tokenizer() if kind == "byte-level" else word_tokenizer(text.split())
    if kind == "suffix":
        pieces = {
            piece: n
            for n, piece in enumerate([*"abeno,", *(f"{letter}</w>" for letter in "abeno,")])
        }
        fast = Tokenizer(models.BPE(pieces, [], end_of_word_suffix="</w>"))
        fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=fast)
    fast.save_pretrained(tmp_path)
    edges = word_edges(tmp_path)
    encoding = fast.backend_tokenizer.encode(text, add_special_tokens=False)
    ids, words = np.array(encoding.ids), np.array(encoding.word_ids)
    begins = np.append(True, edges.begins[ids[1:]] | edges.ends[ids[:-1]])
    assert begins.tolist() == np.append(True, np.diff(words) != 0).tolist(), encoding.tokens


def test_sequences_with_nothing_to_hide_are_an_error_at_the_start(prepared, tmp_path, monkeypatch):
    task = build_task(train_config(tmp_path, prepared))
    rows = task.train_data()
    rows.draw(np.arange(16)[None])
    rows.masker.special[:] = True
    rejects(
        "of the first 32 sequences have no token that may be masked",
        rows.draw,
        np.arange(16)[None],
    )


def test_masks_are_the_same_whatever_the_batch_and_other_in_each_epoch_and_seed(tokens):
    whole = draw(tokens)
    parts = [draw(tokens[start : start + 7], first_row=start) for start in range(0, B, 7)]
    assert (whole.input_ids == np.concatenate([part.input_ids for part in parts])).all()
    assert (whole.labels == np.concatenate([part.labels for part in parts])).all()
    assert (draw(tokens, epoch=1).positions != whole.positions).mean() > 0.5
    assert (draw(tokens, seed=2).positions != whole.positions).mean() > 0.5


def test_an_evaluation_hides_15_percent_whatever_training_hides(prepared, tmp_path):
    for trained in (0.15, 0.3):
        task = build_task(train_config(tmp_path / "run", prepared, f"task.mask_rate={trained}"))
        for data, rate in ((task.train_data(), trained), (task.eval_data(), 0.15)):
            labels = data.draw(np.arange(4)[None])["inputs"]["labels"]
            assert (
                labels.shape == (1, 4, round(SEQ_LEN * rate))
                and (labels != IGNORE_INDEX).float().mean() > 0.7
            )
        assert task.predictions == round(SEQ_LEN * trained)
