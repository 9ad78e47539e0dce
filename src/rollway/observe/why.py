"""A situation in words: what the current step waits for, oldest first."""

from ..records.situation import EngineState, Situation, WaitingRollout

MAX_LINES = 15


def first_line(now: Situation) -> str:
    """The one thing to know."""
    text = f"step {now.core.step} waits for {_waits_for(now)} ({now.core.ready} of {now.core.batch_size} ready, "
    text += f"{now.core.in_flight} in flight)"
    silent = [
        (one.silent_s, name) for name, one in now.envs.items() if one.in_flight and one.silent_s > 10
    ]
    if now.oldest:
        text += f"; oldest: {held(now.oldest[0])}"
    if len(now.envs) > 1 and silent:
        seconds, name = max(silent)
        text += f"; no rollout of '{name}' has settled for {seconds:.0f} s"
    return text


def _waits_for(now: Situation) -> str:
    """Rollouts cannot go on while no engine answers: that is what everything waits for then."""
    away = [f"the {engine(one)}" for one in now.engines if one.trouble]
    is_cause = len(away) == len(now.engines) and not now.core.waits_for.startswith("the trainer")
    return "; ".join(away if away and is_cause else [now.core.waits_for, *away])


def engine(one: EngineState) -> str:
    """One engine: what it does, or for how long it has not answered."""
    if one.trouble:
        return f"engine at {one.url}: no answer for {one.silent_s:.0f} s ({one.trouble})"
    text = f"engine at {one.url}: version {one.version}"
    if one.load is not None:
        text += f", {one.load.running} running, {one.load.waiting} waiting, cache "
        text += f"{one.load.cache_use:.0%} full"
    return text


def held(one: WaitingRollout) -> str:
    """One rollout: where it is and for how long."""
    where = f" in {one.worker}" if one.worker else ""
    text = f"{one.rollout_id} of '{one.env}' (task '{one.task_id}'), {one.age_s:.0f} s old, "
    text += f"{one.phase} for {one.phase_s:.0f} s{where}"
    if one.num_turns:
        text += f", {one.num_turns} turns and {one.num_tokens} tokens so far"
    return text


def lines(now: Situation) -> list[str]:
    """Everything that is known, most important first."""
    told = [
        f"{first_line(now)}; version {now.core.version}, {now.step_s:.0f} s since the last was published"
    ]
    for name, one in sorted(now.envs.items(), key=lambda item: -item[1].silent_s):
        told.append(
            f"  environment '{name}': {one.in_flight} in flight, {one.num_settled} settled, the last "
            f"{one.silent_s:.0f} s ago"
        )
    told += [f"  {engine(one)}" for one in now.engines]
    told += [f"  {held(one)}" for one in now.oldest[:MAX_LINES]]
    if len(now.oldest) > MAX_LINES:
        told.append(f"  … and {now.core.in_flight - MAX_LINES} younger ones")
    return told
