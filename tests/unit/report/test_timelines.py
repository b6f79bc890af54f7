"""The reports that `python -m keras_hvd.report` makes from timelines."""

import json
import sys
import tracemalloc

import numpy as np
import pytest

from keras_hvd.report import timelines
from keras_hvd.report.__main__ import main


def event(name, kind="M", row=0, process=0, **more):
    more = {"name": name, "ph": kind, "pid": process, "tid": row, **more}
    return json.dumps(more, separators=(",", ":"))


def start(size=2, time=1000):
    return event("start", args={"time": time, "size": size})


def tensor(row, name, **args):
    return event("thread_name", row=row, args={"name": name, **args})


def span(name, row, begin, end, process=0, **args):
    return event(name, "X", row, process, ts=begin, dur=end - begin, args=args)


def submitted(row, batch, arrivals, decided):
    """A request that ranks submitted at these times, in microseconds."""
    first = min(arrivals.values())
    ready = {str(rank): time - first for rank, time in arrivals.items()}
    return span("NEGOTIATE_ALLREDUCE", row, first, decided, batch=batch, ready=ready)


def run(row, batch, decided, began, end, copies, size, **more):
    return [
        span("QUEUE", row, decided, began, batch=batch),
        *(span("COPY_IN", row, *copy, batch=batch) for copy in copies),
        span("WAIT_FOR_RANKS", row, began, end, batch=batch),
        span(
            "SHARED_MEMORY_ALLREDUCE",
            *(row, began, end),
            **{"batch": batch, "requests": 1, "bytes": size, **more},
        ),
    ]


def write(path, *lines, end="\n]\n"):
    path.write_text("[\n" + ",\n".join(lines) + end)
    return path


# Two steps of two tensors. In microseconds.
STEPS = [
    *(tensor(0, "a"), tensor(1, "b")),
    submitted(0, 1, {0: 100, 1: 130}, decided=140),
    *run(0, 1, 140, 150, 190, [(150, 160), (170, 180)], size=40),
    submitted(1, 2, {0: 200, 1: 180}, decided=210),
    *run(1, 2, 210, 220, 260, [(220, 250)], size=8),
    submitted(0, 3, {0: 300, 1: 305}, decided=310),
    *run(0, 3, 310, 310, 330, [(310, 330)], size=40),
    submitted(1, 4, {0: 320, 1: 370}, decided=370),
    *run(1, 4, 370, 380, 400, [], size=8),
]


def check_steps(intervals, begin=100):
    """The sums of STEPS, worked out by hand."""
    micro = {
        name: (1e6 * np.array(values)).round(6).tolist()
        for name, values in vars(intervals).items()
    }
    begins = [begin, 300 + begin - 100]
    ends = [300 + begin - 100, 400 + begin - 100]
    assert micro["begin"] == begins and micro["end"] == ends
    assert intervals.steps.tolist() == [1, 1]
    assert intervals.bytes.tolist() == [48, 48]
    # Copies: 150-160, 170-180, 220-250; then 310-330.
    assert micro["moving"] == [50, 20]
    # A tensor of rank 0 is under way 100-190 and 200-260; then 300-330, 320-400.
    assert micro["waiting"] == [150 - 50, 100 - 20]
    # Rank 0's last tensor of a step comes at 200, and at 320.
    assert micro["exposed_moving"] == [30, 10]
    assert micro["exposed_waiting"] == [60 - 30, 80 - 10]
    # 100-130 for rank 1; 180-200 for rank 0; then 300-305 and 320-370 for rank 1.
    assert micro["waits"] == [[30, 20], [55, 0]]
    assert micro["waited_for"] == [[20, 30], [0, 55]]
    assert np.isnan(intervals.samples).all() and np.isnan(intervals.loss).all()


def test_a_small_timeline_has_the_sums_worked_out_by_hand(tmp_path):
    job = timelines.read([write(tmp_path / "t", start(), *STEPS)])
    check_steps(job.intervals)
    assert (job.size, job.begin, job.seconds) == (2, 1000, pytest.approx(400e-6))
    a, b = job.tensors
    assert (a.name, a.times, a.bytes, b.name, b.times, b.bytes) == (
        *("a", 2, 80),
        *("b", 2, 16),
    )
    phases = [
        (a.negotiating, a.queued, a.running),
        (b.negotiating, b.queued, b.running),
    ]
    assert (1e6 * np.array(phases)).round(6).tolist() == [[35, 25, 60], [70, 30, 60]]
    assert job.ended.startswith("ended") and job.left_out == 0
    assert "Samples" in job.not_known


def test_what_callbacks_exchange_after_a_step_hides_no_waiting_before(tmp_path):
    lines = [tensor(0, "gradients"), tensor(1, "keras_hvd/stop_training")]
    for step in range(3):
        at = 100 * (step + 1)
        lines += [
            submitted(0, 2 * step + 1, {0: at + 30, 1: at + 80}, decided=at + 80),
            *run(0, 2 * step + 1, at + 80, at + 80, at + 80, [], size=8),
            submitted(1, 2 * step + 2, {0: at + 80, 1: at + 90}, decided=at + 90),
            *run(1, 2 * step + 2, at + 90, at + 90, at + 90, [], size=1),
        ]
    job = timelines.read([write(tmp_path / "t", start(), *lines)])
    assert (1e6 * job.intervals.exposed_waiting).round(6).tolist() == [60, 60, 60]


def test_what_was_cut_off_by_a_kill_is_left_out_and_said(tmp_path):
    cut = tmp_path / "cut"
    write(cut, start(), *STEPS, '{"name":"NEGOTIATE_ALLREDUCE","ph":"X","ts":9', end="")
    job = timelines.read([cut])
    check_steps(job.intervals)
    assert job.ended.startswith("was killed, or still runs")
    assert "damaged" not in job.not_known


def test_damage_in_the_middle_is_counted_and_said(tmp_path):
    wrong = submitted(0, 9, {0: 1, 7: 2}, decided=3)
    job = timelines.read([write(tmp_path / "t", start(), "{oops", wrong, *STEPS)])
    assert job.intervals.steps.sum() == 2
    assert "2 lines are damaged" in job.not_known


@pytest.mark.parametrize(
    "name, times, queued", [("NEGOTIATE_", 1, 5), ("QUEUE", 2, 15), ("COPY_IN", 2, 25)]
)
def test_a_damaged_line_takes_no_others_with_it(tmp_path, name, times, queued):
    lines = [*STEPS]
    lost = next(place for place, line in enumerate(lines) if name in line)
    lines[lost] = lines[lost][:20]
    job = timelines.read([write(tmp_path / "t", start(), *lines)])
    assert "1 lines are damaged" in job.not_known
    (a,) = [each for each in job.tensors if each.name == "a"]
    assert (a.times, round(1e6 * a.queued)) == (times, queued)


def test_parts_of_a_job_follow_each_other_in_any_order(tmp_path):
    first = write(tmp_path / "b", start(time=1000), *STEPS)
    later = write(tmp_path / "a", start(time=5000), *STEPS)
    job = timelines.read([later, first])
    assert (job.begin, job.intervals.steps.sum()) == (1000, 4)
    begins, ends = job.intervals.begin, job.intervals.end
    assert begins[1:].tolist() == ends[:-1].tolist()
    # Its first step has also the 100 us from the start to its first tensor.
    assert (1e6 * ends).round(6).tolist() == [300, 400, 700, 800]
    assert job.intervals.waits.sum() == pytest.approx(2 * 105e-6)
    assert [each.times for each in job.tensors] == [4, 4]
    assert "between the 2 timelines" in job.not_known


def test_a_stall_has_its_ranks_and_its_length(tmp_path):
    def missing(rank, since, now):
        args = {"rank": rank, "since": since}
        return event("WAITING_FOR_RANK", "i", 0, ts=now, args=args)

    job = timelines.read(
        [
            write(
                tmp_path / "t",
                *(
                    start(3),
                    tensor(0, "late"),
                    missing(1, 50, 1e6),
                    missing(2, 50, 1e6),
                ),
                submitted(0, 1, {0: 50, 1: 60, 2: 2e6 + 50}, decided=2e6 + 60),
                *run(0, 1, 2e6 + 60, 2e6 + 70, 2e6 + 80, [], 4, failed=True),
                missing(2, 3e6, 4.5e6),
                event("NOT_RECORDED", "i", ts=5e6, args={"requests": 7, "phases": 1}),
            )
        ]
    )
    assert job.intervals.waited_for.tolist() == [[0, 0, pytest.approx(2 - 10e-6)]]
    failed, ended, open_ = sorted(job.events, key=lambda each: each.kind != "warning")
    assert failed.text == "the collective of 'late' failed"
    assert ended.text == "'late' waited for rank 1 and rank 2, for 2.0 s"
    assert open_.text == "'late' waited for rank 2" and open_.time == 3
    assert (job.left_out, job.seconds) == (7, 5)


def test_other_hosts_leaders_are_known_and_what_others_do_alone_is_no_work_of_rank_0(
    tmp_path,
):
    row = event("thread_name", row=7, process=2, args={"name": "rank 1 (pid 9 on h2)"})
    elsewhere = span("ALLREDUCE", 7, 0, 999, process=2, tensors="a")
    alone = submitted(8, 2, {1: 185, 2: 195}, decided=196)
    lines = [
        start(3),
        row,
        elsewhere,
        tensor(8, "c (process set 1)"),
        *STEPS[:7],
        alone,
    ]
    job = timelines.read([write(tmp_path / "t", *lines, *STEPS[7:])])
    assert [each.host for each in job.members] == [None, "h2", None]
    assert job.members[1].process == 9
    assert [each.name for each in job.tensors] == ["a", "b"]
    job.intervals.waits[0, 1] -= 10e-6  # from 185 until 195, beside 180 until 200
    assert job.intervals.waited_for[0].round(9).tolist() == [20e-6, 30e-6, 10e-6]


def test_what_runs_on_the_gpu_moves_bytes_but_not_while_it_waits(tmp_path):
    lines = [
        *(start(1), tensor(0, "a"), submitted(0, 1, {0: 0}, decided=10)),
        *(span("QUEUE", 0, 10, 20, batch=1),),
        span("ENQUEUE_ALLREDUCE", 0, 20, 30, batch=1, requests=1, bytes=4),
        span("WAIT_FOR_INPUTS", 5, 30, 50, process=1, batch=1, tensors="a"),
        span("NCCL_ALLREDUCE", 5, 50, 80, process=1, batch=1, tensors="a"),
    ]
    intervals = timelines.read([write(tmp_path / "t", *lines)]).intervals
    assert intervals.moving.tolist() == pytest.approx([30e-6])
    assert intervals.end.tolist() == pytest.approx([80e-6])


def test_many_steps_of_ever_new_names_take_little(tmp_path):
    """The memory does not grow with the job, though the end of a request was lost."""
    steps, path = 2500, tmp_path / "long"
    with path.open("w") as file:
        file.write(f"[\n{start()},\n{tensor(0, 'a')},\n{tensor(1, 'a #2', tensor='a')}")
        for step in range(steps):
            at, new = 10_000 * step, 2 + step
            lines = [
                submitted(0, 3 * step, {0: at, 1: at + 300}, at + 300),
                *run(
                    0, 3 * step, at + 300, at + 300, at + 400, [(at + 350, at + 400)], 4
                ),
                tensor(new, f"new {step}"),
                submitted(new, 3 * step + 1, {0: at + 9, 1: at + 9}, at + 400),
                *run(new, 3 * step + 1, at + 400, at + 410, at + 420, [], 4),
            ]
            if step == 0:
                lines.insert(1, submitted(1, 2, {0: 1, 1: 1}, 2))
            file.write("".join(f",\n{line}" for line in lines))
    tracemalloc.start()
    job = timelines.read([path])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    intervals = job.intervals
    # The second 'a' began another step.
    assert intervals.steps.tolist() == [2] * 1250 + [1]
    assert intervals.bytes.sum() == 8 * steps
    assert intervals.moving.sum() == pytest.approx(50e-6 * steps)
    assert intervals.waiting.sum() == pytest.approx(370e-6 * steps)
    assert intervals.waits[:, 0].sum() == pytest.approx(300e-6 * steps)
    assert len(job.tensors) == 1024
    assert sum(each.times for each in job.tensors) == 2 * steps
    (others,) = [each for each in job.tensors if each.name == "(all other tensors)"]
    assert others.times == steps - 1022
    assert most < 2e6


def report(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    return main()


def test_the_command_writes_the_page_that_says_what_is_not_known(
    tmp_path, monkeypatch, capsys
):
    path, page = write(tmp_path / "t", start(), *STEPS), tmp_path / "page.html"
    assert report(monkeypatch, path, "--output", page) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "Samples, loss, command" in text and "Who waited" in text
    assert "None" not in text and "nan" not in text
    assert "Who took part" not in text and "on 1 host" not in text


def test_a_job_that_only_gathers_has_a_page_without_rates(tmp_path, monkeypatch):
    lines = [line.replace('"bytes":40', '"bytes":0') for line in STEPS[:7]]
    path, page = write(tmp_path / "t", start(), *lines), tmp_path / "page.html"
    assert report(monkeypatch, path, "-o", page) == 0
    text = page.read_text()
    assert "Who waited" in text and "Links and memory" not in text


@pytest.mark.parametrize(
    "names, why",
    [
        (["missing"], "No such file or directory: '{}/missing'"),
        (["empty"], "'{}/empty' is no timeline of keras_hvd"),
        (["other"], "'{}/other' is no timeline of keras_hvd"),
        (["good", "folder"], "'{}/folder' is a folder: a report is of one recording"),
        (["good", "of3"], "'{}/good' is of a job of 2 ranks, and '{}/of3' of one of 3"),
        (["good", "beside"], "'{}/good' and '{}/beside' were written at the same time"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(
    tmp_path, monkeypatch, capsys, names, why
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_bytes(b'{"traceEvents": [\0\xff' + 9000 * b"[")
    late = submitted(0, 9, {0: 9e6, 1: 9e6}, 9e6 + 1)
    write(tmp_path / "good", start(), *STEPS, late)
    write(tmp_path / "of3", start(3))
    write(tmp_path / "beside", start(time=1007), *STEPS)
    output = "-o", tmp_path / "page.html"
    assert report(monkeypatch, *output, *(tmp_path / name for name in names)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert why.replace("{}", str(tmp_path)) in line
    assert not (tmp_path / "page.html").exists()
