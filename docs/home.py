"""The first screen of the site: the kernel of the README, its report, how to get it, and counts."""

import configparser
import re
from pathlib import Path

from npattn import __version__
from npattn.cli.lists import count_all

ROOT = Path(__file__).parent.parent
HOME = """**Get it**, version {version}: in a clone of [the source]({source}),

```bash
{install}```

::::{{grid}} 1 1 2 2
:class-container: home

:::{{grid-item}}
```python
{kernel}```
:::

:::{{grid-item}}
```console
{report}```
:::
::::

[The README](readme.md) explains this report line by line. {counts}.
"""


def address():
    """Return the address of the repository, as setup.cfg has it."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", "utf-8")
    return settings["metadata"]["url"]


def write_home():
    """Return the Markdown of the first screen, made from the README."""
    readme = (ROOT / "README.md").read_text("utf-8")

    def find(pattern):
        return re.search(pattern, readme, re.DOTALL)[1]

    return HOME.format(
        kernel=find(r"```python\n(# my_kernel.py\n.*?)```"),
        report=find(r"<!-- printed: my-kernel -->\n```console\n(.*?)```"),
        install=find(r"<!-- ci: main -->\n```bash\n(.*?)```"),
        source=address(),
        version=__version__,
        counts=count_all(),
    )
