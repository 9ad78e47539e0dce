"""`rollway why`: says in words what a step waits for."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollway.cli.main import make_app
from rollway.observe.why import first_line, lines
from rollway.records.engine import EngineLoad
from rollway.records.ids import GroupId, RolloutId, WorkerName
from rollway.records.situation import (
    CoreView,
    EngineState,
    EnvState,
    Situation,
    WaitingRollout,
)
from rollway.rundir.rundir import RunDir


def waiting(number: int, env: str = "dead") -> WaitingRollout:
    rollout_id = RolloutId(f"g{number}.0")
    return WaitingRollout(
        rollout_id,
        GroupId(number),
        env,
        str(number),
        60 - number,
        "engine",
        50,
        WorkerName("w1"),
        3,
        70,
        1,
    )


CORE = CoreView(
    step=7,
    version=6,
    waits_for="rollouts",
    in_flight=40,
    max_in_flight=64,
    ready=24,
    batch_size=64,
    live_bytes=0,
    is_held_back=False,
    num_retries=0,
    pools={},
)
NOW = Situation(
    time_s=0,
    core=CORE,
    step_s=61,
    envs={"dead": EnvState(20, 0, 61), "good": EnvState(20, 900, 0.2)},
    oldest=tuple(waiting(number) for number in range(20)),
)


def test_the_first_line_names_the_oldest_rollout_and_the_silent_environment() -> None:
    assert first_line(NOW) == (
        "step 7 waits for rollouts (24 of 64 ready, 40 in flight); oldest: g0.0 of 'dead' (task '0'), "
        "60 s old, engine for 50 s in w1, 3 turns and 70 tokens so far; no rollout of 'dead' has "
        "settled for 61 s"
    )


UP = EngineState("http://b:8000", 6, load=EngineLoad(12, 3, 0.4))
GONE = EngineState("http://a:8000", 5, 14.2, "/metrics: cannot connect")


@pytest.mark.parametrize(
    ("engines", "waits_for", "text"),
    [
        ((GONE,), "rollouts",
         "waits for the engine at http://a:8000: no answer for 14 s (/metrics: cannot connect) (24 of"),
        ((GONE, UP), "rollouts",
         "waits for rollouts; the engine at http://a:8000: no answer for 14 s (/metrics: cannot"),
        ((GONE,), "the trainer", "waits for the trainer; the engine at http://a:8000: no answer for"),
        ((UP,), "rollouts", "waits for rollouts (24 of"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_answer_is_named(
    engines: tuple[EngineState, ...], waits_for: str, text: str
) -> None:
    core = msgspec.structs.replace(CORE, waits_for=waits_for)
    now = msgspec.structs.replace(NOW, engines=engines, core=core)
    assert text in first_line(now)
    line = "  engine at http://b:8000: version 6, 12 running, 3 waiting, cache 40% full"
    assert (line in lines(now)) == (UP in engines)


def test_the_oldest_rollouts_come_first_and_the_rest_is_counted() -> None:
    shown = lines(NOW)
    assert "environment 'dead': 20 in flight, 0 scored, 0 failed" in shown[1]
    assert "g0.0" in shown[3]
    assert shown[-1] == "  … and 25 younger rollouts"


def test_why_says_when_a_run_has_ended(tmp_path: Path) -> None:
    cli = CliRunner()
    assert "not a run directory" in str(
        cli.invoke(make_app(), ["why", str(tmp_path)]).exception
    )
    (tmp_path / "config.toml").write_text("")
    assert "never started" in str(cli.invoke(make_app(), ["why", str(tmp_path)]).exception)
    (tmp_path / "now.json").write_bytes(msgspec.json.encode(NOW))
    result = cli.invoke(make_app(), ["why", str(tmp_path)])
    assert result.exit_code == 0
    assert "The run has ended. State at 1970-01-01" in result.output
    assert "step 7 waits for rollouts" in result.output
    with RunDir(tmp_path).lock():
        result = cli.invoke(make_app(), ["why", str(tmp_path)])
    assert "The run is starting or ending, or its orchestrator hangs. State" in result.output
    picture = cli.invoke(make_app(), ["why", str(tmp_path), "--json"])
    assert msgspec.json.decode(picture.output, type=Situation) == NOW


@pytest.mark.parametrize("text", ["{", '{"step": 1}'])
def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "now.json").write_text(text)
    message = str(CliRunner().invoke(make_app(), ["why", str(tmp_path)]).exception)
    assert "now.json cannot be read" in message


def test_no_id_and_no_error_acts_on_the_terminal_or_adds_a_line(tmp_path: Path) -> None:
    hostile, shown = (
        "\x1b[2J\x9b[/b]\nThe run is complete",
        r"\x1b[2J\x9b[/b]\nThe run is complete",
    )
    rollout = msgspec.structs.replace(waiting(0), task_id=hostile)
    env = msgspec.structs.replace(NOW.envs["dead"], commonest_failure=hostile)
    now = msgspec.structs.replace(NOW, oldest=(rollout,), envs={hostile: env})
    assert f"task '{shown}'" in first_line(now)
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "now.json").write_bytes(msgspec.json.encode(now))
    cli = CliRunner()
    told = cli.invoke(make_app(), ["why", str(tmp_path)]).output
    picture = cli.invoke(make_app(), ["why", str(tmp_path), "--json"]).output
    for output in (told, picture):
        assert not {"\x1b", "\x9b"} & {*output}
    assert told.count(shown) == 4
    assert "\nThe run is complete" not in told
    assert msgspec.json.decode(picture, type=Situation) == now
