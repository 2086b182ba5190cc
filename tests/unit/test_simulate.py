"""``python -m ringdl simulate``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringdl import _engine, _safetensors
from ringdl._errors import UsageError
from ringdl.simulate import main
from ringdl.simulate._cluster import Cluster, parse_rate, parse_seconds, predict
from ringdl.simulate._models import MODELS, gradients_of
from ringdl.simulate._train import buckets_of, predict_step

MB = 1_000_000


def cluster(ranks: int, hosts: int, link: float = 1.25e9, latency: float = 20e-6) -> Cluster:
    return Cluster(
        ranks,
        hosts,
        link,
        latency,
        memory=8e9,
        memory_latency=1e-6,
        message=5e-7,
        eager=64 << 10,
        copy=8e9,
        reduce=6e9,
        segment_bytes=32 << 10,
        shares_memory=True,
    )


def test_units() -> None:
    assert parse_rate("200gbit") == 25e9
    assert parse_rate("1.5 GB/s") == 1.5e9
    assert parse_rate("100Mbit") == 12.5e6
    assert parse_seconds("2us") == 2e-6
    assert parse_seconds("0.3s") == 0.3
    for wrong in (
        "200",
        "gbit",
        "-1gbit",
        "0gbit",
        "3 furlongs",
        "1.2.3gbit",
        "10Gb",
        "10Gb/s",
        "1e400gbit",
        "1e-300gbit",
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a rate"):
            parse_rate(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
        parse_seconds("2")


def test_models_have_the_sizes_that_they_are_known_for() -> None:
    totals = {name: sum(model()) for name, model in MODELS.items()}
    assert totals == {"resnet50": 25_557_032, "vgg16": 138_357_544, "gpt2": 124_439_808}


def test_models_of_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    arrays = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}
    with weights.open("wb") as file:
        _safetensors.write(file, arrays, {})
    assert gradients_of(str(weights)) == [12, 5]
    counts = tmp_path / "counts.json"
    counts.write_text("[7, 8]")
    assert gradients_of(str(counts)) == [7, 8]
    for wrong in ("{}", "[]", '["a"]', "[-1]", "[true]", f"[{10**20}]", "no JSON"):
        counts.write_text(wrong)
        with pytest.raises(UsageError, match="--model"):
            gradients_of(str(counts))
    with pytest.raises(UsageError, match="there is no such file"):
        gradients_of("alexnet")


def test_buckets_are_those_of_a_backward_pass() -> None:
    """The last gradient is ready first, and the first one when computing ends."""
    buckets = buckets_of([1000, 2000, 3000, 300_000], 3.0, 8000)
    assert [ready for _, ready in buckets] == pytest.approx([1.5, 2.0, 2.5, 3.0])
    sizes = [byte_count for byte_count, _ in buckets]
    assert sizes == pytest.approx([1_200_000, 12_000, 8_000, 4_000], abs=100)
    whole = buckets_of([1000, 2000, 3000, 300_000], 3.0, 100_000)
    assert [ready for _, ready in whole] == pytest.approx([1.5, 3.0])


def test_buckets_are_as_large_as_tuned_jobs_make_them() -> None:
    assert cluster(4, 1).bucket_bytes() == 25 << 20, "inside a host nothing is hidden"
    near, far = cluster(4, 4, 125e6), cluster(4, 4, 125e6, 2e-3)
    assert 256 << 10 <= near.bucket_bytes() < far.bucket_bytes() <= 25 << 20
    assert dataclasses.replace(cluster(4, 1), shares_memory=False).bucket_bytes() < 25 << 20


def test_links_are_what_it_takes() -> None:
    its = cluster(64, 8)
    predicted = predict(its, [(100 * MB, 0.0)])
    assert predicted.algorithms == ["hierarchical"]
    assert predicted.link_seconds == pytest.approx(0.14)
    assert 1 <= predicted.seconds / predicted.link_seconds < 1.05
    assert 175 * MB <= predicted.link_bytes < 176 * MB
    assert predicted.limited_by == "links"
    assert predict(its, [(4000, 0.0)]).limited_by == "latency"
    assert predict(cluster(8, 1), [(100 * MB, 0.0)]).limited_by == "processors"


@pytest.mark.parametrize("ranks", [2, 8])
def test_inside_a_host_an_array_is_read_and_written_once(ranks: int) -> None:
    """What a copy of it takes, whatever their number."""
    predicted = predict(cluster(ranks, 1), [(100 * MB, 0.0)], _engine.Algorithm.direct)
    assert 1 <= predicted.seconds / (100 * MB / 8e9) < 1.1


def test_hosts_are_as_full_as_they_are() -> None:
    assert cluster(12, 4).with_ranks(4).hosts == 2
    assert cluster(48, 8).with_ranks(8).hosts == 2
    assert cluster(64, 8).with_ranks(4).hosts == 1


def test_a_message_keeps_both_processors_busy() -> None:
    its = dataclasses.replace(
        cluster(2, 2, 1e12, 1e-6), message=5e-5, copy=1e15, reduce=1e15, segment_bytes=16 << 10
    )
    predicted = predict(its, [(8 * MB, 0.0)], _engine.Algorithm.ring)
    assert predicted.busiest_seconds == pytest.approx(predicted.messages * 5e-5, rel=0.02)
    assert predicted.seconds >= predicted.busiest_seconds


def test_long_messages_take_three_latencies() -> None:
    its = dataclasses.replace(cluster(2, 2, 1e12, 1e-3), segment_bytes=32 << 10)
    eager = predict(its, [(64 << 10, 0.0)], _engine.Algorithm.ring).seconds
    announced = dataclasses.replace(its, eager=16 << 10)
    assert eager == pytest.approx(4e-3, rel=0.05)
    later = predict(announced, [(64 << 10, 0.0)], _engine.Algorithm.ring).seconds
    assert later == pytest.approx(8e-3, rel=0.05)


def test_what_limits_is_what_is_busy() -> None:
    flat = predict(cluster(128, 2), [(8 * MB, 0.0)], _engine.Algorithm.ring)
    assert flat.limited_by == "links"
    assert flat.share_of_bound < 0.55, "less would have to be carried"


def test_hundreds_of_hosts_are_not_bound_by_latency() -> None:
    predicted = predict(cluster(512, 128, 25e9, 2e-6), [(100 * MB, 0.0)])
    assert predicted.share_of_bound > 0.88


def test_an_array_is_not_reduced_before_it_is_ready() -> None:
    its = cluster(4, 4)
    alone = predict(its, [(10 * MB, 0.0)]).seconds
    assert predict(its, [(10 * MB, 1.0)]).seconds == pytest.approx(1 + alone, rel=1e-3)
    both = predict(its, [(10 * MB, 0.0), (10 * MB, 0.5 * alone)]).seconds
    assert both == pytest.approx(2 * alone, rel=0.05)


def test_averaging_hides_behind_computing() -> None:
    counts = [250_000] * 40
    hidden = predict_step(cluster(4, 4), buckets_of(counts, 0.5, 10 * MB), 0.5)
    assert 0.97 < hidden.efficiency < 0.99
    assert hidden.limited_by == "the last bucket"
    bound = predict_step(cluster(4, 4, 125e6), buckets_of(counts, 0.1, 4 * MB), 0.1)
    assert bound.limited_by == "links"
    assert bound.seconds == pytest.approx(0.1 / 3 + 1.5 * 40 * MB / 125e6, rel=0.05)
    assert predict_step(cluster(1, 1), buckets_of(counts, 0.5, 4 * MB), 0.5).efficiency == 1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = ["--ranks", "16", "--hosts", "4", "--link", "10gbit", "-J", str(file), "--scaling"]
    assert main(["allreduce", *words, "--size", "4M", "--algorithm", "all"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {(row["ranks"], row["hosts"]) for row in rows} == {(2, 1), (4, 1), (8, 2), (16, 4)}
    assert {row["algorithms"][0] for row in rows} == {"ring", "direct", "hierarchical"}
    assert all(row["seconds"] >= row["bound_seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(rows)
    assert main(["train", *words, "--model", "resnet50", "--compute", "100ms"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8, 16]
    assert rows[0]["efficiency"] == 1
    assert all(row["efficiency"] <= 1 for row in rows)


@pytest.mark.parametrize("command", ["allreduce", "train"])
def test_plot(command: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [command, "--ranks", "8", "--hosts", "4", "--link", "10gbit"]
    words += ["--plot", str(tmp_path / "scaling.png")]
    if command == "train":
        words += ["--model", "resnet50", "--compute", "100ms"]
    assert main(words) == 0
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["allreduce", "--link", "10gbit"]
    for more, said in (
        (["--ranks", "4", "--hosts", "8"], "4 ranks are not on 8 hosts"),
        (["--ranks", "8", "--hosts", "4", "--algorithm", "direct"], "ranks that all share memory"),
        (["--ranks", "8", "--hosts", "4", "--algorithm", "tree"], "known are ring, doubling"),
        (["--ranks", "8", "--hosts", "4", "--algorithm", "mpi"], "ranks that MPI has started"),
        (["--ranks", "8", "--hosts", "8", "--algorithm", "direct", "--scaling"], "share memory"),
        (["--ranks", "8", "--hosts", "8", "--algorithm", "doubling"], "doubling is for smaller"),
        (["--ranks", "2", "--hosts", "2", "-J", "/nonexistent/x.json"], "cannot be written"),
        (["--ranks", "2", "--hosts", "2", "-J", "/dev/full"], "No space left on device"),
        (["--ranks", "2", "--hosts", "2", "--size", "1000000G"], "memory"),
        (["--ranks", "2", "--hosts", "2", "--link", "1kbit"], "longer than a day"),
    ):
        assert main(words + more) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UsageError, match="there is no array"):
        cluster(2, 1).engine().predict_allreduces([], None)


def test_a_reader_that_has_seen_enough() -> None:
    words = ["--ranks", "16", "--hosts", "4", "--link", "10gbit", "--scaling"]
    job = subprocess.Popen(
        [sys.executable, "-m", "ringdl", "simulate", "allreduce", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    job.stdout.close()
    job.stdout = None
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (0, "")


def test_files_are_written_for_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = f"--ranks 16 --hosts 4 --link 10gbit --scaling -J {file}"
    command = f"{sys.executable} -m ringdl simulate allreduce {words} | head -1"
    ended = subprocess.run(command, shell=True, check=False, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert len(json.loads(file.read_text())["rows"]) == 4


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["allreduce", "--link", "10gbit", "--ranks", "4", "--hosts", "4"]
    assert main([*words, "--algorithm", "ring,nccl,doubling"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "nccl left out, as it is for ranks with a CUDA device" in told
    assert "doubling left out, as it is for smaller arrays" in told


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("size", [4 << 10, 8 << 10, 16 << 10, 32 << 10])
def test_the_chosen_algorithm_is_about_the_fastest(ranks: int, size: int) -> None:
    """Ranks of a host share its link, whatever the algorithm."""
    its = cluster(ranks, ranks // 8 + 1, 25e9, 2e-6)
    seconds = {
        each.name: predict(its, [(size, 0.0)], each).seconds
        for each in (_engine.Algorithm.ring, _engine.Algorithm.doubling)
    }
    seconds["hierarchical"] = predict(its, [(size, 0.0)], _engine.Algorithm.hierarchical).seconds
    chosen = predict(its, [(size, 0.0)])
    assert chosen.seconds <= 1.5 * min(seconds.values()), (chosen.algorithms, seconds)


def test_an_algorithm_that_is_not_for_these_ranks() -> None:
    with pytest.raises(UsageError, match="direct"):
        predict(cluster(8, 4), [(MB, 0.0)], _engine.Algorithm.direct)
