"""The notebooks run from top to bottom."""

import pathlib

import nbclient
import nbformat
import pytest

_NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_is_stored_without_output(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "clear the outputs before committing"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any(output.get("data", {}).get("image/png") for cell in code for output in cell.outputs)


def test_there_is_a_notebook():
    assert _NOTEBOOKS
