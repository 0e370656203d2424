"""The code on the site's pages and in the README runs."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [path for path in [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))] if _BLOCK.search(path.read_text())]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(_ROOT).as_posix())
def test_the_python_blocks_of_a_page_run_in_order(page, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXML25_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace = {"__name__": "docs"}
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1  # so that a traceback shows the line of the page
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


def test_the_guide_to_importing_shows_every_kind_of_model():
    text = (_ROOT / "docs" / "guides" / "import-a-function.md").read_text()
    code = "".join(block[1] for block in _BLOCK.finditer(text))
    for needed in ("from flax import linen", "nnx.split", "nnx.merge", "import equinox", "from_dict = draw"):
        assert needed in code
