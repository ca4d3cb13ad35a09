import hashlib

import numpy as np
import pytest
from finetuning import byte_tokenizer, word_tokenizer
from running import SEQ_LEN, train_config

from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.text.encoding import starts_of
from train.tasks import build_task

V, S, B = 2000, 64, 500
WORD_START = np.random.default_rng(3).random(V) < 0.6
WORDS = WORD_START


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


def test_of_an_only_word_that_is_longer_than_the_budget_a_part_at_a_random_place_is_hidden():
    tokens = np.full((B, S), 7)
    tokens[:, 0] = 2
    result = draw(tokens, words=np.zeros(V, bool))
    number = round(0.15 * (S - 1))
    hidden = result.positions[:, :number]
    assert ((result.labels != IGNORE_INDEX).sum(1) == number).all()
    assert (np.diff(hidden) == 1).all()
    assert set(hidden[:, 0]) == set(range(1, S - number + 1))


def test_a_budget_of_the_whole_sequence_cuts_no_word():
    tokens = np.random.default_rng(0).integers(5, V, (B, S))
    result = draw(tokens, words=WORDS, mask_rate=1.0, max_predictions=S)
    assert (result.positions == np.arange(S)).all() and (result.labels == tokens).all()


@pytest.mark.parametrize("kind", ["byte-level", "words", "unigram"])
def test_words_begin_where_a_text_has_blanks(kind, tokenizer):
    text = "ba be na no"
    made = {"byte-level": byte_tokenizer(), "words": word_tokenizer(text.split())}
    encoding = made.get(kind, tokenizer).backend_tokenizer.encode(text, add_special_tokens=False)
    begins = starts_of(made.get(kind, tokenizer).backend_tokenizer)[encoding.ids]
    assert begins[1:].tolist() == (np.diff(encoding.word_ids) != 0).tolist(), encoding.tokens


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
