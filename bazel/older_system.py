"""Makes libraries to link against, so that the result runs on older systems.

    python older_system.py COMPILER FOLDER

Each has this system's C or C++ library's symbols, as they were in the versions of
`NEWEST`, and nothing in them. The linker refuses a program that needs a newer symbol.
Symbols that moved between libraries with glibc 2.34 are where they were.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys

# Of manylinux_2_27, which is TensorFlow's own: RHEL 8, Debian 10, Ubuntu 18.10 and
# newer systems. The C++ library is that of GCC 7.
NEWEST = {
    "GLIBC": (2, 27),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
}
# The version of the symbols that glibc 2.34 took in from libraries of their own.
_MERGED = "GLIBC_2.34"
_SYMBOL = re.compile(
    r"\s*\d+: \w+\s+(?P<size>\w+) (?P<type>\w+)\s+(?P<binding>\w+)\s+\w+\s+(?!UND)\w+ "
    r"(?P<name>[^@\s]+)@@?(?P<version>\S+)"
)
_KINDS = {
    "FUNC": ("@function", ".text"),
    "IFUNC": ("@function", ".text"),
    "OBJECT": ("@object", '.section .data,"aw"'),
    "TLS": ("@tls_object", '.section .tbss,"awT",@nobits'),
}


def symbols(library: pathlib.Path) -> dict[str, dict[str, tuple[str, int]]]:
    """The symbols that a library defines: for each name the versions, kind and size."""
    listed = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found = collections.defaultdict(dict)
    for line in listed.splitlines():
        match = _SYMBOL.fullmatch(line)
        if match and match["type"] in _KINDS:
            found[match["name"]][match["version"]] = (
                match["type"],
                int(match["size"], 0),
            )
    return found


def newest_allowed(versions: dict[str, tuple[str, int]]) -> str | None:
    """The newest of a symbol's versions that older systems have."""
    allowed = {}
    for version in versions:
        family, _, number = version.partition("_")
        if re.fullmatch(r"[\d.]+", number):
            numbers = tuple(map(int, number.split(".")))
            if numbers <= NEWEST.get(family, ()):
                allowed[numbers] = version
    return allowed[max(allowed)] if allowed else None


def was_in(library: str, name: str, versions: dict[str, tuple[str, int]]) -> str | None:
    """The library that had the symbol; None: one that nothing here needs."""
    if library != "libc.so.6" or _MERGED not in versions or len(versions) == 1:
        return library
    if name.startswith("dl"):
        return "libdl.so.2"
    return "libpthread.so.0" if name.startswith("pthread_") else None


def write(
    compiler: str, soname: str, content: dict[str, tuple[str, str, int]], path: str
) -> None:
    """Links a library that has the symbols, each given by version, kind and size."""
    lines = []
    for number, (name, (version, kind, size)) in enumerate(sorted(content.items())):
        type_, section = _KINDS[kind]
        lines += [
            section,
            f".globl s{number}",
            f".type s{number}, {type_}",
            f".size s{number}, {size}",
            f"s{number}: .zero {max(size, 1) if type_ != '@function' else 1}",
            f".symver s{number}, {name}@@@{version}",
        ]
    lines.append('.section .note.GNU-stack,"",%progbits')
    versions = sorted({version for version, _, _ in content.values()})
    assembly, script = pathlib.Path(f"{path}.s"), pathlib.Path(f"{path}.lds")
    assembly.write_text("\n".join(lines) + "\n")
    script.write_text("".join(f"{version} {{ }};\n" for version in versions))
    subprocess.run(
        [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", path]
        + [f"-Wl,--version-script,{script}", assembly],
        check=True,
    )
    assembly.unlink()
    script.unlink()


def main(compiler: str, folder: pathlib.Path) -> None:
    def path_of(name: str) -> pathlib.Path:
        asked = [compiler, f"-print-file-name={name}"]
        done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
        return pathlib.Path(done.stdout.strip()).resolve()

    content = collections.defaultdict(dict)
    for library in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        for name, versions in symbols(path_of(library)).items():
            version = newest_allowed(versions)
            place = was_in(library, name, versions)
            if version and place:
                content[place][name] = (version, *versions[version])
    folder.mkdir(parents=True, exist_ok=True)
    for library, of_library in content.items():
        name = library if library.startswith("libc.") else library.rpartition(".")[0]
        write(compiler, library, of_library, str(folder / name))
    # A linker script like the system's, with the part for each program, and the loader.
    loader = next(path_of("libc.so.6").parent.glob("ld-linux-*.so.*")).name
    (folder / "libc.so").write_text(
        f"GROUP ( libc.so.6 -lpthread -ldl {path_of('libc_nonshared.a')} "
        f"AS_NEEDED ( {path_of(loader)} ) )\n"
    )


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
