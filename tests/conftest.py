"Tests run with the package's shapes and types checked: a wrong axis fails by its name."
import shutil
import signal
from pathlib import Path

import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_packages
from jaxtyping import TypeCheckError, config, install_import_hook

# Before anything imports the package. The toy grammar has no shapes, and makes a million small calls.
ROOT = Path(__file__).parents[1]
MODULES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts): path.read_text(encoding='utf-8')
           for path in (ROOT/'annotated_transformer').rglob('*.py')
           if path.stem != '__init__' and not path.stem.startswith('toy_')}
WITH_SHAPES = [name for name, code in MODULES.items() if 'jaxtyping' in code]
install_import_hook(WITH_SHAPES, 'beartype.beartype')
# Where no shapes are to be compared, types alone are checked: that is much faster.
beartype_packages(sorted(MODULES.keys() - WITH_SHAPES), conf=BeartypeConf(claw_is_pep526=False, violation_type=TypeCheckError))


@pytest.fixture(scope='module', autouse=True)
def shapes_are_checked(request):
    "Shapes are checked in the tests of the modules that declare them. Commands and services would take twice as long."
    module = 'annotated_transformer.' + request.module.__name__.removeprefix('test_')
    config.update('jaxtyping_disable', module not in WITH_SHAPES)


# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests press it in.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

CHROMIUM_FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
                  '--disable-component-update', '--disable-sync']


@pytest.fixture(scope='module')
def chromium():
    "A browser: Playwright's own, or one that is installed."
    playwright_api = pytest.importorskip('playwright.sync_api')
    with playwright_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        installed = filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')))
        found = own if Path(own).exists() else next(installed, None)
        if not found:
            pytest.fail('no browser: `apt-get install chromium`, or `playwright install chromium`')
        browser = playwright.chromium.launch(executable_path=found, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()
