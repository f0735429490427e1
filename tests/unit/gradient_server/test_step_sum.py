"""One step's sums: the true mean whatever comes in which order, in bounded memory, and refusals by name."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.gradient_server.buffers import Buffers
from runtime.gradient_server.sample_shares import Share, by_speed, even
from runtime.gradient_server.step_sum import WHOLE, GradientRefused, Plan, StepSum, block, component, part
from runtime.gradient_server.wire.messages import MAX_PARTS, Dtype, Reason

RANDOM = numpy.random.default_rng(7)


def floats(*values):
    return numpy.array(values, numpy.float32)


def send(total, worker, values, key=WHOLE, dtype=Dtype.FLOAT32, sizes=()):
    """All of a worker's gradient at once; whether the key is complete then."""
    total.begin(worker, key, len(values), dtype, sizes)
    total.add(worker, key, 0, values)
    return total.end(worker, key)


def refusal(function, *args, **keywords):
    with pytest.raises(GradientRefused) as caught:
        function(*args, **keywords)
    return caught.value


def two_workers(samples=8, **keywords):
    return StepSum(3, 0, even(samples, [0, 1]), **keywords)


def shares_of(*lengths):
    edges = numpy.cumsum([0, *lengths]).tolist()
    return {worker: Share(*pair) for worker, pair in enumerate(pairwise(edges))}


def test_even_shares_give_the_plain_mean():
    total = two_workers()
    assert not send(total, 0, floats(1, 2, 3))
    assert send(total, 1, floats(3, 2, 5))
    assert total.average(WHOLE).dtype == numpy.float32
    assert total.average(WHOLE).tolist() == [2, 2, 4]


def test_uneven_shares_give_the_true_mean_over_all_samples():
    gradients = RANDOM.standard_normal((10, 1000)).astype(numpy.float32)  # one a sample
    total = StepSum(0, 0, shares_of(2, 2, 2, 4))
    for worker, share in total.shares.items():
        send(total, worker, gradients[share.start : share.end].mean(0, dtype=numpy.float64).astype(numpy.float32))
    expected = gradients.mean(0, dtype=numpy.float64)
    numpy.testing.assert_allclose(total.average(WHOLE), expected, atol=1e-7)


def test_what_float32_would_lose_is_not_lost():
    total = StepSum(0, 0, even(4, range(4)))
    for worker, value in enumerate([1e8, 1, 1, -1e8]):
        send(total, worker, floats(value))
    assert total.average(WHOLE).tolist() == [0.5]


@given(st.data())
@settings(deadline=None)
def test_pieces_of_any_size_in_any_order_of_workers(data):
    count = data.draw(st.integers(0, 200), label="count")
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), label="lengths")
    values = RANDOM.standard_normal((len(lengths), count)).astype(numpy.float32)
    buffers = Buffers()
    for attempt in range(2):  # the second finds the first one's numbers in its memory
        total = StepSum(0, attempt, shares_of(*lengths), buffers)
        at = [0] * len(lengths)
        for worker in range(len(lengths)):
            total.begin(worker, WHOLE, count)
        while open_ones := [worker for worker, position in enumerate(at) if position < count]:
            worker = data.draw(st.sampled_from(open_ones))
            length = data.draw(st.integers(1, count - at[worker]))
            total.add(worker, WHOLE, at[worker], values[worker, at[worker] : at[worker] + length])
            at[worker] += length
        assert [total.end(worker, WHOLE) for worker in range(len(lengths))][-1]
        expected = numpy.average(values.astype(numpy.float64), axis=0, weights=lengths).astype(numpy.float32)
        numpy.testing.assert_allclose(total.average(WHOLE), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("lengths", [(1,), (3, 3), (1, 2, 5)])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64, Dtype.FLOAT16, Dtype.BFLOAT16])
def test_every_dtype_is_averaged_to_its_nearest_number(dtype, lengths):
    exact = RANDOM.standard_normal((len(lengths), 70_000)).astype(numpy.float32)
    sent = [_as(dtype, row) for row in exact]
    total = StepSum(0, 0, shares_of(*lengths))
    for worker, values in enumerate(sent):
        send(total, worker, values, dtype=dtype)
    mean = numpy.average([_read(dtype, values) for values in sent], axis=0, weights=lengths)
    assert total.average(WHOLE).dtype == dtype.numpy
    numpy.testing.assert_array_equal(total.average(WHOLE), _as(dtype, mean))


def _as(dtype, values):
    if dtype is not Dtype.BFLOAT16:
        return values.astype(dtype.numpy)
    torch = pytest.importorskip("torch")
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)


def _read(dtype, values):
    if dtype is not Dtype.BFLOAT16:
        return values.astype(numpy.float64)
    return (values.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


def test_values_at_an_odd_address_are_as_good():
    raw = bytearray(4 * 1000 + 1)
    odd = numpy.frombuffer(raw, numpy.float32, offset=1)
    odd[:] = RANDOM.standard_normal(1000)
    total = StepSum(0, 0, shares_of(1, 2))
    send(total, 0, odd)
    send(total, 1, odd)
    numpy.testing.assert_array_equal(total.average(WHOLE), odd)


def test_who_has_no_samples_counts_for_nothing():
    total = StepSum(0, 0, shares_of(0, 4, 4))
    assert not send(total, 1, floats(1, 1))
    assert not send(total, 2, floats(3, 3))
    assert send(total, 0, floats(math.nan, math.inf))
    assert total.average(WHOLE).tolist() == [2, 2]
    total.report(0, math.nan, 0, 0)
    total.report(1, 1.0, 1, 4)
    total.report(2, 2.0, 3, 4)
    assert (total.loss, total.correct, total.total) == (1.5, 4, 8)


def test_loss_is_weighted_and_the_rest_is_summed():
    total = StepSum(0, 0, shares_of(1, 3))
    total.report(0, 4.0, 1, 1)
    assert not total.has_all_reports
    total.report(1, 2.0, 2, 3)
    assert total.has_all_reports
    assert (total.loss, total.correct, total.total) == (2.5, 3, 4)
    assert math.isnan(two_workers().loss)


# When it is complete.


def test_a_whole_gradient_is_complete_with_its_reports():
    total = two_workers()
    for worker in range(2):
        total.settle(worker, Plan("whole"))
        send(total, worker, floats(1))
    assert not total.is_complete
    total.report(0, 0.0, 0, 4)
    assert total.has_all_of(0)
    assert not total.has_all_of(1)
    total.report(1, 0.0, 0, 4)
    assert total.is_complete


def test_blocks_are_complete_with_all_of_them_and_the_components():
    total = two_workers()
    keys = [block(1), block(0), *(component(number) for number in range(3))]
    for key in keys:
        assert not total.is_complete
        for worker in range(2):
            total.settle(worker, Plan("blocks", 2))
            send(total, worker, floats(1), key)
    assert total.is_complete


def test_parts_are_averaged_each_on_its_own():
    total = two_workers()
    for worker in range(2):
        total.settle(worker, Plan("parts", 2))
        total.begin(worker, part(0), 2)
        total.begin(worker, part(1), 1, Dtype.FLOAT64)
    total.add(0, part(1), 0, numpy.array([4.0]))
    total.add(1, part(1), 0, numpy.array([2.0]))
    assert (total.end(0, part(1)), total.end(1, part(1))) == (False, True)
    assert total.average(part(1)).tolist() == [3.0]
    assert not total.is_complete


# Going on without somebody.


def test_who_has_added_nothing_can_be_left_out():
    total = StepSum(0, 0, shares_of(4, 4, 8))
    send(total, 0, floats(1, 5))
    total.begin(2, WHOLE, 2)
    send(total, 1, floats(3, 3))
    assert not total.has_from(2)
    assert total.leave_out(2) == [WHOLE]
    assert total.average(WHOLE).tolist() == [2, 4]


def test_one_who_comes_after_somebody_was_left_out():
    total = StepSum(0, 0, shares_of(1, 2, 3))
    send(total, 0, floats(6))
    assert total.leave_out(2) == []
    assert send(total, 1, floats(3))
    assert total.average(WHOLE).tolist() == [4]


def test_what_had_come_before_somebody_was_left_out_is_averaged_too():
    total = StepSum(0, 0, shares_of(4, 4, 8))
    for worker, length in ((0, 3), (1, 2)):
        total.begin(worker, WHOLE, 4)
        total.add(worker, WHOLE, 0, floats(*[2 + worker] * length))
    assert total.leave_out(2) == []
    for worker, length in ((1, 2), (0, 1)):
        total.add(worker, WHOLE, 4 - length, floats(*[2 + worker] * length))
        is_complete = total.end(worker, WHOLE)
    assert is_complete
    assert total.average(WHOLE).tolist() == [2.5] * 4


def test_the_average_is_zero_where_nobody_who_is_left_has_samples():
    total = StepSum(0, 0, shares_of(0, 0, 2))
    for worker in (0, 1):
        total.begin(worker, WHOLE, 2)
        total._keys[WHOLE].memory.sums[:] = 7  # as a step before may have left it
        total.add(worker, WHOLE, 0, floats(5, 5))
        total.end(worker, WHOLE)
    assert total.leave_out(2) == [WHOLE]
    assert total.average(WHOLE).tolist() == [0, 0]


def test_nothing_is_left_of_what_only_the_one_left_out_said():
    total = two_workers()
    total.settle(0, Plan("blocks", 7))
    total.begin(0, block(3), 99)
    total.leave_out(0)
    total.settle(1, Plan("whole"))
    assert send(total, 1, floats(1, 2))
    assert total.average(WHOLE).tolist() == [1, 2]


def test_whose_elements_are_in_the_sum_is_known():
    total = two_workers()
    total.begin(0, WHOLE, 2)
    assert not total.has_from(0)
    total.add(0, WHOLE, 0, floats(1))
    assert total.has_from(0)


# Refusals.


def test_another_length():
    total = two_workers()
    send(total, 0, floats(1, 2, 3))
    error = refusal(total.begin, 1, WHOLE, 4)
    assert (error.reason, error.worker) == (Reason.WRONG_LENGTH, 1)
    assert error.detail == "the gradient: 4 elements where worker 0 had 3."


def test_another_length_than_in_earlier_steps_even_from_the_first():
    buffers = Buffers()
    total = two_workers(buffers=buffers)
    send(total, 0, floats(1, 2), block(0), sizes=(2,))
    buffers.settle([block(0)])
    error = refusal(two_workers(buffers=buffers).begin, 1, block(0), 3, sizes=(3,))
    assert error.detail == "block 0: 3 elements where earlier steps had 2."


def test_another_number_of_parts_than_in_earlier_steps_even_from_the_first():
    """Whoever is wrong is refused, and not who comes after it."""
    buffers = Buffers()
    total = two_workers(buffers=buffers)
    for number in range(2):
        send(total, 0, floats(1, 2), part(number))
    buffers.settle([part(0), part(1)])
    error = refusal(two_workers(buffers=buffers).settle, 1, Plan("parts", 0))
    assert (error.reason, error.detail) == (Reason.WRONG_SIZES, "0 parts where earlier steps had 2.")
    two_workers(buffers=buffers).settle(1, Plan("parts", 2))


def test_a_length_of_a_step_that_was_dropped_binds_nobody():
    buffers = Buffers()
    send(two_workers(buffers=buffers), 0, floats(1, 2))
    total = two_workers(buffers=buffers)
    send(total, 0, floats(1))
    send(total, 1, floats(3))
    assert total.average(WHOLE).tolist() == [2]


def test_other_sizes_and_another_dtype():
    total = two_workers()
    send(total, 0, floats(1, 2), block(1), sizes=(1, 1))
    assert refusal(total.begin, 1, block(1), 2, sizes=(2,)).reason is Reason.WRONG_SIZES
    error = refusal(total.begin, 1, block(1), 2, Dtype.FLOAT16, (1, 1))
    assert (error.reason, error.detail) == (Reason.BAD_DTYPE, "block 1: float16 where worker 0 had float32.")


def test_other_plans():
    total = two_workers()
    total.settle(0, Plan("blocks", 2))
    assert refusal(total.settle, 1, Plan("blocks", 3)).reason is Reason.WRONG_BLOCK
    assert refusal(total.settle, 1, Plan("whole")).reason is Reason.UNEXPECTED
    total = two_workers()
    total.settle(0, Plan("parts", 2))
    assert refusal(total.settle, 1, Plan("parts", 3)).reason is Reason.WRONG_SIZES
    assert refusal(two_workers().settle, 1, Plan("blocks", MAX_PARTS + 1)).reason is Reason.TOO_LONG


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64, Dtype.FLOAT16, Dtype.BFLOAT16])
def test_what_is_not_finite(bad, dtype):
    total = two_workers()
    send(total, 0, _as(dtype, floats(1, 2)), dtype=dtype)
    total.begin(1, WHOLE, 2, dtype)
    error = refusal(total.add, 1, WHOLE, 0, _as(dtype, floats(1, bad)))
    assert (error.reason, error.worker) == (Reason.NOT_FINITE, 1)
    assert not total.has_from(1)


def test_largest_numbers_are_finite_and_their_mean_is():
    total = two_workers()
    largest = numpy.finfo(numpy.float32).max
    send(total, 0, floats(largest))
    send(total, 1, floats(largest))
    assert total.average(WHOLE).tolist() == [largest]


@pytest.mark.parametrize(
    ("offset", "length"),
    [(1, 1), (0, 4)],
    ids=["a gap", "too much"],
)
def test_elements_that_are_not_the_next_ones(offset, length):
    total = two_workers()
    total.begin(0, WHOLE, 3)
    assert refusal(total.add, 0, WHOLE, offset, numpy.zeros(length, numpy.float32)).reason is Reason.WRONG_LENGTH


def test_an_end_before_the_end():
    total = two_workers()
    total.begin(0, component(2), 3)
    total.add(0, component(2), 0, floats(1, 2))
    error = refusal(total.end, 0, component(2))
    assert (error.reason, error.detail) == (Reason.WRONG_LENGTH, "embedding ends after 2 of 3 elements.")


def test_twice_never_and_by_a_stranger():
    total = two_workers()
    total.begin(0, WHOLE, 1)
    for function, args in [
        (total.begin, (0, WHOLE, 1)),
        (total.begin, (7, WHOLE, 1)),
        (total.add, (1, WHOLE, 0, floats(1))),
        (total.add, (0, block(4), 0, floats(1))),
        (total.end, (1, WHOLE)),
        (total.report, (7, 0.0, 0, 4)),
    ]:
        assert refusal(function, *args).reason is Reason.UNEXPECTED
    total.report(0, 0.0, 0, 4)
    assert refusal(total.report, 0, 0.0, 0, 4).reason is Reason.UNEXPECTED


def test_another_number_of_samples_than_were_assigned():
    error = refusal(two_workers().report, 1, 0.0, 0, 3)
    assert (error.reason, error.detail) == (Reason.WRONG_TOTAL, "3 samples where [4, 8) are 4.")


def test_a_refusal_survives_the_trip_between_processes():
    error = pickle.loads(pickle.dumps(GradientRefused(Reason.OLD_STEP, "step 3.", 2)))
    assert (error.reason, error.detail, error.worker) == (Reason.OLD_STEP, "step 3.", 2)


# Memory.


def test_memory_is_that_of_the_step_before_however_many_workers_there_are():
    buffers, memories = Buffers(), set()
    for step in range(3):
        total = StepSum(step, 0, even(64, range(2 + step * 30)), buffers)
        for worker in total.shares:
            send(total, worker, numpy.ones(1000, numpy.float32))
        memories.add(total.average(WHOLE).ctypes.data)
        assert buffers.num_bytes == 3 * 4 * 1000
    assert len(memories) == 1


def test_a_gradient_larger_than_the_limit():
    total = two_workers(buffers=Buffers(limit_bytes=12 * 100))
    total.begin(0, part(0), 60)
    error = refusal(total.begin, 0, part(1), 41)
    assert error.reason is Reason.OVER_BUDGET
    assert error.detail == "part 1 of 41 elements: 1212 bytes of at most 1200."
    assert refusal(two_workers().begin, 0, WHOLE, 1 << 60).reason is Reason.OVER_BUDGET
    total.begin(0, part(1), 40)


def test_by_speed_shares_are_weights_too():
    total = StepSum(0, 0, by_speed(10, {0: 4.0, 1: 1.0}))
    send(total, 0, floats(10))
    send(total, 1, floats(20))
    assert total.average(WHOLE).tolist() == [12]


def test_components_and_a_whole_gradient_do_not_mix():
    total = two_workers()
    send(total, 0, floats(1), component(0))
    assert refusal(total.settle, 1, Plan("whole")).reason is Reason.UNEXPECTED
    total = two_workers()
    total.settle(0, Plan("whole"))
    assert refusal(total.begin, 1, component(0), 1).reason is Reason.UNEXPECTED


def test_a_whole_gradient_after_another_worker_sent_none():
    total = two_workers()
    total.report(1, 0.0, 0, 4)
    assert refusal(total.settle, 0, Plan("whole")).detail == "the gradient: elements where worker 1 had none."
