"""The command `baretrain prepare`, which turns text into token shards.

The same text, settings, seed and number of parts produce the same bytes. If the process is killed, each part resumes
after its last complete shard. `manifest.json` is written last, so a folder that has one is complete. These are the
steps of a preparation and the files that they write:

    claim      source.json: the settings and the text's fingerprint, which later calls must match
    tokenizer  tokenizer/, trained or copied unless it exists
    parts      train-00000.safetensors ..., and part-*.safetensors, the progress of each part
    merge      manifest.json; removes part-*.safetensors
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.config import (
    CorpusConfig,
    InputError,
    PrepareConfig,
    Unreachable,
    check,
    flatten,
    shortlist,
    to_dict,
)
from train.data.random_bits import text_uniform
from train.data.shards.format import FORMAT, SPLITS, DataManifest, read_manifest
from train.data.text.corpus import Corpus, open_corpus
from train.data.text.coverage import (
    MOST_SAMPLES,
    Sample,
    UnusableText,
    losses_of,
    unknown_of,
    unknown_share,
    unused_capitals,
)
from train.data.text.documents import WHOLE, CorpusPart
from train.data.text.encoding import Vocabulary
from train.data.text.preparation import (
    OVERLAP,
    STATE_NAMES,
    TOKENS_OF,
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
from train.machine.console import say
from train.machine.progress import Phase
from train.run import compose as cli
from train.run_folder.identity import differences
from train.storage.folders import (
    Folder,
    canonical_json,
    empty_folders_removed,
    is_s3,
    local_path,
    open_folder,
    sha256_json,
)
from train.storage.schema import BadContent, of_type, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_PARTS = 256  # enough for any machine's processes; with 75 GB of text or more, every part fills at least one shard
SAMPLED_PARTS = 64  # the tokenizer is trained on text from this many places in a corpus larger than train_bytes
SPLIT_RULE = 3  # version of the rule that holds out text; a preparation must end with the version with which it began
FEW_SEQUENCES = 64  # number of validation sequences below which the loss is too noisy


USED: tuple[str, ...] = (
    "output",
    "corpus.path",
    "corpus.column",
    "corpus.separator",
    "corpus.encoding",
    "seq_len",
)
USED += ("corpus.weights", "corpus.validation", "tokenizer.add_tokens")
USED += (
    "tokenizer.vocab_size",
    "tokenizer.pretrained",
    "tokenizer.lowercase",
    "tokenizer.strip_accents",
)
USED += (
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
    made = nullcontext() if is_s3(cfg.output) else empty_folders_removed(local_path(cfg.output))
    with progress.reported(), made:
        manifest = prepare(cfg)
    if manifest is None:
        say(
            f"{cfg.output}: part {cfg.part} is done; when all parts are done, run this command with merge=true instead "
            "of part"
        )
        return cli.DONE
    held_out = manifest.rows("validation")
    say(
        f"{cfg.output}: {manifest.rows('train'):,} training and {held_out:,} validation sequences "
        f"of {manifest.seq_len} tokens, vocabulary {manifest.tokenizer.vocab_size:,}, "
        f"unigram entropy {manifest.counts['unigram_entropy']:.3f} nats, "
        f"a lookup table of neighbouring tokens predicts "
        f"{manifest.counts['neighbour_accuracy']:.1%} of tokens, id {manifest.id[:12]}"
    )
    unknown, tokens = (manifest.counts.get(name, 0) for name in ("unknown_tokens", "tokens"))
    say(unknown_share(unknown, tokens, "the tokenizer reads the corpus"))
    for line in composition(cfg.corpus, manifest):
        say(line)
    if held_out < FEW_SEQUENCES:
        few = f"the loss of only {held_out} validation sequences is noisy; give more text, or raise validation_fraction"
        say(f"warning: {few} and choose another output", file=sys.stderr)
    return cli.DONE


def composition(cfg: CorpusConfig, manifest: DataManifest) -> Iterator[str]:
    """Yield lines on each corpus's share of the training tokens, and on documents also found in corpus.validation."""
    tokens = [
        manifest.counts.get(f"{TOKENS_OF}{number}", 0) for number in range(1, len(cfg.sources) + 1)
    ]
    if total := sum(tokens):
        weights = cfg.weights or [1] * len(tokens)
        each = zip(cfg.sources, tokens, weights, strict=True)
        parts = [
            f"{number / total:.1%} {name} (weight {weight:g})" for name, number, weight in each
        ]
        yield f"training tokens: {', '.join(parts)}"
    if OVERLAP in manifest.counts:
        yield f"{manifest.counts[OVERLAP]:,} training documents are also in corpus.validation and were left out"


def prepare(cfg: PrepareConfig) -> DataManifest | None:
    """Prepare or resume a corpus or a part of it. Returns the manifest, or None while parts must still be merged.

    If the folder has a manifest, only read it. Raises InputError, without writing a manifest, if text or settings
    cannot be used.
    """
    progress.begin(Phase(f"looking for corpus={cfg.corpus.kind}"))
    folder, corpus = open_folder(cfg.output, cfg.s3), open_corpus(cfg.corpus)
    for line in corpus.remarks():
        say(f"... {line}", file=sys.stderr)
    job = CorpusPart.parse(cfg.part) if cfg.part else WHOLE
    # The number of processes does not change the parts, so any number makes the same shards.
    parts = (
        [] if cfg.merge else job.divided(max(1, min(corpus.most_parts, MOST_PARTS) // job.count))
    )
    num_parts = claimed(folder)["settings"]["parts"] if cfg.merge else parts[0].count
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
    try:
        if not cfg.merge:
            prepare_parts(cfg, folder, corpus, parts, identity)
            if job.count > 1:
                return None
        progress.begin(Phase("writing the manifest"))
        return merge(
            folder, num_parts=num_parts, identity=identity, seq_len=cfg.seq_len, config=settings
        )
    except InputError as error:
        with suppress(InputError, Unreachable):  # The first error is the one to report.
            take_back(folder, job, everything=isinstance(error, UnusableText))
        raise


def prepare_parts(
    cfg: PrepareConfig, folder: Folder, corpus: Corpus, parts: list[CorpusPart], identity: str
) -> None:
    """Prepare parts with the folder's tokenizer, in this process or in new ones."""
    progress.begin(Phase("choosing the validation text"))
    held_out = choose_held_out(corpus, cfg.validation_fraction, cfg.seed)
    recipe = Recipe(cfg, vocabulary_of(cfg, corpus, folder, held_out), held_out, identity)
    share = len(parts) / parts[0].count
    total_bytes = None if corpus.total_bytes is None else int(corpus.total_bytes * share)
    num_processes = min(cfg.processes or most_processes(), len(parts))
    if num_processes > 1:
        memory = f"at most about {PROCESS_BYTES / 1e9:.1g} GB of memory each"
        say(f"... {len(parts)} parts in {num_processes} processes, {memory}", file=sys.stderr)
    with shown("tokenising and packing", total_bytes) as report:
        if num_processes == 1:
            for part in parts:
                prepare_part(recipe, folder, corpus, part, report)
        else:
            prepare_in_processes(recipe, parts, report, num_processes)


@contextmanager
def shown(what: str, total_bytes: int | None) -> Iterator[Report]:
    """Show progress: a bar with MB/s and tokens/s on a terminal, log lines elsewhere."""
    progress.begin(Phase(what, total_bytes, "bytes", has_bar=True))
    with tqdm(
        total=total_bytes, unit="B", unit_scale=True, desc=what, disable=None, mininterval=0.5
    ) as bar:
        tokens, began = 0, time.perf_counter()

        def report(num_bytes: int, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(num_bytes)
            progress.advance(num_bytes)
            if tokens:
                bar.set_postfix_str(
                    f"{tokens / (time.perf_counter() - began):,.0f} tokens/s", refresh=False
                )

        yield report


# ---- the claim -----------------------------------------------------------------------------------------------------


def settings_of(cfg: PrepareConfig, num_parts: int) -> dict[str, Any]:
    """Return the settings on which the data depends: all but locations, `part`, `merge` and `processes`."""
    settings = to_dict(cfg)
    for name in ("output", "s3", "part", "processes", "merge"):
        del settings[name]
    # Instead, source.json has the text's fingerprint in `input`.
    for name in (
        "path",
        "validation",
    ):
        settings["corpus"].pop(name, None)
    for section, name in (("corpus", "weights"), ("tokenizer", "add_tokens")):
        if not settings[section][name]:
            del settings[section][name]
    return {**settings, "parts": num_parts}


def claim(folder: Folder, wanted: dict[str, Any]) -> None:
    """Write source.json, which reserves the folder for this preparation.

    Raises InputError if the folder belongs to another preparation, has other files, or is not writable.
    """
    names = folder.names()
    if "source.json" not in names:
        found = shortlist(names, 3)
        check(
            not names,
            f"output={folder.location} has files ({found}) but no preparation; choose another folder",
        )
        folder.create("source.json", canonical_json(wanted))
    there = claimed(folder)
    if "manifest.json" in names:  # A finished preparation may be read with any number of parts.
        there["settings"]["parts"] = wanted["settings"]["parts"]
    changed = [
        each.removeprefix("settings.")
        for each in differences(dict(flatten(there)), dict(flatten(wanted)))
    ]
    words = ("the corpus has changed" if each.startswith("input: ") else each for each in changed)
    check(
        not changed,
        f"output={folder.location} holds a preparation with other settings ({', '.join(words)}); choose another output "
        "or remove the folder",
    )


def claimed(folder: Folder) -> dict[str, Any]:
    """Return the content of a folder's source.json. Raises InputError if it is missing or damaged."""
    try:
        source = read_object(folder.read("source.json"))
        of_type(
            int,
            of_type(dict[str, Any], source.get("settings"), "settings").get("parts"),
            "settings.parts",
        )
    except FileNotFoundError:
        raise InputError(
            f"output={folder.location} holds no parts to merge; part=1/N ... part=N/N make them"
        ) from None
    except BadContent as error:
        raise InputError(
            f"{folder.location}/source.json is damaged: {error}; choose another output"
        ) from error
    return source


def take_back(folder: Folder, job: CorpusPart, *, everything: bool) -> None:
    """Remove the files of a failed preparation if they are useless, so that the folder can be used again.

    They are useless if `everything` is set, or if no part has written anything and no other job is about to.
    """
    names = folder.names()
    begun = any(name.startswith(STATE_NAMES) for name in names)
    others = job.count > 1 and "tokenizer/tokenizer.json" in names
    if everything or not (begun or others):
        for prefix in (
            STATE_NAMES,
            *(f"{split}-" for split in SPLITS),
            "tokenizer/",
            "source.json",
        ):
            for name in names:
                if name.startswith(prefix):
                    folder.remove(name)


# ---- the tokenizer -------------------------------------------------------------------------------------------------


def vocabulary_of(
    cfg: PrepareConfig, corpus: Corpus, folder: Folder, held_out: HeldOut
) -> Vocabulary:
    """Return the folder's tokenizer, and first make it if necessary. If several jobs make one, all use the first."""
    # imports transformers, which most processes do not need
    from train.data.text import (
        tokenizer as tokenizers,
    )

    if folder.size(tokenizers.PUBLISHED) is None:
        own, sample = cfg.tokenizer, Sample()
        if own.pretrained is not None:
            made = tokenizers.load_tokenizer(own.pretrained)
            tokenizers.add_tokens(made, own.add_tokens)
            sample.take(document.text for document in islice(corpus.documents(), MOST_SAMPLES))
        else:
            # Compressed files are smaller than their text.
            if corpus.seekable and corpus.total_bytes is not None:
                num_bytes = min(own.train_bytes, corpus.total_bytes)
                say(f"... {tokenizers.check_trainer_memory(num_bytes)}", file=sys.stderr)
            made = tokenizers.train_tokenizer(
                sample.watched(training_texts(cfg, corpus, held_out)),
                vocab_size=own.vocab_size,
                train_bytes=own.train_bytes,
                lowercase=own.lowercase,
                strip_accents=own.strip_accents,
            )
        check_coverage(cfg, made, sample.pieces)
        tokenizers.publish_tokenizer(made, folder)
    return tokenizers.published_vocabulary(folder)


def check_coverage(
    cfg: PrepareConfig, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> None:
    """Warn if the tokenizer drops characters of the corpus. Raises InputError if it cannot read the corpus."""
    source = cfg.tokenizer.pretrained
    reads = f"{'the new tokenizer' if source is None else f'tokenizer.pretrained={source}'} reads the corpus"
    # Checks a sample. The exact share is printed at the end.
    unknown_share(*unknown_of(tokenizer, texts), reads)
    for loss, setting in losses_of(tokenizer.backend_tokenizer, texts):
        cure = (
            f"tokenizer.{setting}=false keeps them"
            if source is None
            else "another tokenizer.pretrained may keep them"
        )
        say(
            f"warning: the normalisation of {source or 'the tokenizer'} {loss}; {cure}",
            file=sys.stderr,
        )
    if capitals := unused_capitals(tokenizer):
        say(f"warning: tokenizer.pretrained={source} {capitals}", file=sys.stderr)


def training_texts(cfg: PrepareConfig, corpus: Corpus, held_out: HeldOut) -> Iterator[str]:
    """Yield training documents for the tokenizer, all of them if the corpus has at most tokenizer.train_bytes.

    A larger corpus is read in SAMPLED_PARTS places or, if it is not seekable, as a random sample of documents. If its
    size is unknown, all documents are yielded, but the trainer reads only the first tokenizer.train_bytes.
    """
    wanted, total = cfg.tokenizer.train_bytes, corpus.total_bytes
    share, parts = min(1.0, wanted / total) if total else 1.0, [WHOLE]
    if total and share < 1 and corpus.seekable:
        count = SAMPLED_PARTS * total // wanted
        share, parts = (
            1.0,
            [
                CorpusPart(number * count // SAMPLED_PARTS, count)
                for number in range(SAMPLED_PARTS)
            ],
        )
    num_documents, num_given = 0, 0
    with shown("reading text for the tokenizer", total) as report:
        for document in (document for part in parts for document in corpus.documents(part)):
            num_documents += 1
            report(document.source_bytes, 0)
            text = document.text[: round(len(document.text) * (1 - held_out.share_of(document)))]
            if (
                text
                and document.reading.learns(document.text)
                and text_uniform(document.text, cfg.seed)[1] < share
            ):
                num_given += 1
                yield text
    check(num_documents > 0, f"the corpus ({cfg.corpus.kind}) holds no text")
    by_hash = f"validation_fraction={cfg.validation_fraction}"
    held = f"{by_hash if held_out.known is None else 'corpus.validation'} or a sample of tokenizer.train_bytes={wanted}"
    progress.begin(Phase("training the tokenizer"))
    check(
        num_given > 0,
        f"{held} leaves none of {num_documents} documents for the tokenizer; give more documents",
    )
