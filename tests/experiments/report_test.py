import base64
import html.parser
import json

import pytest

from experiments import report

_PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
_CLAIMS = [
    {"claim": "FK beats best-of-n", "paper": "higher", "measured": 0.91234567, "stderr": 0.01, "bar": 0.8, "holds": True},
    {"claim": "Loss is <small> & low", "paper": None, "measured": 0.2, "stderr": None, "bar": 0.1, "holds": False},
    {"claim": "Never judged here", "paper": 1, "measured": 2, "stderr": None, "bar": 3, "holds": None},
]


class _Checker(html.parser.HTMLParser):
    """Collects tags and addresses, and fails on a tag that is closed by another."""

    void = frozenset({"meta", "img", "rect", "polyline", "circle"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.addresses, self.text = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def _workdir(path, *, summary=True, rows=()):
    (path / "figures").mkdir(parents=True)
    (path / "figures" / "samples.png").write_bytes(_PNG)
    if summary:
        contents = {
            "config": {"experiment": "x", "train": {"steps": 500}},
            "versions": {"jax": "0.10.2"},
            "devices": ["cpu:0"],
            "seconds": 12.5,
            "metrics": {"loss": 0.08},
            "params_digest": "ab" * 32,
            "claims": _CLAIMS,
        }
        (path / "summary.json").write_text(json.dumps(contents))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _page(tmp_path, *paths, status=0):
    output = tmp_path / "report.html"
    assert report.main([*map(str, paths), "--output", str(output)]) == status
    page = output.read_text(encoding="utf-8")
    return page, _Checker(page)


def test_the_page_shows_every_runs_claims_figures_curves_and_config(tmp_path):
    rows = [{"step": 10 * i, "loss": 1 / (i + 1)} for i in range(5)]
    runs = [_workdir(tmp_path / name, rows=rows) for name in ("first", "second")]
    page, checker = _page(tmp_path, *runs)
    text = " ".join(checker.text)
    assert checker.tags.count("section") == 2 and checker.tags.count("polyline") == 2
    assert "0.9123 ± 0.01" in text and "1 of 2 claims hold" in text and "not judged" in text
    assert "train.steps" in text and "500" in text and "0.10.2" in text and "ab" * 32 in text
    assert page.count(base64.b64encode(_PNG).decode()) == 2


def test_the_page_needs_nothing_beside_it_and_no_network(tmp_path):
    page, checker = _page(tmp_path, _workdir(tmp_path / "run", rows=[{"step": 0, "loss": 1.0}]))
    assert all(address.startswith("data:image/png;base64,") for address in checker.addresses)
    assert not {"script", "link", "iframe"} & set(checker.tags)
    assert "http" not in page and "url(" not in page and "@import" not in page


def test_whatever_a_run_writes_is_escaped(tmp_path):
    nasty = '<script>alert("x")</script>'
    path = _workdir(tmp_path / "a<b>&", rows=[{"step": 0, nasty: 1.0}, {"step": 1, nasty: 2.0}])
    summary = json.loads((path / "summary.json").read_text())
    summary["claims"][0].update(claim=nasty, paper=nasty, measured=nasty, bar=[nasty], stderr=nasty)
    summary |= {"config": {nasty: {"x": nasty}}, "versions": nasty, "metrics": [nasty], "seconds": nasty}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "figures" / "<img>&.png").write_bytes(_PNG)
    page, checker = _page(tmp_path, path)
    assert "<script" not in page and checker.tags.count("img") == 2
    assert nasty in "".join(checker.text)


def test_a_curve_joins_its_steps_in_order_and_breaks_where_it_is_not_finite(tmp_path):
    rows = [
        {"step": s, "loss": y, "ok": True, "note": "n"}
        for s, y in [(0, 1.0), (1, 3.0), (2, float("nan")), (3, 2.0), (4, 1.0)]
    ]
    page, checker = _page(tmp_path, _workdir(tmp_path / "run", rows=[*rows, {"step": 1, "loss": 2.0}]))
    assert checker.tags.count("svg") == 1  # neither a flag nor a string is a curve
    assert (
        '<polyline points="8.0,132.0 84.0,8.0"/><polyline points="236.0,8.0 312.0,132.0"/>' in page
    )  # the later 2.0 counts


def test_scalars_logged_without_a_step_are_placed_by_their_row_and_long_curves_are_thinned(tmp_path):
    run = report.read(_workdir(tmp_path / "run", rows=[{"loss": float(i), "namespace": "train"} for i in range(3)]))
    assert run.curves == {"train/loss": [(0, 0.0), (1, 1.0), (2, 2.0)]}
    long = report._curve("loss", [(i, float(i)) for i in range(10_001)])
    assert long.count(",") < 500 and "312.0,8.0" in long


def test_values_over_two_decades_are_drawn_on_a_logarithmic_scale():
    assert "loss (log)" in report._curve("loss", [(0, 1.0), (1, 10.0), (2, 1000.0)])
    assert "(log)" not in report._curve("loss", [(0, -1.0), (1, 1000.0)])
    assert "no finite value" in report._curve("loss", [(0, float("nan"))])
    assert "<circle" in report._curve("loss", [(7, 1.0)])


def test_an_unfinished_run_is_shown_as_such_with_the_curves_it_has(tmp_path):
    path = _workdir(tmp_path / "run", summary=False, rows=[{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}])
    (path / "config.json").write_text('{"train": {"steps": 700}}')
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')  # killed while writing
    _, checker = _page(tmp_path, path)
    text = " ".join(checker.text)
    assert "train.steps" in text and "700" in text
    assert "unfinished" in text and "1 of 3 lines of metrics.jsonl could not be read" in text
    assert checker.tags.count("polyline") == 1


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "there is no such folder"),
        ({}, "it holds neither summary.json nor metrics.jsonl"),
        ({"summary.json": "{"}, "summary.json is not JSON"),
        ({"summary.json": "[]"}, "summary.json is not a JSON object"),
        ({"summary.json": '{"claims": [1]}'}, 'claims in summary.json is not a list of objects with a "claim"'),
    ],
)
def test_a_workdir_that_cannot_be_read_is_one_clear_line_and_the_others_are_still_shown(tmp_path, capsys, contents, message):
    broken = tmp_path / "broken"
    if contents is not None:
        broken.mkdir()
        for name, text in contents.items():
            (broken / name).write_text(text)
    assert report.main([str(broken), "--output", str(tmp_path / "none.html")]) == 1
    assert not (tmp_path / "none.html").exists()
    _, checker = _page(tmp_path, broken, _workdir(tmp_path / "good"), status=1)
    assert checker.tags.count("section") == 1 and message in "".join(checker.text)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(f"{broken}: {message}" in line for line in lines)


def test_a_file_that_is_no_image_is_left_out_and_named(tmp_path):
    path = _workdir(tmp_path / "run")
    (path / "figures" / "torn.png").write_bytes(b"")
    _, checker = _page(tmp_path, path)
    assert checker.tags.count("img") == 1 and "figures/torn.png is not a PNG image" in " ".join(checker.text)


def test_an_output_that_cannot_be_written_is_one_clear_line(tmp_path, capsys):
    path = _workdir(tmp_path / "run")
    assert report.main([str(path), "--output", str(tmp_path / "missing" / "report.html")]) == 1
    assert capsys.readouterr().err.startswith(f"cannot write {tmp_path / 'missing' / 'report.html'}: No such file")
