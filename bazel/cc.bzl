"""Rules for the C++ of keras_hvd: the same warnings everywhere, one test rule."""

# A library exports only symbols that are marked KHVD_EXPORT.
VISIBILITY = ["-fvisibility=hidden"]

# TensorFlow's headers are system headers, so these are about our code alone.
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
]

# Files of one kind of processor are named after it, and built for no other.
_PROCESSORS = ["x86_64", "aarch64"]

def _of_processors():
    return select(
        {
            "//bazel:" + processor: native.glob(["*_%s.cc" % processor], allow_empty = True)
            for processor in _PROCESSORS
        },
        no_match_error = "keras_hvd is built for processors of these kinds: " +
                         ", ".join(_PROCESSORS),
    )

def khvd_cc_library(name, copts = [], linkopts = [], **kwargs):
    """A layer of the engine: every header and source of its folder, tests excepted."""
    elsewhere = ["*_test.cc", "*_fuzz.cc"] + ["*_%s.cc" % processor for processor in _PROCESSORS]
    native.cc_library(
        name = name,
        srcs = native.glob(["*.cc"], exclude = elsewhere) + _of_processors(),
        hdrs = native.glob(["*.h"]),
        copts = VISIBILITY + WARNINGS + copts,
        linkopts = ["-pthread"] + linkopts,
        visibility = ["//tf_ops:__subpackages__", "//benchmarks:__subpackages__"],
        **kwargs
    )

def khvd_cc_tests(deps, **kwargs):
    """One test for each *_test.cc and each *_fuzz.cc of the folder.

    A *_fuzz.cc gets the inputs that fuzzing has found so far: `make fuzz`.
    """
    for source in native.glob(["*_test.cc"]):
        native.cc_test(
            name = source[:-len(".cc")],
            size = "small",
            srcs = [source],
            copts = WARNINGS,
            deps = deps + ["@googletest//:gtest_main"],
            **kwargs
        )
    for source in native.glob(["*_fuzz.cc"]):
        subject = source[:-len("_fuzz.cc")]
        corpus = subject + "_corpus.tar"
        native.genrule(
            name = subject + "_corpus",
            srcs = [corpus + ".gz"],
            outs = [corpus],
            cmd = "gzip -dc $< > $@",
        )
        native.cc_test(
            name = subject + "_corpus_test",
            size = "small",
            srcs = [source, "//tf_ops/testing:read_corpus.cc"],
            args = [native.package_name() + "/" + corpus],
            copts = WARNINGS,
            data = [corpus],
            deps = deps,
            **kwargs
        )
