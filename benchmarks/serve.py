"""Load-test the server with many concurrent clients, some of them misbehaving, against a single client.

    python benchmarks/serve.py [--clients 64] [--seconds 120]

The server runs a small GPT with random weights on this machine. First, one client sends valid requests one after
another. Then all clients run at once: one in nine disconnects during generation, one in nine sends requests that are
malformed, ask for too much or name another host, and one in nine does not complete the head of its request. Lengths of
prompts and completions have the same distribution in both parts, and half of the valid requests stream. No valid
request may fail. The resident memory of the server is read shortly after the start, in the middle and at the end.
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
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from parallel import run_metadata

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
# Tokens of the longest prompt, and of the shortest and longest completion.
MAX_PROMPT, COMPLETION = 128, (8, 96)
CLIENT_TIMEOUT = 600  # seconds: the load of the machine is no failure of the server
MALFORMED = [
    b"",
    b"{",
    b'{"prompt": "\xff"}',
    b'{"prompt": "1", "temperature": -1}',
    b'{"prompt": "x"}',
    b"[" * 10_000,
    json.dumps({"prompt": [[1]] * 20_000, "n": 128}).encode(),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Config):
    """Options of the benchmark."""

    clients: int = flag(64, "concurrent clients", low=8)
    seconds: float = flag(120.0, "duration of the load; the single client runs for a quarter of it", above=0)
    output: str = flag(
        str(ROOT / "benchmarks/results/serve.json"), "file to write the results to", metavar="FILE"
    )


@dataclasses.dataclass
class ClientStats:
    """Results of all clients."""

    tokens: int = 0  # generated for valid requests
    completed: int = 0
    seconds: float = 0.0  # until the last response
    failures: list[str] = dataclasses.field(default_factory=list)
    other_responses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    latencies: list[float] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(description=__doc__.splitlines()[0])
    add_flags(parser, BenchmarkConfig, "benchmark")
    config = make_config(BenchmarkConfig, vars(parser.parse_args(argv)))
    results = run_metadata("serve.py", argv) | {"flags": " ".join(MODEL.split())}
    with run_server() as (url, process):
        print("one client", flush=True)
        serial = asyncio.run(run_clients(url, 1, config.seconds / 4, []))
        print(f"{config.clients} clients", flush=True)
        memory: list[float] = []
        concurrent = asyncio.run(run_clients(url, config.clients, config.seconds, memory, process.pid))
    rates = serial.tokens / serial.seconds, concurrent.tokens / concurrent.seconds
    concurrent.latencies.sort()
    results |= {
        "serial": {
            "tokens a second": round(rates[0], 1),
            "requests": serial.completed,
            "failures": serial.failures,
        },
        "clients": {
            "tokens a second": round(rates[1], 1),
            "requests": concurrent.completed,
            "failures": concurrent.failures[:10],
            "number of failures": len(concurrent.failures),
            "seconds of a request, median": round(concurrent.latencies[len(concurrent.latencies) // 2], 3),
            "seconds of a request, 99 of 100": round(
                concurrent.latencies[len(concurrent.latencies) * 99 // 100], 3
            ),
            "hung up, and answers to rubbish": dict(sorted(concurrent.other_responses.items())),
        },
        "throughput over serial": round(rates[1] / rates[0], 2),
        "resident memory of the server, MB": memory,
    }
    print(json.dumps({name: results[name] for name in list(results)[5:]}, indent=2))
    Path(config.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


@contextmanager
def run_server() -> Iterator[tuple[str, subprocess.Popen]]:
    """Context with the address and process of a server, which runs a new model."""
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
                raise RuntimeError("the server did not start")
            yield address.group(), process
        finally:
            process.terminate()
            process.wait()


async def run_clients(
    url: str, clients: int, seconds: float, memory: list[float], pid: int | None = None
) -> ClientStats:
    """Run the clients for `seconds`. With `pid`, append the memory of that process to `memory` three times."""
    stats, begin = ClientStats(), time.monotonic()
    end = begin + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=CLIENT_TIMEOUT, limits=limits) as http:
        misbehaving = [disconnecting_client, malformed_client, slow_client]
        roles = [valid_client] if clients == 1 else [*misbehaving, *[valid_client] * 6]
        tasks = [
            counted(roles[i % len(roles)](http, stats, random.Random(i), end), stats) for i in range(clients)
        ]
        if pid is not None:
            tasks.append(record_memory(pid, seconds, memory))
        await asyncio.gather(*tasks)
    stats.seconds = time.monotonic() - begin
    return stats


async def counted(client: Coroutine[None, None, None], stats: ClientStats) -> None:
    """Run a client. An error that ends it is a failure, also that of a client that misbehaves."""
    try:
        await client
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        stats.failures.append(f"{client.__name__}: {type(error).__name__}: {error}")


async def record_memory(pid: int, seconds: float, memory: list[float]) -> None:
    begin = time.monotonic()
    for offset in (min(10, seconds / 4), seconds / 2, seconds):
        await asyncio.sleep(begin + offset - time.monotonic())
        kilobytes = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        memory.append(round(int(kilobytes.group(1)) / 1024, 1))


def draw_request(rng: random.Random) -> dict[str, object]:
    """Draw a request. Short prompts are more frequent."""
    length = int(MAX_PROMPT ** rng.random())
    return {
        "prompt": [rng.randrange(VOCAB_SIZE) for _ in range(length)],
        "max_tokens": rng.randint(*COMPLETION),
        "seed": rng.getrandbits(32),
        "stream": rng.random() < 0.5,
    }


async def valid_client(http: httpx.AsyncClient, stats: ClientStats, rng: random.Random, end: float) -> None:
    while time.monotonic() < end:
        body = draw_request(rng)
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
            stats.tokens += usage["completion_tokens"]
            stats.completed += 1
            stats.latencies.append(time.monotonic() - begin)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            stats.failures.append(f"{type(error).__name__}: {error}")


async def disconnecting_client(
    http: httpx.AsyncClient, stats: ClientStats, rng: random.Random, end: float
) -> None:
    while time.monotonic() < end:
        body = draw_request(rng)
        if body["stream"]:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if rng.random() < 0.1:
                        break
        else:
            try:
                await http.post("/v1/completions", json=body, timeout=rng.uniform(0.01, 0.3))
            except httpx.TimeoutException:
                stats.other_responses["hung up before the answer"] += 1
                continue
        stats.other_responses["hung up in a stream, or answered before"] += 1


async def malformed_client(
    http: httpx.AsyncClient, stats: ClientStats, rng: random.Random, end: float
) -> None:
    while time.monotonic() < end:
        headers = {"Content-Type": "application/json"}
        if rng.random() < 0.2:
            headers["Host"] = "example.com"
        response = await http.post("/v1/completions", content=rng.choice(MALFORMED), headers=headers)
        stats.other_responses[f"rubbish, status {response.status_code}"] += 1
        await asyncio.sleep(rng.uniform(0, 0.2))


async def slow_client(http: httpx.AsyncClient, stats: ClientStats, rng: random.Random, end: float) -> None:
    """Send part of a request's head, and wait until the server closes the connection."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    while time.monotonic() < end:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(head[: rng.randrange(len(head))])
        closed = await asyncio.wait_for(reader.read(1), 30) == b""
        stats.other_responses["slow head, closed" if closed else "slow head, answered"] += 1
        writer.close()


if __name__ == "__main__":
    run_command(main)
