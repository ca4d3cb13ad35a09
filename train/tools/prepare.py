"""The command `baretrain prepare`, which turns text into token shards.

The same text, settings, seed and number of parts produce the same bytes. If the process is killed, the parts that
are not finished start over. `manifest.json` is written last, so a folder that has one is complete. These are the
steps of a preparation and the files that they write:

    claim      source.json: the settings and the text's fingerprint, which later calls must match
    tokenizer  tokenizer/, trained or copied unless it exists
    parts      train-00000.safetensors ..., and part-*.json, the result of each part
    merge      manifest.json; removes part-*.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.config import (
    InputError,
    PrepareConfig,
    Unreachable,
    check,
    flatten,
    shortlist,
    to_dict,
)
from train.data.random_bits import text_uniform
from train.data.shards.manifest import FORMAT, DataManifest, read_manifest
from train.data.text.corpus import Corpus, open_corpus
from train.data.text.coverage import (
    MOST_SAMPLES,
    TextSample,
    changed_by,
    unknown_of,
    unknown_share,
)
from train.data.text.documents import WHOLE, CorpusPart
from train.data.text.encoding import Vocabulary
from train.data.text.preparation import (
    HeldOut,
    Recipe,
    Report,
    choose_held_out,
    merge,
    prepare_part,
    remove_states,
)
from train.data.text.processes import PROCESS_BYTES, most_processes, prepare_in_processes
from train.machine import progress
from train.machine.console import note, say, speech
from train.machine.progress import Phase
from train.run import compose as cli
from train.run_folder.identity import differences
from train.storage.folders import (
    Folder,
    LocalFolder,
    canonical_json,
    open_folder,
    sha256_json,
)
from train.storage.schema import BadContent, of_type, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Enough for any machine's processes; with 75 GB of text or more, every part fills at least one shard.
MOST_PARTS = 256
# The tokenizer is trained on text from this many places in a corpus larger than train_bytes.
SAMPLED_PARTS = 64
# The version of the rule that holds out text; a preparation must end with the version with which it began.
SPLIT_RULE = 4
CLAIM = "source.json"
# The settings that do not change the data. Instead of locations, CLAIM has the text's fingerprint.
NOT_DATA = ("output", "s3", "part", "processes", "merge", "corpus.path", "corpus.validation")

USED: tuple[str, ...] = (
    "output",
    "corpus.path",
    "corpus.column",
    "corpus.separator",
    "corpus.encoding",
    "seq_len",
    "corpus.weights",
    "corpus.validation",
    "tokenizer.vocab_size",
    "tokenizer.pretrained",
    "tokenizer.lowercase",
    "tokenizer.strip_accents",
    "validation_fraction",
    "seed",
    "rows_per_shard",
    "processes",
    "part",
    "merge",
    "s3.endpoint",
)


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "prepare",
        PrepareConfig,
        "Turn text into token shards for pretraining. A killed preparation resumes; a finished one is left unchanged.",
        examples=(
            "corpus=text 'corpus.path=\"texts/**/*.txt\"' output=data/mine seq_len=128 tokenizer.vocab_size=4000",
            "corpus=jsonl corpus.path=articles.jsonl corpus.column=body output=s3://bucket/mine processes=8",
            "corpus=parquet corpus.path=texts output=s3://bucket/mine part=3/64",
        ),
        keys=USED,
    )
    return cli.run(PrepareConfig, run, parser, arguments=arguments)


def run(cfg: PrepareConfig) -> int:
    with progress.reported():
        manifest = prepare(cfg)
    if manifest is None:
        then = "when all parts are done, run this command with merge=true instead of part"
        say(f"{cfg.output}: part {cfg.part} is done; {then}")
        return cli.DONE
    held_out = manifest.rows("validation")
    counts = manifest.counts
    say(
        f"{cfg.output}: {manifest.rows('train'):,} training and {held_out:,} validation sequences "
        f"of {manifest.seq_len} tokens, vocabulary {manifest.tokenizer.vocab_size:,}, "
        f"unigram entropy {counts['unigram_entropy']:.3f} nats, "
        f"a lookup table of neighbouring tokens predicts "
        f"{counts['neighbour_accuracy']:.1%} of tokens, id {manifest.id[:12]}"
    )
    reads = "the tokenizer reads the corpus"
    say(unknown_share(counts.get("unknown_tokens", 0), counts.get("tokens", 0), reads))
    return cli.DONE


def prepare(cfg: PrepareConfig) -> DataManifest | None:
    """Prepare or resume a corpus or a part of it. Returns the manifest, or None while parts must still be merged.

    If the folder has a manifest, only read it. Raises InputError, without writing a manifest, if text or settings
    cannot be used.
    """
    progress.begin(Phase(f"looking for corpus={cfg.corpus.kind}"))
    folder, corpus = open_folder(cfg.output, cfg.s3), open_corpus(cfg.corpus)
    for line in corpus.remarks:
        note(f"... {line}")
    if cfg.merge:
        parts = []
        num_parts = claimed(folder)["settings"]["parts"]
    else:
        parts = parts_of(cfg, corpus)
        num_parts = parts[0].count
    settings = settings_of(cfg, num_parts)
    source = {
        "settings": settings,
        "input": corpus.fingerprint(),
        "format": FORMAT,
        "split_rule": SPLIT_RULE,
    }
    claim(folder, source)
    if folder.size("manifest.json") is not None:
        remove_states(folder)  # A merge may have been killed after it wrote the manifest.
        return read_manifest(folder)
    identity = sha256_json(source)
    if not cfg.merge:
        prepare_parts(cfg, folder, corpus, parts, identity)
        if cfg.part and len(parts) < num_parts:
            return None
    progress.begin(Phase("writing the manifest"))
    return merge(
        folder, num_parts=num_parts, identity=identity, seq_len=cfg.seq_len, config=settings
    )


def parts_of(cfg: PrepareConfig, corpus: Corpus) -> list[CorpusPart]:
    """Return the parts that this call prepares. The number of processes does not change them."""
    if cfg.part:
        job = CorpusPart.parse(cfg.part)
    else:
        job = WHOLE
    return job.divided(max(1, min(corpus.most_parts, MOST_PARTS) // job.count))


def prepare_parts(
    cfg: PrepareConfig, folder: Folder, corpus: Corpus, parts: list[CorpusPart], identity: str
) -> None:
    """Prepare parts with the folder's tokenizer, in this process or in new ones."""
    progress.begin(Phase("choosing the validation text"))
    try:
        held_out = choose_held_out(corpus, cfg.validation_fraction, cfg.seed)
        vocabulary = vocabulary_of(cfg, corpus, folder, held_out)
    except InputError:
        with suppress(InputError, Unreachable):  # the first error is the one to report
            give_back(folder)
        raise
    recipe = Recipe(cfg, vocabulary, held_out, identity)
    total_bytes = corpus.total_bytes
    if total_bytes is not None:
        total_bytes = total_bytes * len(parts) // parts[0].count
    num_processes = min(cfg.processes or most_processes(), len(parts))
    with shown("tokenising and packing", total_bytes) as report:
        if num_processes > 1:
            memory = f"at most about {PROCESS_BYTES / 1e9:.1g} GB of memory each"
            note(f"... {len(parts)} parts in {num_processes} processes, {memory}")
            prepare_in_processes(recipe, parts, report, num_processes)
            return
        for part in parts:
            prepare_part(recipe, folder, corpus, part, report)


@contextmanager
def shown(what: str, total_bytes: int | None) -> Iterator[Report]:
    """Show progress: a bar with MB/s on a terminal, log lines elsewhere."""
    progress.begin(Phase(what, total_bytes, "bytes", has_bar=True))
    bar = tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc=what,
        disable=speech.is_quiet or None,  # None: unless the output is a terminal
        mininterval=0.5,
    )

    def report(num_bytes: int) -> None:
        bar.update(num_bytes)
        progress.advance(num_bytes)

    with bar:
        yield report


# ---- the claim -----------------------------------------------------------------------------------------------------


def settings_of(cfg: PrepareConfig, num_parts: int) -> dict[str, Any]:
    """Return the settings on which the data depends."""
    settings = to_dict(cfg)
    for key in NOT_DATA:
        section, _, name = key.rpartition(".")
        if section:
            values = settings[section]
        else:
            values = settings
        values.pop(name, None)
    if not settings["corpus"]["weights"]:
        del settings["corpus"]["weights"]
    return {**settings, "parts": num_parts}


def claim(folder: Folder, wanted: dict[str, Any]) -> None:
    """Write CLAIM, which reserves the folder for this preparation.

    Raises InputError if the folder belongs to another preparation, has other files, or is not writable.
    """
    names = folder.names()
    if CLAIM not in names:
        found = shortlist(names, 3)
        says = f"has files ({found}) but no preparation; choose another folder"
        check(not names, f"output={folder.location} {says}")
        folder.create(CLAIM, canonical_json(wanted))
    there = claimed(folder)
    if "manifest.json" in names:  # A finished preparation may be read with any number of parts.
        there["settings"]["parts"] = wanted["settings"]["parts"]
    changed = differences(dict(flatten(there)), dict(flatten(wanted)))
    words = [each.removeprefix("settings.") for each in changed]
    if any(each.startswith("input: ") for each in changed):
        words = ["the corpus has changed"]
    check(
        not changed,
        f"output={folder.location} holds a preparation with other settings ({', '.join(words)}); choose another output "
        "or remove the folder",
    )


def claimed(folder: Folder) -> dict[str, Any]:
    """Return the content of a folder's CLAIM. Raises InputError if it is missing or damaged."""
    try:
        source = read_object(folder.read(CLAIM))
        settings = of_type(dict[str, Any], source.get("settings"), "settings")
        of_type(int, settings.get("parts"), "settings.parts")
    except FileNotFoundError:
        how = "part=1/N ... part=N/N make them"
        raise InputError(f"output={folder.location} holds no parts to merge; {how}") from None
    except BadContent as error:
        what = f"{folder.location}/{CLAIM} is damaged: {error}"
        raise InputError(f"{what}; choose another output") from error
    return source


def give_back(folder: Folder) -> None:
    """Remove the claim if nothing else is in the folder, so that it can be used with other settings."""
    if folder.names() != [CLAIM]:
        return
    folder.remove(CLAIM)
    if isinstance(folder, LocalFolder):
        with suppress(OSError):
            folder.path.rmdir()


# ---- the tokenizer -------------------------------------------------------------------------------------------------


def vocabulary_of(
    cfg: PrepareConfig, corpus: Corpus, folder: Folder, held_out: HeldOut
) -> Vocabulary:
    """Return the folder's tokenizer, and first make it if necessary. If several jobs make one, all use the first."""
    # This imports transformers, which most processes do not need.
    from train.data.text import tokenizer as tokenizers

    if folder.size(tokenizers.PUBLISHED) is None:
        own = cfg.tokenizer
        sample = TextSample()
        if own.pretrained is not None:
            made = tokenizers.load_tokenizer(own.pretrained)
            sample.take(document.text for document in islice(corpus.documents(), MOST_SAMPLES))
        else:
            made = tokenizers.train_tokenizer(
                sample.watched(training_texts(cfg, corpus, held_out)),
                vocab_size=own.vocab_size,
                train_bytes=own.train_bytes,
                lowercase=own.lowercase,
                strip_accents=own.strip_accents,
            )
        check_coverage(cfg, made, sample.excerpts)
        tokenizers.publish_tokenizer(made, folder)
    return tokenizers.published_vocabulary(folder)


def check_coverage(
    cfg: PrepareConfig, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    """Warn if the tokenizer changes characters of the corpus. Raises InputError if it cannot read the corpus."""
    source = cfg.tokenizer.pretrained
    name = "the new tokenizer"
    cure = "tokenizer.strip_accents=false keeps them"
    if source is not None:
        name = f"tokenizer.pretrained={source}"
        cure = "another tokenizer.pretrained may keep them"
    # This is the share of a sample. The exact share is printed at the end.
    unknown_share(*unknown_of(tokenizer, texts), f"{name} reads the corpus")
    changed = changed_by(tokenizer.backend_tokenizer, texts)
    if changed:
        what = f"warning: the normalisation of {name} changes {changed}"
        say(f"{what}; {cure}", file=sys.stderr)


def training_texts(cfg: PrepareConfig, corpus: Corpus, held_out: HeldOut) -> Iterator[str]:
    """Yield training documents for the tokenizer, all of them if the corpus has at most tokenizer.train_bytes.

    A larger corpus is read in SAMPLED_PARTS places or, if it is not seekable, as a random sample of documents. If its
    size is unknown, all documents are yielded, but the trainer reads only the first tokenizer.train_bytes.
    """
    wanted = cfg.tokenizer.train_bytes
    total = corpus.total_bytes
    share = 1.0
    parts = [WHOLE]
    if total is not None and total > wanted:
        if corpus.seekable:
            count = SAMPLED_PARTS * total // wanted
            indices = [number * count // SAMPLED_PARTS for number in range(SAMPLED_PARTS)]
            parts = [CorpusPart(index, count) for index in indices]
        else:
            share = wanted / total
    num_documents = 0
    num_given = 0
    with shown("reading text for the tokenizer", total) as report:
        for part in parts:
            for document in corpus.documents(part):
                num_documents += 1
                report(document.source_bytes)
                is_drawn = text_uniform(document.text, cfg.seed)[1] < share
                if is_drawn and held_out.split_of(document) == "train":
                    num_given += 1
                    yield document.text
    check(num_documents > 0, f"the corpus ({cfg.corpus.kind}) holds no text")
    says = f"all of {num_documents} documents are held out for validation, and none is left for the tokenizer"
    check(num_given > 0, f"{says}; give more documents")
    progress.begin(Phase("training the tokenizer"))
