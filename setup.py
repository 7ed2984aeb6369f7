"What pip reads: everything comes from settings.ini, with the standard library and setuptools alone."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
config = ConfigParser()
config.read(here/'settings.ini', encoding='utf-8')
cfg = config['DEFAULT']

LICENSES = {'apache2': 'Apache-2.0'}     # nbdev's name for a licence, and the one that indexes know
STATUSES = {'2': '2 - Pre-Alpha', '3': '3 - Alpha', '4': '4 - Beta', '5': '5 - Production/Stable'}
EXTRA = '_requirements'


def readme():
    "The long description; links into the repository are made whole, since an index has no folders."
    text = (here/'README.md').read_text(encoding='utf-8') if (here/'README.md').exists() else ''
    text = text.replace('](site/images/', f']({cfg["git_url"]}/raw/{cfg["branch"]}/site/images/')
    return re.sub(r'\]\((?=[\w.-]+[/)])(?!https?:)', f']({cfg["git_url"]}/blob/{cfg["branch"]}/', text)


setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme(),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    license=LICENSES[cfg['license']],
    url=cfg['git_url'],
    project_urls={'Source': cfg['git_url']},
    keywords=cfg['keywords'].split(),
    classifiers=[f'Development Status :: {STATUSES[cfg["status"]]}',
                 'Intended Audience :: Developers', 'Intended Audience :: Education',
                 f'Natural Language :: {cfg["language"]}', 'Programming Language :: Python :: 3'],
    packages=find_packages(include=[cfg['lib_path'], f'{cfg["lib_path"]}.*']),
    package_data={cfg['lib_path']: ['py.typed', 'data/**']},
    python_requires=f'>={cfg["min_python"]}',
    install_requires=cfg['requirements'].split(),
    extras_require={key[:-len(EXTRA)]: cfg[key].split() for key in cfg if key.endswith(EXTRA)},
    entry_points={'console_scripts': cfg['console_scripts'].split()},
    zip_safe=False,
)
