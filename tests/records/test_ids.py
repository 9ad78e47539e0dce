"""A rollout that runs again gets a new id, from which the number of retries can be read."""

from rollway.records.ids import GroupId, make_rollout_id, next_try, num_retries


def test_each_try_of_a_rollout_has_its_own_id() -> None:
    first = make_rollout_id(GroupId(12), 3)
    second = next_try(first)
    third = next_try(second)
    assert [first, second, third] == ["g12.3", "g12.3+1", "g12.3+2"]
    assert [num_retries(rollout_id) for rollout_id in (first, second, third)] == [0, 1, 2]
