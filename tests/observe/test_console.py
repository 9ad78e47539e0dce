"""The lines that a person sees of a run."""

import io

import msgspec

from rollway.observe.console import Screen, eval_line, stall_line, status_line, step_line
from rollway.observe.report import EvalDone, StepDone
from rollway.records.lag import LagStats, Stall
from rollway.records.situation import CoreView

VIEW = CoreView(
    step=3,
    version=2,
    waits_for="rollouts",
    in_flight=5,
    max_in_flight=64,
    ready=8,
    batch_size=16,
    live_bytes=1_500_000,
    is_held_back=False,
    num_retries=0,
    pools={},
)


def test_step_and_status_lines_show_the_figures() -> None:
    lags = {"engine": LagStats(p99=0.0012, max=0.045), "trainer": LagStats()}
    metrics = {"time/step": 1.5, "reward/all/mean": 0.25, "in_flight": 7, "errors/env": 2,
               "errors/engine": 0, "errors/cancelled": 3}  # fmt: skip
    line = step_line(StepDone(3, metrics, lags), max_steps=9)
    for part in ("Step 3/9", "Time: 1.50s", "Reward: 0.2500", "In Flight: 7", "Failed: 2 env",
                 "engine 1.2/45, trainer 0.0/0.0"):  # fmt: skip
        assert part in line
    assert "engine 0" not in line.lower().partition("lag")[0]
    assert "1.5 MB payload ·" in status_line(VIEW, 9, lags)
    full = msgspec.structs.replace(VIEW, is_held_back=True)
    assert "1.5 MB payload (at its budget: starting nothing) ·" in status_line(full, 9, lags)
    assert "worst lag now: engine 45 ms" in status_line(VIEW, 9, lags)
    stall = Stall("f.py:3", "f", 1, 0.25, 0.25)
    assert stall_line("w0", stall) == "w0: loop held for 250 ms by f.py:3 in f"


def test_an_evaluation_is_one_line_with_all_environments() -> None:
    metrics = {
        "eval/sums/avg@2": 0.5, "eval/sums/pass@1": 0.25, "eval/sums/tasks": 4, "eval/sums/failed": 0.5,
        "eval/sums/version/min": 3, "eval/sums/version/max": 5,
        "eval/words/tasks": 2, "eval/words/failed": 0.0,
    }  # fmt: skip
    assert eval_line(EvalDone(3, metrics)) == (
        "Eval of version 3 | sums: avg@2 0.500, pass@1 0.250 (4 tasks, 50% failed, versions 3 to 5) | "
        "words: nothing was scored (2 tasks)"
    )
    assert eval_line(EvalDone(3, {})).endswith("no environment has tasks in its split 'eval'")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_stays_last_on_a_terminal_and_out_of_files() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        screen = Screen(stream)
        screen.status("working")
        screen.line("done 1")
        screen.close()
    assert terminal.getvalue() == "\r\x1b[2Kworking\r\x1b[2Kdone 1\nworking\r\x1b[2K"
    assert file.getvalue() == "done 1\n"


def test_no_text_acts_on_the_terminal() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.status("now\x1b[1A\x9b")
    screen.line("done\x1b]0;title\x07 [/b]")
    shown = terminal.getvalue().replace("\r\x1b[2K", "")
    assert (
        shown == r"now\x1b[1A\x9b" + r"done\x1b]0;title\x07 [/b]" + "\n" + r"now\x1b[1A\x9b"
    )
