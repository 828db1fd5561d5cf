# The README's setup in a container with the CUDA compiler, and optionally apex.
#
#   docker build -f docker/cuda.Dockerfile -t megatron:cuda [--build-arg APEX=COMMIT] .
#   docker run --rm -it --init --gpus all --ipc host -v megatron-quickstart:/home/user/megatron/quickstart megatron:cuda
#
# The CUDA version must be that of torch in requirements.txt, because apex compiles with no other. APEX is a commit
# of github.com/NVIDIA/apex, that of the README; its release 25.09 does not compile with CUDA 13.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
# NCCL loads the libraries of InfiniBand if they are installed, and otherwise falls back to TCP.
RUN apt-get update && apt-get install --yes --no-install-recommends git g++ libibverbs1 librdmacm1 ibverbs-providers python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1001 user
USER user
# Created by the user, so that a volume mounted here belongs to the user.
RUN mkdir -p /home/user/megatron/quickstart
WORKDIR /home/user/megatron
ENV PIP_NO_CACHE_DIR=1 PATH=/home/user/megatron/.venv/bin:$PATH
# Before the code, because the code changes more often.
COPY --chown=user requirements.txt constraints.txt .
RUN python3 -m venv .venv
RUN .venv/bin/python -m pip install -c constraints.txt -r requirements.txt
ARG APEX=
RUN [ -z "$APEX" ] || python -m pip install setuptools wheel packaging ninja
RUN [ -z "$APEX" ] || APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python -m pip install --no-build-isolation "git+https://github.com/NVIDIA/apex@$APEX"
COPY --chown=user . .
CMD ["bash", "scripts/pretrain_gpt.sh"]
