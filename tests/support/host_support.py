"""Many small kernels in one source: the compiler runs once, and an argument says which is meant."""

from __future__ import annotations

import re


def one_kernel(text: str, name: str, parameters: str) -> tuple[str, list[str]]:
    """Source with a kernel ``name`` that calls the function of number ``which``, its last argument; and
    the functions' names, in the order of their numbers.

    text: in it each function begins with ENTRY(its name) at the start of a line.
    """
    names = re.findall(r"^ENTRY\((\w+)\)", text, re.M)
    given = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    cases = "".join(f"case {number}: {each}({given}); break;\n" for number, each in enumerate(names))
    define = f"#define ENTRY(name) inline void name({parameters})\n"
    kernel = f'extern "C" __global__ void {name}({parameters}, int which) {{ switch (which) {{\n{cases}}} }}\n'
    return text.replace("@ENTRY@", define) + kernel, names
