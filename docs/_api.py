"""MkDocs hook: an API page for every public module, from its docstrings, with no list to keep up to date."""

import pathlib

from mkdocs.structure.files import File

_PACKAGES = ("jaxml25", "pallas_kernels")
_ROOT = pathlib.Path(__file__).parents[1]


def _modules() -> list[str]:
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in paths if not path.stem.startswith("_")]
    return sorted(names)


def on_config(config):
    """Adds an API section to the navigation, grouped by package."""
    groups = {}
    for name in _modules():
        package, module = name.rsplit(".", 1)
        groups.setdefault(package, []).append({module: f"api/{name}.md"})
    config.nav = [*config.nav, {"API": [{package: pages} for package, pages in groups.items()]}]
    return config


def on_files(files, config):
    """Adds the pages themselves."""
    for name in _modules():
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    return files
