"""report.html and the summary behind it: complete, well-formed, the same for equal builds, nothing of this machine."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mmcompile.core.plan import Buffer, Launch, Manifest, Phase, Plan, View
from mmcompile.core.quantities import format_bytes, format_count
from mmcompile.driver.report import write_report
from mmcompile.driver.summary import assign_layers, highlight_ledger

_VOID = {"meta", "rect", "path", "br", "input", "img", "hr", "link"}


class _Balance(HTMLParser):
    """Collects text and demands that every tag is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], set(), set(), []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        if attributes.get("href", "").startswith("#"):
            self.links.add(attributes["href"][1:])
        assert not {"src", "xlink:href"} & attributes.keys(), "the page must be self-contained"
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def page(artifact):
    return (artifact / "report.html").read_text()


def test_the_page_is_well_formed_and_self_contained(page):
    parser = _Balance()
    parser.feed(page)
    assert not parser.open
    assert parser.links <= parser.ids
    assert "http" not in page


def test_the_page_tells_everything(page):
    for expected in (
        "98.6 K", "14 of 15", "qkv_norm_rope_insert", "where the pattern has", "mmcompile/models/llama.py:", "dB",
        "the output projection decides the token", "mm.paged_attention", "decode, layer 1 of 2",
        "Largest buffers of cpu",
    ):  # fmt: skip
        assert expected in page, expected


def test_the_page_is_in_the_manifest_and_repeatable(artifact, page, tmp_path):
    manifest = Manifest.model_validate_json((artifact / "manifest.json").read_text())
    assert "report.html" in manifest.files
    (tmp_path / "passes").mkdir()
    for file in (artifact / "passes").iterdir():
        (tmp_path / "passes" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "counts.json").write_bytes((artifact / "counts.json").read_bytes())
    plans = {"cpu": Plan.model_validate_json((artifact / "plan.cpu.json").read_text())}
    write_report(tmp_path, manifest, plans)
    assert (tmp_path / "report.html").read_text() == page
    assert str(Path.home()) not in page
    assert str(artifact.parent) not in page


def test_names_from_a_model_are_escaped(artifact, tmp_path):
    (tmp_path / "passes").mkdir()
    record = json.loads((artifact / "manifest.json").read_text())
    record["model"]["name"] = "<script>alert(1)</script>"
    plans = {"cpu": Plan.model_validate_json((artifact / "plan.cpu.json").read_text())}
    write_report(tmp_path, Manifest.model_validate(record), plans)
    assert "<script>" not in (tmp_path / "report.html").read_text()


def _plan(weights):
    """A chain of launches; each reads a weight by the given name, or none."""
    buffers, launches = {}, []
    for index, name in enumerate(weights):
        buffers[f"t{index}"] = Buffer(name=f"t{index}", shape=(4,), dtype="float32", role="temporary", offset=0)
        view = View(buffer=f"t{index}", shape=(4,), strides=(1,))
        inputs = {"x": view}
        if name:
            buffers[name] = Buffer(name=name, shape=(4,), dtype="float32", role="weight")
            inputs["weight"] = View(buffer=name, shape=(4,), strides=(1,))
        launches.append(Launch(name=f"n{index}", op="mm.linear", inputs=inputs, outputs=(view,), attributes={}))
    phase = Phase(
        name="decode", inputs=(), outputs=(), launches=tuple(launches), after=((),) * len(launches), arena_bytes=0
    )
    return Plan(target="cpu", symbols={}, buffers=buffers, phases={"decode": phase}, kernels={}), phase


@pytest.mark.parametrize(
    ("weights", "layers"),
    [
        (["embed.weight", "layers.0.q", "layers.0.o", "layers.1.q", "norm.weight"], [None, 0, 0, 1, None]),
        (["layers.0.q", None, "layers.0.o", None, "layers.1.q"], [0, 0, 0, None, 1]),
        (["model_layers_12_mlp_up", "kv_cache.12"], [12, 12]),
        ([None, None], [None, None]),
    ],
)
def test_layers_are_read_from_the_names_of_weights(weights, layers):
    assert assign_layers(*_plan(weights)) == layers


def test_ledger_highlights_count_by_substring():
    ledger = {"v_mfma_f32_16x16": 3, "v_mfma_f32_32x32": 2, "s_nop": 9}
    assert highlight_ledger({"v_mfma": True, "scratch_": False}, ledger) == {"v_mfma": 5, "scratch_": 0}


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (999_960, "1.0 MB"), (2.5e13, "25.0 TB")]
)
def test_bytes(count, expected):
    assert format_bytes(count) == expected


def test_counts():
    assert [format_count(n) for n in (7, 98_624, 134_515_008, 8_030_261_248)] == ["7", "98.6 K", "134.5 M", "8.0 G"]
