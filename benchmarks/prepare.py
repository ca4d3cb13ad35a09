"""`train.prepare` beside the tokenizers library's own `encode_batch_fast`, on the same text and the same cores.

    python -m benchmarks.prepare [--text FILE] [--mb 100] [--rounds 3] [--vocab 6000]

"library" only encodes documents that lie ready in memory and throws the result away, in the threading that turns out
faster: one process with all threads, or one process a core with one thread each. "prepare" is the whole command, from
the start of the interpreter to the manifest: it reads the file, divides it, encodes, packs and writes. A round is one
run of each, in turn; ratios are of the same round: speed of the command / speed of the faster library. The text is the
Python documentation, or FILE, repeated to --mb; documents end at blank lines. The tokenizer was trained before.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

from benchmarks.harness import ROOT, spread
from train.config import CorpusConfig, FilesCorpusConfig
from train.data.text.corpus import open_corpus
from train.data.text.documents import Part
from train.data.text.encoding import chunks
from train.data.text.processes import num_cores

CORPUS = {"kind": "text", "name": "benchmark"}
SEQ_LEN = 512


@dataclass(frozen=True)
class Timing:
    wall_s: float
    cpu_s: float  # user and system, all processes


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


def command(text: Path, output: Path, tokenizer: Path, *settings: str) -> list[str]:
    overrides = [f"output={output}", "corpus=text", f"corpus.path={text}", f"tokenizer.pretrained={tokenizer}"]
    return [sys.executable, "-m", "train.prepare", *overrides, f"seq_len={SEQ_LEN}", *settings]


def timed(arguments: list[str]) -> Timing:
    """Run a command and its children to their end."""
    began = time.perf_counter()
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return Timing(wall_s, usage.ru_utime + usage.ru_stime)


# ---- the library ----------------------------------------------------------------------------------------------------


def encode_all(text: str, tokenizer: str, part: Part, threads: int, start_at: float) -> tuple[float, float, float]:
    """When encoding began and ended (s, of the system's clock) and the CPU seconds it took."""
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    from tokenizers import Tokenizer

    corpus = open_corpus(FilesCorpusConfig(**CORPUS, path=text))
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


def library(text: Path, tokenizer: Path, processes: int) -> Timing:
    threads = num_cores() // processes
    start_at = time.time() + 10 + text.stat().st_size / 20e6
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        parts = [Part(index, processes) for index in range(processes)]
        jobs = [pool.submit(encode_all, str(text), str(tokenizer), part, threads, start_at) for part in parts]
        answer = [job.result() for job in jobs]
    wall_s = max(end for _, end, _ in answer) - min(begin for begin, _, _ in answer)
    return Timing(wall_s, sum(cpu for _, _, cpu in answer))


# ---- the comparison -------------------------------------------------------------------------------------------------


def compare(folder: Path, text: Path, tokenizer: Path, rounds: int) -> None:
    cores, size_mb = num_cores(), text.stat().st_size / 1e6
    result: dict[str, list[Timing]] = {}
    for number in range(rounds):
        runs = {f"library, 1 process x {cores} threads": lambda: library(text, tokenizer, 1)}
        if cores > 1:
            runs[f"library, {cores} processes x 1 thread"] = lambda: library(text, tokenizer, cores)
        for processes in sorted({1, cores}):
            output = folder / f"out-{number}-{processes}"
            arguments = command(text, output, tokenizer, f"processes={processes}")
            runs[f"prepare, processes={processes}"] = lambda arguments=arguments: timed(arguments)
        for name, measure in runs.items():
            result.setdefault(name, []).append(measure())
            print(f"round {number + 1}: {name}: {result[name][-1].wall_s:.1f} s", file=sys.stderr, flush=True)
    libraries = [timings for name, timings in result.items() if name.startswith("library")]
    fastest = [min(timing.wall_s for timing in timings) for timings in zip(*libraries, strict=True)]
    least_cpu = [min(timing.cpu_s for timing in timings) for timings in zip(*libraries, strict=True)]
    print(f"{size_mb:.0f} MB, {cores} cores, least / median / greatest of {rounds} rounds")
    for name, timings in result.items():
        print(f"  {name:34} {spread([size_mb / timing.wall_s for timing in timings])} MB/s")
    for name, timings in result.items():
        if name.startswith("prepare"):
            wall = [best / timing.wall_s for best, timing in zip(fastest, timings, strict=True)]
            cpu = [best / timing.cpu_s for best, timing in zip(least_cpu, timings, strict=True)]
            print(f"  {name}: speed / library's {spread(wall)}; CPU seconds of the library / its own {spread(cpu)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="UTF-8; default: the Python documentation")
    parser.add_argument("--mb", type=float, default=100, help="1e6 bytes to repeat it to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=6000, help="pieces of the tokenizer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        once, text, tokenizer = folder / "once.txt", folder / "text.txt", folder / "trained" / "tokenizer"
        write_text(once, options.text, 4_000_000)
        write_text(text, options.text, int(options.mb * 1e6))
        settings = [f"tokenizer.vocab_size={options.vocab}", "validation_fraction=0.05", f"seq_len={SEQ_LEN}"]
        overrides = [f"output={tokenizer.parent}", "corpus=text", f"corpus.path={once}", *settings]
        timed([sys.executable, "-m", "train.prepare", *overrides])
        compare(folder, text, tokenizer, options.rounds)


if __name__ == "__main__":
    main()
