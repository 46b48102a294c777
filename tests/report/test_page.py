"""The page of a report: whole, without network, escaped, and without errors where there is a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kgen
from kgen.commands.explain import Explanation
from kgen.report.page import framed, page
from kgen.verdict import Outcome, Reason, Verdict

pytestmark = pytest.mark.cpu

VOID = ("meta", "input", "br")


class Reader(HTMLParser):
    """Elements by name, their text, and what is left open or closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.count: Counter[str] = Counter()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text.setdefault(tag, []).append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(32), Attention(), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Parameter(torch.randn(16, 32))
        self.layers = nn.Sequential(*(Layer() for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        x = self.layers(self.tokens(tokens) + self.positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


@pytest.fixture(scope="module")
def gpt() -> Explanation:
    tokens = torch.randint(0, 64, (2, 16))
    return kgen.explain(Gpt(), tokens, tokens, print_report=False)


@pytest.fixture(scope="module")
def resnet() -> Explanation:
    with torch.no_grad():
        return kgen.explain(Residual().eval(), torch.randn(1, 8, 10, 10), print_report=False)


@pytest.fixture(scope="module")
def on_gpu() -> Explanation:
    """A graph whose kernels are for a GPU; Triton's interpreter runs them."""
    with kgen.config.override(gpu_interpreter=True):
        return kgen.explain(
            lambda x, w: torch.softmax(torch.relu(x @ w), -1), torch.randn(16, 16), torch.randn(16, 16), print_report=False
        )


@pytest.fixture(params=["gpt", "resnet", "on_gpu"])
def report(request: pytest.FixtureRequest) -> Explanation:
    found: Explanation = request.getfixturevalue(request.param)
    return found


@pytest.mark.every(2)
def test_the_page_is_whole_and_needs_nothing_else(report: Explanation) -> None:
    text = report.to_html()
    reader = read(text)
    assert not reader.wrong
    assert not reader.open
    assert reader.count["svg"] == len(report.graphs)
    assert reader.links
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    assert not re.search(
        r"@import|url\(|https?:|<link|\bfetch\(|XMLHttpRequest", "".join(reader.text["script"] + reader.text["style"])
    )
    assert not reader.count.keys() & {"link", "img", "iframe", "object"}


def test_every_step_verdict_and_code_is_there(report: Explanation) -> None:
    reader = read(report.to_html())
    listed, shown, bold = "".join(reader.text["li"]), reader.text["pre"], reader.text["b"]
    assert bold == [kernel.name for kernel in report.kernels]
    assert reader.count["rect"] == sum(len(graph.steps) for graph in report.graphs)
    assert reader.count["path"] == sum(len(step.after) for graph in report.graphs for step in graph.steps)
    for kernel in report.kernels:
        assert kernel.source in shown
        assert kernel.ir in shown
    for verdict in report.verdicts:
        assert str(verdict) in listed
        assert verdict.change in listed


def test_names_of_the_users_are_text(resnet: Explanation) -> None:
    hostile = "</pre><script>alert(1)</script>\"'&"
    [graph] = resnet.graphs
    kernel = replace(
        graph.kernels[0], name=hostile, modules=(hostile,), calls=(hostile,), lines=(hostile,), parameters=(hostile,),
        source=hostile, ir=hostile,
    )  # fmt: skip
    verdict = Verdict(hostile, hostile, Outcome.ILLEGAL, Reason.CYCLE, detail=hostile, kernels=(hostile, hostile))
    step = replace(graph.steps[0], name=hostile, after=())
    late = replace(graph.steps[0], name="late", after=((0, hostile),))
    graph = replace(graph, name=hostile, kernels=(kernel,), verdicts=(verdict,), steps=(step, late))
    reader = read(page((graph,), ()))
    assert not reader.wrong
    assert reader.count["script"] == 1
    assert hostile in reader.text["pre"]
    assert hostile in reader.text["title"]


def test_a_tensor_that_passes_steps_is_drawn_beside_them(gpt: Explanation) -> None:
    """A residual's curve went through other steps' texts."""
    pattern = re.compile(r'<path d="M(\d+),(\d+) C(\d+),\d+ \d+,-?\d+ (\d+),(\d+)"')
    curves = [tuple(map(int, match.groups())) for match in pattern.finditer(gpt.to_html())]
    below = [(curve[2] - curve[0], curve[4] - curve[1]) for curve in curves if curve[0] == curve[3]]
    nearest = min(distance for _, distance in below)
    assert any(distance > nearest for _, distance in below)
    assert all((bent > 0) == (distance > nearest) for bent, distance in below)
    assert "color-mix" in gpt.to_html(), "what is drawn of a step is opaque"


def test_a_page_in_a_notebook(resnet: Explanation) -> None:
    frame = framed(resnet.to_html())
    found = re.fullmatch(r'<iframe style="[^"<>]*" sandbox="allow-scripts" srcdoc="([^"]*)"></iframe>', frame)
    assert found is not None
    assert unescape(found[1]) == resnet.to_html()


def test_the_text_of_a_training_step_fits_a_terminal(gpt: Explanation) -> None:
    lines = str(gpt).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert [graph.role for graph in gpt.graphs] == ["forward", "backward"]
    assert sum(line.strip().startswith("to change it:") for line in lines) >= 3
    assert any("layers.*.mlp.*" in line for line in lines)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_finds_no_error(report: Explanation, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert BROWSER is not None
    file = tmp_path / "page.html"
    check = "<script>addEventListener('load', () => { const s = document.getElementById('search'); s.value = 'zzz';"
    check += "s.dispatchEvent(new Event('input')); document.title = document.getElementById('found').textContent; })</script>"
    file.write_text(report.to_html().replace("</body>", check + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    assert "<title>0 of " in done.stdout
    kept = os.environ.get("SCREENSHOTS")  # `make screenshots`
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        file.write_text(report.to_html())
        shot = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1600"]
        target = Path(kept).absolute() / f"{request.node.callspec.params['report']}.png"
        subprocess.run([*shot, f"--screenshot={target}", file.as_uri()], capture_output=True, timeout=60, check=True)
        assert target.stat().st_size > 10_000
