"Every test runs with the package's shapes and types checked: a wrong axis fails by its name."
import signal
from pathlib import Path

from jaxtyping import install_import_hook

# Before anything imports the package. The toy grammar has no shapes, and makes a million small calls.
ROOT = Path(__file__).parents[1]
MODULES = ['.'.join(path.relative_to(ROOT).with_suffix('').parts)
           for path in (ROOT/'annotated_transformer').rglob('*.py')
           if path.stem != '__init__' and not path.stem.startswith('toy_')]
install_import_hook(MODULES, 'beartype.beartype')

# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests press it in.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
