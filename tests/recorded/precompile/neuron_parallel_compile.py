"""Stands in for Neuron's tool: what it writes, from its documentation and source. Compiles nothing.

The folder FAKE_TOOL says what happens: <n>.json are the results of the n-th call, `run` asks for a real
run of the command, `status` is the exit status of the collection. calls.jsonl there gets a line for each call.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

plan, command = Path(os.environ["FAKE_TOOL"]), sys.argv[1:]
calls = plan / "calls.jsonl"
with calls.open("a") as file:
    neuron = {name: value for name, value in os.environ.items() if name.startswith("NEURON")}
    print(json.dumps({"run": command, "env": neuron, "cwd": str(Path.cwd())}), file=file)
status = int((plan / "status").read_text()) if (plan / "status").is_file() else 0
if (plan / "run").is_file():
    status = subprocess.run(
        command, env={**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}
    ).returncode
if status:
    sys.exit(1)
results = plan / f"{len(calls.read_text().splitlines()) - 1}.json"
if results.is_file():
    shutil.copy(results, f"neuron_parallel_compile_results_{time.time()}.json")
    total = {"total_neuron_parallel_compile_time": 391.5}
    Path(f"total_neuron_parallel_compile_results_{time.time()}.json").write_text(json.dumps(total))
    summary = json.loads(results.read_text())["compilation_summary"]
    sys.exit(summary.get("false", 0))
