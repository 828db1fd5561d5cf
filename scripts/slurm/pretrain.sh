#!/usr/bin/env bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Pretrain under SLURM, one task per GPU, and requeue the job until training is done.
#
#   sbatch [--nodes 4 ...] scripts/slurm/pretrain.sh pretrain_gpt.py --save DIR --load DIR [flags]
#   DATA_PATH=... [...] sbatch --nodes 32 scripts/slurm/pretrain.sh scripts/pretrain_gpt_18.4b.sh [flags]
#
# Run it in the root of the repository. --save and --load must name the same directory, visible to all nodes. Five minutes
# before the time limit SLURM signals the tasks; they save and exit, and the job is requeued and resumes from the
# checkpoint. The job is also requeued after a transient fault, such as the loss of a node. Environment variables:
#
#   PYTHON         interpreter that has the packages (default: .venv/bin/python if it exists, else python3)
#   MAX_RESTARTS   restarts after faults before the job gives up, counted since it last reached the time limit
#                  (default: 20)
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
  sed -n '/^# Pretrain/,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: not a SLURM job; start it with sbatch" >&2
  exit 2
fi

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export PYTHON MASTER_ADDR MASTER_PORT
# Let the segments of torch's GPU allocator grow, so that memory does not fragment; settings of the user come first.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}

status=0
if [[ $1 == *.sh ]]; then
  LAUNCHER=scripts/slurm/tasks.sh bash "$@" || status=$?
else
  bash scripts/slurm/tasks.sh "$PYTHON" "$@" || status=$?
fi

faults=.pretrain-$SLURM_JOB_ID.faults # a line for each fault since the run last reached its time limit
case $status in
  0)
    echo "training is done, or a flag ended it"
    rm -f "$faults"
    ;;
  138) # SIGUSR1: the time limit is near
    echo "saved before the time limit; SLURM will restart the job, which then resumes"
    rm -f "$faults"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  134 | 137 | 200) # a task was aborted by NCCL, or killed: a transient fault
    echo "$status" >>"$faults"
    restarts=$(wc -l <"$faults")
    if ((restarts <= ${MAX_RESTARTS:-20})); then
      echo "ended with status $status; restart $((restarts)) of at most ${MAX_RESTARTS:-20}"
      scontrol requeue "$SLURM_JOB_ID"
    else
      echo "ended with status $status after ${MAX_RESTARTS:-20} restarts; giving up" >&2
    fi
    ;;
  129 | 130 | 143) echo "stopped by a signal; run the same command to resume" ;;
  *) echo "ended with status $status, which a restart would not help" >&2 ;;
esac
exit "$status"
