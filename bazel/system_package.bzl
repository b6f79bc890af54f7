"""Sources that a Debian package puts on the machine, as a Bazel repository."""

def _system_package_impl(repository_ctx):
    folder = repository_ctx.path(repository_ctx.attr.path)
    if not folder.exists:
        fail("%s is missing; install it with: apt-get install %s" % (
            folder,
            repository_ctx.attr.debian_package,
        ))
    for child in folder.readdir():
        repository_ctx.symlink(child, child.basename)
    if repository_ctx.attr.build_file:
        repository_ctx.symlink(repository_ctx.attr.build_file, "BUILD.bazel")

system_package = repository_rule(
    implementation = _system_package_impl,
    local = True,
    attrs = {
        "build_file": attr.label(doc = "BUILD file, where the package has none."),
        "debian_package": attr.string(mandatory = True),
        "path": attr.string(mandatory = True),
    },
)
