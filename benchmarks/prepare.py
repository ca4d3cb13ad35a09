"""`train.prepare` and the tokenizers library's `encode_batch_fast`, on the same text and the same cores.

    python -m benchmarks.prepare [--text FILE] [--mb 100] [--rounds 3] [--vocab 6000]

"library" only encodes documents that lie ready in memory and throws the result away, in the threading that turns out
faster: one process with all threads, or one process a core with one thread each. "prepare" is the whole command, from
the start of the interpreter to the manifest: it reads the file, divides it, encodes, packs and writes. A round is one
run of each, in turn; ratios are of the same round: speed of the command / speed of the faster library. The text is the
Python documentation, or FILE, repeated to --mb; documents end at blank lines. The tokenizer was trained before.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Usage, ratios, run_timed, spread
from train.config import CorpusConfig, FilesCorpusConfig
from train.data.text.corpus import open_corpus
from train.data.text.documents import CorpusPart
from train.data.text.encoding import chunks
from train.system.memory import usable_cpus

SEQ_LEN = 512


def write_text(path: Path, source: Path | None, num_bytes: int) -> None:
    if source is None:
        documents = open_corpus(CorpusConfig(kind="pydocs", name="benchmark")).documents()
        text = "\n\n".join(document.text for document in documents).encode()
    else:
        text = source.read_bytes()
    with path.open("wb") as file:
        for piece in cycle([text + b"\n\n"]):
            if file.tell() >= num_bytes:
                break
            file.write(piece[: num_bytes - file.tell()].rpartition(b"\n")[0] + b"\n")


def prepared(text: Path, output: Path, *settings: str) -> Usage:
    """Run the whole command, and return its usage."""
    words = [f"output={output}", "corpus=text", f"corpus.path={text}", f"seq_len={SEQ_LEN}", *settings]
    return run_timed("train.prepare", *words, log=text.with_suffix(".log"))


# ---- the library ----------------------------------------------------------------------------------------------------


def encode_all(
    text: str, tokenizer: str, part: CorpusPart, threads: int, start_at: float
) -> tuple[float, float, float]:
    """Return when encoding began and ended (s, of the system's clock) and the CPU seconds it took."""
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    from tokenizers import Tokenizer

    corpus = open_corpus(FilesCorpusConfig(kind="text", name="benchmark", path=text))
    ready = [[document.text for document in chunk] for chunk in chunks(corpus.documents(part))]
    library = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    library.encode_batch_fast(ready[0][:100], add_special_tokens=False)  # its threads start
    if time.time() > start_at:
        raise RuntimeError("reading took too long to start together")
    time.sleep(start_at - time.time())
    began, cpu_s = time.time(), time.process_time()
    for chunk in ready:
        library.encode_batch_fast(chunk, add_special_tokens=False)
    return began, time.time(), time.process_time() - cpu_s


def library(text: Path, tokenizer: Path, processes: int) -> Usage:
    threads = usable_cpus() // processes
    start_at = time.time() + 10 + text.stat().st_size / 20e6
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [CorpusPart(index, processes) for index in range(processes)]
        jobs = [pool.submit(encode_all, str(text), str(tokenizer), part, threads, start_at) for part in parts]
        begins, ends, cpu_s = zip(*(job.result() for job in jobs), strict=True)
    return Usage(start_at, max(ends) - min(begins), sum(cpu_s), 0.0)


# ---- the comparison -------------------------------------------------------------------------------------------------


def compare(folder: Path, text: Path, tokenizer: Path, rounds: int) -> None:
    cores, size_mb = usable_cpus(), text.stat().st_size / 1e6
    taken: dict[str, list[Usage]] = defaultdict(list)
    for number in range(rounds):
        for processes in sorted({1, cores}):
            name = f"library, {processes} processes x {cores // processes} threads"
            taken[name].append(library(text, tokenizer, processes))
            settings = (f"tokenizer.pretrained={tokenizer}", f"processes={processes}")
            output = folder / f"out-{number}-{processes}"
            taken[f"prepare, processes={processes}"].append(prepared(text, output, *settings))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    libraries = list(zip(*(usages for name, usages in taken.items() if name.startswith("library")), strict=True))
    fastest_s = [min(usage.wall_s for usage in usages) for usages in libraries]
    least_cpu_s = [min(usage.cpu_s for usage in usages) for usages in libraries]
    print(f"{size_mb:.0f} MB, {cores} cores, least / median / greatest of {rounds} rounds")
    for name, usages in taken.items():
        print(f"  {name:34} {spread(size_mb / usage.wall_s for usage in usages)} MB/s")
        if name.startswith("prepare"):
            wall = spread(ratios(fastest_s, [usage.wall_s for usage in usages]))
            cpu = spread(ratios(least_cpu_s, [usage.cpu_s for usage in usages]))
            print(f"    speed / library's {wall}; CPU seconds of the library / its own {cpu}")


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, vocab=6000)
    parser.add_argument("--text", type=Path, help="UTF-8; default: the Python documentation")
    parser.add_argument("--mb", type=float, default=100, help="1e6 bytes to repeat it to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        once, text = folder / "once.txt", folder / "text.txt"
        write_text(once, options.text, 4_000_000)
        write_text(text, options.text, int(options.mb * 1e6))
        prepared(once, folder / "trained", f"tokenizer.vocab_size={options.vocab}", "validation_fraction=0.05")
        compare(folder, text, folder / "trained" / "tokenizer", options.rounds)


if __name__ == "__main__":
    main()
