"""The Python that the build is for.

It is $PYTHON_BIN_PATH, else that of the activated environment, else that of .venv in
this checkout, else the first python3 on the PATH.
"""

PYTHON_VARIABLES = ["PYTHON_BIN_PATH", "VIRTUAL_ENV"]

def chosen_python(repository_ctx):
    """The Python whose packages a repository rule looks for.

    Args:
        repository_ctx: of a rule whose `environ` has PYTHON_VARIABLES.

    Returns:
        Its path.
    """
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
