"""The tokenizer of a corpus: trained on the corpus (unigram pieces, like ALBERT's) or an existing one.

Google's sentencepiece library trains it; the same text and thread count yield the same vocabulary. The trainer in the
library `tokenizers` yields a different one every time, because it iterates over hash maps in random order. `tokenizers`
does run the trained tokenizer, so that `transformers` loads its folder like that of any other fast tokenizer.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import logging as their_logging

from train.config import InputError, check
from train.data.shards.manifest import TokenizerInfo
from train.data.text.encoding import Vocabulary, take_ends
from train.machine.memory import available_bytes
from train.storage.folders import Folder, scratch_folder, sha256_bytes
from train.storage.foreign import check_folder
from train.storage.hub_access import asking_hub, fetched, hub_or_path, is_at_hub, why_missing
from train.storage.model_folder import read_model_json, read_tokenizer_json
from train.storage.schema import Sha256, shown

logger = logging.getLogger("train")

# ALBERT's special pieces, with ALBERT's ids: https://github.com/google-research/albert README, "SentencePiece"
PAD = "<pad>"
UNK = "<unk>"
CLS = "[CLS]"
SEP = "[SEP]"
MASK = "[MASK]"
# The count changes the result: sentencepiece adds up its statistics thread by thread.
TRAINER_THREADS = 16
UNIGRAM: dict[str, Any] = {
    "model_type": "unigram",
    # the library's advice for alphabets; rarer characters become <unk>
    "character_coverage": 0.9995,
    # `normalizer` normalises instead, in training and in use
    "normalization_rule_name": "identity",
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "pad_piece": PAD,
    "unk_piece": UNK,
    "control_symbols": [CLS, SEP, MASK],
    "num_threads": TRAINER_THREADS,
    "minloglevel": 2,
}
PUBLISHED = "tokenizer/tokenizer.json"
# the files to fetch from the Hub
FILES = [
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
]
PIECES = ("tokenizer.json", "vocab*", "*.model")
ANY_FAST = "PreTrainedTokenizerFast"  # the class name that transformers 4 writes for any model's tokenizer.json
# The trial loads a tokenizer.json, and encodes text of all scripts and repeated characters with it. If its tables are
# damaged, the library's Rust code panics or ends the process, which `except` cannot catch. Every 97th character of CJK,
# of Hangul and of the ranges after them is enough.
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
for piece in ("a", "1", " ", "a1", "a ", "\\n", "a.", "-"):
    tokenizer.encode(piece * 4000 + "!")
"""
TRIAL_S = 120  # a usual one takes a second; a regular expression may need time that grows exponentially with the text
# A sign that few vocabularies have.
UNUSUAL = "\U00012000"
MOST_IDS = 2  # maximum ratio of ids to pieces; it is above 1 because some vocabularies skip ids
TRAINER_BYTES = 20  # bytes of memory per byte of text that sentencepiece reads; 19 measured (benchmarks/notes.md)
TOO_LITTLE_MEMORY = (
    f"training the tokenizer takes {TRAINER_BYTES} bytes of memory per byte of text, more than is free; set "
    "tokenizer.train_bytes={most} or less"
)
# sentencepiece drops longer lines (its limit is 4192), so they are cut at a space.
MAX_LINE_BYTES = 4000


def normalizer(*, lowercase: bool, strip_accents: bool) -> normalizers.Normalizer:
    """Return a normalizer that writes each character in one Unicode form, and blanks as single spaces.

    `strip_accents` prepares English text as ALBERT did: it makes LaTeX quotes plain, applies compatibility
    decomposition (NFKD), and removes accents. In other languages these marks may be vowels.
    """
    steps: list[normalizers.Normalizer] = [normalizers.NFC()]
    if strip_accents:
        quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps = [*quotes, normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        case = [normalizers.Lowercase()]
    else:
        case = []
    return normalizers.Sequence(
        [*steps, *case, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    train_bytes: int,
    lowercase: bool,
    strip_accents: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a unigram tokenizer on the first `train_bytes` of the texts. Raises InputError if that fails."""
    rule = normalizer(lowercase=lowercase, strip_accents=strip_accents)
    model = io.BytesIO()
    failures = list[BaseException]()

    def lines() -> Iterator[str]:
        try:
            yield from short_lines(texts, rule, train_bytes)
        except BaseException as error:  # the library would turn it into a RuntimeError
            failures.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            vocab_size=vocab_size,
            **UNIGRAM,
        )
    except RuntimeError as error:
        if failures:
            raise failures[0] from None
        why = str(error).rpartition("] ")[2].strip() or "it is empty"
        raise InputError(
            f"tokenizer.vocab_size={vocab_size}: no tokenizer can be made from this text: {why}"
        ) from error
    return fast_tokenizer(model.getvalue(), rule)


def fast_tokenizer(model: bytes, rule: normalizers.Normalizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with the pieces of a model of sentencepiece."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = [
        (pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())
    ]
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
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        cls_token=CLS,
        sep_token=SEP,
        mask_token=MASK,
    )


def short_lines(
    texts: Iterable[str], rule: normalizers.Normalizer, train_bytes: int
) -> Iterator[str]:
    """Yield normalised lines of at most MAX_LINE_BYTES, until their total size reaches `train_bytes`.

    Raises InputError if the trainer would need more memory than is free.
    """
    given = 0
    most = available_bytes() // TRAINER_BYTES
    for text in texts:
        for raw in text.splitlines():
            for line in cut_line(rule.normalize_str(raw)):
                given += len(line.encode())
                if given > most:
                    raise InputError(TOO_LITTLE_MEMORY.format(most=most))
                yield line
        if given >= train_bytes:
            return


def cut_line(line: str) -> Iterator[str]:
    """Yield a line in parts of at most MAX_LINE_BYTES, cut at spaces."""
    start = 0
    while start < len(line):
        head = line[start : start + MAX_LINE_BYTES + 1]  # enough to see whether the rest fits
        if len(head.encode()) > MAX_LINE_BYTES:
            head = head[: MAX_LINE_BYTES // 4]
            head = head.rpartition(" ")[0] or head
        yield head
        start += len(head)
        while line[start : start + 1].isspace():
            start += 1


def load_tokenizer(
    source: str, *, needs: Sequence[str] = ("cls_token", "sep_token", "mask_token", "pad_token")
) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer from the Hub or a folder, without truncation or padding.

    Raises InputError if it cannot be loaded, is slow, or lacks one of the special tokens `needs`.
    """
    source = hub_or_path(source)
    tokenizer = read_tokenizer(source)
    check(
        tokenizer.is_fast,
        f"tokenizer {source} is a slow one ({type(tokenizer).__name__}, pure Python): it does not know which "
        "characters a token is from; choose a fast one (tokenizer.json)",
    )
    tokenizer.chat_template = None  # not needed; saving it would write files that it names
    tokenizer.backend_tokenizer.no_truncation()  # some tokenizers are saved with truncation
    tokenizer.backend_tokenizer.no_padding()
    take_ends(tokenizer)
    for name in needs:
        says = f"tokenizer {source} has no {name}, which the model needs"
        check(
            getattr(tokenizer, name) is not None,
            f"{says}; name one of its tokens in its tokenizer_config.json",
        )
    unknown = tokenizer.backend_tokenizer.encode(UNUSUAL, add_special_tokens=False).ids
    says = f"tokenizer {source} leaves out characters that it does not know; choose one with an unknown token"
    check(bool(unknown) or not needs, says)
    check_ids(source, tokenizer)
    return tokenizer


def read_tokenizer(source: str) -> Any:
    """Return a tokenizer as transformers reads it. Raises InputError if it cannot be loaded."""
    # A name may be that of a model or run, of which the tokenizer is only read first.
    if is_at_hub(source):
        what = source
    else:
        what = f"tokenizer {source} cannot be loaded"
    try:
        with quiet(), asking_hub(source):
            folder = fetched(source, FILES)
            check_folder(folder)
            config = tokenizer_config(source, folder)
            has_pieces = any(path.is_file() for pattern in PIECES for path in folder.glob(pattern))
            check(
                has_pieces,
                f"tokenizer {source} cannot be loaded: it has no tokenizer.json or vocabulary file",
            )
            if (folder / "tokenizer.json").is_file():
                try_tokenizer(folder)
            return AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
    except InputError:
        raise
    except Exception as error:  # `tokenizers` raises a plain Exception for a bad file
        raise InputError(f"{what}: {why_missing(source, error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        raise InputError(f"{what}: {why_missing(source, error)}") from error


def check_ids(source: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise InputError if ids are far from contiguous, or if a token has an id after those of all pieces."""
    piece, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    check(
        last < MOST_IDS * len(tokenizer),
        f"tokenizer {source}: piece {shown(piece)} has the id {last}, though there are only {len(tokenizer)} pieces",
    )
    for given in (("",), ("", "")):
        ids = tokenizer.backend_tokenizer.encode(*given).ids  # tokens that its post-processor adds
        added = max(ids, default=0)
        check(
            added <= last,
            f"tokenizer {source} adds a token with id {added}, but its pieces' ids end at {last}",
        )


def tokenizer_config(source: str, folder: Path) -> PreTrainedConfig:
    """Read config.json; return a configuration for transformers with only the model type and the tokenizer class.

    Raises BadContent if the files are unsafe to load, InputError if the class is not a fast tokenizer.
    """
    values = read_model_json(folder) or {}
    settings = read_tokenizer_json(folder)
    if values:
        config = AutoConfig.for_model(values["model_type"])
    else:
        config = PreTrainedConfig()
    config.tokenizer_class = values.get("tokenizer_class")
    for name in (settings.get("tokenizer_class"), config.tokenizer_class):
        if not name or name == ANY_FAST:
            continue
        base = str(name).removesuffix("Fast")
        for variant in (str(name), base, f"{name}Fast"):  # transformers tries all of these names
            found: Any = tokenizer_class_from_name(variant)
            is_fast = isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast)
            check(
                found is None or is_fast,
                f"tokenizer {source} is not a fast one ({name}): only a fast one knows which characters a token is "
                "from; choose one (tokenizer.json)",
            )
    return config


def try_tokenizer(folder: Path) -> None:
    """Try a folder's tokenizer.json in a new process, which a bad file may crash. Raises InputError if that fails."""
    command = [sys.executable, "-I", "-c", TRIAL, str(folder / "tokenizer.json"), *sys.path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=TRIAL_S
        )
    except subprocess.TimeoutExpired:
        slow = f"its tokenizer.json takes more than {TRIAL_S} s to read a trial text"
        what = f"tokenizer {folder} cannot be used: {slow}"
        raise InputError(f"{what}; choose another tokenizer") from None
    said = done.stderr.strip().splitlines() or [f"it ended a process with code {done.returncode}"]
    what = f"tokenizer {folder} cannot be loaded: its tokenizer.json is damaged"
    check(done.returncode == 0, f"{what} ({said[-1]})")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' tables and progress bars. Our one-line errors contain what matters in them."""
    level = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)


def publish_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Folder) -> None:
    """Write the files for `AutoTokenizer.from_pretrained` to `tokenizer/`, unless another process has done so."""
    # tokenizer.json is written last: if it exists, all files do.
    with scratch_folder() as temporary:
        tokenizer.save_pretrained(str(temporary))
        files = {
            path.relative_to(temporary).as_posix(): path
            for path in temporary.rglob("*")
            if path.is_file()
        }
        for name in sorted(files, key=lambda name: (name == "tokenizer.json", name)):
            folder.create(f"tokenizer/{name}", files[name].read_bytes())


def published_vocabulary(folder: Folder) -> Vocabulary:
    """Return the tokenizer that `publish_tokenizer` wrote in this process or another one."""
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


def check_same_vocabulary(source: str, ours: dict[str, int], rejection: str) -> None:
    """Raise InputError with `rejection` unless a pretrained model's tokenizer has the same vocabulary.

    Otherwise the model's embeddings would belong to other pieces. If the model has no tokenizer, a warning says that
    nothing was compared.
    """
    try:
        theirs = load_tokenizer(source, needs=())
    except InputError as error:
        logger.warning("model.pretrained=%s has no tokenizer to compare with (%s)", source, error)
        return
    check(theirs.get_vocab() == ours, rejection)
