# The README's setup in a container. torch includes the CUDA runtime, so the image also runs on GPUs.
# docker/cuda.Dockerfile adds the CUDA compiler, for apex and other extensions that are compiled for GPUs.
#
#   docker build -t megatron .
#   docker run --rm -it --init [--gpus all] -v megatron-quickstart:/home/user/megatron/quickstart megatron
#   docker build --target test .       # runs the tests
FROM python:3.12-slim AS base
# torch.compile needs a C++ compiler. NCCL loads the libraries of InfiniBand if they are installed, and otherwise falls
# back to TCP.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libibverbs1 librdmacm1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
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
COPY --chown=user . .
CMD ["bash", "scripts/pretrain_gpt.sh"]

FROM base AS test
RUN bash scripts/test.sh

FROM base
