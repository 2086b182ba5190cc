"""Ranks that are killed: those that are left go on, and train what they would have trained."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from tests.environments import ELASTIC
from tests.running import EVERYTHING, JOBS, SOON, TIMEOUT, Ended, run_job, run_ranks

DEATHS = int(os.environ.get("RINGDL_TEST_DEATHS", 4 if EVERYTHING else 1))
"""How many jobs of each kind lose ranks at random moments."""

JOINING = [
    ("joins", 3),
    ("fails_at_its_start", 2),
    ("does_not_run", 2),
    ("comes_late", 2),
    ("all_others_die", 1),
    ("in_the_second_run", 1),
    ("before_the_first_run", 3),
    ("twice_with_files", 3),
    ("parts_have_changed", 3),
    ("one_has_not_committed", 3),
    ("gradients_are_sparse", 3),
    ("gradients_of_numpy", 3),
    ("keras_optimizers", 3),
    ("parameters_of_numpy", 3),
    ("sets_are_made_again", 3),
    ("has_been_changed", 3),
    ("raises_in_the_meeting", 3),
    ("first_dies_before_they_meet", 3),
    ("second_dies_before_they_meet", 3),
    ("first_dies_while_they_start", 4),
    ("second_dies_while_they_start", 4),
    ("newcomer_dies_while_they_start", 4),
    ("second_dies_once_they_have_met", 3),
    ("second_dies_before_starting", 3),
    ("first_dies_after_starting", 3),
    ("first_dies_before_admitting", 3),
    ("first_dies_after_admitting", 3),
    ("newcomer_dies_before_it_is_ready", 3),
    ("newcomer_dies_at_once", 3),
]
"""Cases of elastic_newcomers.py, and how many are left at the end."""
QUICK = (
    "joins",
    "second_dies_while_they_start",
    "first_dies_after_admitting",
    "parameters_of_numpy",
)

pytestmark = pytest.mark.parametrize("python", ELASTIC)


def run_elastic(
    python: str,
    script: str,
    *arguments: str,
    folder: Path,
    ranks: int = 4,
    replacements: int = 0,
    **environment: str,
) -> Ended:
    command = [python, "-m", "ringdl", "run", "--elastic", "-n", str(ranks)]
    command += [f"--replacements={replacements}"] if replacements else []
    settings = {"ELASTIC_FOLDER": str(folder)} | environment
    return run_job(
        [*command, str(JOBS / script), *arguments], folder, timeout=2 * TIMEOUT, **settings
    )


def digests(ended: Ended, ranks: int) -> set[str]:
    """Of the parameters of those that are left, of which there are so many."""
    assert ended.code == 0, ended.text
    found = re.findall(rf"has ended with (\w+) on {ranks}\n", ended.output)
    assert len(found) == ranks, ended.text
    return set(found)


def digest_by_hand(python: str, script: str, commit: str, ranks: int, folder: Path) -> str:
    """Of so many ranks that begin at a commit that the job has written, and lose none."""
    arguments = ("40", "", str(folder / commit))
    ended = run_ranks(python, ranks, script, *arguments, folder=folder, timeout=2 * TIMEOUT)
    (digest,) = digests(ended, ranks)
    return digest


def went_on(ended: Ended) -> None:
    for seconds in re.findall(r"goes on .* after (\S+) s", ended.output):
        assert float(seconds) < SOON, ended.text


@pytest.mark.parametrize(
    ("kills", "left"),
    [
        ("1:20:kill", 3),
        ("0:20:raise", 3),
        ("1:20:kill,2:20:kill", 2),
        ("0:10:kill,3:15:raise,1:30:exit", 1),
    ],
)
def test_the_others_go_on(python: str, kills: str, left: int, tmp_path: Path) -> None:
    ended = run_elastic(python, "elastic.py", "40", kills, folder=tmp_path)
    (digest,) = digests(ended, left)
    went_on(ended)
    assert digest == digest_by_hand(python, "elastic.py", f"{left}.npz", left, tmp_path)


@pytest.mark.parametrize(
    ("kills", "waits"),
    [
        ("1:10:kill", "30:4"),
        ("0:10:kill,2:20:raise", "30:4"),
        ("3:10:kill,0:25:kill,new:32:kill", "20:4,30:4,38:4"),
    ][0 if EVERYTHING else 2 :],
)
def test_ranks_are_replaced(python: str, kills: str, waits: str, tmp_path: Path) -> None:
    ended = run_elastic(
        python, "elastic.py", "40", kills, folder=tmp_path, replacements=9, ELASTIC_WAITS=waits
    )
    (digest,) = digests(ended, 4)
    went_on(ended)
    assert "rank new has ended" in ended.output
    assert digest == digest_by_hand(python, "elastic.py", "4.npz", 4, tmp_path)


@pytest.mark.parametrize("number", range(DEATHS))
@pytest.mark.parametrize("deaths", [1, 2] if EVERYTHING else [2])
def test_replaced_at_any_moment(python: str, deaths: int, number: int, tmp_path: Path) -> None:
    drawn = random.Random(f"replaced {deaths} {number}")
    kills = ",".join(f"{rank}:{drawn.uniform(0, 3)}" for rank in drawn.sample(range(4), deaths))
    ended = run_elastic(
        python,
        "elastic_torch.py",
        "40",
        kills,
        folder=tmp_path,
        replacements=9,
        ELASTIC_WAITS="38:4",
    )
    (digest,) = digests(ended, 4)
    assert digest == digest_by_hand(python, "elastic_torch.py", "4.pt", 4, tmp_path), kills


@pytest.mark.parametrize(
    ("case", "left"),
    [each for each in JOINING if EVERYTHING or each[0] in QUICK],
)
def test_ranks_join(python: str, case: str, left: int, tmp_path: Path) -> None:
    """Whoever fails when ranks are started, or join."""
    if case == "keras_optimizers":
        pytest.importorskip("keras")
    ranks = max(left, 3)
    # Who hangs while others start must not end by RINGDL_TIMEOUT before the test fails.
    timeout = "300" if "while_they_start" in case else "30"
    ended = run_elastic(
        python,
        "elastic_newcomers.py",
        case,
        folder=tmp_path,
        ranks=ranks,
        replacements=2 if left < ranks else 4,
        ELASTIC_RANKS=str(ranks),
        RINGDL_TIMEOUT=timeout,
        KERAS_BACKEND="torch",
    )
    assert ended.code == 0, ended.text
    assert ended.output.count(f"ended on {left}\n") == left, ended.text
    tracebacks = {"fails_at_its_start": 2, "has_been_changed": 1}
    assert ended.errors.count("Traceback") == tracebacks.get(case, 0), ended.text


def test_new_ranks_find_the_modules_that_others_find(python: str, tmp_path: Path) -> None:
    """In the script's folder, not where the job was started: there, say, ringdl's sources are."""
    (tmp_path / "ringdl").mkdir()
    (tmp_path / "ringdl/__init__.py").write_text("raise ImportError('it was not compiled')\n")
    words = ("run", "--elastic", "-n", "3", "--replacements=1", str(JOBS / "elastic_newcomers.py"))
    settings = {"ELASTIC_FOLDER": str(tmp_path), "PWD": str(tmp_path), "RINGDL_TIMEOUT": "20"}
    command = [python, "-P", "-m", "ringdl", *words, "joins"]
    ended = run_job(command, tmp_path, cwd=tmp_path, **settings)
    assert ended.code == 0, ended.text
    assert ended.output.count("ended on 3\n") == 3, ended.text


@pytest.mark.parametrize("who", ["newcomer", "other"])
def test_a_rank_that_raises_ends_all(python: str, who: str, tmp_path: Path) -> None:
    """Also those that the launcher takes for another job."""
    ended = run_elastic(
        python,
        "elastic_newcomers.py",
        f"{who}_raises_at_the_end",
        folder=tmp_path,
        ranks=3,
        replacements=2,
    )
    assert ended.code != 0, ended.text
    assert "ZeroDivisionError: at the end" in ended.errors
    assert "ended on" not in ended.output, "others wait for half a minute before they end"


@pytest.mark.parametrize("number", range(DEATHS))
@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_death_at_any_moment(python: str, deaths: int, number: int, tmp_path: Path) -> None:
    """The second one within a second of the first: at once, or while the others recover."""
    drawn = random.Random(f"{deaths} {number}")
    first = drawn.uniform(0, 2)
    moments = [first + (drawn.uniform(0, 1) if i else 0) for i in range(deaths)]
    kills = ",".join(
        f"{rank}:{moment}"
        for rank, moment in zip(drawn.sample(range(4), deaths), moments, strict=True)
    )
    ended = run_elastic(python, "elastic_torch.py", "40", kills, folder=tmp_path)
    left = 4 - deaths
    (digest,) = digests(ended, left)
    went_on(ended)
    assert digest == digest_by_hand(python, "elastic_torch.py", f"{left}.pt", left, tmp_path), kills


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("in_groups", 2),
        ("between_runs", 2),
        ("between_passes", 2),
        ("parameters_that_differ", 2),
        ("parameters_that_differ_by_an_optimizer_of_train", 2),
        ("arrays_that_differ", 2),
        ("names_in_flight", 2),
        ("memory_goes", 2),
        ("one_raises_while_others_wait_for_its_clock", 2),
        ("one_dies_whom_nobody_waits_for", 2),
        ("one_dies_while_others_ask", 2),
        ("one_raises_while_others_compute", 2),
        ("one_raises_in_the_recovery", 1),
        ("while_values_arrive", 2),
        ("all_stop_early", 3),
    ],
)
def test_they_go_on(python: str, case: str, left: int, tmp_path: Path) -> None:
    ended = run_elastic(
        python, "elastic_cases.py", case, folder=tmp_path, ranks=3, RINGDL_TIMEOUT="6"
    )
    assert ended.code == 0, ended.text
    assert ended.output.count(f"ended on {left}\n") == left, ended.text
    why = {
        "one_raises_while_others_compute": "ZeroDivisionError: here alone",
        "one_raises_while_others_wait_for_its_clock": "ZeroDivisionError: here alone",
        "one_raises_in_the_recovery": "OSError: too many open files",
    }
    assert ended.errors.count("Traceback") == (case in why), ended.text
    assert why.get(case, "") in ended.errors


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("all_raise", "ZeroDivisionError: everywhere"),
        ("at_the_first_commit", "with it is lost what it had in `own`; start again"),
        ("no_rank_is_lost", "as if a rank were lost, while none was"),
        ("callbacks_commit", "as if a rank were lost, while none was"),
        ("parts_without_copies", "it is lost what it had in `own`, of which no other rank"),
    ],
)
def test_they_cannot_go_on(python: str, case: str, why: str, tmp_path: Path) -> None:
    ended = run_elastic(python, "elastic_cases.py", case, folder=tmp_path, ranks=3)
    assert ended.code == 1, ended.text
    assert why in ended.errors, ended.text


def test_each_epoch_has_its_timeline(python: str, tmp_path: Path) -> None:
    ended = run_elastic(
        python,
        "elastic_cases.py",
        "in_groups",
        folder=tmp_path,
        ranks=3,
        RINGDL_TIMELINE=str(tmp_path / "timeline.json"),
    )
    assert ended.code == 0, ended.text
    for name in ("timeline.json", "timeline.rank2.json", "timeline.epoch2.json"):
        assert json.loads((tmp_path / name).read_text())["traceEvents"]


def test_new_ranks_leave_the_records_alone(python: str, tmp_path: Path) -> None:
    """Before they join they are a job of their own, of which nothing is recorded."""
    ended = run_elastic(
        python,
        "elastic_newcomers.py",
        "joins",
        folder=tmp_path,
        ranks=3,
        replacements=1,
        RINGDL_TIMELINE=str(tmp_path / "timeline.json"),
    )
    assert ended.code == 0, ended.text
    for name in ("timeline.json", "timeline.epoch2.json", "timeline.epoch3.json"):
        assert "ones" in (tmp_path / name).read_text(), name


def test_compiled_functions_go_on(python: str, tmp_path: Path) -> None:
    for needed in ("jax", "optax"):
        pytest.importorskip(needed)
    ended = run_elastic(python, "elastic_jax.py", "1", "20", folder=tmp_path, ranks=3)
    assert ended.code == 0, ended.text
    errors = re.findall(r"of 2 has ended, with an error of (\S+)\n", ended.output)
    assert len(errors) == 2, ended.text
    assert max(map(float, errors)) < 0.01, ended.text


@pytest.mark.parametrize("how", ["kill", "fork"])
def test_if_all_are_killed_the_job_has_failed(python: str, how: str, tmp_path: Path) -> None:
    """For which mpirun reports success; nor is the end of a forked child that of its rank."""
    kills = f"0:9:{how},1:9:kill"
    ended = run_elastic(python, "elastic.py", "40", kills, folder=tmp_path, ranks=2)
    assert ended.code == 1, ended.text
    assert "no rank has ended well" in ended.errors


def test_without_run_the_job_ends(python: str, tmp_path: Path) -> None:
    """A script that cannot go on ends as ever, whatever it was started with."""
    ended = run_elastic(python, "endings.py", "kill", folder=tmp_path)
    assert ended.code != 0, ended.text
    assert "RankFailedError" in ended.errors, ended.text
