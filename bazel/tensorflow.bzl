"""The TensorFlow of the chosen Python, as the repository @tensorflow.

Or that in the folder $KERAS_HVD_TENSORFLOW: see find_tensorflow.py.
"""

load("//bazel:python.bzl", "PYTHON_VARIABLES", "chosen_python")

_LIBRARIES = ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]

def _tensorflow_impl(repository_ctx):
    python = chosen_python(repository_ctx)
    asked = repository_ctx.execute(
        [python, "-I", repository_ctx.path(repository_ctx.attr._finder)],
    )
    if asked.return_code != 0:
        fail(asked.stderr.strip() or "%s could not be run" % python)
    found = json.decode(asked.stdout)

    repository_ctx.symlink(found["include"], "include")
    for library in _LIBRARIES:
        repository_ctx.symlink(found["root"] + "/" + library, library)
    major, minor, patch = found["version"].split(".", 2)
    digits = [c for c in patch.elems() if c.isdigit()]
    repository_ctx.template(
        "BUILD.bazel",
        repository_ctx.attr._build_file,
        substitutions = {
            "%{major}": major,
            "%{minor}": minor,
            "%{patch}": "".join(digits) if len(digits) == len(patch) else "0",
        },
    )
    repository_ctx.file("features.bzl", """# What this TensorFlow has.
HAS_XLA = %s
""" % found["xla"])

tensorflow = repository_rule(
    implementation = _tensorflow_impl,
    local = True,
    environ = PYTHON_VARIABLES + ["KERAS_HVD_TENSORFLOW"],
    attrs = {
        "_build_file": attr.label(default = "//bazel:tensorflow.BUILD"),
        "_finder": attr.label(default = "//bazel:find_tensorflow.py"),
    },
)
