"""A judge asks a real endpoint and reads a number out of its answer."""

import pytest
from tests.doubles.chat import chat_double

import rollway as rw
from rollway.errors import EngineError

pytestmark = pytest.mark.anyio


async def test_a_judge_returns_text_and_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    answers = {
        "good?": "Clear, but 2 mistakes. Grade: 0.75",
        "bad?": "I would rather not say.",
    }
    async with chat_double(lambda text, num_before: answers[text], key="secret") as double:
        judge = rw.Judge(
            double.url, "double", key_var="JUDGE_KEY", system_prompt="Be strict."
        )
        assert await judge.ask("good?") == answers["good?"]
        assert await judge.grade("good?") == 0.75
        with pytest.raises(EngineError, match="gave no number: 'I would rather"):
            await judge.grade("bad?")
        assert double.requests[0]["messages"][0] == {
            "role": "system",
            "content": "Be strict.",
        }
        assert (double.requests[0]["temperature"], double.requests[0]["max_tokens"]) == (
            0.0,
            1024,
        )


async def test_a_judge_samples_as_its_keywords_say() -> None:
    async with chat_double(lambda text, num_before: "7") as double:
        judge = rw.Judge(double.url, "double", temperature=0.5, max_tokens=9)
        assert await judge.grade("good?") == 7.0
        assert (double.requests[0]["temperature"], double.requests[0]["max_tokens"]) == (
            0.5,
            9,
        )
        assert len(double.requests[0]["messages"]) == 1, "no system prompt was given"
    with pytest.raises(TypeError, match="temprature"):
        rw.Judge("http://localhost", "m", temprature=1.0)  # type: ignore[call-arg]
