#!/usr/bin/env python3
"""Measure the server: its throughput beside the offline batch rate, its latency, and what 10,000 requests leave behind.

    python benchmarks/serving.py --data-dir DIR

writes results/serving.json, which the page about serving shows. DIR holds Multi30k: its sentences go through a model of
the recipe's size with random weights, whose translations end at the length of their sources. With --model, a trained
model takes its place, and --texts names a file with sentences for it. Each part is written as soon as it is measured;
--part measures one of them again. Searches continue until no active hypothesis can win (serve --beam-patience inf). With
--patience 1, the recipe's size is measured a second time, with the default of `serve`: a search stops as soon as --beam-size
hypotheses have finished.

Server and clients share this machine. Other programs disturb rates and latencies, so the record has the load of the
machine before the program started and around each part, every round, and the ratio of processor times, which they hardly
disturb. It names the model and the sentences by their hashes, not by their paths.
"""
import argparse
import asyncio
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import psutil
import torch
from record import about, public_settings

from annotated_transformer.checkpoints import build_model
from annotated_transformer.corpora import CorpusConfig, load_corpus
from annotated_transformer.files import atomic_write, checksum, read_json
from annotated_transformer.recipe import default_run
from annotated_transformer.server import n_batches
from annotated_transformer.serving import ServerConfig
from annotated_transformer.toy_languages import toy_ende
from annotated_transformer.translator import SHIPPED, Translator
from annotated_transformer.vocabulary import train_tokenizer

PATH = Path(__file__).parent / 'results/serving.json'
N_CLIENTS = 32
EXACT = ['--beam-patience', 'inf'] # search until no active hypothesis can win
OVERSIZED = b'{"q": "' + b'a' * 300_000 + b'"}'
BAD_REQUESTS = { # kind: body, bytes that the header promises, what the client does then
    'invalid JSON': (b'{"q": ', None, 'reads'),
    'a number for q': (b'{"q": 3}', None, 'reads'),
    'an unknown language': (b'{"q": "The dog sleeps.", "target": "fr"}', None, 'reads'),
    '300,000 bytes': (OVERSIZED, None, 'reads'),
    'not HTTP': (None, None, 'reads'),
    'cut off': (b'{"q": "The dog', 1000, 'ends its side'),
    'the client leaves': (b'{"q": "The dog sleeps."}', None, 'leaves'),
}
CLOSED = 'closed by the server without an answer'
CLOSED_IN_TIME = 5 # seconds that a server has to close the connection of a client that ended its side
LEFT = 'sent, then closed by the client'


class Server:
    "`annotated-transformer serve` in a process of its own."
    def __init__(self, model, log, options=()):
        command = [sys.executable, '-m', 'annotated_transformer', 'serve', '--port', '0', '--model', str(model), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.port = int(re.search(r':(\d+)\.', self.process.stdout.readline())[1])
        self.ps = psutil.Process(self.process.pid)

    def seconds(self) -> float:
        "Processor time so far."
        times = self.ps.cpu_times()
        return times.user + times.system

    def event_loop_seconds(self) -> float:
        "Processor time of the main thread, which runs the event loop. The other threads tokenize and run the model."
        return sum(thread.user_time + thread.system_time for thread in self.ps.threads() if thread.id == self.process.pid)

    def megabytes(self) -> float:
        return round(self.ps.memory_info().rss / 1e6, 1)


@contextmanager
def running(model, options=()):
    "A server, and the path of its log."
    with tempfile.NamedTemporaryFile('w', suffix='.log') as log:
        server = Server(model, log, options)
        try:
            yield server, Path(log.name)
        finally:
            server.process.terminate()
            server.process.wait(60)


def http(body: bytes, length: int | None = None) -> bytes:
    "A request to translate."
    length = len(body) if length is None else length
    return (b'POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
            b'Content-Length: %d\r\n\r\n' % length) + body


async def read_answer(reader) -> tuple[int, bytes]:
    "The status and the body of an answer. Raises IncompleteReadError if the server closes the connection first."
    head = (await reader.readuntil(b'\r\n\r\n')).decode()
    length = re.search(r'content-length: (\d+)', head, re.I)
    body = await reader.readexactly(int(length[1])) if length else await reader.read()
    return int(head.split()[1]), body


class Client:
    "Sends good requests over one connection, and each bad one over a new connection."
    def __init__(self, port):
        self.port = port
        self.connection = None
        self.resends = 0 # good requests that were sent once more

    async def good(self, sentence: str) -> tuple[int, str | None]:
        """The status and the translation; status 0: the connection was lost.

        The server closes a connection that is idle for 5 seconds. If it does so just before it is used again, the
        request was not received, and is sent once more, as browsers and HTTP libraries do.
        """
        was_idle = self.connection is not None
        if not was_idle:
            self.connection = await asyncio.open_connection('127.0.0.1', self.port)
        reader, writer = self.connection
        try:
            writer.write(http(json.dumps({'q': sentence}).encode()))
            status, body = await read_answer(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.connection = None
            writer.close()
            if was_idle and not getattr(error, 'partial', b''):
                self.resends += 1
                return await self.good(sentence)
            return 0, None
        return status, json.loads(body).get('translatedText')

    async def bad(self, kind: str) -> str:
        "What the client of a bad request saw: the status, or how the connection ended."
        body, length, then = BAD_REQUESTS[kind]
        reader, writer = await asyncio.open_connection('127.0.0.1', self.port)
        try:
            writer.write(b'\x16\x03\x01 this is not HTTP\r\n\r\n' if body is None else http(body, length))
            await writer.drain()
            if then == 'leaves':
                return LEFT
            if then == 'ends its side':
                writer.write_eof()
                return await ending(reader)
            return str((await read_answer(reader))[0])
        except (OSError, asyncio.IncompleteReadError):
            return CLOSED
        finally:
            writer.close()


async def ending(reader) -> str:
    "How the server ends a connection on which nothing more will come."
    try:
        answer = await asyncio.wait_for(reader.read(), CLOSED_IN_TIME)
    except asyncio.TimeoutError:
        return f'still open after {CLOSED_IN_TIME} seconds'
    if answer:
        return answer.split()[1].decode()
    return f'{CLOSED} within {CLOSED_IN_TIME} seconds'


async def send_all(port: int, jobs: list, on_done) -> tuple[list, int]:
    """Let the clients send jobs, (sentence, None) or (None, kind), each as soon as its last one is answered.

    Returns the seconds and the result of each job, and how many good requests were sent a second time.
    """
    todo = iter(enumerate(jobs))
    results = [None] * len(jobs)
    clients = []
    n_done = itertools.count(1)

    async def work():
        client = Client(port)
        clients.append(client)
        for i, (sentence, kind) in todo:
            start = time.perf_counter()
            result = await (client.good(sentence) if kind is None else client.bad(kind))
            results[i] = (time.perf_counter() - start, result)
            on_done(next(n_done))

    await asyncio.gather(*(work() for _ in range(N_CLIENTS)))
    return results, sum(client.resends for client in clients)


def offline(
    translator: Translator, sentences: list[str], patience: float | None = None,
) -> tuple[list[str], float, float]:
    "The translations of one call, and its seconds and processor seconds for each sentence."
    start, cpu = time.perf_counter(), time.process_time()
    translations = translator.translate(sentences, patience=patience or math.inf)
    return translations, (time.perf_counter() - start) / len(sentences), (time.process_time() - cpu) / len(sentences)


def spread(values: list[float], digits: int) -> list[float]:
    "Minimum, median and maximum."
    return [round(f(values), digits) for f in (min, median, max)]


def throughput(model, sentences: list[str], rounds: int, patience: float | None = None) -> dict:
    "Compare 32 clients of single sentences with one offline call, in alternation. Both search with this patience."
    options = EXACT if patience is None else ['--beam-patience', str(patience)]
    before = os.getloadavg()
    translator = Translator.load(model, 'cpu', engine='auto')
    offline(translator, sentences[:64], patience)
    found = {'offline': [], 'served': [], 'ratio': [], 'processor_ratio': [], 'median_ms': [], 'p95_ms': [],
             'offline_processor_ms': [], 'server_processor_ms': [], 'event_loop_processor_ms': []}
    n_same = 0
    n_resends = 0
    with running(model, options) as (server, _):
        asyncio.run(send_all(server.port, [(sentence, None) for sentence in sentences[:64]], lambda n: None))
        for _ in range(rounds):
            expected, seconds, cpu = offline(translator, sentences, patience)
            loop_start = server.event_loop_seconds()
            start, server_start = time.perf_counter(), server.seconds()
            results, resends = asyncio.run(send_all(server.port, [(text, None) for text in sentences], lambda n: None))
            n_resends += resends
            served = (time.perf_counter() - start) / len(sentences)
            served_cpu = (server.seconds() - server_start) / len(sentences)
            loop_cpu = (server.event_loop_seconds() - loop_start) / len(sentences)
            latencies = quantiles([1000 * latency for latency, _ in results], n=20)
            n_same = sum(result == (200, text) for (_, result), text in zip(results, expected))
            for name, value in zip(found, (1 / seconds, 1 / served, seconds / served, cpu / served_cpu,
                                           latencies[9], latencies[18], 1000 * cpu, 1000 * served_cpu, 1000 * loop_cpu)):
                found[name].append(value)
            print({name: round(values[-1], 2) for name, values in found.items()}, flush=True)
    return {'engine': translator.engine.name, 'threads': torch.get_num_threads(), 'batches_at_a_time': n_batches(translator),
            'sentences': len(sentences),
            'rounds': rounds, 'same': n_same, 'resends': n_resends,
            'mean_words': round(sum(len(text.split()) for text in sentences) / len(sentences), 1),
            'load': [round(before[0], 1), round(os.getloadavg()[0], 1)],
            'max_wait': ServerConfig().max_wait, **({} if patience is None else {'patience': patience}),
            **{name: spread(values, 3 if 'ratio' in name else 1) for name, values in found.items()},
            'by_round': {name: [round(value, 4) for value in values] for name, values in found.items()}}


def soak(model, sentences: list[str], n_requests: int) -> dict:
    "Send many requests, a tenth of them bad, and look at answers, log and memory."
    before = os.getloadavg()
    expected = dict(zip(sentences, offline(Translator.load(model, 'cpu', engine='auto'), sentences)[0]))
    texts = itertools.cycle(sentences)
    kinds = itertools.cycle(BAD_REQUESTS)
    jobs = [(None, next(kinds)) if i % 10 == 9 else (next(texts), None) for i in range(n_requests)]
    with running(model, EXACT) as (server, log):
        memory = [[0, server.megabytes()]]

        def watch(n):
            if n % max(1, n_requests // 40) == 0:
                memory.append([n, server.megabytes()])

        start = time.perf_counter()
        results, n_resends = asyncio.run(send_all(server.port, jobs, watch))
        minutes = (time.perf_counter() - start) / 60
        time.sleep(1)
        lines = log.read_text().splitlines()
    good = [(sentence, result) for (sentence, kind), (_, result) in zip(jobs, results) if kind is None]
    bad = {kind: Counter(result for (_, k), (_, result) in zip(jobs, results) if k == kind) for kind in BAD_REQUESTS}
    return {'requests': n_requests, 'minutes': round(minutes, 1), 'good': len(good),
            'statuses': dict(Counter(str(status) for _, (status, _) in good)), 'resends': n_resends,
            'own_translation': sum(result == (200, expected[sentence]) for sentence, result in good),
            'bad': {kind: dict(counts) for kind, counts in bad.items()}, 'log_lines': len(lines),
            'tracebacks': sum('Traceback' in line for line in lines), 'megabytes': memory,
            'load': [round(before[0], 1), round(os.getloadavg()[0], 1)]}


def identity(folder: str | Path) -> dict:
    "Hashes, configuration and training corpus of a model; no path. Random weights have no corpus."
    folder = Path(folder)
    corpus = read_json(folder / 'training.json', {}).get('run', {}).get('corpus')
    return {'weights_sha256': checksum(folder / 'model.safetensors')['sha256'],
            'tokenizer_sha256': checksum(folder / 'tokenizer.json')['sha256'],
            'config': read_json(folder / 'config.json'), 'corpus': public_settings(corpus) if corpus else None}


def texts_sha256(sentences: list[str]) -> str:
    "The hash of sentences, one on a line."
    return hashlib.sha256(''.join(sentence + '\n' for sentence in sentences).encode()).hexdigest()


def recipe_texts(args, folder: Path) -> tuple[Path, list[str]]:
    "The model of the part recipe, and its sentences."
    if args.texts:
        return Path(args.model), gzip.open(args.texts, 'rt', encoding='utf-8').read().splitlines()
    model, sentences = recipe_model(args.data_dir, folder / 'model')
    return Path(args.model or model), sentences


def recipe_model(data_dir: str, folder: Path) -> tuple[Path, list[str]]:
    "Write a model of the recipe's size with random weights. Return it with the sentences of test_2016_flickr."
    config = default_run(CorpusConfig('multi30k', data_dir=data_dir))
    corpus = load_corpus(config.corpus)
    tokenizer = train_tokenizer(config.tokenizer, corpus['train'], corpus.langs, config.model.vocab_size)
    torch.manual_seed(0)
    model = build_model(replace(config.model, vocab_size=len(tokenizer)))
    Translator(model, tokenizer, {'decoding': {'max_extra_tokens': 0}}).save(folder)
    return folder, [src for src, _ in corpus['test_2016_flickr']]


def main():
    parser = argparse.ArgumentParser(description='Measure the server.')
    parser.add_argument('--part', choices=['shipped', 'recipe', 'recipe_patience', 'soak'], action='append',
                        help='default: all; recipe_patience needs --patience')
    parser.add_argument('--patience', type=float, help='measure the part recipe a second time, with this patience')
    parser.add_argument('--data-dir', help='folder of Multi30k, for the part recipe')
    parser.add_argument('--model', help="a trained model's folder, for the part recipe; default: random weights")
    parser.add_argument('--texts', help='a gzipped file of sentences for --model; default: those of --data-dir')
    parser.add_argument('--sentences', type=int, default=1000)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--requests', type=int, default=10_000)
    parser.add_argument('--out', type=Path, default=PATH)
    args = parser.parse_args()
    load_at_start = [round(load, 2) for load in os.getloadavg()] # of 1, 5 and 15 minutes
    parts = args.part or ['shipped', 'recipe', 'soak']
    if args.patience is None and 'recipe_patience' in parts:
        parser.error('the part recipe_patience needs a patience: add --patience 1')
    if args.patience is not None and 'recipe_patience' not in parts:
        parts.append('recipe_patience')
    toy = list(dict.fromkeys(pair.src for split in ('test', 'val', 'test_long') for pair in toy_ende(split)))
    record = json.loads(args.out.read_text('utf-8')) if args.out.exists() else {}
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            model, sentences = SHIPPED, toy
            if part.startswith('recipe'):
                model, sentences = recipe_texts(args, Path(folder))
            if part == 'soak':
                found = soak(model, sentences, args.requests)
            else:
                sentences = sentences[:args.sentences]
                patience = args.patience if part == 'recipe_patience' else None
                found = throughput(model, sentences, args.rounds, patience)
            if part.startswith('recipe'):
                found['weights'] = 'trained' if args.model else 'random'
            found |= {'load_at_start': load_at_start, 'model': identity(model), 'texts_sha256': texts_sha256(sentences)}
        command = about()['command']
        for path, name in [(args.data_dir, 'DIR'), (args.model, 'MODEL'), (args.texts, 'TEXTS'), (args.out, 'OUT')]:
            command = command.replace(str(path), name)
        record |= {**about(), 'command': command, 'clients': N_CLIENTS, 'nice': os.nice(0), part: found}
        atomic_write(args.out, json.dumps(record, indent=1) + '\n')
        print(part, json.dumps(found), flush=True)


if __name__ == '__main__':
    main()
