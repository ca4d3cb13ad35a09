#!/bin/bash
# The script of every job: fixed text. What varies is in job.json of the run's record, which launch.slurm.batch reads.
# Arguments: the Python interpreter, then those of launch.slurm.batch.
set -euo pipefail
python=$1
shift
exec "$python" -m launch.slurm.batch "$@" # it takes this shell's place, and so the signals that Slurm sends to it
