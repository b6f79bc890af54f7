"""The command line of khvdrun, right and wrong."""

import os
import signal
import socket
import stat
import sys

import pytest

from keras_hvd.job import installed
from keras_hvd.launch import command_line
from keras_hvd.launch.usage import UsageError

ECHO_ARGUMENTS = (sys.executable, "-c", "import sys; print(sys.argv[1:])")

SECOND_OF_TWO = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "node0:29400"]

SERVICE = ["--membership", "node0:29400"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "how many processes", id="nothing"),
        pytest.param(["true"], "how many processes", id="no-np"),
        pytest.param(["-np"], "expected one argument", id="np-without-value"),
        pytest.param(["-np", "0", "true"], "'0' is not a number", id="np-0"),
        pytest.param(["-np", "-1", "true"], "'-1' is not a number", id="np-negative"),
        pytest.param(["-np", "two", "true"], "'two' is not a number", id="np-word"),
        pytest.param(["-np", "2.0", "true"], "'2.0' is not a number", id="np-float"),
        pytest.param(["-np", "2"], "no command given", id="no-command"),
        pytest.param(
            ["-np", "2", "--"], "no command given", id="no-command-after-dashes"
        ),
        pytest.param(["-np", "2", "--bogus", "true"], "--bogus", id="unknown-option"),
        pytest.param(["-np", "2", "--verb", "true"], "--verb", id="abbreviated-option"),
        pytest.param(
            ["-np", "2", "--bind-to", "sockets", "true"], "'sockets'", id="bind-to"
        ),
        pytest.param(
            ["-np", "2", "--kill-after", "-1", "true"], "argument", id="negative-time"
        ),
        pytest.param(
            ["-np", "2", "--kill-after", "nan", "true"], "'nan' is not", id="nan-time"
        ),
        pytest.param(
            ["-np", "2", "no-such-command"],
            "command not found: 'no-such-command'",
            id="unknown-command",
        ),
        pytest.param(
            ["-np", "2", "./no-such-file"],
            "no such file: './no-such-file'",
            id="no-file",
        ),
        pytest.param(["-np", "2", "/"], "'/' is a directory", id="directory"),
        pytest.param(
            ["-np", "2", "-H", "localhost:1", "true"],
            "-np 2 asks for more processes than the 1 slots",
            id="too-few-slots",
        ),
        pytest.param(
            ["-np", "2", "-H", "localhost:x", "true"],
            "'localhost:x' does not give a number of slots",
            id="slots",
        ),
        pytest.param(
            ["-np", "2", "--hostfile", "/no/such/file", "true"],
            "cannot read '/no/such/file'",
            id="no-hostfile",
        ),
        pytest.param(
            ["--diagnose", "-np", "2", "true"],
            "--diagnose takes no command, and 'true' is one",
            id="command-to-diagnose",
        ),
        pytest.param(
            ["--nnodes", "2", "-np", "1", "true"],
            "--nnodes 2 needs --node-rank as well",
            id="no-node-rank",
        ),
        pytest.param(
            ["--nnodes", "2", "--node-rank", "0", "-np", "1", "true"],
            "--nnodes 2 needs --rendezvous as well",
            id="no-rendezvous",
        ),
        pytest.param(
            [*SECOND_OF_TWO[:3], "2", *SECOND_OF_TWO[4:], "-np", "1", "true"],
            "there is no --node-rank 2 of 2",
            id="no-such-node",
        ),
        pytest.param(
            [*SECOND_OF_TWO[:-1], "node0", "-np", "1", "true"],
            "argument --rendezvous: 'node0' is not HOST:PORT",
            id="rendezvous-without-port",
        ),
        pytest.param(
            ["--nnodes", "0", "-np", "1", "true"],
            "'0' is not a whole number from 1",
            id="no-nodes",
        ),
        pytest.param(
            [*SERVICE, "--min-np", "1", "true"],
            "--membership takes no command, and 'true' is one",
            id="command-for-a-service",
        ),
        pytest.param(
            [*SERVICE], "--membership needs --min-np", id="service-without-min-np"
        ),
        pytest.param(
            [*SERVICE, "--min-np", "1", "--nnodes", "1:2"],
            "--membership decides for others, without --nnodes",
            id="service-and-nnodes",
        ),
        pytest.param(
            [*SERVICE, "--min-np", "1", "-H", "localhost"],
            "--membership decides for others, without -H",
            id="service-and-hosts",
        ),
        pytest.param(
            [*SERVICE, "--min-np", "3", "-np", "2"],
            "--min-np 3 is more than -np 2",
            id="service-with-min-np-too-large",
        ),
        pytest.param(
            ["--membership", "node0", "--min-np", "1"],
            "argument --membership: 'node0' is not HOST:PORT",
            id="service-without-port",
        ),
        pytest.param(
            ["--join", "node0:29400", "-np", "1"],
            "no command given",
            id="join-without-command",
        ),
        pytest.param(
            ["--join", "node0:29400", "true"],
            "how many processes",
            id="join-without-np",
        ),
        pytest.param(
            ["--join", "node0", "-np", "1", "true"],
            "argument --join: 'node0' is not HOST:PORT",
            id="join-without-port",
        ),
        pytest.param(
            ["--join", "node0:29400", "-np", "1", "--min-np", "1", "true"],
            "--join takes part in the job of others, without --min-np",
            id="join-and-min-np",
        ),
        pytest.param(
            ["--network-interfaces", "eth0,", "-np", "1", "true"],
            "'eth0,' is not names of network interfaces",
            id="interfaces",
        ),
        pytest.param(
            ["-np", "2", "--output-filename", "/dev/null/logs", "true"],
            "cannot make '/dev/null/logs': Not a directory",
            id="output-directory",
        ),
    ],
)
def test_refuses_bad_input_with_one_error(khvdrun, arguments, message):
    ended = khvdrun.run(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("khvdrun: error: ")
    assert message in ended.stderr
    assert ended.stderr.endswith("See khvdrun --help.\n")
    assert len(ended.stderr.splitlines()) == 2


def test_says_how_to_run_a_script_that_is_not_executable(khvdrun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('never')\n")
    ended = khvdrun.run("-np", 2, script)
    assert ended.returncode == 2
    assert f"put an interpreter before it (python {script})" in ended.stderr


def test_says_that_a_command_of_this_directory_needs_its_path(khvdrun, tmp_path):
    script = tmp_path / "train"
    script.write_text("#!/bin/sh\n")
    script.chmod(stat.S_IRWXU)
    ended = khvdrun.run("-np", 2, "train", cwd=tmp_path, env={"PYTHONPATH": _root()})
    assert ended.returncode == 2
    assert "write ./train" in ended.stderr


@pytest.mark.parametrize("first_line", ["", "#!/no/such/interpreter\n"])
def test_says_why_the_kernel_refuses_a_command(khvdrun, tmp_path, first_line):
    script = tmp_path / "train"
    script.write_text(first_line + "echo never\n")
    script.chmod(stat.S_IRWXU)
    ended = khvdrun.run("-np", 2, script)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"khvdrun: error: cannot execute '{script}': ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["-np", "-n", "--num-proc"])
def test_counts_ranks_under_each_of_its_names(khvdrun, option):
    assert len(khvdrun.run(option, 3, "echo").stdout.splitlines()) == 3


@pytest.mark.parametrize("separator", [[], ["--"]], ids=["bare", "dashes"])
def test_leaves_the_command_its_arguments(khvdrun, separator):
    own = ["-np", "3", "--verbose", "--", "--help", "-H", "node1", "", "a b", "--bogus"]
    ended = khvdrun.run("-np", 1, *separator, *ECHO_ARGUMENTS, *own)
    assert ended.returncode == 0
    assert ended.stdout == f"[0] {own}\n"


@pytest.mark.parametrize(
    "hosts",
    [
        ["-H", "localhost:2"],
        ["-H", "localhost"],
        ["-H", "127.0.0.1:1,localhost:1"],
        ["--hosts", f"{socket.gethostname()}:2"],
    ],
)
def test_accepts_this_host_by_name(khvdrun, hosts):
    assert khvdrun.run("-np", 2, *hosts, "true").returncode == 0


def test_reads_a_hostfile_of_this_host(khvdrun, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two at most\nlocalhost slots=2\n\n")
    assert khvdrun.run("-np", 2, "--hostfile", hostfile, "true").returncode == 0
    refused = khvdrun.run("-np", 3, "--hostfile", hostfile, "true")
    assert refused.returncode == 2
    assert "more processes than the 2 slots" in refused.stderr


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("--nodes-rank", "--node-rank"), ("--np=2", "-np"), ("--dryrun", "--dry-run")],
)
def test_guesses_which_option_was_meant(khvdrun, misspelt, meant):
    ended = khvdrun.run(misspelt, 0, "true")
    name = misspelt.partition("=")[0]
    said = f"khvdrun: error: there is no option {name}: did you mean {meant}?"
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (2, said)


def test_does_not_guess_where_no_option_is_similar(khvdrun):
    ended = khvdrun.run("-np", 1, "--xyz", "true")
    assert ended.stderr.splitlines()[0] == "khvdrun: error: there is no option --xyz"


BEHIND = "(behind the command, which gets it: khvdrun's own options come before)"


def test_warns_of_its_own_options_behind_the_command(khvdrun):
    arguments = ["--hosts=node0:2", "-np", "2"]
    ended = khvdrun.run("-np", 1, *ECHO_ARGUMENTS, *arguments)
    assert ended.stdout == f"[0] {arguments}\n"
    assert ended.stderr == (
        f"khvdrun: warning: without effect here: --hosts {BEHIND}\n"
    )


def test_an_error_says_that_the_missing_option_is_behind_the_command(khvdrun):
    ended = khvdrun.run(*ECHO_ARGUMENTS, "-np", 4)
    assert ended.returncode == 2
    error, explanation, _ = ended.stderr.splitlines()
    assert error.startswith("khvdrun: error: how many processes? ")
    assert explanation == f"khvdrun: without effect here: -np {BEHIND}"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["--", "echo", "-H", "node0"], id="set-off"),
        pytest.param(["echo", "--", "-H", "node0"], id="not-the-commands-either"),
        pytest.param(["echo", "-np", "3"], id="given-before-too"),
        pytest.param(["echo", "--verbose", "-n", "3", "--host", "a"], id="common"),
    ],
)
def test_does_not_warn_of_arguments_that_are_the_commands_own(khvdrun, command):
    assert khvdrun.run("-np", 1, *command).stderr == ""


def test_help_and_version_succeed(khvdrun):
    helped = khvdrun.run("--help")
    assert helped.returncode == 0
    assert "usage: khvdrun -np N" in helped.stdout
    assert khvdrun.run("--version").stdout.startswith("khvdrun ")
    rows = [line.split() for line in helped.stdout.splitlines()]
    texts = [" ".join(row) for row in rows if row]
    options = [text.partition(" ")[0] for text in texts if text.startswith("-")]
    assert len(options) > 20 and len(set(options)) == len(options)
    assert not any("mark-cycles" in text and "no-" in text for text in texts)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--check-build"], ["--diagnose"], ["--dry-run", "-np", "1", "true"]],
    ids=" ".join,
)
def test_ends_as_other_tools_do_when_its_reader_has_left(khvdrun, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    # argparse drops a text that is not buffered.
    ended = khvdrun.run(*arguments, stdout=writing, env={"PYTHONUNBUFFERED": ""})
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_help_documents_the_defaults_in_force():
    options = command_line.parse(["-np", "2", "true"])
    declared = command_line.Options(check_build=False)
    assert options.term_after == declared.term_after == 5
    assert options.kill_after == declared.kill_after == 5


FIRST_OF_TWO_TO_FOUR = "--nnodes 2:4 --node-rank 0 --rendezvous node0:29400 -np 3"


def test_a_dry_run_of_hosts_that_may_come_waits_for_none(khvdrun):
    ended = khvdrun.run(*FIRST_OF_TWO_TO_FOUR.split(), "--dry-run", "true")
    assert (ended.returncode, ended.stdout) == (0, "3 times on this host: true\n")


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ("", 6, 12),
        ("--min-np 1", 1, 12),
        ("--min-np 12", 12, 12),
        ("--max-np 7", 6, 7),
        ("--min-np 4 --max-np 20", 4, 20),
    ],
)
def test_hosts_that_may_come_set_the_limits_that_are_not_given(options, least, most):
    words = f"{FIRST_OF_TWO_TO_FOUR} {options} true"
    found = command_line.read(words.split())
    assert (found.least_ranks, found.most_ranks, found.ranks) == (least, most, 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            "--min-np 13",
            "--min-np 13 is more than --max-np 12, which is the most hosts",
        ),
        ("--max-np 5", "--min-np 6 is more than --max-np 5"),
        ("--min-np 1 --max-np 2", "--max-np 2 is less than -np 3"),
    ],
)
def test_limits_that_contradict_the_hosts_are_refused(options, why):
    words = f"{FIRST_OF_TWO_TO_FOUR} {options} true"
    with pytest.raises(UsageError, match=why):
        command_line.read(words.split())


def test_says_how_to_install_what_a_report_takes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command_line.parse(["-np", "2", "--report", str(tmp_path / "r.html"), "true"])
    advice = f"--report takes matplotlib: {installed.install_command('report')}"
    assert advice in capsys.readouterr().err


def test_starts_without_tensorflow_and_keras(khvdrun):
    program = (
        "import sys, keras_hvd.launch.__main__ as m, keras_hvd.launch.job; "
        "print([n for n in ('tensorflow', 'keras', 'numpy') if n in sys.modules])"
    )
    ended = khvdrun.run("-np", 1, sys.executable, "-c", program)
    assert ended.stdout == "[0] []\n"


def _root() -> str:
    return str(command_line.Path(command_line.__file__).parents[2])
