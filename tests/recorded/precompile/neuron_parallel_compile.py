"""Stands in for Neuron's tool: its options and what it writes, from its documentation and source. Compiles nothing.

The folder FAKE_TOOL says what happens: <n>.json are the results of the n-th call that compiles, `run` asks for a real
run of the command, `status` is the exit status of the collection. calls.jsonl there gets a line for each call.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

plan = Path(os.environ["FAKE_TOOL"])
parser = argparse.ArgumentParser()
commands = ["collect-and-compile", "collect", "clear-locks", "clear-neffs", "compile", "clean", "scan", "analyze"]
parser.add_argument("--command", choices=commands, default="collect-and-compile")
for option in ("--num_parallel", "--node_id", "--world_size"):
    parser.add_argument(option, type=int)
parser.add_argument("--static_schedule", action="store_true")
for option in ("--analyze-output", "--analyze-verbosity", "--parallel_compile_workdir", "--log_level"):
    parser.add_argument(option)
options, command = parser.parse_known_args()  # as the tool does: what it does not know is the run's command

calls = plan / "calls.jsonl"
with calls.open("a") as file:
    neuron = {name: value for name, value in os.environ.items() if name.startswith("NEURON")}
    print(json.dumps({"command": options.command, "run": command, "env": neuron, "cwd": str(Path.cwd())}), file=file)
if options.command == "collect-and-compile":
    status = int((plan / "status").read_text()) if (plan / "status").is_file() else 0
    if (plan / "run").is_file():
        status = subprocess.run(command, env={**os.environ, "NEURON_EXTRACT_GRAPHS_ONLY": "1"}).returncode
    if status:
        sys.exit(1)
if options.command in ("collect-and-compile", "compile"):
    done = [json.loads(line)["command"] for line in calls.read_text().splitlines()]
    results = plan / f"{len([name for name in done if name != 'clear-locks']) - 1}.json"
    if results.is_file():
        shutil.copy(results, f"neuron_parallel_compile_results_{time.time()}.json")
        total = {"total_neuron_parallel_compile_time": 391.5}
        Path(f"total_neuron_parallel_compile_results_{time.time()}.json").write_text(json.dumps(total))
        try:
            sys.exit(json.loads(results.read_text())["compilation_summary"].get("false", 0))
        except ValueError:
            sys.exit(0)
