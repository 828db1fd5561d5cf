# The README's set-up in a container. torch carries CUDA, so it runs on GPUs too; docker/cuda.Dockerfile adds the CUDA
# compiler, for apex and what else is built for GPUs.
#
#   docker build -t megatron .
#   docker run --rm -it --init [--gpus all] -v megatron-quickstart:/home/user/megatron/quickstart megatron
#   docker build --target test .       # runs the tests in it
FROM python:3.12-slim AS base
# torch.compile needs a C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1001 user
USER user
# As the user, whom a volume that is mounted here then belongs to.
RUN mkdir -p /home/user/megatron/quickstart
WORKDIR /home/user/megatron
ENV PIP_NO_CACHE_DIR=1 PATH=/home/user/megatron/.venv/bin:$PATH
# Before the code, which changes more often.
COPY --chown=user requirements.txt .
RUN python3 -m venv .venv
RUN .venv/bin/python -m pip install -r requirements.txt
COPY --chown=user . .
CMD ["bash", "scripts/pretrain_gpt.sh"]

FROM base AS test
RUN bash scripts/test.sh

FROM base
