import numpy as np
import pytest

from train.data.text.packing import Packer, Rows

CLS, SEP = 2, 3
STARTS = np.arange(1000) % 3 == 0  # every third piece begins a word


def packer(seq_len=16):
    return Packer(seq_len, CLS, SEP, STARTS, seed=5, dtype=np.dtype(np.uint16))


def documents(number, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 1000, rng.integers(1, longest)).tolist() for _ in range(number)]


def add(work, source):
    """Documents to the packer; what comes out."""
    tokens = np.array([token for document in source for token in document], np.int32)
    return work.add(tokens, np.array([len(document) for document in source], np.int64))


@pytest.mark.parametrize("longest", [4, 60, 500])
@pytest.mark.parametrize("seq_len", [8, 16, 33])
def test_nothing_is_lost_but_the_last_partial_sequence(seq_len, longest):
    work, source = packer(seq_len), documents(60, longest=longest)
    rows = add(work, source)
    assert (rows.tokens[:, 0] == CLS).all()
    assert (rows.tokens[:, -1] == SEP).all()
    text = rows.tokens[:, 1:-1]
    packed = [*text[text != SEP].tolist(), *work.stream[work.stream != SEP].tolist()]
    assert packed == [token for document in source for token in document]
    assert len(work.stream) <= seq_len


def test_the_pivot_is_behind_a_separator_and_within_a_document_at_a_word_start():
    rows = add(packer(), documents(200))
    line = np.arange(len(rows))
    assert (rows.tokens[line, rows.pivot - 1] == SEP).all()
    assert (rows.pivot >= 3).all() and (rows.pivot <= 14).all()  # at least one token on each side
    rows = add(packer(64), documents(2, longest=5000))
    inside = rows.same_document == 1
    begins = STARTS[rows.tokens[np.arange(len(rows)), rows.pivot]]
    assert begins[inside].mean() > 0.95  # the last place of a sequence may have none behind it


def test_a_document_end_inside_a_sequence_is_where_the_segments_part():
    rows = add(packer(), [list(range(100, 108)), list(range(200, 240))])
    first = rows.tokens[0].tolist()
    assert first[1:10] == [*range(100, 108), SEP]
    assert (rows.pivot[0], rows.same_document[0]) == (10, 0)
    assert rows.same_document[1] == 1


def test_documents_without_a_token_leave_no_separators():
    source = documents(80)
    rows = add(packer(), [part for document in source for part in ([], document, [], [])])
    np.testing.assert_array_equal(rows.tokens, add(packer(), source).tokens)


def test_the_sequences_do_not_depend_on_how_the_documents_arrive():
    source = documents(80)
    whole = add(packer(), source)
    one_by_one = packer()
    parts = Rows.concatenate([add(one_by_one, [document]) for document in source])
    for name in ("tokens", "pivot", "same_document"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
