"The web server: batching, limits, errors with a reason, and no client gets another client's text."
import asyncio
import json
import logging
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest

from annotated_transformer import server
from annotated_transformer.server import BadRequest, Batcher, ServerConfig, create_app, parse_body, parse_request
from annotated_transformer.translator import SHIPPED, Translation, Translator

testclient = pytest.importorskip('fastapi.testclient', reason='the extra `serve` is not installed')
JSON = 'application/json'


@pytest.fixture(scope='module')
def translator():
    return Translator.load(device='cpu')


@pytest.fixture(scope='module')
def client(translator):
    with testclient.TestClient(create_app(translator)) as client:
        yield client


def limited(translator, **limits):
    return testclient.TestClient(create_app(translator, ServerConfig(**limits)))


def echo(texts, n_best):
    return [[Translation(text.upper(), 0.0, 0.0)] * n_best for text in texts]


def test_one_sentence(client, translator):
    answer = client.post('/translate', json={'q': 'The small dog sleeps.', 'source': 'en', 'target': 'de'})
    assert answer.status_code == 200
    assert answer.json() == {'translatedText': translator.translate('The small dog sleeps.')}


def test_several_sentences_with_alternatives(client, translator):
    texts = ['The dog sleeps.', '', 'The cat reads.']
    answer = client.post('/translate', json={'q': texts, 'alternatives': 2}).json()
    assert answer['translatedText'] == translator.translate(texts)
    expected = [[found.text for found in row[1:]] for row in translator.translate_n_best(texts, 3)]
    assert answer['alternatives'] == expected


def test_every_line_of_a_text_is_translated(client, translator):
    "A model that was trained on sentences would leave out all lines but the first."
    lines = ['The dog sleeps.', '', 'The cat reads.']
    expected = [[found.text for found in ways] for ways in translator.translate_n_best(lines, 2)]
    answer = client.post('/translate', json={'q': '\r\n'.join(lines) + '\n'}).json()
    assert answer == {'translatedText': 'Der Hund schläft.\n\nDie Katze liest.'}
    answer = client.post('/translate', json={'q': ['A dog.', '\n'.join(lines)], 'alternatives': 1}).json()
    assert answer['translatedText'] == [translator.translate('A dog.'), 'Der Hund schläft.\n\nDie Katze liest.']
    assert answer['alternatives'][1] == [f'{expected[0][1]}\n\n{expected[2][1]}']
    with limited(translator, max_sentences=2) as small:
        assert small.post('/translate', json={'q': 'A dog.\nA cat.'}).status_code == 200
        answer = small.post('/translate', json={'q': 'a\nb\nc'})
        assert answer.status_code == 413 and 'q has 3 sentences: send at most 2' in answer.json()['error']


def test_no_warning_quotes_a_clients_text(client, recwarn):
    for path in ('/translate', '/attention'):
        assert client.post(path, json={'q': 'The \N{SNOWMAN} sleeps.'}).status_code == 200
    assert not [warning for warning in recwarn if 'SNOWMAN' in str(warning.message) or 'unknown' in str(warning.message)]


def test_web_form(client, translator):
    answer = client.post('/translate', data={'q': 'The dog sleeps.', 'source': 'en', 'target': 'de', 'format': 'text'})
    assert answer.json() == {'translatedText': translator.translate('The dog sleeps.')}


@pytest.mark.parametrize('body, status, reason', [
    (b'', 400, 'neither JSON nor a web form'), (b'{"q": ', 400, 'neither JSON'), (b'\xff\xfe', 400, 'neither JSON'),
    (b'[1]', 400, 'a JSON object'), (b'{}', 400, 'q must be'), (b'{"q": 3}', 400, 'q must be'),
    (b'{"q": []}', 400, 'q must be'), (b'{"q": ["a", 1]}', 400, 'q must be'),
    (b'{"q": "a", "target": "fr"}', 400, 'translates en to de'), (b'{"q": "a", "source": 7}', 400, 'translates en'),
    (b'{"q": "a", "format": "html"}', 400, 'format'), (b'{"q": "a", "alternatives": 9}', 400, 'from 0 to 3'),
    (b'{"q": "a", "alternatives": "x"}', 400, 'from 0 to 3'), (b'[' * 100_000, 400, 'neither JSON'),
    (b'{"q": "a", "alternatives": 1e999}', 400, 'from 0 to 3'),
    (b'{"q": "a", "alternatives": 1.9}', 400, 'from 0 to 3'),
    (b'{"q": "a", "alternatives": true}', 400, 'from 0 to 3'),
    (b'{"q": "a", "source": "\\ud800"}', 400, 'neither JSON'), (b'{"q": "\\ud800"}', 400, 'neither JSON')])
def test_bad_request_gets_a_reason(client, body, status, reason):
    answer = client.post('/translate', content=body, headers={'content-type': JSON})
    assert answer.status_code == status
    assert reason in answer.json()['error']
    assert 'Traceback' not in answer.text


def test_limits_of_size(translator):
    with limited(translator, max_bytes=200, max_sentences=2) as client:
        assert client.post('/translate', json={'q': 'a' * 300}).status_code == 413
        answer = client.post('/translate', json={'q': ['a', 'b', 'c']})
        assert answer.status_code == 413 and 'at most 2' in answer.json()['error']

        def parts(): # a body without a length
            for _ in range(100):
                yield b'x' * 10

        assert client.post('/translate', content=parts()).status_code == 413


def test_a_sentence_that_the_model_would_truncate_is_refused(client, translator):
    "It gets 413, and so does a request that holds it; other sentences of its batch are translated."
    long = 'dog ' * translator.model.config.max_len
    reason = f'a sentence has {translator.model.config.max_len} tokens: this model reads at most'
    for path in ('/translate', '/attention'):
        answer = client.post(path, json={'q': long})
        assert answer.status_code == 413 and answer.json()['error'].startswith(reason)
    assert client.post('/translate', json={'q': ['The dog sleeps.', long]}).status_code == 413
    batcher, _ = server.make_batchers(translator, ServerConfig())
    good, refused = batcher.translate(['The dog sleeps.', long], 1)
    assert good[0].text == 'Der Hund schläft.' and isinstance(refused, BadRequest)
    assert server.too_long(translator, ['dog ' * (translator.model.config.max_len - 1)]) == {}


def test_detect_knows_one_language(client):
    assert client.post('/detect', data={'q': 'The dog sleeps.'}).json() == [{'language': 'en', 'confidence': 100.0}]
    assert client.post('/detect', json={}).status_code == 400


def test_api_key(translator):
    with limited(translator, api_key='secret') as client:
        assert client.post('/translate', json={'q': 'a'}).status_code == 403
        assert client.post('/translate', json={'q': 'a', 'api_key': 'wrong'}).status_code == 403
        assert client.post('/translate', json={'q': 'a', 'api_key': 7}).status_code == 403
        assert client.post('/translate', json={'q': 'a', 'api_key': 'secret'}).status_code == 200
        bearer = {'authorization': 'Bearer secret'}
        assert client.post('/translate', json={'q': 'a'}, headers=bearer).status_code == 200
        assert client.get('/health').status_code == 200


def test_pages_for_people_and_machines(client):
    assert client.get('/health').json() == {'status': 'ok', 'waiting': 0}
    assert client.get('/languages').json()[0]['targets'] == ['de']
    assert '/translate' in client.get('/openapi.json').json()['paths']
    page = client.get('/')
    assert page.status_code == 200 and 'en to de' in page.text and 'SOURCE' not in page.text
    assert client.get('/nothing').status_code == 404
    assert client.get('/translate').status_code == 405


def test_attention(client, translator):
    found = client.post('/attention', json={'q': 'The dog sleeps.'}).json()
    assert len(found['weights']) == len(found['target']) and len(found['weights'][0]) == len(found['source'])
    assert all(abs(sum(row) - 1) < 0.01 for row in found['weights'])


def test_attention_has_a_queue_with_a_limit(monkeypatch):
    "Requests for attention weights beyond the limit get 429, and translations do not wait for those in the queue."
    slow = Translator.load(device='cpu')
    calls = []
    running = []

    def record(name, result):
        def call(*arguments):
            assert not running, 'two threads use the model'
            running.append(name)
            calls.append(name)
            time.sleep(0.1)
            running.clear()
            return result
        return call

    monkeypatch.setattr(server, 'attention_response', record('attention', {'weights': []}))
    monkeypatch.setattr(slow, 'translate_n_best', record('translation', echo(['a'], 1)))
    with limited(slow, max_attention=3) as client, ThreadPoolExecutor(11) as pool:
        maps = [pool.submit(client.post, '/attention', json={'q': 'a'}) for _ in range(10)]
        time.sleep(0.15) # the first is computed, three wait
        answer = pool.submit(client.post, '/translate', json={'q': 'a'})
        statuses = sorted(found.result().status_code for found in maps)
        assert answer.result().json() == {'translatedText': 'A'}
    assert statuses.count(200) in (4, 5) and statuses.count(429) == 10 - statuses.count(200)
    assert 'translation' in calls[:4], calls # not after all that wait for attention


def test_ctranslate2_translates_one_batch_for_each_worker_at_a_time(monkeypatch):
    "Each of two batches waits in the model for the other one."
    pytest.importorskip('ctranslate2')
    translator = Translator.load(device='cpu', engine='ctranslate2')
    monkeypatch.setattr(translator.engine, 'n_workers', 2)
    both = threading.Barrier(2)

    def wait_for_the_other(texts, n_best):
        both.wait(20) # an error, so status 500, if there is no second batch
        return echo(texts, n_best)

    monkeypatch.setattr(translator, 'translate_n_best', wait_for_the_other)
    with limited(translator, max_batch=1) as client, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda text: client.post('/translate', json={'q': text}).json(), 'ab'))
    assert answers == [{'translatedText': 'A'}, {'translatedText': 'B'}]


def test_ctranslate2_with_two_batches_at_a_time_gives_each_client_its_own_translation(monkeypatch, recwarn):
    pytest.importorskip('ctranslate2')
    translator = Translator.load(device='cpu', engine='ctranslate2')
    nouns = ['dog', 'cat', 'man', 'woman', 'bird', 'horse', '\N{SNOWMAN}']
    texts = [f'The {noun} sleeps.' for noun in nouns] * 8
    silent = server.without_warnings(translator)
    expected = [{'translatedText': found[0].text} for found in silent.translate_n_best(texts, 1)]
    monkeypatch.setattr(translator.engine, 'n_workers', 2)
    with limited(translator, max_batch=4) as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: client.post('/translate', json={'q': text}).json(), texts)) == expected
    assert not [warning for warning in recwarn if 'unknown' in str(warning.message)]


def test_server_does_not_warn_of_a_fallback(recwarn):
    "Its log holds JSON alone. Outside the server, the same translator still warns."
    pytest.importorskip('ctranslate2')
    translator = Translator.load(device='cpu', engine='ctranslate2')
    with limited(translator) as client:
        assert client.post('/attention', json={'q': 'The dog sleeps.'}).status_code == 200
    assert not [warning for warning in recwarn if 'Falling back' in str(warning.message)]
    with pytest.warns(UserWarning, match='Falling back to PyTorch'):
        translator.attention('The dog sleeps.')


def test_one_timeout_for_reading_and_translating():
    class SlowRequest:
        headers = {}
        url = type('URL', (), {'path': '/translate'})

        def __init__(self, seconds):
            self.seconds = seconds

        async def stream(self):
            await asyncio.sleep(self.seconds)
            yield b'{"q": "a"}'

    async def respond(fields):
        await asyncio.sleep(0.4)
        return {}

    config = ServerConfig(timeout=0.6)
    assert asyncio.run(server.handle(SlowRequest(0.0), respond, config))[0] == 200
    assert asyncio.run(server.handle(SlowRequest(0.4), respond, config))[0] == 504
    assert asyncio.run(server.handle(SlowRequest(0.9), respond, config))[0] == 408


def test_slow_translation_times_out(translator, monkeypatch):
    slow = Translator.load(device='cpu')
    monkeypatch.setattr(slow, 'translate_n_best', lambda texts, n_best: time.sleep(0.5) or echo(texts, n_best))
    with limited(slow, timeout=0.1) as client:
        answer = client.post('/translate', json={'q': 'a'})
        assert answer.status_code == 504 and '0.1 seconds' in answer.json()['error']


def test_failure_gets_no_traceback_and_is_logged(translator, monkeypatch, caplog):
    broken = Translator.load(device='cpu')
    monkeypatch.setattr(broken, 'translate_n_best', lambda texts, n_best: 1 / 0)
    with limited(broken) as client:
        answer = client.post('/translate', json={'q': 'secret text'})
    assert answer.status_code == 500 and answer.json() == {'error': 'the translation failed'}
    assert 'ZeroDivisionError' in caplog.text


def test_log_has_no_text(client, caplog):
    with caplog.at_level(logging.INFO, logger='annotated_transformer.server'):
        client.post('/translate', json={'q': 'The dog sleeps.'})
    entry = json.loads(caplog.records[-1].message)
    assert entry['status'] == 200 and entry['path'] == '/translate' and entry['milliseconds'] > 0
    assert 'dog' not in caplog.text


def test_waiting_sentences_share_a_batch():
    sizes = []

    def count(texts, n_best):
        sizes.append(len(texts))
        return echo(texts, n_best)

    async def run():
        batcher = Batcher(count, ServerConfig(max_batch=10))
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*(batcher.submit([f'a{i}']) for i in range(25)))
        task.cancel()
        return [row[0][0].text for row in found]

    assert asyncio.run(run()) == [f'A{i}' for i in range(25)]
    assert sizes == [10, 10, 5]


def test_empty_batches_do_not_block_the_event_loop():
    class Empty(Batcher):
        n_calls = 0

        async def next_batch(self):
            self.n_calls += 1
            assert self.n_calls < 100, 'no other task has run'
            return []

    async def run():
        task = asyncio.create_task(Empty(echo).run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize('limits, expected', [({}, [1, 1]), ({'max_wait': 1.0}, [2])])
def test_a_batch_waits_for_more_sentences_only_if_told_to(limits, expected):
    sizes = []

    def count(texts, n_best):
        sizes.append(len(texts))
        return echo(texts, n_best)

    async def run():
        batcher = Batcher(count, ServerConfig(**limits))
        task = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.submit(['a']))
        await asyncio.sleep(0.1)
        found = await asyncio.gather(first, batcher.submit(['b']))
        task.cancel()
        return [row[0][0].text for row in found]

    assert asyncio.run(run()) == ['A', 'B']
    assert sizes == expected


def test_each_request_of_a_batch_gets_as_many_results_as_it_asked_for():
    async def run():
        batcher = Batcher(echo)
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(batcher.submit(['a']), batcher.submit(['b', 'c'], 3))
        task.cancel()
        return [[len(results) for results in rows] for rows in found]

    assert asyncio.run(run()) == [[1], [3, 3]]


def test_missing_results_are_an_error():
    "Otherwise, the sentences without results would wait until their timeout."
    async def run():
        batcher = Batcher(lambda texts, n_best: echo(texts, n_best)[1:])
        task = asyncio.create_task(batcher.run())
        found = await asyncio.wait_for(asyncio.gather(*(batcher.submit([text]) for text in 'ab'), return_exceptions=True), 20)
        task.cancel()
        return found

    assert [str(error) for error in asyncio.run(run())] == ['1 sentences have 0 results'] * 2


def test_one_bad_sentence_does_not_spoil_its_batch():
    def fail_on_b(texts, n_best):
        if 'b' in texts:
            raise RuntimeError('cannot')
        return echo(texts, n_best)

    async def run():
        batcher = Batcher(fail_on_b)
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(*(batcher.submit([text]) for text in 'abc'), return_exceptions=True)
        task.cancel()
        return found

    a, b, c = asyncio.run(run())
    assert a[0][0].text == 'A' and c[0][0].text == 'C' and isinstance(b, RuntimeError)


def test_after_a_failed_batch_each_answer_is_sent_as_soon_as_it_is_there():
    "Not only when all sentences of the batch have been translated again."
    may_go_on = threading.Event()

    def fail_as_a_batch(texts, n_best):
        if len(texts) > 1:
            raise RuntimeError('cannot')
        if texts == ['b']:
            assert may_go_on.wait(20)
        return echo(texts, n_best)

    async def run():
        batcher = Batcher(fail_as_a_batch)
        task = asyncio.create_task(batcher.run())
        first, second = [asyncio.create_task(batcher.submit([text])) for text in 'ab']
        try:
            await asyncio.wait_for(asyncio.shield(first), 10) # while the second is being translated
            is_waiting = not second.done()
        finally:
            may_go_on.set()
        await second
        task.cancel()
        return is_waiting

    assert asyncio.run(run())


def test_full_queue_is_refused():
    async def run():
        batcher = Batcher(echo, ServerConfig(max_waiting=3, max_sentences=3))
        first = asyncio.create_task(batcher.submit(['a', 'b']))
        await asyncio.sleep(0)
        with pytest.raises(BadRequest) as error:
            await batcher.submit(['c', 'd'])
        first.cancel()
        return error.value

    error = asyncio.run(run())
    assert error.status == 429
    assert error.reason == 'the queue holds at most 3 sentences, and 2 are waiting: try again later'


def test_sentences_that_ran_out_of_time_do_not_fill_the_queue():
    async def run():
        batcher = Batcher(echo, ServerConfig(max_waiting=3, max_sentences=3))
        first = asyncio.create_task(batcher.submit(['a']))
        late = asyncio.create_task(batcher.submit(['b', 'c']))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.sleep(0)
        with pytest.raises(BadRequest, match='1 are waiting'): # only 'a' counts
            await batcher.submit(['d', 'e', 'f'])
        second = asyncio.create_task(batcher.submit(['d', 'e']))
        await asyncio.sleep(0)
        task = asyncio.create_task(batcher.run())
        found = await asyncio.gather(first, second)
        task.cancel()
        return [[options[0].text for options in texts] for texts in found]

    assert asyncio.run(run()) == [['A'], ['D', 'E']]


@pytest.mark.parametrize('limit', [{'max_batch': 0}, {'timeout': -1.0}, {'timeout': 0.0},
                                   {'port': 70_000}, {'max_bytes': 0},
                                   {'max_attention': 0}, {'max_sentences': 300, 'max_waiting': 200}])
def test_limits_out_of_range_are_refused(limit):
    with pytest.raises(ValueError, match=next(iter(limit))):
        ServerConfig(**limit)


def test_many_clients_and_bad_requests_at_once(translator, address):
    "A real server: every good request gets its own translation, every bad one a reason."
    import httpx
    nouns = ['dog', 'cat', 'man', 'woman', 'bird', 'horse']
    expected = dict(zip(nouns, translator.translate([f'The {noun} sleeps.' for noun in nouns])))

    def ask(i):
        noun = nouns[i % len(nouns)]
        content = b'{"q": ' if i % 10 == 9 else json.dumps({'q': f'The {noun} sleeps.'}).encode()
        answer = httpx.post(address + '/translate', content=content, headers={'content-type': JSON}, timeout=30)
        return i, noun, answer

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(150)))
    for i, noun, answer in answers:
        if i % 10 == 9:
            assert answer.status_code == 400
        else:
            assert answer.json() == {'translatedText': expected[noun]}


def test_parse_request_by_hand():
    fields = parse_body(b'q=a%20b&target=de', 'application/x-www-form-urlencoded; charset=utf-8')
    asked = parse_request(fields, ('en', 'de'), max_n_best=4, max_sentences=1)
    assert asked.texts == ['a b'] and asked.is_single and asked.n_best == 1
    with pytest.raises(BadRequest, match='UTF-8'): # not translated with a replacement character
        parse_body(b'q=a%FFb', 'application/x-www-form-urlencoded')


def test_serve_prints_its_address_and_ends_with_an_interrupt():
    "The command as a user meets it: an address, answers at that address, a log without texts, Ctrl-C."
    httpx = pytest.importorskip('httpx')
    command = [sys.executable, '-m', 'annotated_transformer', 'serve', '--port', '0', '--model', str(SHIPPED)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        line = process.stdout.readline()
        address = re.search(r'http://127.0.0.1:\d+', line)[0]
        answer = httpx.post(f'{address}/translate', data={'q': 'The dog sleeps.'}, timeout=30)
        assert answer.json() == {'translatedText': 'Der Hund schläft.'}
        cut_off(address, b'{"q": "The dog')
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        lines = [json.loads(line) for line in process.stderr.read().splitlines()] # JSON alone: no traceback
        assert [line['status'] for line in lines] == [200, 499]
        assert set(lines[0]) == {'time', 'path', 'status', 'bytes', 'milliseconds'}
    finally:
        process.kill()


def cut_off(address, body):
    "Begin a request, and leave."
    host, port = address.removeprefix('http://').split(':')
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b'POST /translate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n'
                       b'Content-Length: 1000\r\n\r\n' + body)
        time.sleep(0.2)
    time.sleep(0.2)


def test_sigterm_lets_requests_in_progress_finish():
    httpx = pytest.importorskip('httpx')
    program = '''
import time
from annotated_transformer.server import ServerConfig, serve
from annotated_transformer.translator import Translator
translator = Translator.load(device='cpu')
translate = translator.translate_n_best
translator.translate_n_best = lambda texts, n_best: time.sleep(1) or translate(texts, n_best)
serve(translator, ServerConfig(port=0, log_requests=False), lambda address: print(address, flush=True))
'''
    process = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().strip()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f'{address}/translate', json={'q': 'The dog sleeps.'}, timeout=30)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert answer.result().json() == {'translatedText': 'Der Hund schläft.'}
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert process.stderr.read() == ''
        with pytest.raises(httpx.ConnectError):
            httpx.get(f'{address}/health')
    finally:
        process.kill()


@pytest.fixture(params=['h11', 'httptools'])
def hasty(request, translator, monkeypatch):
    "The port of a server with a time limit of half a second."
    protocols = pytest.importorskip(f'uvicorn.protocols.http.{request.param}_impl')
    protocol = protocols.H11Protocol if request.param == 'h11' else protocols.HttpToolsProtocol
    monkeypatch.setattr('uvicorn.protocols.http.auto.AutoHTTPProtocol', protocol)
    addresses = queue.Queue()
    config = ServerConfig(port=0, timeout=0.5, log_requests=False)
    threading.Thread(target=server.serve, args=(translator, config, addresses.put), daemon=True).start()
    return int(addresses.get(timeout=20).split(':')[-1])


@pytest.mark.parametrize('before', [b'', b'GET /health HTTP/1.1\r\nHost: test\r\n\r\n'], ids=['first request', 'second request'])
def test_headers_have_a_time_limit(hasty, before):
    "A client that sends its headers byte by byte, and does not finish them, is cut off."
    with socket.create_connection(('127.0.0.1', hasty), timeout=10) as client:
        if before:
            client.sendall(before)
            assert client.recv(10_000).startswith(b'HTTP/1.1 200')
        start = time.monotonic()
        client.sendall(b'GET /health HTTP/1.1\r\nHost: ')
        client.settimeout(0.1)
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b'a')
                try:
                    if client.recv(1) == b'':
                        raise ConnectionResetError
                except TimeoutError:
                    continue
        assert 0.3 < time.monotonic() - start < 3


def test_a_slow_body_gets_a_reason(hasty):
    with socket.create_connection(('127.0.0.1', hasty), timeout=10) as client:
        client.sendall(b'POST /translate HTTP/1.1\r\nHost: test\r\nContent-Length: 24\r\n\r\n{"q": ')
        assert client.recv(10_000).startswith(b'HTTP/1.1 408')


@contextmanager
def running(translator):
    "The address of a running server."
    uvicorn = pytest.importorskip('uvicorn')
    http_server = uvicorn.Server(uvicorn.Config(create_app(translator), port=0, log_level='error'))
    thread = threading.Thread(target=http_server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not http_server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f'http://127.0.0.1:{http_server.servers[0].sockets[0].getsockname()[1]}'
    http_server.should_exit = True
    thread.join(10)


@pytest.fixture(scope='module')
def address(translator):
    with running(translator) as address:
        yield address


def test_a_client_of_libretranslate_works(address):
    "An existing client, unchanged: it sends forms, and reads languages, translations and reasons."
    libretranslatepy = pytest.importorskip('libretranslatepy')
    client = libretranslatepy.LibreTranslateAPI(address, api_key='unused')
    assert [(language['code'], language['targets']) for language in client.languages()] == [('en', ['de'])]
    assert client.translate('The dog sleeps.', 'en', 'de') == 'Der Hund schläft.'
    assert client.translate('The dog sleeps.\nThe cat reads.', 'auto', 'de') == 'Der Hund schläft.\nDie Katze liest.'
    assert client.detect('The dog sleeps.')[0]['language'] == 'en'
    with pytest.raises(HTTPError) as refused:
        client.translate('The dog sleeps.', 'en', 'fr')
    assert refused.value.code == 400 and 'en to fr is not supported' in json.loads(refused.value.read())['error']


def test_the_list_of_endpoints_is_complete_and_needs_no_other_server(chromium, address):
    page = chromium.new_page()
    asked = []
    page.on('request', lambda request: asked.append(request.url))
    page.goto(f'{address}/docs')
    text = page.inner_text('body')
    for path, methods in page.evaluate('fetch("openapi.json").then(answer => answer.json())')['paths'].items():
        for method in methods:
            assert f'{method.upper()} {path}' in text
    assert all(url.startswith(address) for url in asked)
    page.close()


@pytest.fixture
def page(chromium, address):
    "The page at /, in Chromium. At the end, the console must be silent, and nothing but the server may have been asked."
    page = chromium.new_page()
    problems = []
    page.on('console', lambda message: problems.append(message.text))
    page.on('pageerror', lambda error: problems.append(str(error)))
    page.on('request', lambda request: request.url.startswith(address) or problems.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert [problem for problem in problems if 'status of 4' not in problem] == []


def test_page_translates_shows_alternatives_and_alignment(page, translator):
    text = 'The small dog sleeps.'
    page.fill('textarea', text)
    page.press('textarea', 'Enter')
    page.wait_for_selector('#target span')
    best, *others = [found.text for found in translator.translate_n_best([text], 4)[0]]
    assert page.inner_text('output') == best
    assert page.locator('ol li').all_inner_texts() == others
    target = page.locator('#target span')
    assert [token.strip() for token in target.all_text_contents()] == ['Der', 'kleine', 'Hund', 'schläft', '.', '<eos>']
    target.nth(1).hover()
    alphas = page.eval_on_selector_all(
        '#source span', "spans => spans.map(span => +(getComputedStyle(span).backgroundColor.match(/[\\d.]+/g)[3] ?? 1))")
    sources = [token.strip() for token in page.locator('#source span').all_text_contents()]
    assert sources[alphas.index(max(alphas))] == 'small'


def small_beam(translator, beam_size):
    return Translator(translator.model, translator.tokenizer, {'decoding': {'beam_size': beam_size}})


def test_page_asks_for_no_more_alternatives_than_the_beam_has(translator):
    for beam_size, n_others in ((1, 0), (2, 1), (4, 3), (9, 3)):
        with testclient.TestClient(create_app(small_beam(translator, beam_size))) as client:
            assert re.search(r'alternatives: (.*?)}', client.get('/').text)[1] == str(n_others)
            answer = client.post('/translate', json={'q': 'The dog sleeps.', 'alternatives': n_others})
            assert answer.status_code == 200 and answer.json()['translatedText'] == 'Der Hund schläft.'


def test_page_of_a_greedy_search_shows_its_translation(chromium, translator):
    with running(small_beam(translator, 1)) as address:
        page = chromium.new_page()
        page.goto(address)
        page.fill('textarea', 'The dog sleeps.')
        page.click('button')
        page.wait_for_selector('#target span, output.error')
        assert page.inner_text('output') == 'Der Hund schläft.'
        assert page.locator('ol li').count() == 0
        page.close()


def test_page_shows_errors_and_recovers(page):
    page.fill('textarea', '\n'.join(['The dog sleeps.'] * 300))
    page.click('button')
    page.wait_for_selector('output.error')
    assert 'q has 300 sentences: send at most 200 at a time' in page.inner_text('output')
    page.fill('textarea', '<b>The dog sleeps.</b>')     # shown as text, not as HTML
    page.click('button')
    page.wait_for_selector('output:not(.error)')
    page.wait_for_selector('#target span')
    assert page.locator('output b').count() == 0
