"""`train.prepare` and the tokenizers library's `encode_batch_fast`, on the same text and the same cores.

    python -m benchmarks.prepare [--text FILE] [--mb 100] [--rounds 3] [--vocab 6000]

"library" only encodes documents that are already in memory, and discards the result. It runs both as one process with
all threads and as one process per core with one thread each, and the faster way counts. "prepare" is the whole command,
from the start of the interpreter to the manifest: it reads the file, splits it, encodes, packs and writes. A round runs
each once. Ratios compare runs of the same round: speed of the command / speed of the library. The text is the Python
documentation, or FILE, repeated up to --mb; blank lines end documents. The tokenizer is trained beforehand.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import ratios, run_timed, spread, table
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


def prepare_s(text: Path, output: Path, *settings: str) -> float:
    """Run the whole command, and return its seconds."""
    words = [f"output={output}", "corpus=text", f"corpus.path={text}", f"seq_len={SEQ_LEN}", *settings]
    return run_timed("train.prepare", *words, log=text.with_suffix(".log")).wall_s


# ---- the library ----------------------------------------------------------------------------------------------------


def encode_all(text: str, tokenizer: str, part: CorpusPart, threads: int, start_at: float) -> tuple[float, float]:
    """Return the times at which encoding began and ended, in seconds of the system clock."""
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    from tokenizers import Tokenizer

    corpus = open_corpus(FilesCorpusConfig(kind="text", name="benchmark", path=text))
    ready = [[document.text for document in chunk] for chunk in chunks(corpus.documents(part))]
    library = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    library.encode_batch_fast(ready[0][:100], add_special_tokens=False)  # starts its threads
    if time.time() > start_at:
        raise RuntimeError("reading took so long that the processes could not start together")
    time.sleep(start_at - time.time())
    began = time.time()
    for chunk in ready:
        library.encode_batch_fast(chunk, add_special_tokens=False)
    return began, time.time()


def library_s(text: Path, tokenizer: Path, processes: int) -> float:
    threads = usable_cpus() // processes
    start_at = time.time() + 10 + text.stat().st_size / 20e6
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [CorpusPart(index, processes) for index in range(processes)]
        jobs = [pool.submit(encode_all, str(text), str(tokenizer), part, threads, start_at) for part in parts]
        begins, ends = zip(*(job.result() for job in jobs), strict=True)
    return max(ends) - min(begins)


# ---- the comparison -------------------------------------------------------------------------------------------------


def compare(folder: Path, text: Path, tokenizer: Path, rounds: int) -> str:
    cores, size_mb = usable_cpus(), text.stat().st_size / 1e6
    ways = sorted({1, cores})
    fastest_s, seconds = [], {processes: list[float]() for processes in ways}
    for number in range(rounds):
        fastest_s.append(min(library_s(text, tokenizer, processes) for processes in ways))
        for processes in ways:
            settings = (f"tokenizer.pretrained={tokenizer}", f"processes={processes}")
            seconds[processes].append(prepare_s(text, folder / f"out-{number}-{processes}", *settings))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    rows = [["the library", spread(size_mb / each for each in fastest_s), ""]]
    for processes, taken_s in seconds.items():
        speed, share = spread(size_mb / each for each in taken_s), spread(ratios(fastest_s, taken_s))
        rows.append([f"prepare, processes={processes}", speed, share])
    return table([f"{size_mb:.0f} MB, {cores} cores", "MB/s", "share of the library's speed"], rows)


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, vocab=6000)
    parser.add_argument("--text", type=Path, help="a UTF-8 file; default: the Python documentation")
    parser.add_argument("--mb", type=float, default=100, help="the text's size in 1e6 bytes [100]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        once, text = folder / "once.txt", folder / "text.txt"
        write_text(once, options.text, 4_000_000)
        write_text(text, options.text, int(options.mb * 1e6))
        prepare_s(once, folder / "trained", f"tokenizer.vocab_size={options.vocab}", "validation_fraction=0.05")
        print(compare(folder, text, folder / "trained" / "tokenizer", options.rounds))


if __name__ == "__main__":
    main()
