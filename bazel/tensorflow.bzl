"""The TensorFlow of the chosen Python, as the repository @tensorflow.

The Python is $PYTHON_BIN_PATH, else that of the activated environment, else that of
.venv in this checkout, else the first python3 on the PATH.
"""

_LIBRARIES = ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]

def _chosen_python(repository_ctx):
    environ = repository_ctx.os.environ
    if environ.get("PYTHON_BIN_PATH"):
        return environ["PYTHON_BIN_PATH"]
    if environ.get("VIRTUAL_ENV"):
        return environ["VIRTUAL_ENV"] + "/bin/python"
    checkout = repository_ctx.path(Label("//:WORKSPACE")).dirname
    in_checkout = checkout.get_child(".venv").get_child("bin").get_child("python")
    if in_checkout.exists:
        return in_checkout
    return repository_ctx.which("python3") or fail("there is no python3 on the PATH")

def _tensorflow_impl(repository_ctx):
    python = _chosen_python(repository_ctx)
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
    environ = ["PYTHON_BIN_PATH", "VIRTUAL_ENV"],
    attrs = {
        "_build_file": attr.label(default = "//bazel:tensorflow.BUILD"),
        "_finder": attr.label(default = "//bazel:find_tensorflow.py"),
    },
)
