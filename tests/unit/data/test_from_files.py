"""from_files on one process: its readers, on files that these tests write."""

import datetime
import gzip
import json
import pickle
import re
import sys

import fastavro
import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import parquet

import keras_hvd
from keras_hvd.data import Position, from_files, plan, readers
from keras_hvd.data.readers import tensorflow_io
from keras_hvd.job import installed

NO_TENSORFLOW_IO = tensorflow_io.why_not()
needs_tensorflow_io = pytest.mark.skipif(
    bool(NO_TENSORFLOW_IO), reason=f"no tensorflow-io: {NO_TENSORFLOW_IO}"
)


@pytest.fixture(autouse=True, scope="module")
def initialized():
    keras_hvd.init()


def samples(dataset):
    return list(dataset.as_numpy_iterator())


def by(name, rows):
    return sorted(rows, key=lambda row: row[name])


# --- readers --------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_tfrecords(tmp_path, compression):
    for file in range(3):
        path = str(tmp_path / f"{file}.tfrecord")
        with tf.io.TFRecordWriter(path, compression) as writer:
            for i in range(5):
                writer.write(b"%d" % (5 * file + i))
    read = samples(from_files(str(tmp_path / "*"), "tfrecord", compression=compression))
    assert sorted(map(int, read)) == list(range(15))


def test_text(tmp_path):
    (tmp_path / "a").write_text("one\ntwo\n\nfour")
    (tmp_path / "b").write_text("")
    assert samples(from_files(str(tmp_path / "*"), "text", shuffle=0)) == [
        b"one",
        b"two",
        b"",
        b"four",
    ]
    (tmp_path / "c").write_bytes(gzip.compress(b"zipped\n"))
    dataset = from_files(str(tmp_path / "c"), "text", compression="GZIP")
    assert samples(dataset) == [b"zipped"]


def test_a_function(tmp_path):
    (tmp_path / "a").write_text("3")
    (tmp_path / "b").write_text("2")

    def read(path):
        count = tf.strings.to_number(tf.io.read_file(path), tf.int64)
        ragged = tf.data.Dataset.range(count).map(lambda i: (i, {"n": tf.range(i)}))
        return ragged

    read_back = samples(from_files(str(tmp_path / "*"), read, shuffle=100))
    assert sorted(int(i) for i, _ in read_back) == [0, 0, 1, 1, 2]
    assert all(len(each["n"]) == i for i, each in read_back)
    with pytest.raises(TypeError, match="must return a tf.data.Dataset, got"):
        from_files(str(tmp_path / "*"), lambda path: path)
    with pytest.raises(TypeError, match="takes no options, got compression"):
        from_files(str(tmp_path / "*"), read, compression="GZIP")


def test_csv(tmp_path):
    for file in range(2):
        (tmp_path / f"{file}.csv").write_text(
            'x,"the name",y\n' + f'{file}.5,"a, b",7\n' + f"{file},c,\n"
        )
    pattern = str(tmp_path / "*.csv")
    chosen = from_files(pattern, "csv", columns={"y": -1, "x": tf.float32})
    assert by("x", samples(chosen)) == [
        {"x": 0.0, "y": -1},
        {"x": 0.5, "y": 7},
        {"x": 1.0, "y": -1},
        {"x": 1.5, "y": 7},
    ]
    assert by("x", samples(from_files(pattern, "csv")))[1] == {
        "x": b"0.5",
        "the name": b"a, b",
        "y": b"7",
    }
    with pytest.raises(ValueError, match="has no column 'z'; it has 'x', 'the name'"):
        from_files(pattern, "csv", columns={"z": tf.float32})
    (tmp_path / "2.csv").write_text("y,the name,x\n1,d,2\n")
    with pytest.raises(tf.errors.InvalidArgumentError, match="other columns than the"):
        samples(from_files(pattern, "csv"))


def test_csv_without_names(tmp_path):
    (tmp_path / "a").write_text("1;2.5\n3;4.5\n")
    columns = {"a": tf.int64, "b": tf.float64}
    dataset = from_files(
        str(tmp_path / "a"), "csv", columns=columns, header=False, delimiter=";"
    )
    assert by("a", samples(dataset)) == [{"a": 1, "b": 2.5}, {"a": 3, "b": 4.5}]
    with pytest.raises(ValueError, match="need columns="):
        from_files(str(tmp_path / "a"), "csv", header=False)
    with pytest.raises(TypeError, match="must be a dict of names and types"):
        from_files(str(tmp_path / "a"), "csv", columns=["a"])


@pytest.fixture
def parquet_files(tmp_path):
    """A pattern of two files of 50 rows, in row groups of 20."""
    for file in range(2):
        table = pyarrow.table(
            {
                "id": np.arange(50, dtype=np.int64) + 50 * file,
                "half": np.arange(50, dtype=np.float32) / 2 + 25 * file,
                "name": [f"row {i + 50 * file}" for i in range(50)],
            }
        )
        parquet.write_table(table, tmp_path / f"{file}.parquet", row_group_size=20)
    return str(tmp_path / "*.parquet")


@pytest.mark.parametrize(
    "engine", [pytest.param("tensorflow-io", marks=needs_tensorflow_io), "pyarrow"]
)
def test_parquet(parquet_files, engine):
    dataset = from_files(parquet_files, "parquet", engine=engine)
    assert {name: spec.dtype for name, spec in dataset.element_spec.items()} == {
        "id": tf.int64,
        "half": tf.float32,
        "name": tf.string,
    }
    read = samples(dataset)
    assert [row["id"] for row in read] != list(range(100))
    for i, row in enumerate(by("id", read)):
        assert row == {"id": i, "half": i / 2, "name": b"row %d" % i}
    chosen = from_files(parquet_files, "parquet", columns=["half"], engine=engine)
    assert sorted(row["half"] for row in samples(chosen)) == [i / 2 for i in range(100)]
    with pytest.raises(ValueError, match="has no column 'other'; it has 'id', 'half'"):
        from_files(parquet_files, "parquet", columns=["other"], engine=engine)


def test_parquet_by_row_groups(parquet_files):
    reader = readers.make("parquet", {"engine": "pyarrow"})
    [path, _] = tf.io.gfile.glob(parquet_files)
    groups = reader.groups(path, 0)
    assert [group for group, _ in groups] == [0, 1, 2]
    sizes = [size for _, size in groups]
    assert sizes[2] < sizes[0] == sizes[1]


def test_parquet_types(tmp_path):
    day = datetime.date(2026, 11, 22)
    columns = {
        "flag": pyarrow.array([True, False]),
        "byte": pyarrow.array([1, 2], pyarrow.uint8()),
        "missing": pyarrow.array([1.5, None], pyarrow.float64()),
        "bytes": pyarrow.array([b"\xff", b""], pyarrow.binary()),
        "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
        "day": pyarrow.array([day, day], pyarrow.date32()),
        "when": pyarrow.array([1, 2], pyarrow.timestamp("ms")),
        "vector": pyarrow.array(
            [[1, 2, 3], [4, 5, 6]], pyarrow.list_(pyarrow.int32(), 3)
        ),
    }
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    first, second = samples(from_files(path, "parquet", engine="pyarrow", shuffle=0))
    assert first["flag"] and not second["flag"]
    assert (first["byte"], second["byte"]) == (1, 2)
    assert first["missing"] == 1.5 and np.isnan(second["missing"])
    assert (first["bytes"], second["bytes"]) == (b"\xff", b"")
    assert (first["kind"], second["kind"]) == (b"a", b"b")
    assert first["day"] == (day - datetime.date(1970, 1, 1)).days
    assert (first["when"], second["when"]) == (1, 2)
    assert second["vector"].tolist() == [4, 5, 6]


def test_parquet_that_makes_no_tensors(tmp_path):
    path = str(tmp_path / "a.parquet")
    lists = pyarrow.array([[1], [1, 2]])
    parquet.write_table(pyarrow.table({"x": [1, None], "lists": lists}), path)
    with pytest.raises(ValueError, match=r"column 'lists' of .* is of type list<"):
        from_files(path, "parquet", engine="pyarrow")
    dataset = from_files(path, "parquet", columns=["x"], engine="pyarrow")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="'x' in row group 0 of .* has 1 nulls"
    ):
        samples(dataset)
    other = str(tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"x": ["text"]}), other)
    dataset = from_files([path, other], "parquet", columns=["x"], engine="pyarrow")
    with pytest.raises(tf.errors.InvalidArgumentError):
        samples(dataset)
    (tmp_path / "c.parquet").write_text("no Parquet")
    with pytest.raises(ValueError, match="c.parquet"):
        from_files(str(tmp_path / "c.parquet"), "parquet", engine="pyarrow")


SCHEMA = {
    "type": "record",
    "name": "row",
    "fields": [{"name": "x", "type": "long"}, {"name": "name", "type": "string"}],
}


@pytest.fixture
def avro_files(tmp_path):
    for file in range(2):
        rows = [{"x": i, "name": f"row {i}"} for i in range(60 * file, 60 * file + 60)]
        with open(tmp_path / f"{file}.avro", "wb") as out:
            fastavro.writer(out, SCHEMA, rows, sync_interval=200)
    return str(tmp_path / "*.avro")


@needs_tensorflow_io
def test_avro(avro_files):
    features = {
        "x": tf.io.FixedLenFeature([], tf.int64),
        "name": tf.io.FixedLenFeature([], tf.string),
    }
    schema = json.dumps(SCHEMA)
    dataset = from_files(avro_files, "avro", schema=schema, features=features)
    for _ in range(2):
        read = samples(dataset)
        for i, row in enumerate(by("x", read)):
            assert row == {"x": i, "name": b"row %d" % i}
    strings = samples(from_files(avro_files, "avro", schema=schema))
    assert len(set(strings)) == 120


@pytest.mark.skipif(not NO_TENSORFLOW_IO, reason="tensorflow-io is there")
def test_what_needs_tensorflow_io_says_which_versions(avro_files, parquet_files):
    versions = r"tensorflow-io 0\.37\.1, which loads on TensorFlow 2\.16 only"
    with pytest.raises(ImportError, match=f"Avro files are .* {versions}"):
        from_files(avro_files, "avro", schema=json.dumps(SCHEMA))
    with pytest.raises(ImportError, match=f"{versions}, or through pyarrow"):
        from_files(parquet_files, "parquet", engine="tensorflow-io")
    assert len(samples(from_files(parquet_files, "parquet"))) == 100


def test_missing_pyarrow(parquet_files, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    advice = f"pyarrow is not installed: {installed.install_command('io')}"
    with pytest.raises(ImportError, match=re.escape(advice)):
        from_files(parquet_files, "parquet", engine="pyarrow")


def test_missing_tensorflow_io(monkeypatch):
    monkeypatch.setattr(tf, "__version__", "2.16.2")
    monkeypatch.setattr(tensorflow_io.importlib.util, "find_spec", lambda name: None)
    advice = f"tensorflow-io is not installed: {installed.install_command('io')}"
    assert tensorflow_io.why_not() == advice


def test_arguments_that_make_no_sense(tmp_path):
    (tmp_path / "a").write_text("x\n")
    path = str(tmp_path / "a")
    for error, match, arguments in (
        (ValueError, "no reader 'orc'; there are avro, csv", {"reader": "orc"}),
        (TypeError, "must be a name or a function, got 3", {"reader": 3}),
        (TypeError, "has no option 'columns'; it has compr", {"columns": ["x"]}),
        (ValueError, "compression must be", {"compression": "BZIP2"}),
        (ValueError, "shuffle=-1 must be at least 0", {"shuffle": -1}),
        (ValueError, "interleave=0 must be at least 1", {"interleave": 0}),
        (ValueError, "even=0 must be at least 1", {"even": 0}),
        (ValueError, r"seed=4294967296 must be below", {"seed": 2**32}),
        (TypeError, "position must be a Position, got 0", {"position": 0}),
        (TypeError, "pattern must be a string", {"pattern": []}),
        (TypeError, "pattern must be a string", {"pattern": [path, 3]}),
    ):
        with pytest.raises(error, match=match):
            from_files(**{"pattern": path, "reader": "text", **arguments})


def test_names_with_characters_of_patterns(tmp_path):
    (tmp_path / "a[1].txt").write_text("x\n")
    assert samples(from_files(str(tmp_path / "a[1].txt"), "text")) == [b"x"]


def test_the_seed_of_tensorflow_changes_nothing(tmp_path):
    (tmp_path / "a").write_text("\n".join(map(str, range(100))))
    orders = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        orders.append(samples(from_files(str(tmp_path / "a"), "text")))
    assert orders[0] == orders[1] != sorted(orders[0])


# --- Position -------------------------------------------------------------------------


@pytest.fixture
def numbers(tmp_path):
    """A dataset of 0 to 99 in 4 files, and its position."""
    for file in range(4):
        lines = "\n".join(str(i) for i in range(25 * file, 25 * file + 25))
        (tmp_path / f"{file}.txt").write_text(lines)

    def make(**settings):
        position = Position()
        dataset = from_files(
            str(tmp_path / "*.txt"), "text", position=position, **settings
        )
        return dataset.map(lambda line: tf.strings.to_number(line, tf.int64)), position

    return make


def test_a_position_moves_as_training_says(numbers):
    dataset, position = numbers()
    assert (position.epoch, position.is_inside_epoch) == (0, False)
    iterator = iter(dataset)
    seen = [int(next(iterator)) for _ in range(40)]
    position.advance(30)
    assert position.is_inside_epoch
    rest = [int(number) for number in dataset]
    assert sorted(seen[:30] + rest) == list(range(100))
    with pytest.raises(ValueError, match=r"advance\(71\): .* at most 70 .* epoch 0"):
        position.advance(71)
    with pytest.raises(ValueError, match="advance"):
        position.advance(-1)
    position.advance(70)
    position.end_epoch()
    assert (position.epoch, position.is_inside_epoch) == (1, False)
    assert sorted(int(number) for number in dataset) == list(range(100))


def test_an_epoch_that_was_not_ended_is_an_error(numbers):
    dataset, position = numbers()
    for batch in dataset.batch(10):
        position.advance(len(batch))
    with pytest.raises(tf.errors.OpError, match=r"epoch 0 was .* Position.end_epoch"):
        next(iter(dataset))
    position.end_epoch()
    with pytest.raises(tf.errors.OpError, match="repeat"):
        for batch in dataset.batch(10).repeat():
            position.advance(len(batch))


def test_a_position_that_nobody_moves_is_warned_of(numbers):
    dataset, _ = numbers()
    first = samples(dataset)
    assert samples(dataset) == first
    with pytest.warns(UserWarning, match="epoch 0 is read again, because the Pos"):
        assert samples(dataset) == first


def test_abandoned_iterators_do_not_count(numbers):
    dataset, position = numbers()
    abandoned = iter(dataset.prefetch(100))
    next(abandoned)
    iterator = iter(dataset)
    seen = [int(next(iterator)) for _ in range(10)]
    assert len(list(abandoned)) == 99
    position.advance(10)
    assert sorted(seen + [int(number) for number in dataset]) == list(range(100))


@pytest.mark.parametrize("make", [json.dumps, pickle.dumps])
def test_states_can_be_kept(numbers, make):
    dataset, position = numbers()
    next(iter(dataset))
    position.advance(1)
    loads = {json.dumps: json.loads, pickle.dumps: pickle.loads}[make]
    assert loads(make(position.state())) == position.state()


def test_a_place_in_other_data_is_refused(numbers, tmp_path):
    dataset, position = numbers()
    next(iter(dataset))
    position.advance(1)
    state = position.state()
    for settings in ({"seed": 1}, {"shuffle": 10}):
        _, other = numbers(**settings)
        [name] = settings
        with pytest.raises(ValueError, match=f"within an epoch of {name}=.*, now"):
            other.restore(state)
        assert other.epoch == 0
    for version in (None, {}, {**state, "version": 0}):
        with pytest.raises(ValueError, match="this is no state of a Position"):
            position.restore(version)
    other_shuffle = {**state, "shuffled": [1, 0]}
    with pytest.raises(ValueError, match="shuffles differently from the version"):
        position.restore(other_shuffle)
    (tmp_path / "4.txt").write_text("more")
    restored = Position()
    restored.restore(state)
    with pytest.raises(ValueError, match="has 4 files or row groups, this dataset 5"):
        from_files(str(tmp_path / "*.txt"), "text", position=restored)
    with pytest.raises(ValueError, match="belongs to another dataset already"):
        from_files(str(tmp_path / "*.txt"), "text", position=position)


def test_a_place_between_epochs_fits_any_data(numbers):
    _, position = numbers()
    position.start_epoch(3)
    _, other = numbers(seed=9)
    other.restore(position.state())
    assert (other.epoch, other.is_inside_epoch) == (3, False)


def test_a_position_without_a_dataset(numbers):
    position = Position()
    for call in (
        lambda: position.advance(1),
        position.end_epoch,
        position.state,
    ):
        with pytest.raises(RuntimeError, match="give the position to .*from_files"):
            call()
    with pytest.raises(ValueError, match="epochs count from 0"):
        numbers()[1].start_epoch(-1)


def test_a_checkpoint_holds_the_position(numbers, tmp_path):
    dataset, position = numbers()
    iterator = iter(dataset)
    seen = [int(next(iterator)) for _ in range(33)]
    position.advance(33)
    weight = tf.Variable(5.0)
    path = tf.train.Checkpoint(weight=weight, position=position).save(
        str(tmp_path / "checkpoint")
    )
    dataset, position = numbers()
    weight = tf.Variable(0.0)
    tf.train.Checkpoint(weight=weight, position=position).restore(
        path
    ).assert_consumed()
    assert weight.numpy() == 5.0
    assert sorted(seen + [int(number) for number in dataset]) == list(range(100))


def test_samples_are_counted_exactly_in_even(numbers):
    dataset, position = numbers(even=30)
    iterator = iter(dataset)
    seen = [int(next(iterator)) for _ in range(30)]
    position.advance(30)
    seen += [int(number) for number in dataset]
    assert len(set(seen)) == len(seen) == 90


# --- the plan -------------------------------------------------------------------------


def places(parts, counts):
    """All (piece, place) of parts."""
    return [(p, i) for p, start, step in parts for i in range(start, counts[p], step)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("pieces", [1, 2, 7, 50])
def test_shares_are_a_partition(pieces, ranks):
    random = np.random.RandomState(pieces * ranks)
    counts = random.randint(0, 60, pieces)
    parts = plan.whole(pieces)
    everything = sorted(places(parts, counts))
    taken = []
    for divide in (False, True, True):
        weights = plan.lengths(parts, counts).astype(float)
        if divide:
            parts, weights = plan.split(parts, weights, ranks)
        shares = plan.shares(parts, weights, ranks)
        assert len(shares) == ranks
        loads = [plan.lengths(share, counts).sum() for share in shares]
        if divide:
            assert max(loads) - min(loads) <= 0.3 * np.mean(loads) + max(
                map(len, shares)
            )
        parts = np.concatenate(shares)
        assert sorted(taken + places(parts, counts)) == everything
        for part in parts:
            some = random.randint(0, 1 + len(places([part], counts)))
            taken += places([part], counts)[:some]
            part[plan.START] += some * part[plan.STEP]
        assert sorted(taken + places(parts, counts)) == everything


def test_the_largest_parts_are_shared_out_first():
    parts = plan.whole(7)
    first, second = plan.shares(parts, np.array([1.0, 1, 1, 1, 1, 1, 6]), 2)
    assert first[:, plan.PIECE].tolist() == [6]
    assert second[:, plan.PIECE].tolist() == [0, 1, 2, 3, 4, 5]


def test_parts_of_no_weight_are_shared_out_too():
    shares = plan.shares(plan.whole(6), np.zeros(6), 3)
    assert [len(share) for share in shares] == [2, 2, 2]


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_which_rank_begins_a_piece_that_all_share_goes_round(ranks):
    """So that none has one sample more of each piece than another has."""
    counts = np.full(ranks - 1, 2 * ranks + 1)
    shares = plan.shares(plan.whole(ranks - 1), counts.astype(float), ranks)
    taken = [places(share, counts) for share in shares]
    assert sorted(sum(taken, [])) == places(plan.whole(ranks - 1), counts)
    lengths = [len(each) for each in taken]
    assert max(lengths) - min(lengths) == 1


def test_what_is_left_of_a_piece_weighs_what_its_ranks_have_of_it():
    """One piece of 800 bytes is whole, one a half, and one a quarter."""
    parts = np.array([[0, 0, 1], [1, 1, 2], [2, 3, 4]])
    weights = plan.remaining(parts, np.full(3, 800))
    assert weights.tolist() == [800, 400, 200]


def test_files_are_known_wherever_they_are():
    def digest(*pieces):
        return plan.Plan([plan.Piece(*each) for each in pieces], 0, 0, 0, 1).digest()

    known = digest(("/here/a", 0, 8), ("/here/b", 0, 8))
    assert digest(("/there/a", 0, 8), ("/else/b", 0, 8)) == known
    assert digest(("/here/a", 0, 8), ("/here/c", 0, 8)) != known
    assert digest(("/here/a", 1, 8), ("/here/b", 0, 8)) != known
    assert digest(("/here/a", 0, 9), ("/here/b", 0, 8)) != known
    assert digest(("/here/b", 0, 8), ("/here/a", 0, 8)) != known
