"""What a server bears: many clients at once against one, and those that behave badly among them.

    python benchmarks/serve.py [--clients 64] [--seconds 120]

A small GPT with random weights, served on this machine. First one client sends good requests, one after another; then
all clients at once, of whom one in eight hangs up in the middle of its texts and one in eight sends rubbish. Lengths of
prompts and texts are mixed, the same in both parts; half the good requests stream. Of good requests none may fail. The
server's memory is read a while after the start, in the middle and at the end.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import about

from megatron.cli import Parser, add_flags, make_config, run_command
from megatron.errors import InputError
from megatron.flags import Config, flag

try:
    import httpx
except ImportError:
    raise InputError("this benchmark needs httpx: pip install httpx") from None

VOCAB_SIZE, LENGTH = 8191, 256
MODEL = f"""
    --device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --num-workers 0 --num-layers 4
    --hidden-size 256 --num-attention-heads 8 --seq-length {LENGTH} --micro-batch-size 1 --train-iters 1 --lr 1e-3
    --eval-iters 0
"""
# The longest prompt, and the shortest and longest text, in tokens.
PROMPT, TEXT = 128, (8, 96)
RUBBISH = [
    b"",
    b"{",
    b'{"prompt": "\xff"}',
    b'{"prompt": "1", "temperature": -1}',
    b'{"prompt": "x"}',
    b"[" * 10_000,
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """How many clients, for how long."""

    clients: int = flag(64, "clients at once", low=8)
    seconds: float = flag(120.0, "that they go on for; the single client takes a quarter of it", above=0)
    output: str = flag(str(ROOT / "benchmarks/results/serve.json"), "where results go", metavar="FILE")


@dataclasses.dataclass
class Tally:
    """What clients have met."""

    tokens: int = 0  # of good requests
    good: int = 0
    seconds: float = 0.0  # until the last answer
    failures: list[str] = dataclasses.field(default_factory=list)
    others: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    latencies: list[float] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = about("serve.py", argv) | {"flags": " ".join(MODEL.split())}
    with served() as (url, process):
        print("one client", flush=True)
        serial = asyncio.run(load(url, 1, config.seconds / 4, []))
        print(f"{config.clients} clients", flush=True)
        memory: list[float] = []
        every = asyncio.run(load(url, config.clients, config.seconds, memory, process.pid))
    rates = serial.tokens / serial.seconds, every.tokens / every.seconds
    every.latencies.sort()
    results |= {
        "serial": {
            "tokens a second": round(rates[0], 1),
            "requests": serial.good,
            "failures": serial.failures,
        },
        "clients": {
            "tokens a second": round(rates[1], 1),
            "requests": every.good,
            "failures": every.failures[:10],
            "number of failures": len(every.failures),
            "seconds of a request, median": round(every.latencies[len(every.latencies) // 2], 3),
            "seconds of a request, 99 of 100": round(every.latencies[len(every.latencies) * 99 // 100], 3),
            "hung up, and answers to rubbish": dict(sorted(every.others.items())),
        },
        "throughput over serial": round(rates[1] / rates[0], 2),
        "resident memory of the server, MB": memory,
    }
    print(json.dumps({name: results[name] for name in list(results)[5:]}, indent=2))
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen]]:
    """A server of a model that was made for it: its address and process."""
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "pretrain_gpt.py", *MODEL.split(), "--save", folder]
        subprocess.run(train, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        serve = [
            sys.executable,
            "tools/serve.py",
            "--load",
            folder,
            "--port",
            "0",
            "--served-model-name",
            "small",
        ]
        process = subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            address = re.search(r"http://\S+\d", process.stdout.readline())
            if address is None:
                raise RuntimeError("the server has not started")
            yield address.group(), process
        finally:
            process.terminate()
            process.wait()


async def load(url: str, clients: int, seconds: float, memory: list[float], pid: int | None = None) -> Tally:
    """Let clients ask for so many seconds; with `pid`, note the memory of that process three times."""
    tally, begin = Tally(), time.monotonic()
    end = begin + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        roles = [good] if clients == 1 else [hang_up, rubbish, *[good] * 6]
        tasks = [roles[i % len(roles)](http, tally, random.Random(i), end) for i in range(clients)]
        if pid is not None:
            tasks.append(watch(pid, seconds, memory))
        await asyncio.gather(*tasks)
    tally.seconds = time.monotonic() - begin
    return tally


async def watch(pid: int, seconds: float, memory: list[float]) -> None:
    begin = time.monotonic()
    for moment in (min(10, seconds / 4), seconds / 2, seconds):
        await asyncio.sleep(begin + moment - time.monotonic())
        kilobytes = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        memory.append(round(int(kilobytes.group(1)) / 1024, 1))


def body_of(rng: random.Random) -> dict[str, object]:
    """A request: prompt and text of lengths that are drawn, the short ones more often."""
    length = int(PROMPT ** rng.random())
    return {
        "prompt": [rng.randrange(VOCAB_SIZE) for _ in range(length)],
        "max_tokens": rng.randint(*TEXT),
        "seed": rng.getrandbits(32),
        "stream": rng.random() < 0.5,
    }


async def good(http: httpx.AsyncClient, tally: Tally, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
        body = body_of(rng)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        begin = time.monotonic()
        try:
            response = await http.post("/v1/completions", json=body)
            response.raise_for_status()
            if body["stream"]:
                *_, last, done = [line for line in response.text.split("\n\n") if line]
                usage = json.loads(last.removeprefix("data: "))["usage"] if done == "data: [DONE]" else None
            else:
                usage = response.json()["usage"]
            tally.tokens += usage["completion_tokens"]
            tally.good += 1
            tally.latencies.append(time.monotonic() - begin)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            tally.failures.append(f"{type(error).__name__}: {error}")


async def hang_up(http: httpx.AsyncClient, tally: Tally, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
        body = body_of(rng)
        if body["stream"]:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if rng.random() < 0.1:
                        break
        else:
            try:
                await http.post("/v1/completions", json=body, timeout=rng.uniform(0.01, 0.3))
            except httpx.TimeoutException:
                tally.others["hung up before the answer"] += 1
                continue
        tally.others["hung up in a stream, or answered before"] += 1


async def rubbish(http: httpx.AsyncClient, tally: Tally, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
        headers = {"Content-Type": "application/json"}
        response = await http.post("/v1/completions", content=rng.choice(RUBBISH), headers=headers)
        tally.others[f"rubbish, status {response.status_code}"] += 1
        await asyncio.sleep(rng.uniform(0, 0.2))


if __name__ == "__main__":
    run_command(main)
