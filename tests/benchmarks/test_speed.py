from __future__ import annotations

import ast
import itertools
import json
import pathlib

import pytest

from benchmarks import fast, report, speed
from benchmarks.peers import environments, run, table
from benchmarks.peers.environments import Absent
from benchmarks.peers.protocol import Answers, CaseAnswer, Timing
from benchmarks.peers.weights import FORMS

FACTS = speed.Facts(
    weight_bytes=1000,
    cache_bytes_per_token=10,
    flop_per_token=100,
    flop_per_token_and_position=2,
    text=list(range(50)),
)


def answers(*cases: CaseAnswer) -> Answers:
    return Answers(load_seconds=3.0, about={"version": "1"}, cases=list(cases), peak_mb=500.0)


def case(context: int, rows: int, seconds: float, tokens: list[int]) -> CaseAnswer:
    """A case that prefilled in 2 s."""
    timing = Timing(2.0, seconds, 40 * rows, context * rows, [tokens] * rows)
    return CaseAnswer(context, rows, timing, warm_up_seconds=1.0)


@pytest.fixture
def found() -> speed.Comparison:
    """Two rounds of two systems; one of them differs in its third token."""
    comparison = speed.Comparison(FACTS, threads=2, beside=[0.1, 0.2])
    comparison.machine = {"read_gb_per_s": [1e-5, 2e-5], "gemm_gflop_per_s": [1e-5, 1e-5]}
    for seconds in (4.0, 2.0):
        ours = answers(case(100, 1, seconds, [1, 2, 3, 4]))
        comparison.add("tfkv", ours, ours)
        comparison.add("keras-nlp", answers(case(100, 1, 2 * seconds, [1, 2, 9, 4])), ours)
    comparison.absent["vLLM"] = "a CUDA build | of gigabytes"
    return comparison


def test_rates_are_medians_and_tokens_are_compared_up_to_the_first_difference(
    found: speed.Comparison,
) -> None:
    theirs = found.runs["keras-nlp", 100, 1]
    assert (theirs.agreed, theirs.compared) == (4, 8)
    assert found.runs["tfkv", 100, 1].agreed == 8
    assert found.rate("tfkv", 100) == pytest.approx((10 + 20) / 2)
    assert found.rate("tfkv", 100, phase="prefill") == 50.0


def test_what_was_not_measured_says_why(found: speed.Comparison) -> None:
    with pytest.raises(Absent, match="CUDA"):
        found.rate("vLLM", 100)
    refused = answers(CaseAnswer(4000, 1, reason="gigabytes"))
    found.add("keras-nlp", refused, None)
    with pytest.raises(Absent, match="keras-nlp: gigabytes"):
        found.rate("keras-nlp", 4000)


def test_the_limit_of_decoding_is_what_has_to_be_read() -> None:
    ours, int8 = table.SYSTEMS["tfkv"], table.SYSTEMS["tfkv int8"]
    assert FACTS.decode_limit(ours, 100, 1, 6000.0) == 6000 / (1000 + 100 * 10)
    assert FACTS.decode_limit(ours, 100, 8, 9000.0) == 8 * 9000 / (1000 + 800 * 10)
    assert FACTS.decode_limit(int8, 100, 1, 6000.0) == 6000 / (250 + 250)


def test_the_limit_of_a_prefill_counts_the_half_that_a_token_looks_at() -> None:
    assert FACTS.prefill_limit(100, 4000.0) == 4000 / (100 + 2 * 50)


def test_texts_of_a_case_are_all_different() -> None:
    made = speed.cases_of(iter(FACTS.text), 4, 3)
    rows = [*made.prompts, *made.warm_up]
    assert (made.context, made.rows, len(rows)) == (4, 3, 6)
    assert len(set(itertools.chain(*rows))) == 24


def test_tables_say_what_ran_what_did_not_and_what_is_absent(found: speed.Comparison) -> None:
    found.add("keras-nlp", answers(CaseAnswer(4000, 1, reason="gigabytes")), None)
    text = report.markdown(found.to_dict())
    lines = text.splitlines()
    (ours,) = [line for line in lines if line.startswith("| tfkv | 100")]
    assert "15.0 (10.0-20.0)" in ours
    assert "8 of 8" in ours
    assert any("| keras-nlp | 4000 | 1 | not run: gigabytes |" in line for line in lines)
    assert "| vLLM | a CUDA build / of gigabytes |" in text
    assert "| tfkv | 3.0 (3.0-3.0) | 1.0 (1.0-1.0) | 500 | version 1 |" in lines
    widths = {
        line.count("|") for line in lines if line.startswith(("| tfkv | 100", "| system | c"))
    }
    assert len(widths) == 1


def test_a_comparison_is_written_as_data_tables_and_plots(
    found: speed.Comparison, tmp_path: pathlib.Path
) -> None:
    report.write(found.to_dict(), tmp_path)
    data = json.loads((tmp_path / "speed.json").read_text())
    assert data["runs"][0]["decode_median"] == 15.0
    assert data["runs"][0]["decode_share"] == pytest.approx(15 * (1000 + 10 * 116) / 20000)
    assert (tmp_path / "decode-context.png").stat().st_size > 1000


def test_figures_of_what_is_absent_are_not_numbers(found: speed.Comparison) -> None:
    values = fast.figures(found)
    assert values["fast.vs_keras_nlp_100"].value == pytest.approx(15 / 7.5)
    assert str(values["fast.vs_llamacpp_f32_100"].value) == "nan"
    assert set(values) == set(fast.rates.names)


def test_every_system_has_its_environment_its_weights_and_its_module() -> None:
    own = {"artifact-f32", "artifact-int8", "source"}
    for name, system in table.SYSTEMS.items():
        assert system.environment in {table.OWN, *table.ENVIRONMENTS}, name
        assert system.weights in own | set(FORMS), name
        assert (pathlib.Path(table.__file__).parent / f"{system.module}.py").exists(), name


@pytest.mark.parametrize(
    "module",
    sorted({s.module for s in table.SYSTEMS.values() if s.environment != table.OWN})
    + ["child", "protocol", "llamacpp_quantize"],
)
def test_what_runs_in_a_peers_environment_imports_nothing_of_ours(module: str) -> None:
    path = pathlib.Path(table.__file__).parent / f"{module}.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.startswith(("benchmarks", "tfkv"))}
    allowed = ("benchmarks.peers.child", "benchmarks.peers.protocol.")
    assert all(name.startswith(allowed) for name in ours), ours


def test_a_peer_that_nothing_runs_is_reported_with_what_came_of_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, say: object) -> pathlib.Path:
        raise Absent(f"no {name} here")

    monkeypatch.setattr(environments, "python_of", refuse)
    assert environments.probe(print) == {"vLLM": "no vllm here"}


def test_pins_are_exact() -> None:
    pins = [pin for item in table.ENVIRONMENTS.values() for pin in item.pins]
    assert all("==" in pin for pin in pins)


def test_packages_for_cuda_are_known_by_name() -> None:
    names = ["torch", "nvidia-cublas", "nvidia_cudnn_cu13", "cuda-bindings", "numpy"]
    assert environments.cuda_packages(names) == names[1:4]


def test_the_line_of_a_log_that_says_why() -> None:
    log = "collecting\nERROR: No matching distribution found for x\n\nsee above\n"
    assert environments.last_error(log) == "ERROR: No matching distribution found for x"
    assert environments.last_error("so far so good\n") == "so far so good"


def test_a_failing_preparation_is_absent_with_its_reason(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(Absent, match="error: no wheel"):
        environments.run(["sh", "-c", "echo error: no wheel; exit 3"], log)
    with pytest.raises(Absent, match="no-such-program"):
        environments.run(["no-such-program"], log)


@pytest.fixture
def prepared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> run.Prepared:
    """A system of our own environment whose process is a shell script."""
    script = tmp_path / "python"
    monkeypatch.setattr(run, "BUILD", tmp_path)
    monkeypatch.setattr(run, "python_of", lambda name, say: script)
    monkeypatch.setattr(run, "path_of", lambda form, say: tmp_path)
    return run.Prepared("tfkv", table.SYSTEMS["tfkv"], print)


def script(folder: pathlib.Path, body: str) -> None:
    (folder / "python").write_text(f"#!/bin/sh\ncat > {folder}/job\n{body}\n")
    (folder / "python").chmod(0o755)


def test_a_system_is_handed_its_job_and_heard(prepared: run.Prepared, tmp_path: pathlib.Path):
    script(tmp_path, """echo '{"kind": "end", "peak_mb": 7}'""")
    assert prepared.run([], 4, 2, 60).peak_mb == 7
    assert json.loads((tmp_path / "job").read_text())["steps"] == 4


def test_a_system_that_fails_is_absent_with_its_reason(
    prepared: run.Prepared, tmp_path: pathlib.Path
):
    script(tmp_path, "echo 'ImportError: libfoo.so' >&2; exit 4")
    with pytest.raises(Absent, match="exit code 4: ImportError: libfoo"):
        prepared.run([], 4, 2, 60)


def test_a_system_that_takes_too_long_is_ended(prepared: run.Prepared, tmp_path: pathlib.Path):
    script(tmp_path, "sleep 60")
    with pytest.raises(Absent, match="not done within"):
        prepared.run([], 4, 2, 0.5)
