"""The output of `python -m keras_hvd.timeline` for files, whole and cut."""

import subprocess
import sys

import pytest

from keras_hvd.timeline import summary

START = '{"name":"start","ph":"M","pid":0,"args":{"time":0,"size":3}}'


def row(number, name, tensor=None):
    more = f',"tensor":"{tensor}"' if tensor else ""
    args = f'{{"name":"{name}"{more}}}'
    return f'{{"name":"thread_name","ph":"M","pid":0,"tid":{number},"args":{args}}}'


def span(name, number, begin, end, batch, more=""):
    return (
        f'{{"name":"{name}","ph":"X","pid":0,"tid":{number},"ts":{begin},'
        f'"dur":{end - begin},"args":{{"batch":{batch}{more}}}}}'
    )


def request(number, begin, decided, began, end, batch, ready, requests=1):
    times = ",".join(f'"{rank}":{time}' for rank, time in ready.items())
    return [
        span(
            "NEGOTIATE_ALLREDUCE",
            number,
            begin,
            decided,
            batch,
            f',"ready":{{{times}}}',
        ),
        span("QUEUE", number, decided, began, batch),
        span("COPY_IN", number, began + 1, end - 1, batch),
        span(
            "SHARED_MEMORY_ALLREDUCE",
            number,
            began,
            end,
            batch,
            f',"requests":{requests}',
        ),
    ]


def timeline(*events, end="\n]\n"):
    return ("[\n" + ",\n".join(events) + end).splitlines()


TOGETHER = [
    START,
    row(0, "a"),
    row(1, "b"),
    *request(0, 0, 100, 110, 210, 1, {0: 0, 1: 10, 2: 90}, 2),
    *request(1, 20, 100, 110, 210, 1, {1: 0, 0: 10, 2: 75}, 2),
]


def test_times_are_counted_once():
    found = summary.read(timeline(*TOGETHER))
    assert found.is_whole
    assert (found.first, found.last) == (0, 210)
    durations = {name: list(spans.durations()) for name, spans in found.phases.items()}
    assert durations == {
        "NEGOTIATE_ALLREDUCE": [100, 80],
        "QUEUE": [10, 10],
        "COPY_IN": [98],
        "SHARED_MEMORY_ALLREDUCE": [100],
    }
    assert found.phases["NEGOTIATE_ALLREDUCE"].covered() == 100
    assert found.tensors["a"].total == 210
    assert found.tensors["b"].phases == (80, 10, 100)


def test_a_wait_is_from_the_last_but_one_to_the_last_and_counts_once():
    found = summary.read(timeline(*TOGETHER))
    # 10 to 90, and 30 to 95.
    assert {rank: spans.covered() for rank, spans in found.waits.items()} == {2: 85}
    assert found.was_last == {2: 2}
    assert "the others waited most for rank 2: 85 us" in summary.text(found)


def on_gpu(name, begin, end, batch):
    arguments = f'"args":{{"batch":{batch},"tensors":"a and 1 more","within":2}}'
    return (
        f'{{"name":"{name}","ph":"X","pid":1,"tid":9,"ts":{begin},'
        f'"dur":{end - begin},{arguments}}}'
    )


def test_what_runs_on_the_gpu_is_a_phase_and_no_tensors():
    enqueued = [
        event.replace("SHARED_MEMORY_", "ENQUEUE_")
        for event in request(0, 0, 10, 20, 30, 1, {0: 0})
    ]
    events = [
        START,
        row(0, "a"),
        *enqueued,
        '{"name":"thread_name","ph":"M","pid":1,"tid":9,"args":{"name":"collectives"}}',
        on_gpu("COPY_TO_GPU", 60, 90, 1),
        on_gpu("NCCL_ALLREDUCE", 50, 60, 1),
        on_gpu("WAIT_FOR_INPUTS", 25, 50, 1),
        on_gpu("COPY_TO_HOST", 55, 56, 1),
        on_gpu("COPY_ON_GPU", 56, 57, 1),
    ]
    found = summary.read(timeline(*events))
    assert found.last == 90
    assert list(found.tensors) == ["a"]
    assert found.tensors["a"].total == 30
    assert list(found.phases["NCCL_ALLREDUCE"].durations()) == [10]
    order = [line.split()[0] for line in summary.text(found).splitlines()[3:12]]
    assert order == [
        "NEGOTIATE_ALLREDUCE",
        "QUEUE",
        "ENQUEUE_ALLREDUCE",
        "COPY_IN",
        "WAIT_FOR_INPUTS",
        "NCCL_ALLREDUCE",
        "COPY_TO_HOST",
        "COPY_TO_GPU",
        "COPY_ON_GPU",
    ]


def test_rows_of_one_tensor_count_together():
    events = [
        START,
        row(0, "a"),
        row(1, "a #2", "a"),
        *request(0, 0, 10, 20, 30, 1, {0: 0}),
        *request(1, 5, 10, 30, 50, 2, {0: 0}),
    ]
    found = summary.read(timeline(*events))
    assert list(found.tensors) == ["a"]
    assert found.tensors["a"].requests == 2
    assert found.waits == {}
    assert "no rank waited for another" in summary.text(found)


def test_the_ten_slowest_are_listed():
    events = [START]
    for number in range(12):
        events += [
            row(number, f"tensor{number}"),
            *request(number, 0, 1, 2, 10 + number, number, {0: 0, 1: 1}),
        ]
    text = summary.text(summary.read(timeline(*events)))
    listed = [word for word in text.split() if word.startswith("tensor")]
    assert listed == ["tensors", *(f"tensor{number}" for number in range(11, 1, -1))]


@pytest.mark.parametrize("end", ["", ",", "        ", ',\n{"name":"QUEUE","ph":"X","t'])
def test_a_file_that_ends_early_counts_up_to_there(end):
    found = summary.read(timeline(*TOGETHER, end=end))
    assert not found.is_whole
    assert found.tensors["b"].requests == 1
    assert "the file ends early" in summary.text(found)
    assert found.unreadable == 0


def test_damage_in_the_middle_is_counted_and_said():
    found = summary.read(timeline(START, '{"name":"QUE', "lost", *TOGETHER[1:]))
    assert found.tensors["b"].requests == 1
    assert found.unreadable == 2
    assert "skipped as damaged: 2 lines of the file" in summary.text(found)


@pytest.mark.parametrize("time", ["NaN", "1" + 400 * "0", 20_000 * "[", '"soon"'])
def test_lines_of_something_else_are_damage(time):
    line = (
        f'{{"name":"QUEUE","ph":"X","tid":0,"ts":{time},"dur":1,"args":{{"batch":1}}}}'
    )
    found = summary.read(timeline(START, line, *TOGETHER[1:]))
    assert found.unreadable == 1
    assert (found.first, found.last) == (0, 210)


def test_what_was_not_recorded_and_what_never_ended_is_said():
    events = [
        START,
        '{"name":"NOT_RECORDED","ph":"i","ts":1,"args":{"requests":7,"phases":0}}',
        row(0, "late"),
        '{"name":"WAITING_FOR_RANK","ph":"i","tid":0,"ts":9,"args":{"rank":2}}',
    ]
    text = summary.text(summary.read(timeline(*events, end="")))
    assert "not recorded for lack of room: 7 requests" in text
    assert "late was still waiting for rank 2" in text
    ended = summary.read(timeline(*events, *request(0, 0, 1, 2, 3, 1, {0: 0, 2: 1})))
    assert "still waiting" not in summary.text(ended)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "keras_hvd.timeline", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_the_command_prints_it_or_says_what_is_wrong(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text("\n".join(timeline(*TOGETHER)))
    ended = run(path)
    assert ended.returncode == 0
    assert ended.stdout == summary.text(summary.read(timeline(*TOGETHER))) + "\n"
    wrong = ("", "[]", '{"traceEvents": []}', "\0\xff", "1\n2", 20_000 * "[")
    for content in (*wrong, START.replace("3", '"three"')):
        path.write_text(content)
        ended = run(path)
        assert ended.returncode == 1
        assert f"{path}: this is not a timeline" in ended.stderr
    path.write_text("\n".join(timeline(START, row(0, r"\ud800"), *TOGETHER[3:])))
    ended = run(path)
    assert r"\ud800" in ended.stdout
    ended = run(tmp_path / "missing")
    assert ended.returncode == 1
    assert "No such file" in ended.stderr
    assert run().returncode == 2
