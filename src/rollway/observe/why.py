"""Describes a situation in words: what the current step waits for, oldest first."""

from ..records.situation import EngineState, EnvState, Situation, WaitingRollout
from ..records.text import one_line

MAX_LINES = 15


def first_line(now: Situation) -> str:
    """Return the most important line: what the step waits for, and the oldest rollout."""
    core = now.core
    counts = f"{core.ready} of {core.batch_size} ready, {core.in_flight} in flight"
    text = f"step {core.step} waits for {_waits_for(now)} ({counts})"
    if now.oldest:
        text += f"; oldest: {rollout_line(now.oldest[0])}"
    silent = [(env.silent_s, name) for name, env in now.envs.items() if env.in_flight]
    seconds, name = max(silent, default=(0, ""))
    if len(now.envs) > 1 and seconds > 10:
        text += f"; no rollout of '{name}' has settled for {seconds:.0f} s"
    return one_line(text)


def _waits_for(now: Situation) -> str:
    """Name engines that do not answer. If none answers, all rollouts wait for them alone."""
    waits_for = now.core.waits_for
    away = [f"the {engine_line(engine)}" for engine in now.engines if engine.trouble]
    if not away:
        return waits_for
    is_cause = len(away) == len(now.engines) and not waits_for.startswith("the trainer")
    return "; ".join(away if is_cause else [waits_for, *away])


def engine_line(engine: EngineState) -> str:
    if engine.trouble:
        return f"engine at {engine.url}: no answer for {engine.silent_s:.0f} s ({engine.trouble})"
    text = f"engine at {engine.url}: version {engine.version}"
    if load := engine.load:
        text += f", {load.running} running, {load.waiting} waiting, cache {load.cache_use:.0%} full"
    return text


def rollout_line(rollout: WaitingRollout) -> str:
    where = f" in {rollout.worker}" if rollout.worker else ""
    text = f"{rollout.rollout_id} of '{rollout.env}' (task '{rollout.task_id}'), "
    text += f"{rollout.age_s:.0f} s old, {rollout.phase} for {rollout.phase_s:.0f} s{where}"
    if rollout.num_turns:
        text += f", {rollout.num_turns} turns and {rollout.num_tokens} tokens so far"
    return text


def _env_lines(name: str, env: EnvState) -> list[str]:
    """Describe an environment: what its rollouts are doing, how they ended, and why they failed."""
    phases = ", ".join(f"{count} {phase}" for phase, count in env.phases.items())
    running = f"{env.in_flight} in flight{f' ({phases})' * bool(phases)}"
    scored = env.num_settled - env.num_failed
    last = f", the last {env.silent_s:.0f} s ago" if env.num_settled else ""
    text = [
        f"  environment '{name}': {running}, {scored} scored, {env.num_failed} failed{last}"
    ]
    if env.commonest_failure:
        text.append(f"    commonest failure: {env.commonest_failure}")
    return text


def lines(now: Situation) -> list[str]:
    """Return everything that is known, most important first."""
    published = f"version {now.core.version}, {now.step_s:.0f} s since the last was published"
    text = [f"{first_line(now)}; {published}"]
    for name, env in sorted(now.envs.items(), key=lambda item: -item[1].silent_s):
        text += _env_lines(name, env)
    text += [f"  {engine_line(engine)}" for engine in now.engines]
    text += [f"  {rollout_line(rollout)}" for rollout in now.oldest[:MAX_LINES]]
    if len(now.oldest) > MAX_LINES:
        text.append(f"  … and {now.core.in_flight - MAX_LINES} younger rollouts")
    return text
