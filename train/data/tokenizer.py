"""A tokenizer trained on the corpus (unigram pieces, as ALBERT's) or one that exists, and what training needs of it.

Trained with Google's sentencepiece library: the trainer of `tokenizers` gives another vocabulary every time, because
it walks hash maps in random order; sentencepiece gives the same one for the same text and number of threads. Used
through `tokenizers`, so that `transformers` loads the folder as any other fast tokenizer.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train.config import InputError, check
from train.data.documents import Document
from train.data.shards import TokenizerInfo
from train.storage import sha256_file

logger = logging.getLogger("train")

# ALBERT's special pieces in ALBERT's places, https://github.com/google-research/albert README, "SentencePiece"
PAD, UNK, CLS, SEP, MASK = "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"
TRAINER_THREADS = 16  # part of the result: sentencepiece adds its counts thread by thread
CHUNK_CHARS = 2 * 2**20  # text handed to the tokenizer at once; it spreads a chunk over all cores
CHUNKS_AHEAD = 2  # tokenised beside the packing
MAX_LINE_BYTES = 4000  # sentencepiece drops longer lines (its limit is 4192), so they are cut at a space


def normalizer(*, lowercase: bool) -> normalizers.Normalizer:
    """ALBERT's: LaTeX quotes to plain ones, compatibility decomposition, accents and case dropped, single spaces."""
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD()]
    if lowercase:
        steps += [normalizers.StripAccents(), normalizers.Lowercase()]
    return normalizers.Sequence([*steps, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, lowercase: bool, train_bytes: int
) -> PreTrainedTokenizerFast:
    """Learn a unigram vocabulary of `vocab_size` pieces from the first `train_bytes` of the texts.

    Raises:
        InputError: the text is too small for so many pieces; the message says how many it gives.
    """
    rule = normalizer(lowercase=lowercase)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=short_lines(texts, rule, train_bytes),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,  # the library's advice for alphabets; rarer characters become <unk>
            normalization_rule_name="identity",  # done by `rule`, the one that is used later too
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece=PAD,
            unk_piece=UNK,
            control_symbols=[CLS, SEP, MASK],
            num_threads=TRAINER_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise InputError(
            f"no tokenizer of tokenizer.vocab_size={vocab_size} pieces from this corpus: {reason}"
        ) from error
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1))
    tokenizer.normalizer = rule
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(CLS, 2), (SEP, 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNK, cls_token=CLS, sep_token=SEP, mask_token=MASK
    )


def short_lines(texts: Iterable[str], rule: normalizers.Normalizer, train_bytes: int) -> Iterator[str]:
    """Normalised lines of at most MAX_LINE_BYTES until `train_bytes` are given out."""
    given = 0
    for text in texts:
        for raw in text.splitlines():
            line = rule.normalize_str(raw)
            while line:
                head = line if len(line.encode()) <= MAX_LINE_BYTES else line[: MAX_LINE_BYTES // 4]
                if len(head) < len(line):
                    head = head.rpartition(" ")[0] or head
                given += len(head.encode())
                yield head
                line = line[len(head) :].lstrip()
            if given >= train_bytes:
                return


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """A fast tokenizer with the special tokens that masked language modelling needs, from the Hub or a folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"tokenizer {source} is not to be had: {reason}") from error
    check(tokenizer.is_fast, f"tokenizer {source} is a slow one (pure Python); only fast tokenizers are supported")
    tokenizer.backend_tokenizer.no_truncation()  # some are saved with it, and would cut every document short
    tokenizer.backend_tokenizer.no_padding()
    for name in ("cls_token", "sep_token", "mask_token", "pad_token"):
        check(getattr(tokenizer, name) is not None, f"tokenizer {source} has no {name}; masked models need one")
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> TokenizerInfo:
    """Write the files that `AutoTokenizer.from_pretrained(folder)` reads, and describe them."""
    tokenizer.save_pretrained(folder)
    return TokenizerInfo(
        sha256=sha256_file(folder / "tokenizer.json"),
        vocab_size=len(tokenizer),
        cls_id=tokenizer.cls_token_id,
        sep_id=tokenizer.sep_token_id,
        mask_id=tokenizer.mask_token_id,
        pad_id=tokenizer.pad_token_id,
        special_ids=sorted(tokenizer.all_special_ids),
    )


def text_pieces(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """[vocab] bool: False for [CLS], [SEP], [MASK] and padding, which structure sequences and which no text holds."""
    is_text = np.ones(len(tokenizer), bool)
    is_text[[tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id, tokenizer.pad_token_id]] = False
    return is_text


def check_same_vocabulary(source: str, folder: Path) -> None:
    """Refuse a pretrained model whose tokenizer is not the one in `folder`: its embeddings would be of other pieces.

    A model that comes without a tokenizer cannot be checked, and a warning says so.
    """
    try:
        theirs = load_tokenizer(source)
    except InputError as error:
        logger.warning("model.pretrained=%s comes without a tokenizer to compare with the data's (%s)", source, error)
        return
    ours = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    check(
        theirs.get_vocab() == ours,
        f"model.pretrained={source} has another tokenizer than the data; prepare it with tokenizer.pretrained={source}",
    )


def word_starts(folder: Path) -> np.ndarray:
    """[vocab] bool: True for pieces that begin a word (Metaspace, byte-level and WordPiece spelling)."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    if any(piece.startswith("##") for piece in pieces):
        return np.array([not piece.startswith("##") for piece in pieces])
    return np.array([piece.startswith(("▁", "Ġ")) for piece in pieces])


def chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def tokenised(
    source: Iterator[list[Document]], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Each chunk with its token ids, in order, the next being worked on meanwhile (tokenizers free the GIL)."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # "[SEP]" in a text is text
    is_text = text_pieces(tokenizer)

    def encode(chunk: list[Document]) -> tuple[list[Document], list[np.ndarray]]:
        found = backend.encode_batch_fast([document.text for document in chunk], add_special_tokens=False)
        ids = (np.array(encoding.ids, np.int64) for encoding in found)
        return chunk, [document[is_text[document]] for document in ids]  # a text may still spell "<pad>"

    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(encode, chunk) for chunk in islice(source, CHUNKS_AHEAD)]
        while pending:
            yield pending.pop(0).result()
            pending += [pool.submit(encode, chunk) for chunk in islice(source, 1)]
