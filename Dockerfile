# The README's set-up in a container: the tests pass while the image is built, and running it trains a GPT.
#
#   docker build -t megatron .
#   docker run --rm -it --init [--gpus all] -v megatron-quickstart:/home/user/megatron/quickstart megatron
FROM python:3.12-slim
RUN useradd --create-home user
USER user
RUN mkdir -p /home/user/megatron/quickstart
WORKDIR /home/user/megatron
COPY --chown=user . .
RUN bash scripts/test.sh
CMD ["bash", "scripts/pretrain_gpt.sh"]
