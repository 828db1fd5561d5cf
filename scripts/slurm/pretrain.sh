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
# Pretrain under SLURM, one task per GPU, again and again until training is done.
#
#   sbatch [--nodes 4 ...] scripts/slurm/pretrain.sh pretrain_gpt.py --save DIR --load DIR [flags]
#   DATA_PATH=... [...] sbatch --nodes 32 scripts/slurm/pretrain.sh scripts/pretrain_gpt_18.4b.sh [flags]
#
# From the repository's folder; --save and --load must name the same folder, one that all nodes see. Five minutes before
# the time limit SLURM signals the tasks: they save and leave, and the job is put into the queue again, where it goes on
# from what was saved. So it is after a fault that may pass, as the loss of a node. Environment variables:
#
#   PYTHON         interpreter that has the packages (default: .venv/bin/python if there is one, or else python3)
#   MAX_RESTARTS   how often to try again after faults without coming to the time limit in between (default: 20)
set -euo pipefail

if (($# == 0)) || [[ $1 == -h || $1 == --help ]]; then
  sed -n '/^# Pretrain/,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "error: this is no SLURM job; start it with sbatch" >&2
  exit 2
fi

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export PYTHON MASTER_ADDR MASTER_PORT

status=0
if [[ $1 == *.sh ]]; then
  LAUNCHER=scripts/slurm/tasks.sh bash "$@" || status=$?
else
  bash scripts/slurm/tasks.sh "$PYTHON" "$@" || status=$?
fi

faults=.pretrain-$SLURM_JOB_ID.faults # one line for each since the run last came to its time limit
case $status in
  0)
    echo "training is done, or stopped where a flag said"
    rm -f "$faults"
    ;;
  138) # SIGUSR1: the time was up
    echo "saved before the time limit; goes on when SLURM starts it again"
    rm -f "$faults"
    scontrol requeue "$SLURM_JOB_ID"
    ;;
  134 | 137 | 200) # a task was aborted by NCCL, or killed; a fault that may pass
    echo "$status" >>"$faults"
    restarts=$(wc -l <"$faults")
    if ((restarts <= ${MAX_RESTARTS:-20})); then
      echo "ended with status $status; restart $((restarts)) of at most ${MAX_RESTARTS:-20}"
      scontrol requeue "$SLURM_JOB_ID"
    else
      echo "ended with status $status after ${MAX_RESTARTS:-20} restarts; giving up" >&2
    fi
    ;;
  130 | 143) echo "stopped by a signal; the same command goes on from what was saved" ;;
  *) echo "ended with status $status, which starting again would not help" >&2 ;;
esac
exit "$status"
