"""Headers that a Python package may have brought, as a Bazel repository.

Without them its library is empty: nothing is built with them, but what is declared after
them is checked where they are.
"""

load("//bazel:python.bzl", "PYTHON_VARIABLES", "chosen_python")

def _optional_headers_impl(repository_ctx):
    folder = repository_ctx.os.environ.get(repository_ctx.attr.variable)
    if not folder:
        finder = repository_ctx.path(repository_ctx.attr._finder)
        asked = repository_ctx.execute(
            [chosen_python(repository_ctx), "-I", finder] + repository_ctx.attr.headers,
        )
        if asked.return_code != 0:
            fail(asked.stderr)
        folder = asked.stdout.strip()
    if folder:
        repository_ctx.symlink(folder, "include")
    repository_ctx.file("BUILD.bazel", """# Headers of %s, or none.
cc_library(
    name = "headers",
    # One label for a folder, which Bazel does not look into: its path, given as an
    # include path too, is what says that it is another one.
    hdrs = %s,
    defines = ["%s=\\\\\\"%s\\\\\\""],
    includes = %s,
    visibility = ["//visibility:public"],
)
""" % (
        repository_ctx.attr.headers,
        ["include"] if folder else [],
        repository_ctx.attr.variable,
        folder,
        ["include"] if folder else [],
    ))

optional_headers = repository_rule(
    implementation = _optional_headers_impl,
    local = True,
    environ = PYTHON_VARIABLES + [
        "KERAS_HVD_CUDA_INCLUDE",
        "KERAS_HVD_NCCL_INCLUDE",
        "KERAS_HVD_NVTX_INCLUDE",
    ],
    attrs = {
        "headers": attr.string_list(mandatory = True),
        "variable": attr.string(
            mandatory = True,
            doc = "Of the environment: a folder to take. Also the macro with its path.",
        ),
        "_finder": attr.label(default = "//bazel:find_headers.py"),
    },
)
