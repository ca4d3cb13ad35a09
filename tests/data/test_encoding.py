"""Texts encoded word by word: the ids are those of the whole text, and other tokenizers get whole texts."""

import json
import random

import numpy as np
import pytest
from finetuning import byte_tokenizer, word_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from train.data.text.documents import Document
from train.data.text.encoding import encode, reads_words

# letters whose form depends on their neighbours, marks, signs that stand for several, kinds of blanks and controls
SIGNS = "aAeßΣ\u03c3ςéñ\u0131İ中文한½\u00b4¨ﬁ`'.,!▁\u0301\u0308\u0327\u200b\ufeff\x1c\x85\xa0\u2028\u3000\t\r\n"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def bert_tokenizer(**rules):
    pieces = ["[UNK]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", *".,!'`"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(**rules)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def form_of(tokenizer):
    return json.loads(tokenizer.to_str())


def texts():
    draw = random.Random(0)
    signs = [*SIGNS, *LETTERS, *"    ", "the ", " [SEP] ", "``", "''"]
    made = ["".join(draw.choices(signs, k=draw.randint(1, 60))) for _ in range(3000)]
    return ["the", " ", "\n", *made]


def encoded(tokenizer, *, by_words):
    tokenizer.encode_special_tokens = True
    documents = [Document(text, 0) for text in texts()]
    is_text = np.ones(tokenizer.get_vocab_size(), bool)
    is_text[1] = False  # lengths must follow
    return encode(documents, tokenizer, is_text, by_words=by_words)


@pytest.mark.parametrize(
    "name", ["bert", "cased bert", "bert that keeps controls", "trained here", "with accents"]
)
def test_words_have_the_ids_that_they_have_in_their_text(prepared, name):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    if "bert" in name:
        tokenizer = bert_tokenizer(
            lowercase=name != "cased bert", clean_text=name != "bert that keeps controls"
        )
    if name == "with accents":
        spaces, ends = list(tokenizer.normalizer)[-2:]
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, ends])
    assert reads_words(form_of(tokenizer))
    whole = encoded(tokenizer, by_words=False)
    words = encoded(tokenizer, by_words=True)
    assert np.array_equal(words.tokens, whole.tokens) and len(whole.tokens) > 10_000
    assert np.array_equal(words.lengths, whole.lengths)


def test_each_different_word_is_encoded_once():
    asked = []

    class Watched:
        def encode_batch_fast(self, texts, **options):
            asked.extend(texts)
            return tokenizer.encode_batch_fast(texts, **options)

    tokenizer = bert_tokenizer()
    documents = [Document("the sea the\nsea", 0), Document("sea the end", 0)]
    is_text = np.ones(tokenizer.get_vocab_size(), bool)
    encode(documents, Watched(), is_text, by_words=True)
    assert asked == ["the", "sea", "end"]


def test_tokenizers_whose_words_depend_on_spaces_get_whole_texts(prepared):
    with_phrase = bert_tokenizer()
    with_phrase.add_tokens([AddedToken("new york")])
    no_collapse = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    no_collapse.normalizer = normalizers.NFC()
    others = [with_phrase, no_collapse]
    others += [each.backend_tokenizer for each in (byte_tokenizer(), word_tokenizer(["a"]))]
    assert [reads_words(form_of(each)) for each in others] == [False] * 4
    form = form_of(bert_tokenizer())
    assert reads_words(form) and not reads_words(form | {"model": {"type": "BPE", "dropout": 0.1}})


@pytest.mark.parametrize(
    "step",
    [
        normalizers.Replace(" ", "_"),
        normalizers.Replace(" ,", ","),
        normalizers.Replace("_", "▁"),
        normalizers.Replace(Regex("a b"), "c"),
        normalizers.Prepend("a"),
    ],
)
def test_steps_of_a_normalizer_that_reach_over_words_get_whole_texts(prepared, step):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    local = list(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence([step, *local])
    assert not reads_words(form_of(tokenizer))
