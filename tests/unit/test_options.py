"""The tables of options and of variables, and the documentation's, say the same."""

import dataclasses
import pathlib
import re

import pytest

from keras_hvd.job import settings
from keras_hvd.job.settings import OwnSetting, Setting
from keras_hvd.launch import command_line
from keras_hvd.launch.options import BY_KEY, BY_NAME
from keras_hvd.launch.usage import UsageError

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
LAUNCHING = (DOCS / "launching.md").read_text()

SETTINGS = [
    *(each for each in vars(settings).values() if isinstance(each, Setting)),
    *(row.metadata["setting"] for row in dataclasses.fields(settings.Settings)),
]
# A variable of a rank's place, which has a table of its own.
ELSEWHERE = {"KERAS_HVD_REQUIRE_SIZE", "KERAS_HVD_JOB_ID"}


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table with this head."""
    table = page.partition(f"\n{head}\n")[2].partition("\n\n")[0]
    lines = table.splitlines()[1:]
    assert lines
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


def names_of(setting: Setting) -> tuple[str, set[str]]:
    """Our name of a variable, and Horovod's names for it."""
    others = set() if isinstance(setting, OwnSetting) else setting.names[1:]
    if not others and not isinstance(setting, OwnSetting):
        others = setting.names
    return f"KERAS_HVD_{setting.names[0]}", {f"HOROVOD_{name}" for name in others}


def test_the_page_lists_the_options():
    cells = [row[0] for row in rows(LAUNCHING, "| option | meaning |")]
    listed = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(cells), re.I))
    of_argparse = {"-v", "--version", "-h", "--help"}
    shown = {name for name, each in BY_NAME.items() if "SUPPRESS" not in each.help}
    # Other spellings of one that is listed.
    others = {
        name for name in shown - listed if listed.intersection(BY_NAME[name].names)
    }
    assert shown - others <= listed
    assert listed - of_argparse <= set(BY_NAME)


def test_the_page_lists_the_keys_of_a_configuration_file():
    pages = LAUNCHING + (DOCS / "autotune.md").read_text()
    for key in BY_KEY:
        assert re.search(rf"\b{key.rpartition('.')[2].replace('-', '[-_]')}\b", pages)


def test_the_page_lists_the_variables():
    head = "| variable | Horovod's | default | meaning |"
    page = (DOCS / "environment.md").read_text()
    listed = {
        row[0].strip(" `"): set(re.findall(r"HOROVOD_\w+", row[1]))
        for row in rows(page, head)
    }
    known = dict(map(names_of, SETTINGS))
    # One with the opposite meaning has a name of its own.
    known["KERAS_HVD_LOG_TIMESTAMP"] = known.pop("KERAS_HVD_LOG_HIDE_TIME")
    assert {name: known[name] for name in known.keys() - ELSEWHERE} == listed


def test_what_options_set_is_read():
    read = {
        prefix + name
        for each in SETTINGS
        for prefix in each.prefixes
        for name in each.names
    }
    variables = {each.sets for each in BY_NAME.values() if each.sets.isupper()}
    assert len(variables) > 15
    assert variables <= read


@pytest.mark.parametrize(
    "argument, value, name",
    [("np", 0, "np"), ("num_proc", 0, "num_proc"), ("slots", 0, "slots")],
)
def test_errors_name_arguments_of_run_as_they_were_given(argument, value, name):
    with pytest.raises(UsageError) as raised:
        command_line.of_arguments({"num_proc": 1, argument: value}, ["true"])
    assert str(raised.value).startswith(f"{name}: ")
    assert "--" not in str(raised.value).partition(": this version")[0]


def test_run_takes_a_list_where_an_option_has_commas():
    given = {"num_proc": 2, "network_interfaces": ["eth0", "eth1"]}
    options = command_line.of_arguments(given, ["true"])
    assert options.variables == {"KERAS_HVD_NETWORK_INTERFACES": "eth0,eth1"}


def test_run_takes_as_many_values_as_an_option_has():
    given = {"num_proc": 2, "min_np": 1, "cooldown_range": (1, 2.5)}
    assert command_line.of_arguments(given, ["true"]).cooldown_range == [1.0, 2.5]
