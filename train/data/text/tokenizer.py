"""A tokenizer trained on the corpus (unigram pieces, as ALBERT's) or an existing one, and its facts for training.

Trained with Google's sentencepiece library: the trainer of `tokenizers` makes a different vocabulary every time,
because it walks hash maps in random order; sentencepiece makes the same one for the same text and number of threads.
Used through `tokenizers`, so that `transformers` loads the folder as any other fast tokenizer.
"""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import logging as their_logging

from train.config import MIN_VOCAB_SIZE, InputError, check
from train.data.shards.format import TokenizerInfo
from train.data.text.encoding import Vocabulary
from train.system.folders import Folder, scratch_folder, sha256_bytes
from train.system.hub_access import asking_hub, fetched, hub_or_path, why_missing
from train.system.memory import available_bytes
from train.system.model_folder import models_below, read_model_json, read_tokenizer_json
from train.system.schema import Sha256, shown

logger = logging.getLogger("train")

# ALBERT's special pieces in ALBERT's places, https://github.com/google-research/albert README, "SentencePiece"
PAD, UNK, CLS, SEP, MASK = "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"
TRAINER_THREADS = 16  # part of the result: sentencepiece adds its counts thread by thread
PUBLISHED = "tokenizer/tokenizer.json"
FILES = [
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
]  # at the Hub
PIECES = ("tokenizer.json", "vocab*", "*.model")
NO_PIECES = "it has no tokenizer.json or vocabulary file"
ANY_FAST = "PreTrainedTokenizerFast"  # in files of transformers 4, for a tokenizer.json of any model
# The trial reads a tokenizer.json, and text of all scripts with it: damage in its tables makes the library's Rust code
# panic, or ends the process, where no `except` helps. Of CJK, Hangul and characters without letters every 97th is
# enough.
TRIAL = """
import sys
sys.path[:] = sys.argv[2:]
from itertools import chain
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.no_truncation()
tokenizer.no_padding()
alphabets = range(0x3400), range(0xF900, 0x10000), range(0x1D000, 0x20000)
text = "".join(map(chr, chain(*alphabets, range(0x3400, 0xD800, 97), range(0x20000, 0x110000, 97))))
tokenizer.decode(tokenizer.encode("a b " + text).ids)
"""
MOST_IDS = 2  # per piece: some vocabularies have holes
TRAINER_BYTES = 20  # of memory for each byte of text that sentencepiece reads; 19 were measured (benchmarks/notes.md)
MAX_LINE_BYTES = 4000  # sentencepiece drops longer lines (its limit is 4192), so they are cut at a space


def normalizer(*, lowercase: bool, strip_accents: bool) -> normalizers.Normalizer:
    """Return a normalizer to one spelling of each character and single spaces.

    `strip_accents` is for English text as ALBERT read it: LaTeX quotes to plain ones, compatibility decomposition, and
    no marks, which other languages write vowels with.
    """
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    if strip_accents:
        quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps = [*quotes, normalizers.NFKD(), normalizers.StripAccents()]
    case = [normalizers.Lowercase()] if lowercase else []
    return normalizers.Sequence([*steps, *case, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, train_bytes: int, lowercase: bool, strip_accents: bool = False
) -> PreTrainedTokenizerFast:
    """Learn a unigram vocabulary of `vocab_size` pieces from the first `train_bytes` of the texts.

    Raises InputError if the text is too small for this number of pieces; the message says how many it allows.
    """
    rule = normalizer(lowercase=lowercase, strip_accents=strip_accents)
    model, failures = io.BytesIO(), list[BaseException]()

    def lines() -> Iterator[str]:
        try:
            yield from short_lines(texts, rule, train_bytes)
        except BaseException as error:  # the library would wrap it
            failures.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,  # the library's advice for alphabets; rarer characters become <unk>
            normalization_rule_name="identity",  # done by `rule`, which is also used later
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
        if failures:
            raise failures[0] from None
        raise InputError(unfit(vocab_size, str(error))) from error
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


def check_trainer_memory(num_bytes: int) -> str:
    """Return a text on the memory for training a tokenizer on this many bytes. Raises InputError if there is less."""
    needed, free = TRAINER_BYTES * num_bytes, available_bytes()
    what = f"the tokenizer is trained on {num_bytes / 1e6:,.3g} MB of text, which takes about {needed / 1e9:.2g} GB"
    most = f"tokenizer.train_bytes={free // TRAINER_BYTES} or less"
    check(needed <= free, f"{what} of memory, and {free / 1e9:.2g} GB are free; set {most}")
    return f"{what} of memory"


def unfit(vocab_size: int, error: str) -> str:
    """Return the reason why sentencepiece made no vocabulary of this size, and a size that the text allows."""
    given = f"tokenizer.vocab_size={vocab_size}"
    if most := re.search(r"too high .*<= (\d+)", error):
        smaller = f"set tokenizer.vocab_size={most[1]} or less, or " if int(most[1]) >= MIN_VOCAB_SIZE else ""
        return f"{given} is more than this text can fill: {smaller}give more text"
    if fewest := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return f"{given} is fewer than the characters of this text: set tokenizer.vocab_size={fewest[1]} or more"
    return f"{given}: no tokenizer can be made from this text ({error.rsplit('] ', 1)[-1].strip() or 'it is empty'})"


def short_lines(texts: Iterable[str], rule: normalizers.Normalizer, train_bytes: int) -> Iterator[str]:
    """Yield normalised lines of at most MAX_LINE_BYTES, of `train_bytes` in all."""
    given = 0
    for text in texts:
        for raw in text.splitlines():
            line, start = rule.normalize_str(raw), 0
            while start < len(line):
                head = line[start : start + MAX_LINE_BYTES + 1]  # if that is too long in bytes, the rest is too
                if len(head.encode()) > MAX_LINE_BYTES:
                    head = head[: MAX_LINE_BYTES // 4]
                    head = head.rpartition(" ")[0] or head
                given += len(head.encode())
                yield head
                start += len(head)
                while line[start : start + 1].isspace():
                    start += 1
            if given >= train_bytes:
                return


def load_tokenizer(
    source: str, *, needs: Sequence[str] = ("cls_token", "sep_token", "mask_token", "pad_token")
) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer from the Hub or a folder, which neither cuts nor pads.

    Raises InputError if it cannot be loaded, is slow, or lacks a special token that is needed.
    """
    source = hub_or_path(source)
    try:
        with quiet(), asking_hub(source):
            folder = fetched(source, FILES)
            config = tokenizer_config(source, folder)
            has_pieces = any(path.is_file() for pattern in PIECES for path in folder.glob(pattern))
            check(has_pieces, f"tokenizer {source} cannot be loaded: {NO_PIECES}{models_below(folder)}")
            if (folder / "tokenizer.json").is_file():
                try_tokenizer(folder)
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
    except InputError:
        raise
    except BaseException as error:  # tokenizers raises a plain one if a file is not a tokenizer's
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        why = why_missing(source, error)
        raise InputError(f"tokenizer {source} cannot be loaded: {why}; without the Hub give a folder") from error
    check(
        tokenizer.is_fast,
        f"tokenizer {source} is a slow one ({type(tokenizer).__name__}, pure Python): it does not know which "
        "characters a token is from; choose a fast one (tokenizer.json)",
    )
    check(
        len(tokenizer) > len(tokenizer.all_special_ids),  # transformers makes such a tokenizer if there is no file
        f"tokenizer {source} cannot be loaded: {NO_PIECES}",
    )
    for name in needs:
        check(getattr(tokenizer, name) is not None, f"tokenizer {source} has no {name}, which the model needs")
    piece, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    check(
        last < MOST_IDS * len(tokenizer),
        f"tokenizer {source}: piece {shown(piece)} has the number {last}, though there are {len(tokenizer)} pieces",
    )
    tokenizer.chat_template = None  # an encoder has none, and saved ones are files with names of the template's choice
    tokenizer.backend_tokenizer.no_truncation()  # some are saved with it, and would cut every text short
    tokenizer.backend_tokenizer.no_padding()
    for given in (("",), ("", "")):
        added = max(tokenizer.backend_tokenizer.encode(*given).ids, default=0)  # by its post-processor alone
        check(added <= last, f"tokenizer {source} adds a token of number {added}, and its pieces have 0 to {last}")
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer, numbered behind its own.

    Raises InputError if it has one of them already, or would not find it in a text.
    """
    known, first = tokenizer.get_vocab(), len(tokenizer)
    ok = not tokens or max(known.values()) < first
    check(ok, f"tokenizer.add_tokens: numbers below {first} are not used by the tokenizer, so that it cannot grow")
    for token in tokens:
        given = f"tokenizer.add_tokens: {shown(token)}"
        check(token not in known, f"{given} is a piece of the tokenizer already; leave it out")
        tokenizer.add_tokens(token)
        known[token] = first
    for number, token in enumerate(tokens, first):  # of two that are one without capitals, either may be found
        read = tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids
        given = f"tokenizer.add_tokens: {shown(token)}"
        check(read == [number], f"{given} cannot be added: the tokenizer reads it as {read}, not as [{number}]")


def tokenizer_config(source: str, folder: Path) -> PreTrainedConfig:
    """Return a configuration of transformers that only names the tokenizer's model: config.json is read here.

    Raises BadContent if transformers must not see the files, InputError if the class is not a fast tokenizer.
    """
    values, settings = read_model_json(folder) or {}, read_tokenizer_json(folder)
    config = AutoConfig.for_model(values["model_type"]) if values else PreTrainedConfig()
    config.tokenizer_class = values.get("tokenizer_class")
    for name in map(str, filter(None, (settings.get("tokenizer_class"), config.tokenizer_class))):
        variants = (name, name.removesuffix("Fast"), f"{name}Fast")  # transformers tries all, of all its classes
        for variant in variants if name != ANY_FAST else ():
            found: Any = tokenizer_class_from_name(variant)
            check(
                found is None or (isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast)),
                f"tokenizer {source} is a slow one ({name}, pure Python) or none: a fast one knows which characters a "
                "token is from; choose one (tokenizer.json)",
            )
    return config


def try_tokenizer(folder: Path) -> None:
    """Raise InputError if the tokenizer.json of a folder cannot be read and used, in a process that it may end."""
    command = [sys.executable, "-I", "-c", TRIAL, str(folder / "tokenizer.json"), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"it ends a process with {done.returncode}"])[-1]
        raise InputError(f"tokenizer {folder} cannot be loaded: its tokenizer.json is damaged ({why})")


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared data set. Raises InputError if it is damaged."""
    try_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' tables and progress bars: our errors have the important parts of them, in one line."""
    level, had_bars = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if had_bars:
            their_logging.enable_progress_bar()


def publish_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Folder) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads into `tokenizer/`, unless another process has."""
    # tokenizer.json comes last: if it exists, the others do.
    with scratch_folder() as temporary:
        tokenizer.save_pretrained(str(temporary))
        files = {path.relative_to(temporary).as_posix(): path for path in temporary.rglob("*") if path.is_file()}
        for name in sorted(files, key=lambda name: (name == "tokenizer.json", name)):
            folder.create(f"tokenizer/{name}", files[name].read_bytes())


def published_vocabulary(folder: Folder) -> Vocabulary:
    """Return the tokenizer that `publish_tokenizer` wrote, in this or another process."""
    with scratch_folder() as temporary:
        for name in folder.names("tokenizer/"):
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(folder.read(name))
        tokenizer = load_tokenizer(str(temporary / "tokenizer"))
    info = TokenizerInfo(
        sha256=Sha256(sha256_bytes(folder.read(PUBLISHED))),
        vocab_size=len(tokenizer),
        cls_id=tokenizer.cls_token_id,
        sep_id=tokenizer.sep_token_id,
        mask_id=tokenizer.mask_token_id,
        pad_id=tokenizer.pad_token_id,
        special_ids=sorted(tokenizer.all_special_ids),
    )
    return Vocabulary(tokenizer.backend_tokenizer.to_str(), info, tokenizer.unk_token_id)


def check_same_vocabulary(
    source: str, ours: dict[str, int], rejection: str, *, added: Collection[str] = ()
) -> dict[int, str]:
    """Return those of the `added` tokens that a pretrained model's tokenizer lacks, by their numbers.

    Raises InputError with `rejection` if its vocabulary differs in anything else: its embeddings would be of other
    pieces. A model without a tokenizer cannot be checked, and a warning says so.
    """
    try:
        theirs = load_tokenizer(source, needs=())
    except InputError as error:
        logger.warning("model.pretrained=%s has no tokenizer to compare with (%s)", source, error)
        return {}
    known = theirs.get_vocab()
    new = {ours[token]: token for token in added if token not in known}
    check(known == {piece: number for piece, number in ours.items() if number not in new}, rejection)
    return new
