"""The simulator on schedules written by hand, and the first impossible action named."""

import pytest

from analysis.checkpointing import Chain, IllegalActionError, Keep, Stage, Value, simulate
from analysis.checkpointing.offloading import offload_checkpoints, offload_stages
from analysis.checkpointing.schedule import backward, drop, fetch, forward, loss, offload

CHAIN = Chain(
    (
        Stage(10, 5, forward_s=1, backward_s=2),
        Stage(20, 7, gradient_bytes=40, forward_temporary_bytes=3, saving_temporary_bytes=4),
        Stage(1, 2, backward_temporary_bytes=100, forward_s=3, backward_s=4),
    ),
    input_bytes=1000,
    input_gradient_bytes=500,
)
STORE = [forward(i, Keep.ALL) for i in (1, 2, 3)]
BACK = [backward(i) for i in (3, 2, 1)]


def test_bytes_of_every_action() -> None:
    replay = simulate(CHAIN, (*STORE, loss(3), *BACK))
    #        a0     kept 1  kept 2    kept 3  loss
    held = [1000 + 15, 1015 + 27 + 4, 1042 + 3, 1045 + 1]
    back3 = 1046 + 40 + 100  # the gradient of a_2 and the temporaries
    back2 = 1000 + 15 + 27 + 40 + 10  # gone: stage 3, its gradient; there: gradients of a_2, a_1
    back1 = 1000 + 15 + 10 + 500
    assert list(replay.live_bytes) == [*held, back3, back2, back1]
    assert replay.peak_bytes == back1
    assert replay.peak_index == 6
    assert (replay.forwards, replay.advances) == (3, 0)
    assert replay.seconds == pytest.approx(1 + 1 + 3 + 2 + 2 + 4)


def test_checkpoints_are_freed_when_nobody_can_need_them() -> None:
    """After the backward of stage 3, a_2 is gone unless stage 2 is kept."""
    schedule = (
        forward(1, Keep.INPUT),
        forward(2, Keep.NOTHING),
        forward(3, Keep.ALL),
        loss(3),
        backward(3),
        forward(1, Keep.ALL),
        forward(2, Keep.ALL),
        backward(2),
        backward(1),
    )
    replay = simulate(CHAIN, schedule)
    assert replay.forwards_by_stage == (2, 2, 1)
    assert replay.live_bytes[1] == 1000 + 10 + 20 + 3
    assert replay.live_bytes[5] == 1000 + 40 + 15
    assert replay.advances == 2


@pytest.mark.parametrize(
    ("schedule", "index", "reason"),
    [
        ((forward(2, Keep.ALL),), 0, "activation 1, is not on the device"),
        ((forward(4, Keep.ALL),), 0, "there is no stage 4"),
        ((*STORE, loss(3), backward(2)), 4, "gradient of activation 2 does not exist"),
        ((*STORE, backward(3)), 3, "gradient of activation 3 does not exist"),
        ((*STORE[:2], loss(3)), 2, "needs activation 3"),
        ((*STORE, loss(3), loss(3)), 4, "already"),
        ((*STORE, loss(3), *BACK[:2]), 6, "backward of stage 1 never ran"),
        ((STORE[0], forward(1, Keep.ALL)), 1, "stage 1 is already kept"),
        ((STORE[0], forward(2, Keep.NOTHING)), 1, "belongs to kept stage 1"),
        ((forward(1, Keep.INPUT), forward(1, Keep.NOTHING)), 1, "activation 1 is already held"),
        ((drop(Value.ACTIVATION, 1),), 0, "activation 1 is not on the device"),
        ((STORE[0], drop(Value.ACTIVATION, 0)), 1, "input of kept stage 1"),
        ((drop(Value.ACTIVATION, 0), STORE[0]), 1, "activation 0, is not on the device"),
        ((*STORE, loss(3), offload(Value.STAGE, 3), backward(3)), 5, "stage 3 is not kept"),
        ((fetch(Value.STAGE, 1),), 0, "not on the host"),
    ],
)
def test_first_impossible_action_is_named(schedule: tuple, index: int, reason: str) -> None:
    with pytest.raises(IllegalActionError, match=reason) as caught:
        simulate(CHAIN, schedule, link_bytes_per_s=1.0)
    assert caught.value.index == index


def test_offloading_moves_bytes_off_the_device_and_takes_link_time() -> None:
    kept = simulate(CHAIN, (*STORE, loss(3), *BACK))
    moved = simulate(CHAIN, offload_stages(CHAIN), link_bytes_per_s=21.0)
    assert moved.forwards == 3
    assert moved.moved_bytes == 2 * (15 + 27)
    assert moved.host_peak_bytes == 15 + 27
    assert moved.seconds == pytest.approx(kept.seconds + 84 / 21)
    assert moved.live_bytes[5] == 1000 + 3 + 1  # the loss: only stage 3 and the new gradient
    with pytest.raises(IllegalActionError, match="link_bytes_per_s"):
        simulate(CHAIN, offload_stages(CHAIN))


def test_offloaded_checkpoints_come_back_for_their_segment() -> None:
    replay = simulate(CHAIN, offload_checkpoints(CHAIN, 1), link_bytes_per_s=10.0)
    assert replay.forwards == 3 + 2
    assert replay.moved_bytes == 2 * 10  # a_1; a_0 is the caller's and a_2 the last segment's
