#!/usr/bin/env python3
"""Measure the website that `make site` built with Lighthouse, as a phone and as a desktop computer, and how soon the
live explainer is ready. The record is results/site.json: medians of several runs.

    python benchmarks/site_speed.py                             # needs Node.js and Chromium; npx fetches Lighthouse
    python benchmarks/site_speed.py --pages 01_attention --runs 1 --record /dev/null

A server on this machine compresses the pages, as GitHub Pages does. Lighthouse simulates the network and the
processor of a phone: see `settings`. Other programs make the pages slower: `load` is the load average before each run.
"""
import argparse
import functools
import gzip
import http.server
import json
import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
import threading
from pathlib import Path

from annotated_transformer.files import atomic_write
from record import RESULTS, about

SITE = Path(__file__).parents[1] / 'site' / 'build' / 'html'
PAGES = ['index', '00_tour', '01_attention', '08_decoding', '28_inference']
CATEGORIES = ['performance', 'accessibility', 'best-practices', 'seo']
# our names of Lighthouse's audits, and what their values are divided by
AUDITS = {'first_paint_s': ('first-contentful-paint', 1000), 'largest_paint_s': ('largest-contentful-paint', 1000),
          'speed_index_s': ('speed-index', 1000), 'blocking_ms': ('total-blocking-time', 1),
          'layout_shift': ('cumulative-layout-shift', 1), 'kilobytes': ('total-byte-weight', 1000)}
CHROMIUM_FLAGS = ['--headless=new', '--no-sandbox', '--disable-gpu']


class Compressing(http.server.SimpleHTTPRequestHandler):
    "Serve files; compress those that are text, as GitHub Pages does."
    protocol_version = 'HTTP/1.1'
    texts = {'.html', '.css', '.js', '.json', '.svg'}

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header('Content-Type', self.guess_type(path))
        self.send_header('Cache-Control', 'max-age=600')
        if path.suffix in self.texts:
            data = compressed(path)
            self.send_header('Content-Encoding', 'gzip')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@functools.cache
def compressed(path: Path) -> bytes:
    "Return a file, compressed."
    return gzip.compress(path.read_bytes(), 6)


def serve() -> str:
    "Serve the site in the background; return its address."
    handler = functools.partial(Compressing, directory=SITE)
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}'


def chromium() -> str:
    "Return the path of a browser: CHROME_PATH, or one that is installed."
    names = ('chromium', 'chromium-browser', 'google-chrome')
    found = os.environ.get('CHROME_PATH') or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise SystemExit('no browser: install Chromium, or set CHROME_PATH to one')
    return found


def lighthouse(command: str, url: str, screen: str) -> dict:
    "Return Lighthouse's report on a page."
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'report.json'
        arguments = [*shlex.split(command), url, '--quiet', '--output=json', f'--output-path={out}',
                     f'--only-categories={",".join(CATEGORIES)}', f'--chrome-flags={" ".join(CHROMIUM_FLAGS)}']
        if screen == 'desk':
            arguments.append('--preset=desktop')
        done = subprocess.run(arguments, env={**os.environ, 'CHROME_PATH': chromium()}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f'{shlex.join(arguments)} failed:\n{done.stderr[-2000:]}')
        return json.loads(out.read_text(encoding='utf-8'))


def figures(report: dict) -> dict:
    "Return the figures of one report: scores from 0 to 100, times, layout shift and size."
    row = {name.replace('-', '_'): round(100 * report['categories'][name]['score']) for name in CATEGORIES}
    for name, (audit, unit) in AUDITS.items():
        row[name] = round(report['audits'][audit]['numericValue'] / unit, 3)
    return row


def medians(runs: list[dict]) -> dict:
    "Return the median of each figure, and the scores of all runs."
    row = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    return row | {'performance_of_runs': [run['performance'] for run in runs]}


def measure_explainer(address: str, n_runs: int) -> dict:
    "Return when the live explainer was ready, in milliseconds from the request, and the time of a decoding step."
    from playwright.sync_api import sync_playwright
    ready = []
    steps = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_FLAGS)
        for _ in range(n_runs):
            page = browser.new_context().new_page()
            page.goto(f'{address}/explainer/index.html')
            page.wait_for_function('window.explainer && explainer.ready')
            ready.append(round(page.evaluate('explainer.ready')))
            steps.append(round(page.evaluate('explainer.state.milliseconds / explainer.state.tokens.length'), 2))
            page.context.close()
        browser.close()
    return {'ready_ms': statistics.median(ready), 'ready_ms_of_runs': ready, 'step_ms': statistics.median(steps),
            'kilobytes': round(len(compressed(SITE / 'explainer' / 'index.html')) / 1000)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pages', nargs='+', default=PAGES, metavar='NAME', help='pages to measure (%(default)s)')
    parser.add_argument('--runs', type=int, default=3, help='runs of each page and screen (%(default)s)')
    parser.add_argument('--lighthouse', default='npx --yes lighthouse@12.8.2', metavar='COMMAND',
                        help='command that starts Lighthouse (%(default)s)')
    parser.add_argument('--record', type=Path, default=RESULTS / 'site.json', metavar='FILE',
                        help='file to write (%(default)s)')
    args = parser.parse_args()
    missing = [name for name in args.pages if not (SITE / f'{name}.html').exists()]
    if missing:
        parser.error(f'{SITE} has no page {missing[0]}: run `make site`, and name pages without .html')
    address = serve()
    command = f'python benchmarks/site_speed.py --runs {args.runs}'
    record = {'name': 'site', **about(), 'command': command, 'load': [], 'settings': {}, 'pages': {}}
    for name in args.pages:
        record['pages'][name] = {}
        for screen in ('phone', 'desk'):
            runs = []
            for _ in range(args.runs):
                record['load'].append(round(os.getloadavg()[0], 1))
                report = lighthouse(args.lighthouse, f'{address}/{name}.html', screen)
                runs.append(figures(report))
            throttling = report['configSettings']['throttling']
            record['settings'][screen] = {key: throttling[key] for key in ('rttMs', 'throughputKbps', 'cpuSlowdownMultiplier')}
            record['versions']['lighthouse'] = report['lighthouseVersion']
            record['pages'][name][screen] = medians(runs)
            print(name, screen, record['pages'][name][screen], flush=True)
    record['explainer'] = measure_explainer(address, args.runs)
    print(record['explainer'])
    atomic_write(args.record, json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main()
